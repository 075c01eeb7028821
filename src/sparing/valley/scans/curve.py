"""A curve: what was measured along one kind of direction, at one width, and the numbers that say how lopsided it is."""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from sparing.errors import require
from sparing.report.frames import as_frame
from sparing.valley.scans import asymmetry as shape
from sparing.valley.scans import intervals
from sparing.valley.scans.better import Better, ByMetric, as_cost, better_by_metric
from sparing.valley.scans.intervals import Index

if TYPE_CHECKING:
    from sparing.report import Figure

Floats = NDArray[np.float64]

# how much worse the model is where a half-width is read, by metric: a share of rows, nat
RISES: Mapping[str, float] = {"error": 0.05, "accuracy": 0.05, "loss": 0.5}


@dataclass(frozen=True, kw_only=True, eq=False)
class Curve:
    """Values at θ + λ · width · ε, for some draws of ε."""

    direction: str
    """Name of the direction, with its sign, norm and group."""
    lambdas: Floats
    """λ, shape (L,), rising and symmetric around 0; dimensionless."""
    width: float
    """s: with ``norm="scaled"``, λ = 1 is a step of s · ‖θ‖."""
    values: Mapping[str, Floats]
    """Metric -> numbers, shape (draws, L), float64, raw: not clipped, infinite or NaN where the model is."""
    consistency: Floats
    """SCR of each draw: share of elements whose sign is that of their weight, shape (draws,); 1/2 is no bias."""
    weighted_consistency: Floats
    """The same, weighted by |ε θ|, shape (draws,)."""
    cosine: Floats
    """Cosine between direction and weights, shape (draws,)."""
    distance: Floats
    """Length of the step from θ to λ = 1, in the unit of the weights, shape (draws,)."""
    theta_norm: float
    """‖θ‖ over the parameters that move."""
    statistics: str
    """How batch-norm statistics were computed: "exact", "cumulative", "stale", "batch"; "none" without batch norm."""
    seed: int
    """Seed of the draws."""
    rows: int | None = None
    """Evaluated rows behind every number (count), if ``evaluate`` says."""
    floors: Mapping[str, float] | None = None
    """Noise floors of |N| + |P| that the caller chose, by metric; the others are computed from ``rows``."""
    better: Mapping[str, Better] | None = None
    """Declared by the caller for metrics whose name does not say whether lower or higher is better."""

    @property
    def draws(self) -> int:
        """Draws of the direction (count); 1 where it is not random."""
        return len(self.consistency)

    @property
    def metrics(self) -> tuple[str, ...]:
        """Names of what was measured."""
        return tuple(self.values)

    def mean(self, metric: str) -> Floats:
        """Return the mean of a metric over draws, shape (L,)."""
        return np.asarray(self._of(metric).mean(0))

    def floor(self, metric: str) -> float:
        """Return the noise floor below which a metric's asymmetry is NaN: the caller's, or that of its mean curve."""
        mean = self.mean(metric)
        chosen = (self.floors or {}).get(metric)
        return shape.noise_floor(metric, self.lambdas, mean, self.rows) if chosen is None else chosen

    @functools.cached_property
    def senses(self) -> ByMetric[Better]:
        """Whether lower or higher is better, by metric; looking up an unknown one is refused."""
        return better_by_metric(self.values, self.better)

    @functools.cached_property
    def asymmetry(self) -> ByMetric[Index]:
        """Asymmetry index by metric, with its interval over draws; > 0 where the + side is flatter.

        It is computed on the cost: of an accuracy a rise is its fall.
        """
        return self.senses.map(
            lambda name: intervals.asymmetry_index(self.lambdas, self._cost(name), floor=self.floor(name))
        )

    @functools.cached_property
    def branches(self) -> ByMetric[shape.Branches]:
        """Means over λ < 0 and λ > 0 of the mean curve by metric, and how much worse the model is there."""
        return self.senses.map(self._branches)

    def half_widths(self, metric: str, rise: float | None = None) -> tuple[float, float]:
        """Return how far the mean curve goes to either side before the model is worse by ``rise``.

        Args:
            metric: Its name.
            rise: How much worse than at λ = 0, in the metric's unit; 0.05 for errors and accuracies and 0.5 nat for
                losses by default.

        Returns:
            To − and to +, in λ; ``inf`` where it does not get that bad.

        Raises:
            UserError: If the metric has no default and ``rise`` is missing, or its better side is unknown.
        """
        if rise is None:
            why, do = f"{metric!r} has no height of its own", "pass rise=, in the unit of the metric"
            require(metric in RISES, "rise", None, why, do)
            rise = RISES[metric]
        return shape.half_widths(self.lambdas, self._cost(metric).mean(0), rise)

    def odd_even(self, metric: str) -> shape.OddEven:
        """Split how much worse the model gets on the mean curve of a metric into odd and even parts."""
        return shape.odd_even(self.lambdas, self._cost(metric).mean(0))

    def band(self, metric: str) -> tuple[Floats, Floats]:
        """Return both ends, (L,) each, of the mean's 95 % interval by Student's t; NaN where draws cannot tell."""
        ends = [intervals.mean_interval(column) for column in self._of(metric).T]
        return np.array([low for low, _ in ends]), np.array([high for _, high in ends])

    def plot(self, metric: str | None = None) -> Figure:
        """Draw the mean of a metric (by default the first) over draws with its interval; nonfinite values are gaps."""
        from sparing.valley.scans.plots import curve_figure

        return curve_figure([self], metric or self.metrics[0])

    def rows_of(self) -> list[dict[str, float | int | str | None]]:
        """Return one row per draw and point, for a table of a record, with a column per metric."""
        return [
            {
                "direction": self.direction, "width": self.width, "draw": draw, "lambda": float(at),
                **{name: float(values[draw, k]) for name, values in self.values.items()},
                "sign_consistency": float(self.consistency[draw]),
                "weighted_consistency": float(self.weighted_consistency[draw]),
                "cosine": float(self.cosine[draw]), "distance": float(self.distance[draw]),
                "statistics": self.statistics,
            }
            for draw in range(self.draws) for k, at in enumerate(self.lambdas)
        ]  # fmt: skip

    def table(self) -> Any:
        """Return ``rows_of`` as a pandas DataFrame, or as they are where pandas is not installed."""
        return as_frame(self.rows_of())

    def summary(self) -> list[dict[str, float | int | str | None]]:
        """Return one row per metric: what a table says of this curve.

        Returns:
            Columns direction, width, metric, better ("unknown" if undeclared), asymmetry, asymmetry_low,
            asymmetry_high, minimum (whether the model gets no better on either side), n, floor, minus and plus (branch
            means), at_zero, log_ratio, half_width_minus and half_width_plus (NaN where the metric has no height of
            its own), cubic, sign_consistency (mean over draws) and statistics; NaN where a number needs the better side
            and it is unknown.
        """
        return [self._summary_of(name) for name in self.values]

    def _summary_of(self, name: str) -> dict[str, float | int | str | None]:
        nothing = Index(math.nan, (math.nan, math.nan), self.draws, self.floor(name))
        known, mean = name in self.senses, self.mean(name)
        found, branch = self.asymmetry.get(name, nothing), shape.branch_means(self.lambdas, mean)
        minus, plus = self.half_widths(name) if known and name in RISES else (math.nan, math.nan)
        return {
            "direction": self.direction, "width": self.width, "metric": name,
            "better": self.senses.get(name, "unknown"), "asymmetry": found.value,
            "asymmetry_low": found.interval[0], "asymmetry_high": found.interval[1],
            "minimum": found.minimum if known else None, "n": found.n, "floor": found.floor,
            "minus": branch.minus, "plus": branch.plus, "at_zero": float(mean[self.lambdas == 0][0]),
            "log_ratio": self.branches[name].log_ratio if known else math.nan,
            "half_width_minus": minus, "half_width_plus": plus,
            "cubic": shape.odd_even(self.lambdas, mean).cubic,  # a ratio: which way is better does not matter
            "sign_consistency": float(self.consistency.mean()), "statistics": self.statistics,
        }  # fmt: skip

    def _branches(self, name: str) -> shape.Branches:
        # Means in the metric's own unit, rises as costs
        plain, worse = (shape.branch_means(self.lambdas, f) for f in (self.mean(name), self._cost(name).mean(0)))
        return shape.Branches(plain.minus, plain.plus, worse.rise_minus, worse.rise_plus)

    def _cost(self, metric: str) -> Floats:
        return as_cost(self._of(metric), self.senses[metric])

    def _of(self, metric: str) -> Floats:
        why = f"evaluate returned {', '.join(self.values)}"
        require(metric in self.values, "metric", repr(metric), why, "name one of them")
        return self.values[metric]
