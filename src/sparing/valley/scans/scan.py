"""The scan: loss and error along a direction, to both sides, with batch-norm statistics that belong to every point.

Source: Li et al. 2024 (arXiv:2405.12489), §3 and appendix A.3.
"""

from __future__ import annotations

import contextlib
import math
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from sparing.blocks import named_parameters
from sparing.errors import require
from sparing.report import Progress
from sparing.valley.apply import perturbing
from sparing.valley.directions.config import Direction, Given, Noise
from sparing.valley.directions.resolve import Resolved
from sparing.valley.scans.batch_norm import Batch, Refresher, Statistics
from sparing.valley.scans.better import SHARES, Better, better_by_metric, declared_better
from sparing.valley.scans.curve import Curve
from sparing.valley.scans.evaluators import Evaluate, check_evaluate, require_same_metrics
from sparing.valley.scans.memory_format import channels_last, suits_channels_last
from sparing.valley.scans.workers import (
    DirectionCache,
    DirectionFacts,
    OnPoint,
    Point,
    ScanTask,
    measure_all,
    num_threads,
)

if TYPE_CHECKING:
    from sparing.report import Figure

Floats = NDArray[np.float64]

# A given direction is warned of if its SCR is this far from 1/2; less is worth at most 0.1 of asymmetry, 2 · SCR − 1
FAR: float = 0.05
DEVIATIONS: float = 4.0  # and how many standard deviations of a fair coin: an accident of 1 in 16,000


