"""Tables of ``docs/results/scaling.md`` from the committed JSON."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

from benchmarks import prune_drift, transfer_tables
from benchmarks.marks import marked
from benchmarks.memory_tables import table
from sparing.jobs.transfer.figures import TITLES
from sparing.report import Record, format_number

RESULTS = Path(__file__).parent / "results"
ARMS = {"parametrized": "W·M parametrized", "panels": "our kernel", "csr": "CSR by MKL", "sparselab": "SparseLab"}


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
         *(ratio(rows.get((d, s, arm))) for arm in known), ratio(rows.get((d, s, "panels")), "faster_than_sparselab")]
        for d, s in dict.fromkeys(key[:2] for key in rows)
    ]  # fmt: skip
    heads = [*(f"{ARMS[arm]}, ×" for arm in known), "our kernel over SparseLab, ×"]
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
        "layers that run sparse",
        "MiB masked",
        "MiB auto",
        "loss differs by",
    ]
    return table(head, found)


def pareto(document: Mapping[str, Any]) -> str:
    """Test loss and accuracy of exported checkpoints by rule and density, at the base's best rate and re-tuned."""
    chosen, found = document["chosen"], []
    for rule, density in dict.fromkeys((row["rule"], row["density"]) for row in _measured(document)):
        moved = _at(document, rule, density, chosen["base"])
        best = chosen.get(f"{rule} {density}")
        own = _at(document, rule, density, best) if best is not None else []
        found.append([
            f"{TITLES[rule]}, ρ = {density}", f"{(moved or own)[0]['live'] / 1e6:.2f}", _mean(moved, "test_loss"),
            _mean(moved, "bits_per_byte"), _mean(moved, "acc_norm", 100, 1), "–" if best is None else f"2^{best}",
            _mean(own, "test_loss"), _mean(own, "acc_norm", 100, 1), f"{len(moved)}, {len(own)}",
        ])  # fmt: skip
    head = ["", "live parameters, M", "test loss, nat/token", "bits per byte", "accuracy, %"]
    return table([*head, "re-tuned rate", "test loss so", "accuracy so, %", "n, n so"], found)


def margins(document: Mapping[str, Any]) -> str:
    """By how much the loss of SμPar is below that of the others, seed by seed."""
    base, chosen, found = document["chosen"]["base"], document["chosen"], []
    for density in dict.fromkeys(row["density"] for row in _measured(document)):
        ours, own = (_at(document, "supar", density, octave) for octave in (base, chosen.get(f"supar {density}")))
        others = [_at(document, rule, density, base) for rule in ("sp", "mup")]
        retuned = _at(document, "sp", density, chosen.get(f"sp {density}"))
        pairs = ((ours, others[0]), (ours, others[1]), (own, retuned))
        cells = [_below(one, other) for one, other in pairs]
        found += [[density, *cells]] if set(cells) != {"–"} else []
    head = ["loss of SμPar below, %, at ρ =", "SP, both transferred", "μP, both transferred", "SP, both re-tuned"]
    return table(head, found) if found else "No density has two rules yet."


def _measured(document: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    return [row for row in document["rows"].values() if "test_loss" in row]


def _at(document: Mapping[str, Any], rule: str, density: str, octave: int | None) -> list[Mapping[str, Any]]:
    wanted = (rule, density, octave)
    return [row for row in _measured(document) if (row["rule"], row["density"], row["octave"]) == wanted]


def _below(ours: Sequence[Mapping[str, Any]], theirs: Sequence[Mapping[str, Any]]) -> str:
    """Mean and ends of 1 − ours/theirs over the seeds that both have, in percent."""
    other = {row["seed"]: row["test_loss"] for row in theirs}
    rows = [{"below": 1 - row["test_loss"] / other[row["seed"]]} for row in ours if row["seed"] in other]
    return f"{_mean(rows, 'below', 100, 1)} (n = {len(rows)})" if rows else "–"


def _mean(rows: Sequence[Mapping[str, Any]], name: str, times: float = 1.0, digits: int = 3) -> str:
    values = [times * row[name] for row in rows if name in row]
    ends = f" [{min(values):.{digits}f}, {max(values):.{digits}f}]" if len(values) > 1 else ""
    return f"{fmean(values):.{digits}f}{ends}" if values else "–"


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
        made = {"layers": layers, "memory": memory, "models": models}
        page = marked(page, {name: fill(record) for name, fill in made.items()})
    if prune_drift.RESULT.exists():
        page = marked(page, {"prune-drift": prune_drift.shown()})
    if (path := RESULTS / "scaling_families.json").exists():
        document = json.loads(path.read_text())
        page = marked(page, {"families": families(document), "families-counts": families_counts(document)})
    if (path := RESULTS / "pretrain_pareto.json").exists():
        document = json.loads(path.read_text())
        page = marked(page, {"pareto": pareto(document), "pareto-margins": margins(document)})
    return page
