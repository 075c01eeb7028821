"""How many draws, and rows of each, an index of stated precision takes: two-stage sampling, rows within draws.

Every draw is measured on rows of its own, at all its points the same ones: within a draw what a row is like cancels
from its rises, and draws stay independent, so that an interval over draws holds the scatter of rows as well. To first
order a row with rises (n, p) moves the index by g = 2 (P n − N p) / (|N| + |P|)². If g varies by a between draws and by
r between rows of a draw (variances), D draws of R rows give it the variance (a + r / R) / D. A draw costs as much as c
rows, so that R = √(c r / a) is cheapest, and D follows from the precision.

Source: Cochran 1977, "Sampling Techniques", §10.6, for the split; Stein 1945 for sampling until a precision is reached.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final, Literal

import numpy as np
from numpy.typing import NDArray

from sparing.errors import require
from sparing.valley.scans.intervals import ratio_interval, student_t_quantile

Floats = NDArray[np.float64]

DRAWS, ROWS = 8, 8  # of the first look, which tells both variances: the least (count)
GUESS: Final = 4.0  # rows vary by so many times what draws do (variances), until they are measured
GROWTH: Final = 4  # at most so many times the draws before variances are looked at anew
STEP: Final = 16  # and at least one in so many more
NORMAL: Final = 1.959964  # standard deviations of a normal number on either side that hold 95 %

Measure = Callable[[range, int], Floats]  # draws and how many more rows of each -> rises (draws, rows, K, 2)
Limit = Literal["", "data", "budget"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Spent:
    """What was measured until the precision was reached, or could not be."""

    pairs: Floats  # rises (N, P) of every row of every draw, shape (D, R, K, 2)
    evaluated: int  # rows run through the model, at all points, calibration rows too (count)
    limit: Limit  # what ended it before the precision was reached

    @property
    def errors(self) -> Floats:
        """Standard errors of the K indices."""
        return standard_errors(self.pairs.mean(1))


@dataclass(frozen=True, slots=True, kw_only=True)
class Costs:
    """What draws and rows cost, and how many there are."""

    points: int  # evaluations of a draw: points of all widths, with λ = 0 (count)
    calibration: int = 0  # rows that are run before each of them (count)
    move: float = 0.0  # what it costs to bring a model to a point besides, in rows
    available: int  # rows that there are (count)
    budget: float = math.inf  # rows that may be run through the model (count)

    @property
    def draw(self) -> float:
        """What an evaluation costs besides its rows, in rows."""
        return self.calibration + self.move

    def first_rows(self, draws: int) -> int:
        """Rows of each of so many draws in the first look: cheapest if the guess is right, or what there is."""
        return min(max(round(math.sqrt(GUESS * self.draw)), ROWS), self.available // draws)

    def rows(self, draws: int, rows: int) -> int:
        """Rows run through the model for so many draws of so many rows."""
        return draws * self.points * (self.calibration + rows)


def standard_errors(draws: Floats) -> Floats:
    """Standard error of each index from rises of draws, shape (D, K, 2): half its 95 % interval, over 1.96.

    So few draws count for less, by Student's t, and an index of no clear rise has an error too. Where a side falls, the
    index is ±1 whatever the rises are, and its interval short; the linear part still says how well they are known.
    """
    ends = np.array([ratio_interval(draws[:, k]) for k in range(draws.shape[1])])
    reach = student_t_quantile(0.975, len(draws) - 1) / math.sqrt(len(draws))
    linear = np.minimum(reach * linear_parts(draws, draws.mean(0)).std(0, ddof=1), 1.0)
    return np.asarray(np.maximum((ends[:, 1] - ends[:, 0]) / 2, linear) / NORMAL)


def linear_parts(pairs: Floats, means: Floats) -> Floats:
    """What rises, shape (..., K, 2), move the indices by, to first order around mean rises, shape (K, 2)."""
    minus, plus = means[:, 0], means[:, 1]
    size = np.maximum((np.abs(minus) + np.abs(plus)) ** 2, 1e-300)
    return np.asarray(2 * (plus * pairs[..., 0] - minus * pairs[..., 1]) / size)


def components(pairs: Floats) -> tuple[Floats, Floats]:
    """Variances of each index's linear part between draws and between rows of a draw, shape (K,) each."""
    parts = linear_parts(pairs, pairs.mean((0, 1)))
    within = parts.var(1, ddof=1).mean(0)
    # what rows alone make means of draws vary by is not between draws
    between = np.maximum(parts.mean(1).var(0, ddof=1) - within / pairs.shape[1], 0.0)
    return between, within


