"""The plane through three models: loss and error over it, and a trajectory of checkpoints projected onto it."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from sparing import vectors
from sparing.blocks import named_parameters, tied
from sparing.errors import UserError, require
from sparing.report.frames import as_frame
from sparing.valley.directions.config import Given, difference
from sparing.valley.merging.compatible import Model, is_statistic, require_compatible, state_of
from sparing.valley.merging.model_folders import require_same_function
from sparing.valley.scans.batch_norm import Batch, Statistics
from sparing.valley.scans.evaluators import Evaluate
from sparing.valley.scans.points import measure_points, row_count, scan_task, statistics_label
from sparing.valley.scans.workers import DirectionFacts, Point

if TYPE_CHECKING:
    from sparing.report import Figure

Floats = NDArray[np.float64]

FLAT: float = 1e-3  # sine of the angle at the first model below which three models lie on a line


@dataclass(frozen=True, kw_only=True, eq=False)
class Plane:
    """Values at θ + x u + y v; u points from the first model to the second, v at a right angle to the third's side."""

    names: tuple[str, str, str]  # of the three models
    x: Floats  # coordinates along u, shape (P,), rising; in the unit of the weights, 0 is the first model
    y: Floats  # along v, shape (P,)
    values: Mapping[str, Floats]  # metric -> numbers, shape (P, P), float64, raw: first index along x
    corners: Floats  # coordinates of the three models, shape (3, 2)
    at_corners: Mapping[str, Floats]  # metric -> numbers at the models themselves, shape (3,)
    path: Floats  # coordinates of the projected checkpoints, shape (T, 2)
    # distance of each checkpoint from the plane over its distance from the first model, shape (T,); 0 lies in it
    off: Floats
    statistics: str  # how batch-norm statistics were computed; "none" without batch norm
    rows: int | None = None  # evaluated rows behind every number (count), if ``evaluate`` says

    def rows_of(self) -> list[dict[str, Any]]:
        """Return one row per point of the grid, for a table of a record."""
        return [
            {"x": float(a), "y": float(b), **{name: float(at[i, j]) for name, at in self.values.items()}}
            for i, a in enumerate(self.x) for j, b in enumerate(self.y)
        ]  # fmt: skip

    def table(self) -> Any:
        """Return ``rows_of`` as a pandas DataFrame, or as they are where pandas is not installed."""
        return as_frame(self.rows_of())

    def plot(self, metric: str | None = None) -> Figure:
        """Draw contours of a metric (by default the first) with the three models and the trajectory."""
        from sparing.valley.scans.plots import plane_figure

        return plane_figure(self, metric or next(iter(self.values)))


def plane(
    a: nn.Module,
    b: Model,
    c: Model,
    evaluate: Evaluate,
    *,
    path: Sequence[Model] = (),
    names: tuple[str, str, str] = ("A", "B", "C"),
    points: int = 11,
    margin: float = 0.25,
    calibrate: Iterable[Batch] | None = None,
    statistics: Statistics = "exact",
    workers: int = 1,
    threads: int | None = None,
    label: str = "",
) -> Plane:
    """Measure a model over the plane through three models, and project checkpoints onto it.

    Batch-norm statistics are re-estimated at every point. The live model gets its weights back, to the bit.

    Args:
        a: Live model, the origin.
        b: Second model, live or a state; u points to it.
        c: Third model.
        evaluate: As in ``scan``.
        path: Checkpoints of one run, in order.
        names: What the picture calls the three.
        points: Coordinates on each axis (count), >= 2.
        margin: Space around models and checkpoints, as a share of their extent, >= 0.
        calibrate: As in ``scan``.
        statistics: As in ``scan``.
        workers: As in ``scan``.
        threads: As in ``scan``.
        label: As in ``scan``.

    Returns:
        Values on the grid and at the three models, and the projected checkpoints with how far off the plane they are.

    Raises:
        UserError: As ``scan``; if the models are of different architectures, lie on one line, or differ in weights
            that do not move (frozen or masked).
    """
    require(isinstance(points, int) and points >= 2, "points", points, "a grid has two ends", "pass points >= 2")
    require(0 <= margin < math.inf, "margin", margin, "it is a share of the extent", "pass a number >= 0")
    steps = _steps(a, (b, c, *path))
    u, v = _basis(*steps[:2])
    placed = np.array([(0.0, 0.0, 0.0), *(_place(one, u, v) for one in steps)])
    places, length = placed[:, :2], placed[:, 2]
    x, y = (_axis(places[:, k], points, margin) for k in (0, 1))
    directions = Given(u, norm="raw", name="u"), Given(v, norm="raw", name="v")
    task = scan_task(a, evaluate, directions, calibrate, statistics, 0, threads)
    corners = places[:3]
    where: list[Point] = [((0, 0, float(s)), (1, 1, float(t))) for s in x for t in y]
    where += [((0, 0, float(s)), (1, 1, float(t))) for s, t in corners[1:]]
    # Directions to other models are not meant to be unbiased
    found, zero, facts = measure_points(task, where, workers=workers, label=label, warn=False)
    _require_moved(facts, names)
    grid, ends = found[: points * points], [zero, *found[points * points :]]
    return Plane(
        names=names, x=x, y=y, corners=corners, path=places[3:],
        values={name: np.array([one[name] for one in grid]).reshape(points, points) for name in zero},
        at_corners={name: np.array([one[name] for one in ends]) for name in zero},
        off=np.sqrt(np.maximum(length**2 - (places**2).sum(1), 0.0))[3:] / np.maximum(length[3:], 1e-300),
        statistics=statistics_label(a, statistics), rows=row_count(evaluate),
    )  # fmt: skip


