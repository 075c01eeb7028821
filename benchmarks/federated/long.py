"""A hundred rounds on CIFAR-10 with a deep convolutional and a residual net, over clients of unequal size.

Clients differ in labels as in ``study``, and in rows: of what the split gives client k it keeps a share 8^−u, u uniform
in [0, 1), so that local steps differ fourfold. Settings are chosen on a seed of their own, on validation rows, at α =
0.5: from one setting for each method to its neighbours, until the best has beaten all of its own. ``--seeds N`` has N
seeds instead of three, and ``--alphas 0.5 0.1`` the deep net at α = 0.1 too. What clients keep for themselves is
measured in ``personal``.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any

import torch

from benchmarks.federated import arms, personal
from benchmarks.federated.arms import MATCHED, Setting, Sweep, Watched, sweep
from benchmarks.federated.cases import LEAST, LOW, TUNING_ALPHA, Case
from benchmarks.federated.store import Store
from sparing.errors import RunError
from sparing.federated import Client, FedAvg, FedDyn, simulate
from sparing.federated.methods.fednova import FedNova
from sparing.federated.methods.interface import Method
from sparing.federated.metrics import Accuracy
from sparing.federated.server.optimizers import FedYogi
from sparing.seeds import stream

SEEDS, TUNING_SEED = range(3), 100
ALPHAS: tuple[float, ...] = (0.5,)
LAST = 10
"""Rounds at the end whose evaluations are averaged."""

SKEW = 8
"""How many times as many rows the largest client keeps of its part as the smallest."""

Norms = list[dict[str, float]]


@dataclass(frozen=True, kw_only=True, slots=True)
class Uneven(Case):
    """A case whose clients differ in rows too."""

    methods: tuple[str, ...]
    """What is measured, beside FedSign's controls."""

    def clients(self, alpha: float, seed: int) -> list[Client]:
        """The clients of a seed, the same for all methods; at least ``LEAST`` rows each."""
        return [_part(client, seed, at) for at, client in enumerate(Case.clients(self, alpha, seed))]


def _part(client: Client, seed: int, at: int) -> Client:
    """A client's share of what the split gave it."""
    source = stream(seed, "share of rows", at)
    share = SKEW ** -float(torch.rand((), generator=source, dtype=torch.float64))
    kept = torch.randperm(len(client), generator=source)[: max(round(share * len(client)), LEAST)]
    return Client(client.inputs[kept], client.targets[kept])


METHODS: dict[str, tuple[Callable[[Any], Method], tuple[Any, ...]]] = {
    "fedavg": (arms.METHODS["fedavg"][0], (None,)),
    "fedsign": (arms.METHODS["fedsign"][0], (0.01,)),
    "feddyn": (arms.METHODS["feddyn"][0], (0.1,)),
    "feddyn, by rows": (lambda alpha: FedDyn(alpha=alpha, weights="size"), (0.1,)),
    "scaffold": (arms.METHODS["scaffold"][0], ("momentum", "plain")),
    "fednova": (lambda _: FedNova(momentum=0.9), (None,)),
    "fedyogi": (lambda rate: FedAvg(server=FedYogi(lr=rate)), (0.01,)),
    "fedpan": (arms.METHODS["fedpan"][0], ("mul", "add")),
}
"""Method -> what makes it of its strength, and the strengths tried first."""

FIRST_RATE = 0.1
DEEP = Uneven(
    data="cifar10", net="deep CNN, BN", rounds=100, batch=32, train=10_000, test=4000, rates=LOW, every=2,
    tuning_seeds=(TUNING_SEED,), methods=tuple(METHODS),
)  # fmt: skip
RESIDUAL = Uneven(
    data="cifar10", net="residual, GN", rounds=100, batch=32, train=10_000, test=4000, rates=LOW, every=2,
    tuning_seeds=(TUNING_SEED,), methods=("fedavg", "fedsign", "feddyn"),
)  # fmt: skip
ORDER = ((DEEP, 0.5), (RESIDUAL, 0.5), (DEEP, 0.1))
"""Cases and alphas in the order in which they are measured, those of ``ALPHAS``."""


def train(
    case: Case, arm: str, setting: Setting, alpha: float, seed: int, judge: Accuracy, norms: Norms | None = None
) -> tuple[dict[str, Any], Norms]:
    """One run: its row, and the norms of every tensor after each round."""
    method = arms.method_of(arm, setting, norms) if arm in MATCHED else METHODS[arm][0](setting.strength)
    watched, began = Watched(method), time.process_time()
    row: dict[str, Any] = {"lr": setting.lr, "strength": setting.strength, "momentum": setting.momentum}
    try:
        run = simulate(
            case.make_model(), case.clients(alpha, seed), watched, case.schedule(setting.lr, setting.momentum),
            # Hooks on a net with batch norm are not stacked.
            evaluate=judge, every=case.every, members=False, seed=seed, engine="loop" if arm == "fedpan" else "batched",
        )  # fmt: skip
        row |= summary(run.record, watched.first)
    except RunError as error:
        chance = 1 / case.rows.classes
        row |= {"diverged": True, "why": str(error)[:80], "accuracy": chance, "accuracy_run": chance}
    return row | {"seconds": time.process_time() - began}, watched.norms


