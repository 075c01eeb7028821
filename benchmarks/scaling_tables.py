"""Tables of ``docs/results/scaling.md`` from the committed JSON."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks import prune_drift, scaling_updates, transfer_tables
from benchmarks.marks import marked
from benchmarks.memory_tables import table
from sparing.report import Record, format_number

RESULTS = Path(__file__).parent / "results"
ARMS = {
    "parametrized": "W·M parametrized", "onednn": "masked dense by oneDNN", "panels": "our kernel", "csr": "CSR by MKL",
    "sparselab": "SparseLab",
}  # fmt: skip


def ratio(row: Mapping[str, Any] | None, name: str = "faster") -> str:
    """How many times faster, by default than masked dense, with the ends of the rounds."""
    if row is None or name not in row:
        return "–"
    return f"{row[name]:.2f} [{row[f'{name}_low']:.2f}, {row[f'{name}_high']:.2f}]"


def layers(record: Record) -> str:
    """Seconds of a step and how many times faster it is, by width and sparsity."""
    rows = {(row["d"], row["sparsity"], row["arm"]): row for row in record.table("layer")}
    known = [arm for arm in ARMS if any(key[2] == arm for key in rows)]
    found = [
        [f"{d}, {100 * s:g} %", format_number(rows[d, s, "masked"]["seconds"], "s"),
         *(ratio(rows.get((d, s, arm))) for arm in known),
         *(ratio(rows.get((d, s, "panels")), f"faster_than_{peer}") for peer in ("onednn", "sparselab"))]
        for d, s in dict.fromkeys(key[:2] for key in rows)
    ]  # fmt: skip
    heads = [*(f"{ARMS[arm]}, ×" for arm in known), "our kernel over oneDNN, ×", "over SparseLab, ×"]
    return table(["d, sparsity", "masked dense", *heads], found)


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


def threads(record: Record) -> str:
    """How many times faster two threads are than one, by sparsity and width."""
    rows = {(row["sparsity"], row["d"]): row for row in record.table("threads")}
    widths = sorted({d for _, d in rows})
    found = [
        [f"{100 * s:g} %", *(f"{rows[s, d]['seconds'] * 1e3:.2f} ms, {rows[s, d]['faster']:.2f}×" for d in widths)]
        for s in dict.fromkeys(s for s, _ in rows)
    ]
    return table(["sparsity", *(f"one thread, two threads at d = {d}" for d in widths)], found)


def models(record: Record) -> str:
    """Whole steps of a language model."""
    rows, found = {(row["sparsity"], row["arm"]): row for row in record.table("model")}, []
    for sparsity in dict.fromkeys(sparsity for sparsity, _ in rows):
        dense, auto = (rows[sparsity, arm] for arm in ("masked", "auto"))
        both = [ratio(rows.get((sparsity, f"{arm} onednn"))) for arm in ("masked", "auto")]
        over = ratio(rows.get((sparsity, "auto onednn")), "faster_than_onednn")
        held = [f"{one['held'] / 2**20:.1f}" for one in (dense, auto)]
        found.append([
            f"{100 * sparsity:g} %", format_number(dense["seconds"], "s"), ratio(auto), *both, over,
            f"{auto['csr']} of {auto['layers']}", *held, f"{abs(auto['loss'] - dense['loss']):.0e}",
        ])  # fmt: skip
    head = ["sparsity", "masked dense", "auto, ×", "masked dense by oneDNN, ×", "auto, other products by oneDNN, ×"]
    head += ["auto over masked, both with oneDNN, ×", "layers that run sparse", "MiB masked", "MiB auto"]
    return table([*head, "loss differs by"], found)


AXES = ("width", "density")
STATISTICS = {"forward": "outputs", "gradient": "gradients", "update": "changes", "logits": "logits"}


def families(document: Mapping[str, Any]) -> str:
    """The slope furthest from 0 of every family and kind of size, over width and over density; refusals apart."""
    rows, found = document["rows"], []
    for family in dict.fromkeys(row["family"] for row in rows.values()):
        both = [rows[key] for axis in AXES if (key := f"{family}, {axis}") in rows]
        verdicts = " / ".join(row["outcome"] for row in both)
        cells = [_steepest([row["largest"].get(stat) for row in both if "largest" in row]) for stat in STATISTICS]
        control = _steepest([row.get("control") for row in both])
        seeds = " / ".join(str(row.get("seeds", "–")) for row in both)
        found.append([family, verdicts, seeds, str(sum(row.get("slopes", 0) for row in both)), *cells, control])
    return table(["", "over width / density", "seeds", "slopes", *STATISTICS.values(), "without scaling"], found)


def families_counts(document: Mapping[str, Any]) -> str:
    """How many families pass and are refused, what is furthest from 0 in all, and what the control shows at least."""
    found = []
    for axis in AXES:
        rows = [row for row in document["rows"].values() if row["axis"] == axis]
        passing = [row for row in rows if row["outcome"] == "passes"]
        steepest = [one for row in passing for one in row["largest"].values()]
        controls = [row["control"] for row in rows if "control" in row]
        counts = [str(sum(row["outcome"] == outcome for row in rows)) for outcome in ("passes", "refused", "fails")]
        seen = sum(one["outcome"] == "fails" for one in controls)
        least = min(abs(one["slope"]) for one in controls if one["slope"] is not None)
        extent = document["settings"][axis]
        at = extent["widths"] if axis == "width" else extent["densities"]
        slopes = str(sum(row["slopes"] for row in passing))
        place = f"{axis} {at[0]:g} … {at[-1]:g}, {extent['seeds']} seeds, {extent['steps']} steps"
        found.append([place, *counts, slopes, _steepest(steepest), f"{seen} of {len(controls)}", f"{least:.2f}"])
    head = ["over", "pass", "refused", "fail", "slopes judged", "furthest from 0"]
    return table([*head, "fail without scaling", "least of their slopes"], found)


def _steepest(slopes: Sequence[Mapping[str, Any] | None]) -> str:
    """The slope furthest from 0 with its standard error; ∞ for sizes that are no numbers any more."""
    known = [one for one in slopes if one]
    if not known:
        return "–"
    if any(one["slope"] is None for one in known):
        return "∞"
    most = max(known, key=lambda one: abs(one["slope"]))
    return f"{most['slope']:+.2f} ± {most['error']:.2f}"


def filled(page: str) -> str:
    """The page with every table that has its rows."""
    page = transfer_tables.filled(page)
    if (path := RESULTS / "scaling_speed.jsonl").exists():
        record = Record.read(path)
        made = {"layers": layers, "threads": threads, "memory": memory, "models": models}
        page = marked(page, {name: fill(record) for name, fill in made.items()})
    if scaling_updates.RESULT.exists():
        page = marked(page, {"updates": scaling_updates.shown(Record.read(scaling_updates.RESULT))})
    if prune_drift.RESULT.exists():
        page = marked(page, {"prune-drift": prune_drift.shown()})
    if (path := RESULTS / "scaling_families.json").exists():
        document = json.loads(path.read_text())
        page = marked(page, {"families": families(document), "families-counts": families_counts(document)})
    return page
