"""How good the planner is where a choice is one: pairs that measurements tell apart, and memories that exclude plans.

    python -m benchmarks.network.bars benchmarks/results/network_plans.jsonl

A *pair* is two plans of a cell whose rounds are disjoint; it is right if the prediction orders it as the medians do. A
*choice* is a cell with a memory: each peak that some plan of the cell has (by ``predict``) is a memory, and the plans
up to it may be chosen. Its *regret* is the time of what is chosen over that of the best that fits, less one: by the
medians of all rounds, and in a fresh round, where the best is the plan whose median is least in all other rounds. The
rule of thumb *loses* where the best, found so, is faster than its choice. Intervals are of 95 %, by 2000 resamples of
whole cells, since the choices of a cell share their rounds.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from pathlib import Path
from statistics import fmean, median
from typing import Any

import numpy as np

from benchmarks.memory_tables import table
from benchmarks.network.cells import Cell
from benchmarks.network.predictions import by_cell, cell_of, nominal, predicted, workload
from sparing.report import Record
from sparing.sharding.levels import Plan, effective
from sparing.sharding.planner.choose import TIE, plainness
from sparing.sharding.planner.prediction import Price, predict

Row = Mapping[str, Any]
RESAMPLES, SEED = 2000, 0
ENOUGH = 4
"""Rounds of a plan from which rounds of equal plans are disjoint by chance in fewer than 3 % of pairs (2/C(8, 4))."""
NEAR = 0.2
"""Relative error of a time that counts as right."""


@dataclass(frozen=True)
class Measured:
    """One plan of one cell."""

    plan: Plan
    seconds: float
    """Median of the rounds."""
    rounds: tuple[float, ...]
    predicted: float
    price: Price

    @property
    def levels(self) -> tuple[int, int, int]:
        """Of parameters, gradients and optimizer state."""
        return self.plan.levels()


def cells_of(record: Record, rows: Iterable[Row] | None = None) -> dict[Cell, list[Measured]]:
    """The measured plans of every cell; ``rows`` of ``predicted`` instead of what the record has."""
    arms, found = by_cell(record.table("arms")), dict[Cell, list[Measured]]()
    for row in predicted(record) if rows is None else rows:
        cell = cell_of(row)
        price = predict(workload(cell, arms[cell].get("alone")), nominal(cell), row["plan"])
        one = Measured(price.plan, row["measured"], tuple(row["rounds"]), row["predicted"], price)
        found.setdefault(cell, []).append(one)
    return found


Choose = Callable[[Sequence[Measured]], Sequence[Measured]]
"""Of the plans that fit, the one that is taken; of several, each is as likely."""


def planner(fit: Sequence[Measured]) -> Sequence[Measured]:
    """As ``choose``: the fastest by prediction, and of equal times the plainest."""
    least = min(one.predicted for one in fit)
    return [min((one for one in fit if one.predicted <= least * (1 + TIE)), key=lambda one: plainness(one.price))]


def rule(fit: Sequence[Measured]) -> Sequence[Measured]:
    """Cut parameters last, then gradients, then optimizer state."""
    return [min(fit, key=lambda one: one.levels)]


def first(fit: Sequence[Measured]) -> Sequence[Measured]:
    """The first that fits, in the order of the paper's table."""
    order = {plan: at for at, plan in enumerate(effective())}
    return [min(fit, key=lambda one: order[one.plan])]


def anyone(fit: Sequence[Measured]) -> Sequence[Measured]:
    """A plan at random."""
    return fit


CHOICES: dict[str, Choose] = {
    "the planner": planner, "the rule: cut parameters last, then gradients, then optimizer state": rule,
    "the first that fits, in the paper's order": first, "a plan at random": anyone,
}  # fmt: skip
PLANNER, RULE = list(CHOICES)[:2]


def memories(plans: Sequence[Measured]) -> list[Sequence[Measured]]:
    """The plans that fit, for every memory of a cell."""
    sizes = sorted({one.price.memory for one in plans})
    return [[one for one in plans if one.price.memory <= size] for size in sizes]


@dataclass(frozen=True)
class Regret:
    """Of one way to choose, at one choice."""

    medians: float
    fresh: tuple[float, ...]
    """In each round."""


def regrets(fit: Sequence[Measured]) -> tuple[dict[str, Regret], bool, tuple[bool, ...]]:
    """Regret of each way to choose; whether the rule loses by medians, and by all rounds but each."""
    best = min(one.seconds for one in fit)
    turns = range(len(fit[0].rounds))
    others = [{one.plan: median(one.rounds[:at] + one.rounds[at + 1 :]) for one in fit} for at in turns]
    leaders = [min(fit, key=lambda one, known=known: known[one.plan]) for known in others]  # type: ignore[misc]
    found = {}
    for name, choose in CHOICES.items():
        taken = choose(fit)
        fresh = [fmean(one.rounds[at] for one in taken) / leaders[at].rounds[at] - 1 for at in turns]
        found[name] = Regret(fmean(one.seconds for one in taken) / best - 1, tuple(fresh))
    (mine,) = rule(fit)
    return found, mine.seconds > best, tuple(known[mine.plan] > min(known.values()) for known in others)


