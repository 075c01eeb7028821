"""Points along directions: what every scan of a line or a plane measures, with its checks and warnings."""

from __future__ import annotations

import contextlib
import math
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from sparing.blocks import named_parameters
from sparing.errors import require
from sparing.report import Progress
from sparing.valley.apply import perturbing
from sparing.valley.directions.config import Direction, Given
from sparing.valley.directions.resolve import Resolved
from sparing.valley.scans.batch_norm import Batch, Refresher, Statistics
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

Floats = NDArray[np.float64]

Check = Callable[[Mapping[str, float]], object]  # may refuse the numbers at θ

# A given direction is warned of if its SCR is this far from 1/2; less is worth at most 0.1 of asymmetry, 2 · SCR − 1
FAR: float = 0.05
DEVIATIONS: float = 4.0  # and how many standard deviations of a fair coin: an accident of 1 in 16,000


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
    check: Check = lambda zero: None, warn: bool = True,
) -> tuple[list[dict[str, float]], dict[str, float], DirectionFacts]:  # fmt: skip
    """Check ``evaluate`` at θ, then measure all points; return numbers at each, those at θ, and the directions' facts.

    ``check`` may refuse the numbers at θ before anything else is measured; ``warn`` is of directions far from chance.
    """
    _warn_half(task.model)
    task = with_layout(task)
    directions = DirectionCache(task)
    bar = Progress(label, total=len(points) + 1, unit="point") if label else None
    # Directions are drawn in the layout of the workers: lengths are sums, which round by their order
    with (
        channels_last(task.model, wanted=task.channels_last),
        num_threads(task.threads),
        bar or contextlib.nullcontext(),
    ):
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


def with_layout(task: ScanTask) -> ScanTask:
    """Let convolutions run channels last where the model takes it and gives the same numbers."""
    with num_threads(task.threads):
        suits = suits_channels_last(task.model, task.evaluate, Refresher(task.model, task.calibrate, task.statistics))
    return replace(task, channels_last=suits)


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
