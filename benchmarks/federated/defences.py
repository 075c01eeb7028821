"""Ten ways to make one model of many against eight attacks, at three degrees of unlike clients.

As ``faults``: FedAvg at the rate that ``methods`` chose, MNIST-1D, twenty of a hundred clients in a round, 40 rounds;
FLTrust also at a rate of its own, chosen as that one was, but in this set-up and with nobody attacking.
A fifth of the clients attacks. Every rule that takes a number is told of six attackers in a round of twenty. FLTrust's
server has a hundred clean rows, of those held out; no other rule gets them. A backdoor is judged twice: by accuracy,
and by the share of marked test rows of other classes that get the attackers' label.
"""

from __future__ import annotations

import dataclasses
import itertools
import time
from collections.abc import Mapping
from statistics import fmean
from typing import Any

import torch

from benchmarks.federated import study
from benchmarks.federated.arms import Setting, beyond
from benchmarks.federated.cases import CLIENTS, EPOCHS, SEEDS, SIGNALS, TUNING_ALPHA, TUNING_SEEDS
from benchmarks.federated.faults import CASE, SHARE
from benchmarks.federated.store import Store
from sparing.errors import RunError, UserError
from sparing.federated import Client, simulate
from sparing.federated.client.train import load_
from sparing.federated.methods.fedavg import FedAvg
from sparing.federated.metrics import Accuracy
from sparing.federated.server.collusion import Collusion, flip_labels, marked, plant_backdoor
from sparing.federated.server.defences import Bucketing, Bulyan, CenteredClipping, GeometricMedian
from sparing.federated.server.faults import Guard, Sabotage
from sparing.federated.server.robust import Clipped, Combine, Krum, Mean, Median, TrimmedMean
from sparing.federated.server.trust import FLTrust

ALPHAS = (10.0, 0.5, 0.1)
HOSTILE, ATTACKED = 6, 0.2
"""Attackers that a rule expects among the twenty of a round, four on average; and their share of all."""
LOCAL = ((1, 0.9), (5, 0.0))
"""Local epochs and momentum at which FLTrust is also held against the mean, with nobody attacking; the study's are
five and 0.9."""
TARGET = 0
"""Class that marked rows get."""
ROOT_ROWS = 100
"""Rows of FLTrust's server (count), as its authors have it."""
TUNED = ("FLTrust", "mean")
"""Rules whose best rate in this set-up is looked for, on validation rows that FLTrust's server does not train on."""
OWN_RATE = "FLTrust, its own rate"
ATTACKS = ("none", "flip", "alie", "inner", "inner, small", "sybil", "labels", "backdoor")


def rules(length: float, seed: int) -> dict[str, Combine]:
    """The rules; ``length`` is that of an honest update."""
    return {
        "mean": Mean(), "median": Median(), "trimmed mean": TrimmedMean(share=HOSTILE / (SHARE * CLIENTS)),
        "Krum": Krum(hostile=HOSTILE, keep=None), "Bulyan": Bulyan(hostile=4), "geometric median": GeometricMedian(),
        "clipped mean": Clipped(norm=length), "centred clipping": CenteredClipping(radius=length),
        "centred clipping, buckets of 2": Bucketing(CenteredClipping(radius=length), 2, seed=seed),
        "FLTrust": FLTrust(),
    }  # fmt: skip


def attack_of(kind: str, seed: int) -> Sabotage | Collusion | None:
    """What attackers do to their updates; those of "labels" and "backdoor" only train on wrong rows."""
    if kind in {"none", "labels", "backdoor"}:
        return None
    if kind == "flip":
        return Sabotage(kind="flip", share=ATTACKED, seed=seed)
    if kind == "alie":
        return Collusion(kind="alie", share=ATTACKED, seed=seed)
    if kind == "sybil":
        return Collusion(kind="sybil", share=ATTACKED, seed=seed)
    return Collusion(kind="inner", share=ATTACKED, scale=0.1 if kind == "inner, small" else 1.0, seed=seed)


