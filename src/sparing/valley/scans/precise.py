"""A scan to a stated precision: draws, and rows of each, are added until the index is known well enough."""

from __future__ import annotations

import contextlib
import math
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from sparing.blocks.modes import evaluating
from sparing.errors import UserError, require
from sparing.report import Progress
from sparing.seeds import stream
from sparing.valley.directions.resolve import Resolved
from sparing.valley.scans.allocation import DRAWS, Costs, Spent, components, spend
from sparing.valley.scans.asymmetry import mean_rises
from sparing.valley.scans.batch_norm import Refresher
from sparing.valley.scans.better import as_cost, better_by_metric
from sparing.valley.scans.evaluators import run_evaluate
from sparing.valley.scans.points import Check, measure_points, with_layout
from sparing.valley.scans.workers import DirectionFacts, OnPoint, Point, ScanTask, measure_all

Floats = NDArray[np.float64]

# What it costs to bring a model to a point, in rows: a copy of all weights, which is many rows of a small dense net and
# less than one of a convolutional one; the split depends on its root
MOVE: float = 8.0
CLOSE: float = 1e-5  # relative difference between a mean of rows and evaluate's own number: sums in another order


@dataclass(frozen=True, slots=True, kw_only=True)
class IndexPrecision:
    """How well an asymmetry index is known, and why."""

    metric: str
    width: float
    error: float
    """Standard error over draws and rows."""
    between: float
    """Variance of its linear part between draws."""
    within: float
    """The same between rows of a draw."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Allocation:
    """What a scan to a stated precision spent."""

    asked: float
    """Standard error of an asymmetry index that was asked for."""
    reached: float
    """The largest standard error of its indices."""
    draws: int
    """Draws (count)."""
    rows: int
    """Rows of each draw (count); no two draws share any."""
    evaluated: int
    """Rows run through the model over all points, calibration rows too (count)."""
    limit: str
    """"data" or "budget", whichever ended before the precision was reached; "" where it was."""
    parts: tuple[IndexPrecision, ...]
    """Every index by metric and width."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RowTask(ScanTask):
    """A scan whose draws are measured on rows of their own; numbers are those of every row."""

    rows: Mapping[int, Tensor]  # draw -> indices of rows

    def numbers(self, point: Point) -> dict[str, Any]:
        """Numbers of every row of the draw by metric, float64, shape (rows,)."""
        ((_, draw, _),) = point
        measure: Any = self.evaluate
        with torch.no_grad():
            found = measure.choose(self.rows[draw]).each(self.model)
        return {name: np.asarray(value.detach().cpu().double()) for name, value in found.items()}