@dataclass(frozen=True, kw_only=True, eq=False)
class Scan(Curve):
    """Curves along one kind of direction, one for each width; the scan itself is the curve of the first."""

    curves: tuple[Curve, ...]
    """One for each width, in the order of the widths."""

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
    seed: int = 0,
    floors: Mapping[str, float] | None = None,
    better: Mapping[str, Better] | None = None,
    workers: int = 1,
    threads: int | None = None,
    label: str = "",
) -> Scan:
    """Measure a model along a direction, to both sides of where it is.

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
        draws: Draws of a random direction (count); a direction that is not random has one.
        seed: Of the draws.
        floors: Noise floors by metric, in its unit, instead of those computed from the rows.
        better: "lower" or "higher" for metrics whose name does not say; default: ``evaluate.better``, if any. Others
            are measured, but have no index.
        workers: Processes; the numbers are the same to the bit for any number. More than 1 pickle model, ``evaluate``
            and ``calibrate``, and a script needs ``if __name__ == "__main__":``.
        threads: Threads of each process; torch's setting by default. With several workers, 1 is best, here and in any
            scan whose bits are compared.
        label: Of a progress bar; none is shown by default.

    Returns:
        One curve for each width.

    Raises:
        UserError: If a setting is invalid, the direction does not fit the model, calibration batches are missing, or
            ``evaluate`` is not deterministic, changes the model, returns no finite numbers at λ = 0, or an error or
            accuracy that is no share; ``floors`` or ``better`` name a metric that it does not return.

    Warns:
        UserWarning: If the caller's own direction agrees in sign with the weights far more or less often than chance,
            or the parameters are in half precision, which rounds small steps away.
    """
    at = grid(points, reach)
    holds = len(widths) > 0 and all(0 < width < math.inf for width in widths)
    require(holds, "widths", tuple(widths), "λ is multiplied by each", "pass one number > 0 or more")
    require(draws >= 1, "draws", draws, "a curve needs one", "pass draws >= 1; 5 or more give an interval")
    task = scan_task(model, evaluate, (direction,), calibrate, statistics, seed, threads)
    count = draws if _is_random(direction) else 1
    sides = [k for k in range(points) if k != points // 2]
    # By draw first, so that a worker's chunk needs few directions
    where: list[Point] = [((0, n, float(at[k]) * width),) for n in range(count) for width in widths for k in sides]
    declared = declared_better(evaluate, better)
    found, zero, facts = measure_points(
        task, where, workers=workers, label=label, check=lambda at: _check_at_zero(at, floors, declared)
    )
    known = [facts[0, draw] for draw in range(count)]
    common = {
        "direction": direction.label, "lambdas": at, "theta_norm": known[0].theta_norm, "seed": seed, "floors": floors,
        "better": declared, "statistics": statistics_label(model, statistics), "rows": row_count(evaluate),
    }  # fmt: skip
    curves = _curves(found, zero, known, widths, common)
    return Scan(**{one.name: getattr(curves[0], one.name) for one in fields(Curve)}, curves=tuple(curves))


def _curves(
    found: Sequence[Mapping[str, float]], zero: Mapping[str, float], known: Sequence[Resolved],
    widths: Sequence[float], common: Mapping[str, Any],
) -> list[Curve]:  # fmt: skip
    """The curve of each width, from the numbers by draw, width and point, and those at λ = 0 for all."""
    table = {}
    for name, bottom in zero.items():
        sides = np.array([one[name] for one in found], dtype=np.float64).reshape(len(known), len(widths), -1)
        table[name] = np.insert(sides, sides.shape[2] // 2, bottom, axis=2)
    return [
        Curve(
            width=float(width),
            values={name: numbers[:, k] for name, numbers in table.items()},
            consistency=np.array([one.sign_consistency for one in known]),
            weighted_consistency=np.array([one.weighted_consistency for one in known]),
            cosine=np.array([one.cosine for one in known]),
            distance=np.array([one.direction_norm * float(width) for one in known]),
            **common,
        )
        for k, width in enumerate(widths)
    ]


def grid(points: int, reach: float) -> Floats:
    """Return λ, shape (points,), rising, mirrored to the bit around an exact 0."""
    require(
        isinstance(points, int) and points >= 3 and points % 2 == 1, "points", points,
        "λ = 0 and as many on either side are needed", "pass an odd number >= 3",
    )  # fmt: skip
    require(0 < reach < math.inf, "reach", reach, "λ goes from −reach to reach", "pass a number > 0")
    right = reach * np.arange(1, points // 2 + 1) / (points // 2)
    return np.concatenate([-right[::-1], [0.0], right])


def measure_points(
    task: ScanTask, points: Sequence[Point], *, workers: int = 1, label: str = "",
    check: Callable[[Mapping[str, float]], object] = lambda zero: None, warn: bool = True,
) -> tuple[list[dict[str, float]], dict[str, float], DirectionFacts]:  # fmt: skip
    """Check ``evaluate`` at θ, then measure all points; return numbers at each, those at θ, and the directions' facts.

    ``check`` may refuse the numbers at θ before anything else is measured; ``warn`` is of directions far from chance.
    """
    _warn_half(task.model)
    with num_threads(task.threads):
        suits = suits_channels_last(task.model, task.evaluate, Refresher(task.model, task.calibrate, task.statistics))
    task = replace(task, channels_last=suits)
    directions = DirectionCache(task)
    bar = Progress(label, total=len(points) + 1, unit="point") if label else None
    # Directions are drawn in the layout of the workers: lengths are sums, which round by their order
    with channels_last(task.model, wanted=suits), num_threads(task.threads), bar or contextlib.nullcontext():
        for which, draw, _ in points[0] if points and warn else ():
            _warn_biased(task.directions[which], directions(which, draw))
        on_point: OnPoint = bar.advance if bar else lambda: None
        with perturbing(task.model) as perturber:
            # evaluate has not been checked yet: whatever it writes must not reach the caller's parameters
            perturber.protect()
            task.model.eval()
            with Refresher(task.model, task.calibrate, task.statistics).at_point():
                zero = check_evaluate(task.evaluate, task.model)
        check(zero)
        on_point()
        found, facts = measure_all(task, points, workers=workers, directions=directions, on_point=on_point)
    for values in found:
        require_same_metrics(values, zero)
    return found, zero, directions.facts | facts


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


def scan_task(
    model: nn.Module, evaluate: Evaluate, directions: tuple[Direction, ...], calibrate: Iterable[Batch] | None,
    statistics: Statistics, seed: int, count: int | None,
) -> ScanTask:  # fmt: skip
    """Collect the settings of a scan, with the threads of this process unless ``count`` says otherwise."""
    require(callable(evaluate), "evaluate", type(evaluate).__name__, "it is called with the model", "pass a function")
    require(count is None or count >= 1, "threads", count, "a process needs one", "pass threads >= 1")
    return ScanTask(
        model=model, evaluate=evaluate, directions=directions, calibrate=calibrate, statistics=statistics, seed=seed,
        threads=torch.get_num_threads() if count is None else count,
    )  # fmt: skip


def _is_random(direction: Direction) -> bool:
    """Whether two draws of a direction differ."""
    drawn = isinstance(direction, Noise) and direction.kind != "one"
    return drawn or (not isinstance(direction.sign, str) and 0 < direction.sign < 1)


def statistics_label(model: nn.Module, statistics: Statistics) -> str:
    """Name the statistics for a record: "none" for a model without batch norm."""
    return statistics if Refresher(model, None, "stale").layers else "none"


def row_count(evaluate: Evaluate) -> int | None:
    """The attribute ``rows`` of ``evaluate``, if it is a count."""
    rows = getattr(evaluate, "rows", None)
    return rows if isinstance(rows, int) else None


def _warn_biased(direction: Direction, found: Resolved) -> None:
    """Warn if a direction of the caller's own is biased to one side."""
    if not isinstance(direction, Given) or direction.sign != "raw":
        return
    share = found.sign_consistency
    # A fair coin deviates by 0.5 / √n, so that few elements may be far from one half by chance
    voters = sum(int((value != 0).sum()) for value in found.vector.values())
    off = abs(share - 0.5)
    if voters and off > FAR and off > DEVIATIONS * 0.5 / math.sqrt(voters):
        side = "+" if share > 0.5 else "−"
        warnings.warn(
            f"direction {direction.name!r}: {share:.0%} of its signs are those of the weights (50 % would be chance); "
            f"such a line tends to be flatter on its {side} side, which says nothing about this minimum; compare "
            "with Noise() or draw signs evenly, and report the share (found.consistency) beside the curve",
            UserWarning, stacklevel=4,
        )  # fmt: skip


def _warn_half(model: nn.Module) -> None:
    half = {str(p.dtype) for p in named_parameters(model).values() if p.dtype in {torch.bfloat16, torch.float16}}
    if half:
        warnings.warn(
            f"parameters in {' and '.join(sorted(half))}: small steps are rounded away; scan model.float() instead",
            UserWarning, stacklevel=4,
        )  # fmt: skip
