"""Tables and pictures of ``docs/results/`` from the committed JSON, and the benchmarks that make the JSON.

python -m benchmarks.results                     # every table and picture again; seconds
python -m benchmarks.results --list              # the benchmarks: hours, what they write, what they need
python -m benchmarks.results --run               # measure everything anew, then the tables; goes on if run again
python -m benchmarks.results --run --only 'valley*' step_time
python -m benchmarks.results --run --only step_time --again
"""

from __future__ import annotations

import argparse
import json
import signal
import sys
from pathlib import Path

from benchmarks import (
    claims_tables,
    composition_tables,
    document_attention,
    federated_long_tables,
    federated_tables,
    gpu_tables,
    hypergrad_tables,
    lowbit_tables,
    network_tables,
    plan_tables,
    predicted_tables,
    rerun,
    scaling_tables,
    trust_tables,
    valley_tables,
)
from benchmarks.claims.sources import Pages
from benchmarks.layers import tables as layers_tables
from benchmarks.marks import marked
from benchmarks.memory_tables import with_tables
from benchmarks.network import curves
from benchmarks.scaling_transfer import tables as scaling_transfer_tables
from benchmarks.step_tables import filled
from sparing.report import Record
from sparing.report.atomic import write_whole

OVERVIEW = Path(__file__).parents[1] / "docs" / "results.md"
RESULTS = Path(__file__).parent / "results"
PAGES = Path(__file__).parents[1] / "docs" / "results"


def pages() -> dict[Path, str]:
    """Every page of results, as the committed JSON makes it."""
    text = {path.stem: path.read_text(encoding="utf-8") for path in sorted(PAGES.glob("*.md"))}
    rows = list(json.loads((RESULTS / "memory_grid.json").read_text())["rows"].values())
    text["memory"] = plan_tables.filled(lowbit_tables.filled(with_tables(text["memory"], rows)))
    text["step-time"] = filled(text["step-time"], Record.read(RESULTS / "step_time.jsonl"))
    text["step-time"] = marked(text["step-time"], {"documents": document_attention.table()})
    text["layers"] = layers_tables.filled(text["layers"])
    text["hypergradients"] = hypergrad_tables.filled(text["hypergradients"])
    text["scaling"] = scaling_transfer_tables.filled(scaling_tables.filled(text["scaling"]))
    text["sharding"] = network_tables.filled(text["sharding"])
    text["valley"] = valley_tables.filled(text["valley"])
    text["federated"] = federated_long_tables.filled(federated_tables.filled(text["federated"]))
    text["gpu"] = gpu_tables.filled(text["gpu"])
    text["trust"] = trust_tables.filled(text["trust"])
    text["composition"] = composition_tables.filled(text["composition"])
    text["predicted"] = predicted_tables.filled(text["predicted"])
    text["claims"] = claims_tables.filled(text["claims"], Pages(text))  # last: it takes numbers from the others
    overview = marked(OVERVIEW.read_text(encoding="utf-8"), {"steps": rerun.table()})
    return {PAGES / f"{name}.md": page for name, page in text.items()} | {OVERVIEW: overview}


def pictures() -> dict[Path, str]:
    """Every picture of results, likewise."""
    drawn = predicted_tables.pictures() | scaling_transfer_tables.pictures() | layers_tables.pictures()
    return drawn | curves.pictures()


def rebuild() -> None:
    """Write every page and picture that has changed."""
    for path, text in (pages() | pictures()).items():
        if not path.exists() or path.read_text(encoding="utf-8") != text:
            write_whole(path, text)


def main() -> int:
    """Rebuild, list or run.

    Returns:
        0 if all went well, 1 if a step failed or was left out.
    """
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--run", action="store_true", help="measure what this checkout has not measured yet")
    parser.add_argument("--list", action="store_true", help="print the steps")
    parser.add_argument("--only", nargs="+", default=[], metavar="NAME", help="these steps; patterns such as 'valley*'")
    parser.add_argument("--again", action="store_true", help="also those that are done")
    options = parser.parse_args()
    steps, bench, status = rerun.chosen(options.only), rerun.Bench(), 0
    if options.list:
        print("\n".join(rerun.listing(steps, bench)))
        return 0
    if options.run:
        signal.signal(signal.SIGTERM, lambda *_: sys.exit("ended from outside"))  # so that results are put back
        if options.again:
            bench.forget(steps)
        status = rerun.run_all(steps, bench)
    elif options.only or options.again:
        parser.error("--only and --again go with --run or --list")
    rebuild()
    return status


if __name__ == "__main__":
    sys.exit(main())
