"""Tables and picture of ``docs/results/predicted.md``: what was predicted beside what was measured."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import median

from benchmarks import predicted_pairs as pairs
from benchmarks.claims.sources import MINUS, rows_of
from benchmarks.marks import marked
from benchmarks.pictures import drawn
from benchmarks.predicted_pairs import Pairs
from benchmarks.predicted_picture import Panel, Points, panels
from benchmarks.valley.numbers import spearman
from sparing.report import Figure
from sparing.report.palette import Role

GROUPS: dict[str, tuple[Callable[[], Pairs], ...]] = {
    "bytes": (
        functools.partial(pairs.step_bytes, "ledger", "ledger of live tensors over a real step, 1 each"),
        functools.partial(pairs.step_bytes, "process", "growth of a fresh process over two steps, 1 each"),
        pairs.published_bytes, pairs.unrolling_bytes, pairs.sparse_bytes, pairs.live_weights,
    ),
    "traffic": (pairs.plan_bytes, pairs.plan_wires, pairs.federated_bytes),
    "seconds": (
        pairs.plan_seconds, pairs.reference_seconds, pairs.costed_seconds,
        pairs.collective_seconds, pairs.unrolling_work, pairs.step_speed,
    ),
    "cosines": (
        pairs.cosines, functools.partial(pairs.token_cosines, "psi"), functools.partial(pairs.token_cosines, "phi"),
    ),
    "merges": (functools.partial(pairs.merges, "error"), functools.partial(pairs.merges, "loss")),
    "rates": (functools.partial(pairs.best_rates, "supar"), functools.partial(pairs.best_rates, "sp")),
}  # fmt: skip
"""Mark without ``predicted-`` -> its rows."""


def ratios(one: Pairs) -> list[float]:
    """Measured over predicted."""
    return [b / a for a, b in zip(one.predicted, one.measured, strict=True)]


def differences(one: Pairs) -> list[float]:
    """Measured less predicted."""
    return [b - a for a, b in zip(one.predicted, one.measured, strict=True)]


def spread(values: Sequence[float], form: str) -> str:
    """Median with least and most."""
    shown = f"{median(values):{form}} [{min(values):{form}}, {max(values):{form}}]"
    return shown.replace("-", MINUS)


def judged(one: Pairs) -> list[str]:
    """Cells of the last columns: how far off, how many are near, the order, and the number of rows."""
    if one.ratio:
        off = ratios(one)
        near = f"{sum(abs(math.log(value)) <= math.log(1.05) for value in off)} of {len(off)}"
        cells = [spread(off, ".2f" if max(off) - min(off) > 0.02 else ".3f") + "×", near]
    else:
        off = differences(one)
        cells = [spread(off, "+.2f" if max(map(abs, off)) < 10 else "+.1f") + f" {one.unit}".rstrip(), "–"]
    constant = max(one.predicted) - min(one.predicted) < 0.05 * abs(max(one.predicted))
    rank = "–" if constant else f"{spearman(one.predicted, one.measured):.2f}".replace("-", MINUS)
    return [*cells, rank, str(len(off))]


def rows(group: str) -> str:
    """A table of one group."""
    head = [
        "quantity",
        "predicted by",
        "measured by",
        "measured over (or less) predicted",
        "within 5 %",
        "Spearman",
        "rows",
    ]
    rule = ["---", "---", "---", "---:", "---:", "---:", "---:", "---"]
    lines = [[*head, "command"], rule]
    for make in GROUPS[group]:
        one = make()
        if not one.measured:
            continue
        lines.append([one.what, one.by, one.against, *judged(one), "<br>".join(f"`{name}`" for name in one.steps)])
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def inside() -> str:
    """How often the interval of a merge's prediction held."""
    found = rows_of("valley_predictions")["weights"]["pairs"]
    kinds = {"all": "all", "scratch": "from scratch", "pretrained": "pretrained", "strangers": "strangers"}
    said = []
    for start, title in kinds.items():
        of = [row for row in found if start in ("all", row["start"])]
        hits = sum(row["error low"] <= row["error measured"] <= row["error high"] for row in of)
        said.append(f"{hits} of {len(of)} ({title})")
    return f"The predicted interval of the gap in error holds the measured gap in {', '.join(said)}."


def figure() -> Figure:
    """Small multiples: predicted across, measured upwards, the identity as a line."""
    made = {name: [make() for make in makers] for name, makers in GROUPS.items()}
    bytes_, traffic, (grid, reference, costed, collective, *_) = made["bytes"], made["traffic"], made["seconds"]
    shown = [
        Panel("Bytes of a step", "B", [_points("process", bytes_[1], "ours"), _points("ledger", bytes_[0], "reference"),
                                       _points("H100, others'", bytes_[2], "rival")]),
        Panel("Bytes of a hypergradient", "B", [_points("process", bytes_[3], "ours")]),
        Panel("Bytes of sparse nets", "B", [_points("tensors", bytes_[4], "ours")]),
        Panel("Bytes sent in a step", "B", [_points("plans, counted", traffic[0], "ours"),
                                            _points("at the interface", traffic[1], "extension"),
                                            _points("federated", traffic[2], "rival")]),
        Panel("Seconds of a step", "s", [_points("grid", grid, "ours"), _points("costs probed", costed, "rival"),
                                         _points("reference", reference, "extension")]),
        Panel("Seconds of a collective", "s", [_points("bytes alone", collective, "ours")]),
        Panel("Cosine to the truth", "", [_points("(FG)²U and kin", made["cosines"][0], "ours")]),
        Panel("Gap of an average", "points", [_points("pairs", made["merges"][0], "ours")], log=False),
        Panel("Best rate", "octaves", [_points("SμPar", made["rates"][0], "ours"),
                                       _points("SP", made["rates"][1], "rival")], log=False),
    ]  # fmt: skip
    return panels(
        shown,
        title="Bytes and traffic come out as predicted; seconds where links set them; merges are told apart, not sized",
        caption="Predicted across, measured upwards; the line is where they are equal.",
    )


def _points(label: str, one: Pairs, role: Role) -> Points:
    return Points(label, one.predicted, one.measured, role)


def pictures() -> dict[Path, str]:
    """The picture for light and for dark pages, as SVG."""
    return drawn("predicted", figure())


def filled(page: str) -> str:
    """The page with every table made anew."""
    return marked(page, {f"predicted-{group}": rows(group) for group in GROUPS} | {"predicted-inside": inside()})