def train(
    combine: Combine, lr: float, kind: str, alpha: float, seed: int, epochs: int = EPOCHS, momentum: float = 0.9
) -> Mapping[str, Any]:
    """One run."""
    schedule = dataclasses.replace(CASE.schedule(lr, momentum), participation=SHARE, local_epochs=epochs)
    rows, began, clients = CASE.rows, time.process_time(), CASE.clients(alpha, seed)
    who = Sabotage(kind="flip", share=ATTACKED, seed=seed)
    if kind == "labels":
        clients = flip_labels(clients, who, rows.classes)
    if kind == "backdoor":
        clients = plant_backdoor(clients, who, target=TARGET)
    held = Client(rows.validation.inputs[:ROOT_ROWS], rows.validation.targets[:ROOT_ROWS])
    # Nothing is judged on what a server trained on.
    unseen = Accuracy(rows.validation.inputs[ROOT_ROWS:], rows.validation.targets[ROOT_ROWS:])
    judge = unseen if seed in TUNING_SEEDS else rows.test
    about = {"kind": kind, "seed": seed, "lr": lr, "alpha": alpha}
    try:
        run = simulate(
            CASE.make_model(), clients, FedAvg(combine=combine), schedule, evaluate=judge, every=CASE.every, seed=seed,
            # What is measured is the rule, not the guard before it.
            members=False, engine="batched", tamper=attack_of(kind, seed), guard=Guard(huge=None),
            root=held if isinstance(combine, FLTrust) else None,
        )  # fmt: skip
    except (RunError, UserError) as error:
        return about | {"diverged": True, "why": str(error)[:80], "accuracy": 1 / rows.classes}
    judged = [row for row in run.record if "accuracy" in row][-study.LAST :]
    found = about | {
        "accuracy": fmean(row["accuracy"] for row in judged), "seconds": time.process_time() - began,
        "answered": fmean(row["answered"] for row in run.record),
    }  # fmt: skip
    if kind == "backdoor":
        model = CASE.make_model()()
        load_(model, run.params, run.buffers)
        others = judge.targets != TARGET
        with torch.no_grad():
            taken = model.eval()(marked(judge.inputs[others])).argmax(-1) == TARGET
        found["backdoor"] = float(taken.float().mean())
    return found


def run(share: int, of: int) -> None:
    """Seed by seed; the norms of the rules are the mean length of honest updates on a tuning seed, by α."""
    store, lr = Store("defences"), study.chosen(Store("methods"), SIGNALS, "fedavg").lr
    lengths = {}
    for alpha in ALPHAS:
        first = store.once(f"length {alpha:g}", lambda: honest_length(lr, alpha))  # noqa: B023
        lengths[alpha] = first["update_norm"]
    pieces = [
        (seed, alpha, kind, name)
        for seed in SEEDS for alpha in ALPHAS for kind in ATTACKS for name in rules(1.0, 0)
    ]  # fmt: skip
    for seed, alpha, kind, name in pieces[share::of]:
        combine = rules(lengths[alpha], seed)[name]
        store.once(
            f"{kind}, α = {alpha:g}, {name}, {seed}",
            lambda: {"rule": name} | dict(train(combine, lr, kind, alpha, seed)),  # noqa: B023
        )

    local = [(seed, *how, name) for seed in SEEDS for how in LOCAL for name in ("mean", "FLTrust")]
    for seed, epochs, momentum, name in local[share::of]:
        how, combine = {"epochs": epochs, "momentum": momentum}, rules(1.0, seed)[name]
        store.once(
            f"local {epochs} {momentum:g}, {name}, {seed}",
            lambda: {"rule": name} | dict(train(combine, lr, "none", ALPHAS[0], seed, **how)) | how | {"kind": "local"},  # noqa: B023
        )
    if share == 0:
        own_rate(store)


def own_rate(store: Store) -> None:
    """FLTrust under every attack at the rate that does best for it with nobody attacking; the mean's best beside it."""
    best = {name: best_rate(store, name) for name in TUNED}
    for seed, alpha, kind in itertools.product(SEEDS, ALPHAS, ATTACKS):
        key = f"{kind}, α = {alpha:g}, {OWN_RATE}, {seed}"
        store.once(key, lambda: {"rule": OWN_RATE} | dict(train(FLTrust(), best["FLTrust"], kind, alpha, seed)))  # noqa: B023


def best_rate(store: Store, name: str) -> float:
    """The rate of the highest validation accuracy, widened until it lies inside what was tried."""
    wanted, scores = list(CASE.rates), {}
    while wanted:
        for lr in wanted:
            rows = []
            for seed in TUNING_SEEDS:
                about = {"rule": name, "kind": "tune"}
                run = lambda: dict(train(rules(1.0, 0)[name], lr, "none", TUNING_ALPHA, seed)) | about  # noqa: B023, E731
                rows.append(store.once(f"tune, {name}, {lr:g}, {seed}", run))
            scores[lr] = fmean(row["accuracy"] for row in rows)
        best = max(scores, key=scores.__getitem__)
        wanted = [setting.lr for setting in beyond(Setting(lr=best), CASE) if setting.lr not in scores]
    return best


def honest_length(lr: float, alpha: float) -> dict[str, Any]:
    """Mean length of an update with nobody attacking."""
    schedule = dataclasses.replace(CASE.schedule(lr), participation=SHARE)
    seed = TUNING_SEEDS[0]
    made = simulate(
        CASE.make_model(), CASE.clients(alpha, seed), FedAvg(), schedule, seed=seed, members=False, engine="batched"
    )
    return {"rule": "length", "alpha": alpha, "update_norm": fmean(row["update_norm"] for row in made.record)}
