"""The scan: loss and error along a direction, to both sides, with batch-norm statistics that belong to every point.

Source: Li et al. 2024 (arXiv:2405.12489), §3 and appendix A.3.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray
from torch import nn

from sparing.errors import require
from sparing.valley.directions.config import Direction, Noise
from sparing.valley.directions.resolve import Resolved
from sparing.valley.scans.batch_norm import Batch, Statistics
from sparing.valley.scans.better import SHARES, Better, better_by_metric, declared_better
from sparing.valley.scans.curve import Curve
from sparing.valley.scans.evaluators import Evaluate
from sparing.valley.scans.points import Check, grid, measure_points, row_count, scan_task, statistics_label
from sparing.valley.scans.precise import Allocation, scan_precisely
from sparing.valley.scans.workers import Point

if TYPE_CHECKING:
    from sparing.report import Figure

Floats = NDArray[np.float64]


@dataclass(frozen=True, kw_only=True, eq=False)
class Scan(Curve):
    """Curves along one kind of direction, one for each width; the scan itself is the curve of the first."""

    curves: tuple[Curve, ...]
    """One for each width, in the order of the widths."""
    allocation: Allocation | None = None
    """What a stated precision took, and whether it was reached; None where none was asked for."""

    def rows_of(self) -> list[dict[str, float | int | str | None]]:
        """Rows of all widths: ``Curve.rows_of``."""
        return [row for curve in self.curves for row in curve.rows_of()]

    def summary(self) -> list[dict[str, float | int | str | None]]:
        """One row per width and metric: ``Curve.summary``."""
        return [row for curve in self.curves for row in curve.summary()]

    def plot(self, metric: str | None = None) -> Figure:
        """Draw all widths, each as the mean over draws with its interval."""
        from sparing.valley.scans.plots import curve_figure

        return curve_figure(self.curves, metric or self.metrics[0])


def scan(
    model: nn.Module,
    evaluate: Evaluate,
    direction: Direction,
    *,
    calibrate: Iterable[Batch] | None = None,
    statistics: Statistics = "exact",
    points: int = 21,
    widths: Sequence[float] = (1.0,),
    reach: float = 1.0,
    draws: int = 5,
    precision: float | None = None,
    budget: int | None = None,
    seed: int = 0,
    floors: Mapping[str, float] | None = None,
    better: Mapping[str, Better] | None = None,
    workers: int = 1,
    threads: int | None = None,
    label: str = "",
) -> Scan:
    """Measure a model along a direction, on both sides of its weights.

    At each point the parameters are θ + λ · width · ε, batch-norm statistics are re-estimated, and ``evaluate`` is
    called once, in eval mode and without gradients. All widths and metrics share draws; λ = 0 is measured once.
    Afterwards parameters, buffers, training flags and random state are as before, to the bit, also after an exception.

    Args:
        model: Any module: batch norm, GroupNorm, a Hugging Face language model, frozen parts (which stay), tied or
            masked weights.
        evaluate: Model -> numbers by name, such as {"loss": nat, "error": share}; ``Classification`` and ``NextToken``
            are two. It must be deterministic and leave the model as it is, which is checked at λ = 0. An attribute
            ``rows`` gives the noise floor of the asymmetry.
        direction: ``Noise``, ``Special`` or ``Given``.
        calibrate: Batches of training inputs for batch norm, iterated again at every point; not the evaluated rows.
        statistics: "exact" (all calibration rows in one pass), "cumulative" (mean over batches), "stale" (those of θ)
            or "batch" (each evaluated batch's own); the last two are for comparison.
        points: Values of λ (count), odd, >= 3, equally spaced from −reach to reach.
        widths: Factors s of λ, each > 0.
        reach: Largest λ, > 0.
        draws: Draws of a random direction (count); a direction that is not random has one. With ``precision`` the
            least of them.
        precision: Standard error that every asymmetry index should reach, over draws and rows: 0.05 makes 95 %
            intervals of ± 0.1. Draws, and rows that are different for each draw, are added until it is reached, in
            proportions that follow how much each varies and costs; ``evaluate`` then needs ``choose``, ``each`` and a
            length, as ``Classification`` and ``NextToken`` have. None: all rows at every point of every draw, and
            intervals over draws alone.
        budget: Rows that a scan to a precision may run through the model, calibration rows too (count); none: as many
            as its rows allow.
        seed: Seed of the draws.
        floors: Noise floors by metric, in its unit, instead of those computed from the rows.
        better: "lower" or "higher" for metrics whose name does not say; default: ``evaluate.better``, if any. Others
            are measured, but have no index.
        workers: Processes; the numbers are the same to the bit for any number. More than 1 pickle model, ``evaluate``
            and ``calibrate``, and a script needs ``if __name__ == "__main__":``.
        threads: Threads of each process; torch's setting by default. With several workers, 1 is best, here and in any
            scan whose bits are compared.
        label: Label of a progress bar; none is shown by default.

    Returns:
        One curve for each width.

    Raises:
        UserError: If a setting is invalid, the direction does not fit the model, calibration batches are missing, or
            ``evaluate`` is not deterministic, changes the model, returns no finite numbers at λ = 0, or an error or
            accuracy that is no share; ``floors`` or ``better`` name a metric that it does not return; a precision is
            asked of a direction that is not random, or of an ``evaluate`` whose rows cannot be chosen.

    Warns:
        UserWarning: If rows or budget end before the precision is reached.
        UserWarning: If the caller's own direction agrees in sign with the weights far more or less often than chance,
            or the parameters are in half precision, which rounds small steps away.
    """
    at = grid(points, reach)
    _check_settings(direction, widths, draws, precision, budget)
    declared = declared_better(evaluate, better)
    task = scan_task(model, evaluate, (direction,), calibrate, statistics, seed, threads)
    common = {
        "direction": direction.label, "lambdas": at, "seed": seed, "floors": floors, "better": declared,
        "statistics": statistics_label(model, statistics),
    }  # fmt: skip
    check: Check = partial(_check_at_zero, floors=floors, better=declared)
    if precision is not None:
        values, known, rows, allocation = scan_precisely(
            task, at, widths, precision, budget=math.inf if budget is None else budget, draws=draws, workers=workers,
            label=label, check=check, better=declared,
        )  # fmt: skip
        return _scan(_curves(values, known, widths, common | {"rows": rows}), allocation)
    count = draws if _is_random(direction) else 1
    where = _where(at, widths, count)
    found, zero, facts = measure_points(task, where, workers=workers, label=label, check=check)
    values, known = _values(found, zero, count, len(widths)), [facts[0, draw] for draw in range(count)]
    return _scan(_curves(values, known, widths, common | {"rows": row_count(evaluate)}))


def _check_settings(
    direction: Direction, widths: Sequence[float], draws: int, precision: float | None, budget: int | None
) -> None:
    """Refuse counts and lengths that make no curve, and a precision or budget without meaning."""
    holds = len(widths) > 0 and all(0 < width < math.inf for width in widths)
    require(holds, "widths", tuple(widths), "λ is multiplied by each", "pass one number > 0 or more")
    require(draws >= 1, "draws", draws, "a curve needs one", "pass draws >= 1; 5 or more give an interval")
    alone = precision is None and budget is not None
    require(not alone, "budget", budget, "it bounds a scan to a precision", "pass precision=, or omit it")
    do = "leave precision out: it is measured on all rows, once"
    drawn = precision is None or _is_random(direction)
    require(drawn, "precision", direction.label, "a direction of one draw has no spread", do)


def _where(at: Floats, widths: Sequence[float], draws: int) -> list[Point]:
    """All points but λ = 0, by draw first, so that a worker's chunk needs few directions."""
    steps = [float(one) * width for width in widths for one in at if one]
    return [((0, draw, step),) for draw in range(draws) for step in steps]


def _values(
    found: Sequence[Mapping[str, float]], zero: Mapping[str, float], draws: int, widths: int
) -> dict[str, Floats]:
    """Values by metric, shape (draws, widths, points), from those at all points but λ = 0, and there."""
    values = {}
    for name, bottom in zero.items():
        numbers = np.array([one[name] for one in found], dtype=np.float64).reshape(draws, widths, -1)
        values[name] = np.insert(numbers, numbers.shape[2] // 2, bottom, axis=2)
    return values


def _scan(curves: Sequence[Curve], allocation: Allocation | None = None) -> Scan:
    first = {one.name: getattr(curves[0], one.name) for one in fields(Curve)}
    return Scan(**first, curves=tuple(curves), allocation=allocation)


def _curves(
    values: Mapping[str, Floats], known: Sequence[Resolved], widths: Sequence[float], common: Mapping[str, Any]
) -> list[Curve]:
    """The curve of each width, from values of each metric, shape (draws, widths, points)."""
    return [
        Curve(
            width=float(width),
            theta_norm=known[0].theta_norm,
            values={name: numbers[:, k] for name, numbers in values.items()},
            consistency=np.array([one.sign_consistency for one in known]),
            weighted_consistency=np.array([one.weighted_consistency for one in known]),
            cosine=np.array([one.cosine for one in known]),
            distance=np.array([one.direction_norm * float(width) for one in known]),
            **common,
        )
        for k, width in enumerate(widths)
    ]


def _check_at_zero(
    zero: Mapping[str, float], floors: Mapping[str, float] | None, better: Mapping[str, Better] | None
) -> None:
    """Refuse numbers at θ, floors and declarations that would make no index."""
    better_by_metric(zero, better)
    for name, floor in (floors or {}).items():
        require(name in zero, "floors", repr(name), f"measured were {', '.join(zero)}", "name one of them")
        require(0 <= floor < math.inf, f"floors[{name!r}]", floor, "a noise floor is a height", "pass a number >= 0")
    for name, value in zero.items():
        share = name not in SHARES or 0 <= value <= 1
        do = "return a share of rows, or call it by another name and say better="
        require(share, f"evaluate: {name!r}", value, "noise floor and widths take it as a share in [0, 1]", do)


def _is_random(direction: Direction) -> bool:
    """Whether two draws of a direction differ."""
    drawn = isinstance(direction, Noise) and direction.kind != "one"
    return drawn or (not isinstance(direction.sign, str) and 0 < direction.sign < 1)