class Ratio:
    """A ratio of sums over cells, with an interval by resampling cells."""

    def __init__(self, pairs: Iterable[tuple[float, float]]) -> None:
        """Take numerator and denominator of every cell."""
        self.cells = np.array(list(pairs), dtype=np.float64).reshape(-1, 2)
        draws = np.random.default_rng(SEED).integers(0, len(self.cells), (RESAMPLES, len(self.cells)))
        with np.errstate(invalid="ignore", divide="ignore"):
            above, below = self.cells[draws].sum(1).T
            self.drawn = above / below
        self.value = float(self.cells[:, 0].sum() / self.cells[:, 1].sum())

    @property
    def count(self) -> int:
        """The denominator."""
        return round(float(self.cells[:, 1].sum()))

    def text(self, other: Ratio | None = None, *, times: bool = False) -> str:
        """In percent with its interval; over ``other``, resampled alike: less it, or ``times``."""
        value, drawn = self.value, self.drawn
        if other is not None:
            pair = np.divide if times else np.subtract
            value, drawn = float(pair(value, other.value)), pair(drawn, other.drawn)
        low, high = np.nanpercentile(drawn, [2.5, 97.5])
        if times:
            return f"{value:.2f}× [{low:.2f}, {high:.2f}]"
        return f"{100 * value:.1f} % [{100 * low:.1f}, {100 * high:.1f}]"


Weigh = Callable[[str, tuple[dict[str, Regret], bool, tuple[bool, ...]]], Iterator[float]]


def _medians(name: str, at: tuple[dict[str, Regret], bool, tuple[bool, ...]]) -> Iterator[float]:
    yield at[0][name].medians


def _fresh(name: str, at: tuple[dict[str, Regret], bool, tuple[bool, ...]]) -> Iterator[float]:
    # the rounds of a choice together weigh as much as those of any other
    yield fmean(at[0][name].fresh)


def _lost(name: str, at: tuple[dict[str, Regret], bool, tuple[bool, ...]]) -> Iterator[float]:
    if at[1]:
        yield at[0][name].medians


def _lost_fresh(name: str, at: tuple[dict[str, Regret], bool, tuple[bool, ...]]) -> Iterator[float]:
    yield from (one for one, lost in zip(at[0][name].fresh, at[2], strict=True) if lost)


COLUMNS: dict[str, Weigh] = {
    "mean regret, by medians": _medians, "in a fresh round": _fresh,
    "where the rule loses, by medians": _lost, "where it loses by the other rounds, in the one left": _lost_fresh,
}  # fmt: skip


def regret_ratios(cells: Mapping[Cell, Sequence[Measured]]) -> dict[str, dict[str, Ratio]]:
    """Mean regret of every way to choose, by column."""
    known = [[regrets(fit) for fit in memories(plans)] for plans in cells.values()]

    def ratio(name: str, weigh: Weigh) -> Ratio:
        values = [[value for at in one for value in weigh(name, at)] for one in known]
        return Ratio((sum(cell), len(cell)) for cell in values)

    return {column: {name: ratio(name, weigh) for name in CHOICES} for column, weigh in COLUMNS.items()}


def capped(record: Record) -> str:
    """What every way to choose costs over all memories, and where the rule of thumb loses."""
    found = regret_ratios(cells_of(record))
    lines = [[name, *(ratios[name].text() for ratios in found.values())] for name in CHOICES]
    both = {column: (ratios[PLANNER], ratios[RULE]) for column, ratios in found.items()}
    lines.append(["the planner less the rule, paired", *(mine.text(other) for mine, other in both.values())])
    # what is near zero, or below, is no divisor
    over = [mine.text(other, times=True) if "medians" in column else "–" for column, (mine, other) in both.items()]
    lines.append(["the planner over the rule, paired", *over])
    lines.append(["choices; in the last column rounds of choices", *(str(pair[1].count) for pair in both.values())])
    return table(["the choice, of plans that fit a memory", *found], lines)


def clear(plans: Sequence[Measured], order: Callable[[Measured], Any], least: int = 0) -> tuple[int, int]:
    """Pairs with disjoint rounds that an order has right, and all of them; of plans with ``least`` rounds."""
    right = count = 0
    for one, other in combinations(plans, 2):
        fast, slow = sorted((one, other), key=lambda plan: plan.seconds)
        if len(one.rounds) >= least and max(fast.rounds) < min(slow.rounds):
            count, right = count + 1, right + bool(order(fast) < order(slow))
    return right, count


