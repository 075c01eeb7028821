"""How fast a statistic of a layer grows with density or width, and whether that passes: plain arithmetic on rows."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import fmean, stdev
from typing import Any, Literal

from sparing.scaling.plans.entries import LEAST_LIVE

Along = Literal["density", "width"]
Stat = Literal["forward", "gradient", "update"]
STATS: tuple[Stat, ...] = ("forward", "gradient", "update")

# Half of the smallest power of width or density that a wrong rule makes, which is 1/2: that of a wrong initial scale,
# or of logits divided by the root of a head that grows.
BOUND = 0.25

CHANCE = 0.05  # probability that scatter alone puts any slope of a right rule beyond its limit

Row = Mapping[str, Any]


@dataclass(frozen=True, kw_only=True, slots=True)
class Slope:
    """The slope of one statistic of one module along one axis."""

    module: str
    role: (
        str  # what its weight's dimensions do as the model widens; "readout" for the last layer; "logits" of attention
    )
    stat: Stat
    along: Along
    at: float  # what the other one is fixed at
    points: int  # points on the line (count)
    slope: float  # log2 of the statistic per log2 of the axis; NaN where the statistic is zero or not finite
    limit: float | None  # largest |slope| that passes; None where the slope is only shown
    error: float = 0.0  # standard error of the slope over seeds; 0 with one seed
    bound: float = BOUND  # |slope| beyond which no scatter excuses
    errors: float = 2.0  # standard errors by which scatter may put it beyond its limit (count)

    @property
    def interval(self) -> tuple[float, float]:
        """Two standard errors on either side of the slope."""
        return self.slope - 2 * self.error, self.slope + 2 * self.error

    @property
    def passed(self) -> bool:
        """Whether scatter can have put it beyond its limit, it is within the bound, and its interval within twice that.

        NaN does not pass, nor does a slope that scatters so much over seeds that it could be one of a wrong rule.
        """
        if self.limit is None:
            return True
        near = abs(self.slope) - self.errors * self.error <= self.limit
        return near and abs(self.slope) <= self.bound and max(map(abs, self.interval)) <= 2 * self.bound

    def __str__(self) -> str:
        """One line of text."""
        fixed = f"{'width' if self.along == 'density' else 'density'} {self.at:g}"
        limit = "not judged" if self.limit is None else f"limit {self.limit:g}"
        if self.limit is not None and self.passed and abs(self.slope) > self.limit:
            limit += f", within {self.errors:.1f} standard errors of it"
        size = f"{self.slope:+.3f}" + (f" ± {self.error:.3f}" if self.error else "")
        return f"{self.module}: {self.stat} goes with {self.along}^({size}) at {fixed} ({limit})"


def slope(points: Iterable[tuple[float, float]]) -> float:
    """Return d log y / d log x by least squares; NaN where a value is not positive and finite, or all x are equal."""
    pairs = list(points)
    if any(not (value > 0 and math.isfinite(value)) for pair in pairs for value in pair):
        return math.nan
    logs = [(math.log2(x), math.log2(y)) for x, y in pairs]
    mean_x, mean_y = (fmean(side) for side in zip(*logs, strict=True)) if logs else (0.0, 0.0)
    across = sum((x - mean_x) ** 2 for x, _ in logs)
    return sum((x - mean_x) * (y - mean_y) for x, y in logs) / across if across > 0 else math.nan


def slopes(rows: Sequence[Row], *, limit: float, loose: float, bound: float = BOUND) -> tuple[Slope, ...]:
    """Fit every module's statistics along both axes at the last step.

    Seeds are averaged in the logarithm; their spread gives the standard error. A gradient may be None. How many
    standard errors excuse a slope depends on how many seeds there are and how many slopes are judged: three seeds tell
    their own scatter so badly that of a hundred right slopes several are two standard errors beyond the limit.
    """
    last = max((row["step"] for row in rows), default=0)
    kept = [row for row in rows if row["step"] == last and row["live"] >= LEAST_LIVE]
    found = []
    for along, fixed in (("density", "width"), ("width", "density")):
        for module in dict.fromkeys(row["module"] for row in kept):
            for at in dict.fromkeys(row[fixed] for row in kept):
                points = [row for row in kept if row["module"] == module and row[fixed] == at]
                found += _module_slopes(points, along, at, (limit, loose, bound))  # type: ignore[arg-type]
    seeds, judged = len({row["seed"] for row in kept}), sum(one.limit is not None for one in found)
    if seeds < 2 or not judged:  # there is no standard error
        return tuple(found)
    return tuple(replace(one, errors=student(CHANCE / judged, seeds - 1)) for one in found)


def student(chance: float, freedom: int) -> float:
    """Return t that Student's law of some degrees of freedom exceeds in absolute value with a probability.

    Source: Abramowitz & Stegun 26.7.3 and 26.7.4, exact; t is found by bisection of its angle.
    """
    low, high = 0.0, math.pi / 2
    for _ in range(60):
        angle = (low + high) / 2
        sine, cosine = math.sin(angle), math.cos(angle)
        odd = freedom % 2
        term = total = (cosine if freedom > 1 else 0.0) if odd else 1.0
        for k in range(2 + odd, freedom, 2):
            term *= (k - 1) / k * cosine**2
            total += term
        inside = 2 / math.pi * (angle + sine * total) if odd else sine * total
        low, high = (low, angle) if inside > 1 - chance else (angle, high)
    return math.sqrt(freedom) * math.tan(low)


def _module_slopes(rows: Sequence[Row], along: Along, at: float, limits: tuple[float, float, float]) -> list[Slope]:
    """Return the slopes of one module at one fixed value."""
    limit, loose, bound = limits
    places = sorted({row[along] for row in rows})
    if len(places) < 2:
        return []
    module, role, seeds = rows[0]["module"], rows[0]["role"], sorted({row["seed"] for row in rows})
    found = []
    for stat in STATS:
        if any(row[stat] is None for row in rows):
            continue
        each = [slope((row[along], row[stat]) for row in rows if row["seed"] == seed) for seed in seeds]
        # With one seed, or a slope that is not finite, there is no standard error.
        spread = stdev(each) / len(each) ** 0.5 if len(each) > 1 and all(map(math.isfinite, each)) else 0.0
        most = limit if stat == "forward" else loose
        # A readout's output falls as 1/√width at the start, as the rule intends, and so do logits of heads that grow:
        # they are shown and not judged. Their changes are.
        found.append(
            Slope(
                module=module, role=role, stat=stat, along=along, at=at, points=len(places), slope=fmean(each),
                limit=None if stat == "forward" and role in {"readout", "logits"} else most,
                error=spread, bound=bound,
            )
        )  # fmt: skip
    return found
