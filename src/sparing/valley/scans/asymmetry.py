"""How lopsided a curve is: asymmetry index, branch means, half-widths, and its odd and even parts.

Every function takes positions λ, shape (L,), among them λ = 0, the trained model, and values f there, shape (L,), lower
is better (metrics that rise with quality are negated by the caller). Values are used as they are: a mean over one
infinite value is infinite. An unusable curve raises ``UserError``.

Source: Li et al. 2024 (arXiv:2405.12489), figure 4, for the branch means; the other numbers are ours, because the paper
reads its curves by eye.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray

from sparing.errors import UserError, require

Floats = NDArray[np.float64]

NEAR: float = 0.5  # share of the range of λ, from 0, on which the cubic index is fitted


@dataclass(frozen=True, slots=True)
class Branches:
    """Means over the two sides of a curve."""

    minus: float  # mean of f over λ < 0
    plus: float  # mean of f over λ > 0
    rise_minus: float  # N, mean of f(λ) − f(0) over λ < 0
    rise_plus: float  # P, mean of f(λ) − f(0) over λ > 0

    @property
    def log_ratio(self) -> float:
        """log(N / P) (nat), > 0 where the + side is flatter; NaN unless both rise."""
        if not (self.rise_minus > 0 and self.rise_plus > 0):
            return math.nan
        return math.log(self.rise_minus) - math.log(self.rise_plus)


@dataclass(frozen=True, slots=True)
class OddEven:
    """A curve as the sum of an odd and an even part: f(±λ) − f(0) = E(λ) ± O(λ)."""

    lambdas: Floats  # λ > 0, shape (m,)
    odd: Floats  # O(λ) = (f(λ) − f(−λ)) / 2, shape (m,): what makes the two sides differ; < 0 where + is lower
    even: Floats  # E(λ) = (f(λ) + f(−λ)) / 2 − f(0), shape (m,)
    # coefficient of λ³ over that of λ² (1 / λ), fitted near 0; NaN where the fit has no λ² or too few points
    cubic: float


def index(lambdas: ArrayLike, values: ArrayLike, floor: float = 0.0) -> float:
    """Return the asymmetry index AI = (N − P) / (|N| + |P|) in [−1, 1]; > 0 where the + side is flatter.

    N and P are the mean rises f(λ) − f(0) over λ < 0 and λ > 0. NaN where |N| + |P| is not above ``floor``, in the
    unit of f, or the curve does not say: f is NaN somewhere, or infinite on both sides. Infinite on one side gives ±1.

    Example:
        >>> index([-1, 0, 1], [3.0, 0.0, 1.0])
        0.5
    """
    found = branch_means(lambdas, values)
    return float(signed_ratio(np.array(found.rise_minus), np.array(found.rise_plus), floor))


def signed_ratio(minus: Floats, plus: Floats, floor: float = 0.0) -> Floats:
    """Return (N − P) / (|N| + |P|) elementwise; NaN and limits as in ``index``."""
    size = np.abs(minus) + np.abs(plus)
    one_infinite = np.isinf(minus) ^ np.isinf(plus)
    with np.errstate(invalid="ignore", divide="ignore"):
        found = np.where(size > floor, (minus - plus) / size, np.nan)
    limit = np.where(np.isinf(minus), np.sign(minus), -np.sign(plus))
    return np.where(one_infinite & ~np.isnan(size), limit, found)


def mean_rises(lambdas: ArrayLike, values: ArrayLike) -> tuple[Floats, Floats]:
    """Return the mean rises N and P, shape (...), of curves of shape (..., L)."""
    at, f = validate_curve(lambdas, values)
    with np.errstate(invalid="ignore"):  # inf − inf is NaN, as it should be
        rise = f - f[..., at == 0]
        return rise[..., at < 0].mean(-1), rise[..., at > 0].mean(-1)


def branch_means(lambdas: ArrayLike, values: ArrayLike) -> Branches:
    """Return the means of f, and of its rise above f(0), over both sides."""
    at, f = validate_curve(lambdas, values)
    minus, plus = mean_rises(at, f)
    return Branches(float(f[at < 0].mean()), float(f[at > 0].mean()), float(minus), float(plus))


def half_widths(lambdas: ArrayLike, values: ArrayLike, rise: float) -> tuple[float, float]:
    """Return the distances −λ and λ at which f has risen by ``rise`` (> 0, in the unit of f), linear between positions.

    ``inf`` where the curve does not rise so far within its range, NaN where it is NaN before it does.

    Example:
        >>> half_widths([-2, -1, 0, 1, 2], [8.0, 2.0, 0.0, 1.0, 4.0], rise=2.5)
        (1.0833333333333333, 1.5)
    """
    require(rise > 0, "rise", rise, "a width needs a height above the bottom", "pass rise > 0")
    at, f = validate_curve(lambdas, values)
    order = np.argsort(np.abs(at), kind="stable")
    at, f = at[order], f[order]
    return _first_crossing(-at[at <= 0], f[at <= 0], rise), _first_crossing(at[at >= 0], f[at >= 0], rise)


def _first_crossing(distance: Floats, f: Floats, rise: float) -> float:
    """Smallest distance at which a side that starts at distance 0 has risen by ``rise``."""
    for k in range(1, len(distance)):
        above = f[k] - f[0]
        if math.isnan(above):
            return math.nan
        if above >= rise:
            before = f[k - 1] - f[0]
            # An infinite value only says that the crossing is in between; the nearer end is the cautious answer
            share = (rise - before) / (above - before) if math.isfinite(above) else 0.0
            return float(distance[k - 1] + share * (distance[k] - distance[k - 1]))
    return math.inf


def odd_even(lambdas: ArrayLike, values: ArrayLike, *, near: float = NEAR) -> OddEven:
    """Split a curve into its odd and even parts, and give its cubic index.

    The cubic index is c₃ / c₂ of O = c₁λ + c₃λ³ and E = c₂λ² + c₄λ⁴, both fitted over 0 < λ <= near · max λ (three
    points at least) by Huber's re-weighted least squares, so that one outlier does not decide. λ must be symmetric.

    Example:
        >>> found = odd_even([-2, -1, 0, 1, 2], [-4.0, 0.0, 0.0, 2.0, 12.0])  # λ² + λ³
        >>> found.odd.tolist(), found.even.tolist()
        ([1.0, 8.0], [1.0, 4.0])
    """
    require(0 < near <= 1, "near", near, "it is a share of the range", "pass 0 < near <= 1")
    at, f = validate_curve(lambdas, values)
    order = np.argsort(at)
    at, f = at[order], f[order]
    if not np.allclose(at, -at[::-1], rtol=1e-12, atol=0.0):
        raise UserError(
            "lambdas", got="positions without their mirror images", why="an odd part compares f(λ) with f(−λ)",
            do="use a symmetric grid, as scan does",
        )  # fmt: skip
    half = len(at) // 2
    plus, minus, bottom = f[half + 1 :], f[:half][::-1], f[half]
    with np.errstate(invalid="ignore"):
        odd, even = (plus - minus) / 2, (plus + minus) / 2 - bottom
    right = at[half + 1 :]
    count = max(int((right <= near * right[-1] * (1 + 1e-12)).sum()), min(3, len(right)))
    return OddEven(right, odd, even, _cubic_index(right[:count], odd[:count], even[:count]))


def _cubic_index(x: Floats, odd: Floats, even: Floats) -> float:
    if len(x) < 2 or not (np.isfinite(odd).all() and np.isfinite(even).all()):
        return math.nan
    # In units of max λ all powers are of one size, and the fit does not round the higher ones away
    scale = float(x[-1])
    u = x / scale
    _, third = _huber_fit(np.stack([u, u**3], 1), odd)
    second, _ = _huber_fit(np.stack([u**2, u**4], 1), even)
    return third / second / scale if second != 0 else math.nan


def _huber_fit(design: Floats, target: Floats, rounds: int = 50) -> tuple[float, float]:
    """Fit two coefficients by re-weighted least squares: rows beyond 1.345 robust deviations count less."""
    weights = np.ones(len(target))
    found: Floats = np.zeros(2)
    for _ in range(rounds):
        root = np.sqrt(weights)[:, None]
        new = np.asarray(np.linalg.lstsq(design * root, target * root[:, 0], rcond=None)[0], dtype=np.float64)
        miss = np.abs(target - design @ new)
        deviation = float(np.median(miss)) / 0.6745
        converged = bool(np.allclose(new, found, rtol=1e-12, atol=0.0))
        found = new
        # An exact fit has no deviation to weigh by
        if converged or deviation <= 1e-12 * float(np.abs(target).max(initial=0.0)):
            break
        weights = np.minimum(1.0, 1.345 * deviation / np.maximum(miss, 1e-300))
    return float(found[0]), float(found[1])


def validate_curve(lambdas: ArrayLike, values: ArrayLike) -> tuple[Floats, Floats]:
    """Return positions and values as float64; refuse what is no curve with a single λ = 0 and two sides."""
    at, f = np.asarray(lambdas, dtype=np.float64), np.asarray(values, dtype=np.float64)
    require(
        at.ndim == 1 and f.ndim >= 1 and f.shape[-1] == len(at), "curve", f"shapes {at.shape} and {f.shape}",
        "every position needs one value", "pass lambdas of shape (L,) and values of shape (L,)",
    )  # fmt: skip
    sides = int((at < 0).sum()), int((at == 0).sum()), int((at > 0).sum())
    require(
        bool(np.isfinite(at).all()) and sides[1] == 1 and min(sides) > 0, "lambdas",
        f"{sides[0]} below 0, {sides[1]} at 0 and {sides[2]} above", "rises are counted from f(0), on both sides",
        "use positions on both sides of a single 0",
    )  # fmt: skip
    return at, f


def noise_floor(metric: str, lambdas: ArrayLike, values: ArrayLike, rows: int | None) -> float:
    """Return how large |N| + |P| must be, in the unit of f, before a curve's asymmetry means anything.

    Two standard errors over n rows: 2 √(p (1 − p) / n) of a share ("error", "accuracy"), p its mean over the curve;
    2 f(0) / √n of a mean cross-entropy ("loss"), as if row losses were exponential; 0 for unknown metrics or rows. All
    points share their rows, so both are cautious.
    """
    at, f = validate_curve(lambdas, values)
    if rows is None or rows < 1:
        return 0.0
    if metric in {"error", "accuracy"}:
        # Kept a row away from 0 and 1, or a curve without errors would have no noise
        share = min(max(float(np.nanmean(f)), 1 / rows), 1 - 1 / rows)
        return 2 * math.sqrt(max(share * (1 - share), 0.0) / rows)
    if metric == "loss":
        return 2 * abs(float(f[at == 0][0])) / math.sqrt(rows)
    return 0.0
