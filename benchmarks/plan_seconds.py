"""Processor seconds of ``sparing plan`` for a cluster, by phase, and schedules simulated.

Run ``python -m benchmarks.plan_seconds`` (a minute on one core; ``--rounds 3`` for a spread). Every row is the command
in a process of its own, and once more in another that takes it apart: importing, pricing and simulating every method
under every plan, the maps, the page. Load, which slows processors that share cores, stands beside them.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from contextlib import ExitStack
from functools import wraps
from pathlib import Path
from typing import Any
from unittest.mock import patch

from sparing.report import environment

RESULT = Path(__file__).parent / "results" / "plan_seconds.json"
LINKS = ["--inter", "80Gbps", "--intra", "2000Gbps"]
CLUSTER = ["--params", "65e9", "--groups", "4", "--per-group", "8", *LINKS]
LARGE = ["--params", "400e9", "--groups", "1250", "--per-group", "8", *LINKS, "--memory", "80GB"]
BUSY = ["--accumulate", "30", "--tflops", "150", "--latency-inter", "1e-5"]
COMMANDS: dict[str, list[str]] = {
    "help": ["--help"],
    "one device": ["--params", "7e9"],
    "32 GPUs": CLUSTER,
    "32 GPUs, arithmetic": [*CLUSTER, "--memory", "80GB", *BUSY],
    "10,000 GPUs": LARGE,
    "10,000 GPUs, arithmetic": [*LARGE, *BUSY],
}


def phases(arguments: list[str]) -> dict[str, Any]:
    """Run the command in this process and take its parts apart."""
    from sparing.cli import main
    from sparing.jobs.plan import cluster, cluster_page
    from sparing.sharding.planner import choose

    # the interpreter's start is the command's, too
    spent = {"import": time.process_time()}
    simulated = 0

    def timed(name: str, work: Any) -> Any:
        @wraps(work)
        def run(*given: Any, **named: Any) -> Any:
            start = time.process_time()
            try:
                return work(*given, **named)
            finally:
                spent[name] = spent.get(name, 0.0) + time.process_time() - start

        return run

    def counted(*given: Any) -> Any:
        nonlocal simulated
        simulated += 1
        return simulate(*given)

    simulate = choose.simulate
    with ExitStack() as patches:
        patches.enter_context(patch.object(choose, "simulate", counted))
        for module, function, name in (
            (cluster, "options", "plans"), (cluster, "crossovers", "maps"), (cluster_page, "write_page", "page"),
        ):  # fmt: skip
            patches.enter_context(patch.object(module, function, timed(name, getattr(module, function))))
        status = main(["plan", *arguments])
    return {"status": status, "simulated": simulated, **{name: round(value, 3) for name, value in spent.items()}}


def measured(arguments: list[str]) -> tuple[float, dict[str, Any]]:
    """Processor seconds of the command as people run it, and its parts in another process."""
    threads = os.environ | {"OMP_NUM_THREADS": "1"}
    found: list[Any] = []
    for command in (["-m", "sparing", "plan"], ["-m", "benchmarks.plan_seconds", "--phases"]):
        with tempfile.TemporaryDirectory() as folder:
            out = [] if arguments == ["--help"] else ["--out", folder]
            before = resource.getrusage(resource.RUSAGE_CHILDREN)
            done = subprocess.run(
                [sys.executable, *command, *arguments, *out], env=threads, check=True, capture_output=True, text=True
            )
            after = resource.getrusage(resource.RUSAGE_CHILDREN)
        found.append((after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime, done.stderr))
        if arguments == ["--help"]:
            return found[0][0], {}
    return found[0][0], json.loads(found[1][1].splitlines()[-1])


def main() -> None:
    """Measure and write the result."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--out", type=Path, default=RESULT)
    given = parser.parse_args()
    rows = []
    for name, arguments in COMMANDS.items():
        rounds = [measured(arguments) for _ in range(given.rounds)]
        seconds = sorted(total for total, _ in rounds)
        parts = {part: statistics.median(round_[part] for _, round_ in rounds) for part in rounds[0][1]}
        row = {
            "command": " ".join(["sparing", "plan", *arguments]),
            "name": name,
            "seconds": statistics.median(seconds),
        }
        rows.append(row | {"least": seconds[0], "most": seconds[-1], "parts": parts})
        sys.stderr.write(f"{json.dumps(rows[-1])}\n")
    load = os.getloadavg()[0]
    command = f"python -m benchmarks.plan_seconds --rounds {given.rounds}"
    text = {"command": command, "environment": environment(), "load": load, "rows": rows}
    given.out.write_text(json.dumps(text, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    if sys.argv[1:2] == ["--phases"]:
        parts = phases(sys.argv[2:])
        sys.stderr.write(json.dumps(parts) + "\n")
    else:
        main()