def rows_of_a_draw(between: Floats, within: Floats, precision: float, costs: Costs, *, least: tuple[int, int]) -> int:
    """The rows of a draw that reach a precision at least cost, or that spend best where none does.

    ``least`` are draws and rows of each that are taken in any case.
    """
    rows = np.arange(least[1], max(costs.available // least[0], least[1]) + 1)
    variance = (between[:, None] + within[:, None] / rows).max(0)
    cost = costs.draw + rows
    draws = np.maximum(np.ceil(variance / precision**2), least[0])
    # the first draws come to their points once more where they get more rows
    again = np.where(rows > least[1], least[0] * costs.draw, 0.0)
    total = np.where(draws * rows <= costs.available, draws * cost + again, np.inf)
    # Where no split reaches it, the one with the least variance for its cost
    best = total.argmin() if np.isfinite(total).any() else (variance * cost).argmin()
    return int(rows[best])


def spend(measure: Measure, precision: float, costs: Costs, *, draws: int = DRAWS) -> Spent:
    """Measure draws and rows until the standard errors of all indices are as asked, or rows or budget end.

    Args:
        measure: Called with a range of draws and a number of rows that each of them gets more of, never before used;
            gives their rises, shape (draws, rows, K, 2).
        precision: Standard error of an index, > 0.
        costs: Of draws and rows.
        draws: The least (count), of which the first look is made.
    """
    start = max(draws, DRAWS)
    rows = costs.first_rows(start)
    do = f"pass an evaluate with {2 * start} rows or more"
    require(rows >= 2, "precision", f"{costs.available} rows", f"{start} draws take two rows each", do)
    first = costs.rows(start, rows)
    do = f"pass budget={first} or more"
    require(first <= costs.budget, "budget", costs.budget, f"a first look runs {first} rows", do)
    pairs, spent = measure(range(start), rows), first
    if standard_errors(pairs.mean(1)).max() <= precision:
        return Spent(pairs=pairs, evaluated=spent, limit="")
    wanted = rows_of_a_draw(*components(pairs), precision, costs, least=(start, rows))
    if wanted > rows and spent + costs.rows(start, wanted - rows) <= costs.budget:
        pairs = np.concatenate([pairs, measure(range(start), wanted - rows)], 1)
        spent, rows = spent + costs.rows(start, wanted - rows), wanted
    while (error := float(standard_errors(pairs.mean(1)).max())) > precision:
        have = len(pairs)
        by_data = costs.available // rows
        left = costs.budget - spent
        by_budget = have + int(left // costs.rows(1, rows)) if math.isfinite(left) else by_data
        if have >= min(by_data, by_budget):
            return Spent(pairs=pairs, evaluated=spent, limit="data" if by_data <= by_budget else "budget")
        # what Student's t adds to the error of few draws, more draws lose
        plain = error * NORMAL / student_t_quantile(0.975, have - 1)
        then = math.ceil(have * min((plain / precision) ** 2, GROWTH))
        then = min(max(then, have + max(have // STEP, 1)), by_data, by_budget)
        pairs = np.concatenate([pairs, measure(range(have, then), rows)], 0)
        spent += costs.rows(then - have, rows)
    return Spent(pairs=pairs, evaluated=spent, limit="")