def summary(record: Sequence[Mapping[str, Any]], first: float) -> dict[str, Any]:
    """What is reported of a run: means over the evaluations of the last rounds, and over all of them."""
    judged = [row for row in record if "accuracy" in row]
    late = [row for row in judged if row["round"] > record[-1]["round"] - LAST]
    found = {name: fmean(row[name] for row in late) for name in ("accuracy", "loss", "ssr_global", "ssr_pairs")}
    return found | {
        "accuracy_run": fmean(row["accuracy"] for row in judged),
        "curve": [row["accuracy"] for row in judged if row["round"] % LAST == 0],
        "growth": record[-1]["norm"] / first,
        "left_out": sum(bool(row["left_out"]) for row in record),
        "steps": fmean(row["steps"] for row in record),
        "bytes_up": fmean(row["bytes_up"] for row in record),
    }


def first_settings(arm: str) -> list[Setting]:
    """What is tried of a method at first."""
    plain = {"plain": (arms.PLAIN_FACTOR, 0.0)}
    found = []
    for strength in METHODS[arm][1]:
        factor, momentum = plain.get(strength, (1.0, 0.9)) if isinstance(strength, str) else (1.0, 0.9)
        found.append(Setting(lr=factor * FIRST_RATE, strength=strength, momentum=momentum))
    return found


def tuned(store: Store, case: Case, arm: str, *, measure: bool = True) -> Sweep:
    """The sweep of a method on the tuning seed, widened until its best lies inside; or only what is measured."""

    def score(setting: Setting) -> float | None:
        key = f"tune, {case.name}, {arm}, {setting.label}"
        if key not in store.rows and not measure:
            return None
        about = {"case": case.name, "arm": arm, "alpha": TUNING_ALPHA, "seed": TUNING_SEED, "on": "validation"}
        judge = case.rows.validation
        made = store.once(key, lambda: about | train(case, arm, setting, TUNING_ALPHA, TUNING_SEED, judge)[0])
        return float(made["accuracy"])

    return sweep(arm, case, score, first_settings(arm))


class Group:
    """All methods on one case, alpha and seed."""

    def __init__(self, store: Store, case: Case, alpha: float, seed: int) -> None:
        """Take where rows go and what is run."""
        self.store, self.case, self.alpha, self.seed = store, case, alpha, seed
        self.norms: dict[str, Norms] = {}

    def measure(self, arm: str) -> dict[str, Any]:
        """The row of a method at the setting that it chose."""
        setting = self.setting(arm)
        key = f"{self.case.name}, {self.alpha:g}, {self.seed}, {arm}, {setting.label}"
        about = {"case": self.case.name, "arm": arm, "alpha": self.alpha, "seed": self.seed, "on": "test"}
        return self.store.once(key, lambda: about | self._run(arm))

    def setting(self, arm: str) -> Setting:
        """What a method chose; FedSign's controls have FedSign's."""
        return tuned(self.store, self.case, "fedsign" if arm in MATCHED else arm).best

    def _run(self, arm: str) -> dict[str, Any]:
        if arm == "fedavg, same rate" and self.setting(arm).lr == self.setting("fedavg").lr:
            return {**self.measure("fedavg"), "arm": arm, "strength": self.setting(arm).strength}  # the same run
        other = {"fedavg, grown": "fedsign", "fedsign, held": "fedavg, same rate"}.get(arm)
        norms = self._norms(other) if other else None
        if norms is not None and len(norms) < self.case.rounds:
            chance = 1 / self.case.rows.classes
            return {"diverged": True, "why": f"{other} diverged", "accuracy": chance, "accuracy_run": chance}
        row, self.norms[arm] = self._train(arm, norms)
        return row

    def _train(self, arm: str, norms: Norms | None = None) -> tuple[dict[str, Any], Norms]:
        return train(self.case, arm, self.setting(arm), self.alpha, self.seed, self.case.rows.test, norms)

    def _norms(self, arm: str) -> Norms:
        """Those of a run of this group, which is run again if the process that ran it has ended."""
        if arm == "fedavg, same rate" and self.setting(arm).lr == self.setting("fedavg").lr:
            arm = "fedavg"
        if arm not in self.norms:
            self.norms[arm] = self._train(arm)[1]
        return self.norms[arm]


def run(share: int, of: int) -> None:
    """Case by case and method by method: choose its setting, then measure its seeds; a stop leaves whole methods."""
    store = Store("long")
    for case, alpha in [(case, alpha) for case, alpha in ORDER if alpha in ALPHAS]:
        groups = [Group(store, case, alpha, seed) for seed in list(SEEDS)[share::of]]
        for arm in arms_of(case):
            for group in groups:
                group.measure(arm)
        for group in groups if case is DEEP else ():
            personal.measure(store, case, group.setting("fedavg"), alpha, group.seed)


def arms_of(case: Uneven) -> tuple[str, ...]:
    """What is measured on a case: FedAvg and FedSign, what FedSign's gain is made of, and the rest."""
    return (*case.methods[:2], *MATCHED, *case.methods[2:])