def _steps(a: nn.Module, others: Sequence[Model]) -> list[dict[str, Tensor]]:
    """The steps from a live model to others, over its parameters."""
    states = [state_of(one) for one in (a, *others)]
    require_compatible(states)
    require_same_function([a, *others])
    origin = {name: value.detach() for name, value in named_parameters(a).items()}
    # other names of tied weights are no buffers
    known = origin.keys() | tied(a).keys()
    for name in (name for name in states[0] if name not in known and states[0][name].is_floating_point()):
        same = all(torch.equal(states[0][name], state[name].to(states[0][name])) for state in states[1:])
        why, do = "all points are measured with the buffers of the first model", "give all models the same"
        require(same or is_statistic(name), f"models at {name!r}", "buffers that differ", why, do)
    return [difference(origin, {name: state[name] for name in origin}) for state in states[1:]]


def _require_moved(facts: DirectionFacts, names: tuple[str, str, str]) -> None:
    """Refuse models that the directions do not reach."""
    for which in (0, 1):
        if abs(facts[which, which].direction_norm - 1) > 1e-4:
            got = f"{names[1 + which]} differs in weights that do not move"
            why, do = (
                "frozen and masked weights stay along every direction",
                "unfreeze them, or pass models of one mask",
            )
            raise UserError("plane", got=got, why=why, do=do)


def _basis(first: dict[str, Tensor], second: dict[str, Tensor]) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Two unit vectors at right angles, the first along the first step, both in the plane of the two."""
    length, size = float(vectors.norm(first)), float(vectors.norm(second))
    do = "pass three different models"
    require(min(length, size) > 0, "plane", "two equal models", "three points span a plane", do)
    u = {name: value / length for name, value in first.items()}
    v = vectors.axpy(-float(vectors.dot(u, second)), u, second)
    height = float(vectors.norm(v))
    require(height > FLAT * size, "plane", "three models on one line", "it spans no plane", do)
    v = {name: value / height for name, value in v.items()}
    # Once more, for the rounding of the first subtraction is large where the angle is small
    v = vectors.axpy(-float(vectors.dot(u, v)), u, v)
    height = float(vectors.norm(v))
    return u, {name: value / height for name, value in v.items()}


def _place(step: dict[str, Tensor], u: dict[str, Tensor], v: dict[str, Tensor]) -> tuple[float, float, float]:
    """Coordinates of a step in the plane, and its length."""
    return float(vectors.dot(step, u)), float(vectors.dot(step, v)), float(vectors.norm(step))


def _axis(places: Floats, points: int, margin: float) -> Floats:
    low, high = float(places.min()), float(places.max())
    space = margin * (high - low)
    return np.linspace(low - space, high + space, points)
