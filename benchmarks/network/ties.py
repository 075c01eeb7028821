"""What should decide between plans predicted to take as long? What each rule would have cost in measured cells.

    python -m benchmarks.network.ties benchmarks/results/network_plans.jsonl

Plans are simulated by the code of today, told the rates that links are held to and the arithmetic that was measured
beside the plans, but no latency: that is where times tie. ``--probed`` tells it what the probe found, in cells that
have one.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator
from pathlib import Path
from statistics import fmean
from typing import Any

from benchmarks.network.arms import PLANS
from benchmarks.network.cells import Cell
from benchmarks.network.predictions import by_cell, nominal, workload
from sparing.report import Record, print_table
from sparing.sharding.planner.choose import TIE, plainness
from sparing.sharding.planner.config import Topology
from sparing.sharding.planner.prediction import Price, predict
from sparing.sharding.planner.simulation import simulate

Rule = Callable[[Price], tuple[int, ...]]
RULES: dict[str, Rule] = {
    "least memory": lambda price: (price.memory, price.traffic.messages[-1], price.traffic.total[-1]),
    "fewest messages on the slow axis, then slow bytes, then memory": lambda price: (
        price.traffic.messages[-1],
        price.traffic.total[-1],
        price.memory,
    ),
    "fewest messages over all axes, then slow bytes, then memory": lambda price: (
        sum(price.traffic.messages),
        price.traffic.total[-1],
        price.memory,
    ),
    "the same, and before memory the plan that cuts parameters and gradients least": plainness,
}
"""Least first; the last is that of ``choose``."""


def choices(record: Record, *, probed: bool, tie: float) -> Iterator[dict[str, Any]]:
    """One row per rule and cell: the plan it takes, and how much longer than the best that took."""
    probes = by_cell(record.table("probes"))
    for cell, arms in by_cell(record.table("arms")).items():
        known = [plan for plan in PLANS if plan in arms]
        if len(known) < len(PLANS) or (probed and cell not in probes):
            continue
        place = Topology.from_json(str(probes[cell]["probe"]["topology"])) if probed else nominal(cell)
        work = workload(cell, arms.get("alone"))
        times = {plan: simulate(work, place, plan).seconds for plan in known}
        near = [predict(work, place, plan) for plan in known if times[plan] <= min(times.values()) * (1 + tie)]
        best = min(float(arms[plan]["seconds"]) for plan in known)
        for name, rule in RULES.items():
            plan = min(near, key=rule).plan.name
            yield {"rule": name, "cell": cell, "plan": plan, "regret": float(arms[plan]["seconds"]) / best - 1}


def judged(record: Record, *, probed: bool = False, tie: float = TIE) -> list[dict[str, Any]]:
    """One row per rule.

    Args:
        record: Of ``sweep``.
        probed: Believe the probe, not the rates that links are held to.
        tie: Relative difference of times below which the rule decides.

    Returns:
        Mean and largest regret over the cells in which all plans were measured, and where the largest is.
    """
    rows, found = list(choices(record, probed=probed, tie=tie)), []
    for name in RULES:
        mine = [row for row in rows if row["rule"] == name]
        if mine:
            worst = max(mine, key=lambda row: row["regret"])
            found.append({
                "rule": name, "cells": len(mine), "mean": fmean(row["regret"] for row in mine),
                "worst": worst["regret"], "there": _words(worst["cell"]), "plan": worst["plan"],
            })  # fmt: skip
    return found


def _words(cell: Cell) -> str:
    ratio = f"{cell.ratio:.0f} : 1, s = {cell.accumulate}"
    return f"{cell.groups}×{cell.per_group}, {ratio}, {cell.trainable:.3g} trainable"


def main() -> None:
    """Print the rules."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("record", type=Path)
    parser.add_argument("--probed", action="store_true", help="links as the probe found them")
    parser.add_argument("--tie", type=float, default=TIE, help="times within this share of each other are equal")
    options = parser.parse_args()
    print_table(judged(Record.read(options.record), probed=options.probed, tie=options.tie))


if __name__ == "__main__":
    main()
