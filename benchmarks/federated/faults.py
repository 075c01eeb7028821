"""Clients that crash, send NaN, or send their update turned around, under five ways of making one model of many.

FedAvg at the rate that ``methods`` chose, MNIST-1D, α = 0.5, twenty of a hundred clients in a round. The attackers of
a run are drawn once, each client for itself; whoever is drawn into a round takes part as all others do.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Mapping
from statistics import fmean
from typing import Any

from benchmarks.federated import study
from benchmarks.federated.cases import CLIENTS, SEEDS, SIGNALS, TUNING_SEEDS
from benchmarks.federated.store import Store
from sparing.errors import RunError, UserError
from sparing.federated import simulate
from sparing.federated.methods.fedavg import FedAvg
from sparing.federated.server.faults import Guard, Sabotage
from sparing.federated.server.robust import Clipped, Combine, Krum, Mean, Median, TrimmedMean

CASE = dataclasses.replace(SIGNALS, rounds=40)
ALPHA, SHARE = 0.5, 0.2
"""Heterogeneity; and the share of clients that trains in a round."""
HOSTILE = 8
"""Attackers that Krum and the trimmed mean are told to expect among the twenty of a round."""
ATTACKS = (("none", 0.0), ("crash", 0.2), ("not finite", 0.2), ("flip", 0.1), ("flip", 0.2), ("flip", 0.3))
EVERYWHERE = {"none", "flip"}
"""Attacks under which every rule is measured; the others never reach the mean."""


def rules(length: float) -> dict[str, Combine]:
    """The rules; ``length`` is that of an honest update."""
    return {
        "mean": Mean(), "median": Median(), "trimmed mean": TrimmedMean(share=HOSTILE / (SHARE * CLIENTS)),
        "Krum": Krum(hostile=HOSTILE), "Multi-Krum": Krum(hostile=HOSTILE, keep=int(SHARE * CLIENTS) - HOSTILE),
        "clipped mean": Clipped(norm=length),
    }  # fmt: skip


def train(combine: Combine, lr: float, kind: str, share: float, seed: int) -> Mapping[str, Any]:
    """One run."""
    schedule = dataclasses.replace(CASE.schedule(lr), participation=SHARE)
    tamper = None if kind == "none" else Sabotage(kind=kind, share=share, seed=seed)  # type: ignore[arg-type]
    guard = Guard(huge=None) if kind == "flip" else None  # what is measured is the rule, not the guard before it
    rows, began = CASE.rows, time.process_time()
    about = {
        "kind": kind, "share": share, "seed": seed, "lr": lr, "alpha": ALPHA,
        "attackers": 0 if tamper is None else sum(tamper.is_hostile(client) for client in range(CLIENTS)),
    }  # fmt: skip
    try:
        run = simulate(
            CASE.make_model(), CASE.clients(ALPHA, seed), FedAvg(combine=combine), schedule,
            evaluate=rows.validation if seed in TUNING_SEEDS else rows.test, every=CASE.every, seed=seed,
            members=False, engine="batched", tamper=tamper, guard=guard,
        )  # fmt: skip
    except (RunError, UserError) as error:  # nobody's update is finite, or too few are for the rule
        return about | {"diverged": True, "why": str(error)[:80], "accuracy": 1 / rows.classes}
    judged = [row for row in run.record if "accuracy" in row][-study.LAST :]
    return about | {
        "accuracy": fmean(row["accuracy"] for row in judged),
        "update_norm": fmean(row["update_norm"] for row in run.record),
        "answered": fmean(row["answered"] for row in run.record),
        "seconds": time.process_time() - began,
    }  # fmt: skip


def run(share: int, of: int) -> None:
    """Seed by seed; the clipping bound is the mean length of honest updates on a tuning seed."""
    store, lr = Store("faults"), study.chosen(Store("methods"), SIGNALS, "fedavg").lr
    first = store.once("length", lambda: {"rule": "length"} | dict(train(Mean(), lr, "none", 0.0, TUNING_SEEDS[0])))
    pieces = [
        (seed, kind, part, name)
        for seed in SEEDS for kind, part in ATTACKS for name in rules(1.0)
        if kind in EVERYWHERE or name == "mean"
    ]  # fmt: skip
    for seed, kind, part, name in pieces[share::of]:
        combine = rules(first["update_norm"])[name]
        store.once(
            f"{kind} {part:g}, {name}, {seed}",
            lambda: {"rule": name} | dict(train(combine, lr, kind, part, seed)),  # noqa: B023
        )
