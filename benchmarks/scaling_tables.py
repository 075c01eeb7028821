"""Tables of ``docs/results/scaling.md`` from the committed JSON."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

from benchmarks import transfer_tables
from benchmarks.marks import marked
from benchmarks.memory_tables import table
from sparing.jobs.transfer.figures import TITLES
from sparing.report import Record, format_number

RESULTS = Path(__file__).parent / "results"
ARMS = {"parametrized": "W·M parametrized", "csr": "CSR", "sparselab": "SparseLab"}


def ratio(row: Mapping[str, Any] | None) -> str:
    """How many times faster than masked dense, with the ends of the rounds."""
    if row is None:
        return "–"
    return f"{row['faster']:.2f} [{row['faster_low']:.2f}, {row['faster_high']:.2f}]"


def layers(record: Record) -> str:
    """Seconds of a step and how many times faster it is, by width and sparsity."""
    rows = {(row["d"], row["sparsity"], row["arm"]): row for row in record.table("layer")}
    known = [arm for arm in ARMS if any(key[2] == arm for key in rows)]
    found = [
        [f"{d}, {100 * s:g} %", format_number(rows[d, s, "masked"]["seconds"], "s"),
         *(ratio(rows.get((d, s, arm))) for arm in known)]
        for d, s in dict.fromkeys(key[:2] for key in rows)
    ]  # fmt: skip
    return table(["d, sparsity", "masked dense", *(f"{ARMS[arm]}, ×" for arm in known)], found)


def memory(record: Record) -> str:
    """Peak of the resident set over what was there before, by width and sparsity."""
    rows = {(row["d"], row["sparsity"], row["arm"]): row["peak"] for row in record.table("memory")}
    known = [arm for arm in ("masked", *ARMS) if any(key[2] == arm for key in rows)]
    names = {"masked": "masked dense"} | ARMS
    found = [
        [f"{d}, {100 * s:g} %", *(f"{rows[d, s, arm] / 2**20:.0f}" if (d, s, arm) in rows else "–" for arm in known)]
        for d, s in dict.fromkeys(key[:2] for key in rows)
    ]
    return table(["MiB at d, sparsity", *(names[arm] for arm in known)], found)


def models(record: Record) -> str:
    """Whole steps of a language model."""
    found = []
    for row in record.table("model"):
        if row["arm"] == "auto":
            dense = next(r for r in record.table("model") if (r["sparsity"], r["arm"]) == (row["sparsity"], "masked"))
            cells = [format_number(dense["seconds"], "s"), ratio(row), f"{row['csr']} of {row['layers']}"]
            held = [f"{one['held'] / 2**20:.1f}" for one in (dense, row)]
            found.append([f"{100 * row['sparsity']:g} %", *cells, *held, f"{abs(row['loss'] - dense['loss']):.0e}"])
    head = [
        "sparsity",
        "masked dense",
        "auto, ×",
        "layers that run as CSR",
        "MiB masked",
        "MiB auto",
        "loss differs by",
    ]
    return table(head, found)


def pareto(document: Mapping[str, Any]) -> str:
    """Loss and accuracy of exported checkpoints by rule and density."""
    rows = list(document["rows"].values())
    kinds = dict.fromkeys((row["rule"], row["density"]) for row in rows)
    found = []
    for rule, density in kinds:
        mine = [row for row in rows if (row["rule"], row["density"]) == (rule, density)]
        found.append([
            f"{TITLES[rule]}, ρ = {density}", f"{mine[0]['live'] / 1e6:.2f}", _mean(mine, "test_loss"),
            _mean(mine, "bits_per_byte"), _mean(mine, "acc_norm", 100, 1), len(mine),
        ])  # fmt: skip
    return table(["", "live parameters, M", "test loss, nat/token", "bits per byte", "accuracy, %", "n"], found)


def _mean(rows: Sequence[Mapping[str, Any]], name: str, times: float = 1.0, digits: int = 3) -> str:
    values = [times * row[name] for row in rows]
    ends = f" [{min(values):.{digits}f}, {max(values):.{digits}f}]" if len(values) > 1 else ""
    return f"{fmean(values):.{digits}f}{ends}"


def filled(page: str) -> str:
    """The page with every table that has its rows."""
    page = transfer_tables.filled(page)
    if (path := RESULTS / "scaling_speed.jsonl").exists():
        record = Record.read(path)
        page = marked(page, {"layers": layers(record), "memory": memory(record), "models": models(record)})
    if (path := RESULTS / "pretrain_pareto.json").exists():
        page = marked(page, {"pareto": pareto(json.loads(path.read_text()))})
    return page