ORDERS: dict[str, Callable[[Measured], Any]] = {
    "the simulator": lambda one: one.predicted,
    "the rule of thumb": lambda one: one.levels,
    "bytes between groups, then inside": lambda one: one.price.traffic.total[::-1],
    "memory, most first": lambda one: -one.price.memory,
}


def pairs(record: Record) -> str:
    """Clearly separated pairs that the simulator and simple rules order as the clock does."""
    cells = cells_of(record)
    lines = []
    for name, order in ORDERS.items():
        both = [Ratio(clear(plans, order, least) for plans in cells.values()) for least in (0, ENOUGH)]
        lines.append([name, *(text for one in both for text in (one.text(), str(one.count)))])
    head = ["pairs with disjoint rounds, ordered by", "right", "pairs", f"right, of {ENOUGH} rounds or more", "pairs"]
    return table(head, lines)


def sizes(record: Record) -> str:
    """How far predicted times are from measured ones, as told by the probe, and what three costs more could bring."""
    told = {
        "probed links and arithmetic": cells_of(record, predicted(record, wires=True)),
        CORES: cells_of(record, predicted(record, cores=True) if knows_engine(record) else None),
    }
    if knows_engine(record):
        told["and probed costs of a message, a pass and a step"] = cells_of(record)
    told["cores, and three costs fitted to the other cells"] = left_out(told[CORES])
    lines = []
    for name, cells in told.items():
        offs = [[one.predicted / one.seconds for one in plans] for plans in cells.values()]
        every = Ratio((sum(abs(off - 1) <= NEAR for off in plans), len(plans)) for plans in offs)
        middle = Ratio((abs(median(plans) - 1) <= NEAR, 1) for plans in offs)
        taken = [planner(plans)[0] for plans in cells.values()]
        chosen = Ratio((abs(one.predicted / one.seconds - 1) <= NEAR, 1) for one in taken)
        ratio = median(off for plans in offs for off in plans)
        right = Ratio(clear(plans, ORDERS["the simulator"]) for plans in cells.values())
        costs = regret_ratios(cells)["mean regret, by medians"][PLANNER]
        lines.append([name, f"{ratio:.2f}", *(one.text() for one in (middle, every, chosen, right, costs))])
    head = ["the simulator is told", "predicted over measured, median", "cells whose median plan is within 20 %",
            "plans within 20 %", "chosen plans within 20 %", "clear pairs right", "mean regret"]  # fmt: skip
    return table(head, lines)


CORES = "probed links, arithmetic and cores"


def knows_engine(record: Record) -> bool:
    """Whether the probes of a record measured what collectives and the engine add."""
    return any("per_step" in str(row["topology"]) for row in record.table("probes"))


def left_out(cells: Mapping[Cell, Sequence[Measured]]) -> dict[Cell, list[Measured]]:
    """Predictions with a cost for each message, each pass of a block and each step, from all other cells of a shape.

    A fit of relative errors, no cost below zero: what probed costs could at most bring, and no part of the planner.
    """
    found = {}
    for cell, plans in cells.items():
        same = [key for key in cells if (key.groups, key.per_group) == (cell.groups, cell.per_group) and key != cell]
        counts = np.array([_counts(key, one) / one.seconds for key in same for one in cells[key]])
        missing = np.array([1 - one.predicted / one.seconds for key in same for one in cells[key]])
        costs = positive(counts, missing)
        found[cell] = [
            Measured(one.plan, one.seconds, one.rounds, one.predicted + float(_counts(cell, one) @ costs), one.price)
            for one in plans
        ]
    return found


def _counts(cell: Cell, one: Measured) -> np.ndarray[Any, np.dtype[np.float64]]:
    """Messages of a rank, passes of a block, and 1, in one step."""
    return np.array([sum(one.price.traffic.messages), 2 * cell.blocks * cell.accumulate, 1.0])


def positive(
    counts: np.ndarray[Any, np.dtype[np.float64]], target: np.ndarray[Any, np.dtype[np.float64]]
) -> np.ndarray[Any, np.dtype[np.float64]]:
    """Least squares with no coefficient below zero: the best over all choices of coefficients that are not zero."""
    best, least = np.zeros(counts.shape[1]), float(target @ target)
    columns = range(counts.shape[1])
    for some in (set_ for size in range(1, len(columns) + 1) for set_ in combinations(columns, size)):
        found, *_ = np.linalg.lstsq(counts[:, some], target)
        rest = target - counts[:, some] @ found
        if (found >= 0).all() and float(rest @ rest) < least:
            best, least = np.zeros(len(columns)), float(rest @ rest)
            best[list(some)] = found
    return best


def main() -> None:
    """Print the three tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("record", type=Path)
    record = Record.read(parser.parse_args().record)
    print(capped(record), pairs(record), sizes(record), sep="\n\n")


if __name__ == "__main__":
    main()