class Sampler:
    """Measures draws on rows that no other draw has, and keeps the values of all."""

    def __init__(
        self, task: ScanTask, at: Floats, widths: Sequence[float], zero: Mapping[str, float],
        ways: Mapping[str, Any], *, workers: int, label: str = "",
    ) -> None:  # fmt: skip
        self.task, self.at, self.widths = task, at, widths
        self.workers, self.label = workers, label
        self.metrics, self.ways = tuple(zero), ways
        self.order = row_order(task)
        self.used = 0  # rows (count)
        self.facts: DirectionFacts = {}
        # metric -> values of every draw's rows, a list of (draws, widths, points, rows)
        self.values: dict[str, Floats] = {}

    def __call__(self, draws: range, rows: int) -> Floats:
        """Measure some draws on so many more rows each; return their rises, shape (draws, rows, K, 2)."""
        parts = {draw: self.order[self.used + k * rows : self.used + (k + 1) * rows] for k, draw in enumerate(draws)}
        self.used += rows * len(draws)
        names = {one.name for one in fields(ScanTask)}
        task = RowTask(**{name: getattr(self.task, name) for name in names}, rows=parts)
        sides = [k for k in range(len(self.at)) if self.at[k]]
        where: list[Point] = [
            ((0, draw, step),)
            for draw in draws
            for step in (0.0, *(float(self.at[k]) * width for width in self.widths for k in sides))
        ]
        # how many points are still to come is not known
        bar = Progress(self.label, total=len(where), unit="point") if self.label else None
        with bar or contextlib.nullcontext():
            on_point: OnPoint = bar.advance if bar else lambda: None
            found, facts = measure_all(task, where, workers=self.workers, on_point=on_point)
        self.facts |= facts
        for name in self.metrics:
            each = np.stack([one[name] for one in found]).reshape(len(draws), -1, rows)
            here = np.stack(
                [
                    np.insert(each[:, 1 + k * len(sides) : 1 + (k + 1) * len(sides)], len(sides) // 2, each[:, 0], 1)
                    for k in range(len(self.widths))
                ],
                1,
            )
            self._keep(name, here, draws)
        return self._rises(draws, rows)

    def _keep(self, name: str, here: Floats, draws: range) -> None:
        """Add values to those of earlier draws, or to the rows of the same ones."""
        known = self.values.get(name)
        if known is None:
            self.values[name] = here
        else:
            self.values[name] = np.concatenate([known, here], 0 if draws.start == len(known) else 3)

    def _rises(self, draws: range, rows: int) -> Floats:
        """Rises of the latest rows, as costs, of metrics whose better side is known."""
        found = []
        for name, way in self.ways.items():
            latest = as_cost(self.values[name][draws.start :, ..., -rows:], way)
            if not np.isfinite(latest).all():
                raise UserError(
                    "precision", got=f"{name} that is not finite along the line", why="it has no standard error",
                    do="pass a smaller reach or widths, or an evaluate without it",
                )  # fmt: skip
            found += [
                np.stack(mean_rises(self.at, np.moveaxis(latest[:, k], 1, 2)), 2) for k in range(len(self.widths))
            ]
        return np.stack(found, 2)


def row_order(task: ScanTask) -> Tensor:
    """All rows in the order in which draws take them."""
    measure: Any = task.evaluate
    return torch.randperm(len(measure), generator=stream(task.seed, "rows of a scan"))


def scan_precisely(
    task: ScanTask, at: Floats, widths: Sequence[float], precision: float, *, budget: float, draws: int, workers: int,
    label: str, check: Check, better: Mapping[str, Any] | None,
) -> tuple[dict[str, Floats], list[Resolved], int | None, Allocation]:  # fmt: skip
    """Measure until the precision is reached.

    Returns the values by metric, shape (draws, widths, points), the facts of each draw, the rows behind a number, and
    what was spent.
    """
    measure: Any = task.evaluate
    _check_evaluate_rows(measure)
    require(precision > 0, "precision", precision, "it is a standard error", "pass a number > 0, such as 0.05")
    start = max(draws, DRAWS)
    calibration = Refresher(task.model, task.calibrate, task.statistics).rows
    points = 1 + len(widths) * (len(at) - 1)
    costs = Costs(points=points, calibration=calibration, move=MOVE, available=len(measure), budget=budget)
    first = replace(task, evaluate=measure.choose(row_order(task)[: start * costs.first_rows(start)]))
    _, zero, _ = measure_points(first, (), check=check)
    _check_means(first)
    ways = better_by_metric(zero, better)
    do = 'say which way one gets better: better={"score": "higher"}'
    require(bool(ways), "precision", f"only {', '.join(zero)}", "it is of an asymmetry index", do)
    task = replace(task, channels_last=with_layout(first).channels_last)
    sampler = Sampler(task, at, widths, zero, ways, workers=workers, label=label)
    spent = spend(sampler, precision, costs, draws=start)
    allocation = _allocation(spent, precision, [(name, float(width)) for name in ways for width in widths])
    _warn_limit(allocation, len(measure), budget)
    known = [sampler.facts[0, draw] for draw in range(len(spent.pairs))]
    values = {name: each.mean(3) for name, each in sampler.values.items()}
    rows = getattr(measure.choose(sampler.order[: sampler.used]), "rows", None)
    return values, known, rows if isinstance(rows, int) else None, allocation


def _allocation(spent: Spent, asked: float, names: Sequence[tuple[str, float]]) -> Allocation:
    between, within = components(spent.pairs)
    parts = [
        IndexPrecision(metric=metric, width=width, error=float(error), between=float(a), within=float(r))
        for (metric, width), error, a, r in zip(names, spent.errors, between, within, strict=True)
    ]
    draws, rows = spent.pairs.shape[:2]
    return Allocation(
        asked=asked, reached=float(spent.errors.max()), draws=draws, rows=rows, evaluated=spent.evaluated,
        limit=spent.limit, parts=tuple(parts),
    )  # fmt: skip


def _warn_limit(found: Allocation, available: int, budget: float) -> None:
    """Say that the precision was not reached, and what would do."""
    if not found.limit:
        return
    times = (found.reached / found.asked) ** 2
    ended = (
        f"its {available:,} rows are used up" if found.limit == "data" else f"the budget of {budget:,} rows is spent"
    )
    more = (
        f"about {found.draws * found.rows * times:,.0f} rows" if found.limit == "data"
        else f"budget={found.evaluated * times:,.0f} or so"
    )  # fmt: skip
    warnings.warn(
        f"precision {found.asked:g}: the standard error is {found.reached:.2g} after {found.draws} draws of "
        f"{found.rows} rows, and {ended}; pass {more}, or take what is reached",
        UserWarning, stacklevel=4,
    )  # fmt: skip


def _check_evaluate_rows(evaluate: Any) -> None:
    """Refuse an evaluate that cannot be asked for some of its rows."""
    holds = all(callable(getattr(evaluate, name, None)) for name in ("each", "choose", "__len__"))
    do = "use Classification or NextToken, or give it choose(indices), each(model) and a length"
    require(holds, "precision", type(evaluate).__name__, "rows are chosen, and each has a number", do)


def _check_means(task: ScanTask) -> None:
    """Refuse numbers that are no means over rows: no part of the rows would stand for all."""
    measure: Any = task.evaluate
    with evaluating(task.model):
        whole = run_evaluate(measure, task.model)
        with torch.no_grad():
            means = {name: float(value.double().mean()) for name, value in measure.each(task.model).items()}
    why, do = "both are of the same rows", "return the same names from both"
    require(whole.keys() == means.keys(), "evaluate.each", f"{[*means]} beside {[*whole]}", why, do)
    for name, value in whole.items():
        holds = math.isclose(value, means[name], rel_tol=CLOSE, abs_tol=CLOSE)
        got, why = f"a mean over rows of {means[name]:.6g}", f"evaluate gives {value:.6g}, which is no such mean"
        require(holds, f"evaluate.each: {name!r}", got, why, "pass an evaluate whose numbers are means over rows")
