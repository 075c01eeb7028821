"""The scan of a plane: loss and error over two directions at once."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray
from torch import nn

from sparing import vectors
from sparing.errors import require
from sparing.report.frames import as_frame
from sparing.valley.directions.config import Direction
from sparing.valley.scans.batch_norm import Batch, Statistics
from sparing.valley.scans.evaluators import Evaluate
from sparing.valley.scans.points import grid, measure_points, row_count, scan_task, statistics_label
from sparing.valley.scans.workers import DirectionCache, Point

if TYPE_CHECKING:
    from sparing.report import Figure

Floats = NDArray[np.float64]

PARALLEL: float = 0.999  # cosine beyond which two directions are one


@dataclass(frozen=True, kw_only=True, eq=False)
class Surface:
    """Values at θ + λᵢ · width · ε₁ + λⱼ · width · ε₂."""

    directions: tuple[str, str]  # names of both directions
    lambdas: Floats  # λ of both, shape (P,), rising and symmetric around 0; dimensionless
    width: float  # s, the factor of λ
    values: Mapping[str, Floats]  # metric -> numbers, shape (P, P), float64, raw: first index along the first direction
    consistency: tuple[float, float]  # SCR of both directions; 1/2 is no bias
    # cosine between the two directions: the axes of the picture stand at right angles, the directions may not
    cosine: float
    statistics: str  # how batch-norm statistics were computed; "none" without batch norm
    seed: int  # of the draws
    rows: int | None = None  # evaluated rows behind every number (count), if ``evaluate`` says

    def plot(self, metric: str | None = None) -> Figure:
        """Draw a heatmap, the first direction across and the second upwards; nonfinite values are hatched."""
        from sparing.valley.scans.plots import surface_figure

        return surface_figure(self, metric or next(iter(self.values)))

    def table(self) -> Any:
        """Return ``rows_of`` as a pandas DataFrame, or as they are where pandas is not installed."""
        return as_frame(self.rows_of())

    def rows_of(self) -> list[dict[str, float | str]]:
        """Return one row per point, for a table of a record."""
        return [
            {
                "first": self.directions[0], "second": self.directions[1], "lambda_first": float(a),
                "lambda_second": float(b), "width": self.width,
                **{name: float(numbers[i, j]) for name, numbers in self.values.items()}, "statistics": self.statistics,
            }
            for i, a in enumerate(self.lambdas) for j, b in enumerate(self.lambdas)
        ]  # fmt: skip


def scan2d(
    model: nn.Module,
    evaluate: Evaluate,
    first: Direction,
    second: Direction,
    *,
    calibrate: Iterable[Batch] | None = None,
    statistics: Statistics = "exact",
    points: int = 11,
    width: float = 1.0,
    reach: float = 1.0,
    seed: int = 0,
    workers: int = 1,
    threads: int | None = None,
    label: str = "",
) -> Surface:
    """Measure a model over the plane of two directions.

    The first direction is draw 0 and the second draw 1, so that two noises of one kind differ. They are not made
    orthogonal: in high dimensions two draws nearly are. Each axis equals the ``scan`` along its direction, to the bit.

    Args:
        model: As in ``scan``.
        evaluate: As in ``scan``.
        first: One direction.
        second: The other.
        calibrate: As in ``scan``.
        statistics: As in ``scan``.
        points: Values of λ along each direction (count), odd, >= 3.
        width: Factor of λ, > 0.
        reach: Largest λ, > 0.
        seed: Seed of the draws.
        workers: As in ``scan``.
        threads: As in ``scan``.
        label: As in ``scan``.

    Returns:
        The surface.

    Raises:
        UserError: As ``scan``; if the two directions are the same.
    """
    at = grid(points, reach)
    require(0 < width < float("inf"), "width", width, "λ is multiplied by it", "pass a number > 0")
    task = scan_task(model, evaluate, (first, second), calibrate, statistics, seed, threads)
    cosine = _cosine(DirectionCache(task))
    steps = [float(step) * width for step in at]
    where: list[Point] = [((0, 0, a), (1, 1, b)) for a in steps for b in steps if a or b]
    found, zero, facts = measure_points(task, where, workers=workers, label=label)
    found.insert(len(found) // 2, zero)
    values = {name: np.array([one[name] for one in found], dtype=np.float64).reshape(points, points) for name in zero}
    return Surface(
        directions=(first.label, second.label), lambdas=at, width=float(width), values=values,
        consistency=(facts[0, 0].sign_consistency, facts[1, 1].sign_consistency), cosine=cosine,
        statistics=statistics_label(model, statistics), seed=seed, rows=row_count(evaluate),
    )  # fmt: skip


def _cosine(directions: DirectionCache) -> float:
    """Cosine between the two directions; refuses parallel ones."""
    a, b = directions(0, 0).vector, directions(1, 1).vector
    common = a.keys() & b.keys()
    inner = float(vectors.dot({n: a[n] for n in a if n in common}, {n: b[n] for n in a if n in common}))
    cosine = inner / (float(vectors.norm(a)) * float(vectors.norm(b)))
    require(
        abs(cosine) <= PARALLEL, "directions", f"a cosine of {cosine:+.4f} between them",
        "two directions that are one span no plane", "choose another second direction",
    )  # fmt: skip
    return cosine
