"""The methods beside each other: settings chosen on validation rows, then five seeds at every alpha, paired by seed.

Each method tries six settings at alpha 0.5 on seeds of their own, and then neighbours of the best until it lies inside
what was tried; what did best on the validation rows is used at all alphas. A run whose model is no longer finite counts
at chance.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Mapping, Sequence
from statistics import fmean
from typing import Any

from benchmarks.federated.arms import (
    ARMS,
    LATE,
    MATCHED,
    METHODS,
    SWAPPED,
    Setting,
    Sweep,
    Watched,
    method_of,
    sweep,
)
from benchmarks.federated.cases import ALPHAS, CASES, SEEDS, TUNING_ALPHA, Case
from benchmarks.federated.store import Store
from sparing.errors import RunError
from sparing.federated import simulate
from sparing.federated.methods.interface import Method
from sparing.federated.metrics import Accuracy

LAST = 3
"""Evaluations at the end whose mean is reported."""

Norms = list[dict[str, float]]


def engine_of(case: Case, method: Method) -> str:
    """Stacked clients wherever they can be."""
    return "batched" if case.net == "MLP" and method.stackable else "loop"


def train(
    case: Case, method: Method, setting: Setting, alpha: float, seed: int, judge: Accuracy
) -> tuple[dict[str, Any], Norms]:
    """One run: its row, and the norms of every tensor after each round."""
    watched, began = Watched(method), time.process_time()
    row: dict[str, Any] = {"lr": setting.lr, "strength": setting.strength, "momentum": setting.momentum}
    try:
        run = simulate(
            case.make_model(), case.clients(alpha, seed), watched, case.schedule(setting.lr, setting.momentum),
            evaluate=judge, every=case.every, seed=seed, engine=engine_of(case, method),
        )  # fmt: skip
        row |= summary(run.record, watched.first)
    except RunError as error:
        row |= {"diverged": True, "why": str(error)[:80], "accuracy": 1 / case.rows.classes}
    return row | {"seconds": time.process_time() - began}, watched.norms


def summary(record: Sequence[Mapping[str, Any]], first: float) -> dict[str, Any]:
    """What is reported of a run: means over the last evaluations, and over the rounds between them."""
    judged = [row for row in record if "accuracy" in row][-LAST:]
    rounds = [row for row in record if row["round"] > judged[0]["round"] - 1]
    found = {name: fmean(row[name] for row in judged) for name in ("accuracy", "loss", "client_accuracy", "fusion_gap")}
    found |= {name: fmean(row[name] for row in rounds) for name in ("ssr_global", "ssr_pairs", "update_norm")}
    found |= {"growth": record[-1]["norm"] / first, "left_out": sum(bool(row["left_out"]) for row in record)}
    return found | {
        "steps": fmean(row["steps"] for row in record),
        "bytes_up": fmean(row["bytes_up"] for row in record),
    }


def _trial(store: Store, case: Case, arm: str, setting: Setting, seed: int) -> dict[str, Any]:
    key = f"tune, {case.name}, {arm}, {setting.label}, {seed}"
    about = {"case": case.name, "arm": arm, "alpha": TUNING_ALPHA, "seed": seed, "on": "validation"}
    judge, method = case.rows.validation, method_of(arm, setting)
    return store.once(key, lambda: about | train(case, method, setting, TUNING_ALPHA, seed, judge)[0])


def tuned(store: Store, case: Case, arm: str, *, measure: bool = True) -> Sweep:
    """The sweep of a method on the tuning seeds, widened until its best lies inside; or only what is measured."""

    def score(setting: Setting) -> float | None:
        keys = [f"tune, {case.name}, {arm}, {setting.label}, {seed}" for seed in case.tuning_seeds]
        if all(key in store.rows for key in keys):
            return fmean(store.rows[key]["accuracy"] for key in keys)
        if not measure:
            return None
        return fmean(_trial(store, case, arm, setting, seed)["accuracy"] for seed in case.tuning_seeds)

    return sweep(arm, case, score)


def chosen(store: Store, case: Case, arm: str) -> Setting:
    """The best setting of a method among those measured."""
    return tuned(store, case, arm, measure=False).best


class Group:
    """All methods on one case, alpha and seed."""

    def __init__(self, store: Store, case: Case, alpha: float, seed: int) -> None:
        """Take where rows go and what is run."""
        self.store, self.case, self.alpha, self.seed = store, case, alpha, seed
        self.norms: dict[str, Norms] = {}
        self.settings: dict[str, Setting] = {}

    def measure(self, arm: str) -> dict[str, Any]:
        """The row of a method at the setting that it chose."""
        setting = self._setting(arm)
        key = f"{self.case.name}, {self.alpha:g}, {self.seed}, {arm}"
        if not same(self.store.rows.get(key), setting):  # chosen before its sweep was widened
            key += f", {setting.label}"
        about = {"case": self.case.name, "arm": arm, "alpha": self.alpha, "seed": self.seed, "on": "test"}
        return self.store.once(key, lambda: about | self._run(arm))

    def _run(self, arm: str) -> dict[str, Any]:
        other = {"fedavg, grown": "fedsign", "fedsign, held": "fedavg, same rate"}.get(arm)
        norms = self._norms(other) if other else None
        if norms is not None and len(norms) < self.case.rounds:
            return {"diverged": True, "why": f"{other} diverged", "accuracy": 1 / self.case.rows.classes}
        setting = self._setting(arm)
        row, self.norms[arm] = train(
            self.case, method_of(arm, setting, norms), setting, self.alpha, self.seed, self.case.rows.test
        )
        return row

    def _setting(self, arm: str) -> Setting:
        arm = "fedsign" if arm in MATCHED else SWAPPED.get(arm, (arm, arm))[1]
        if arm not in self.settings:
            self.settings[arm] = tuned(self.store, self.case, arm).best
        return self.settings[arm]

    def _norms(self, arm: str) -> Norms:
        """Those of a run of this group, which is run again if the process that ran it has ended."""
        if arm not in self.norms:
            setting = self._setting(arm)
            self.norms[arm] = train(
                self.case, method_of(arm, setting), setting, self.alpha, self.seed, self.case.rows.test
            )[1]
        return self.norms[arm]


def same(row: Mapping[str, Any] | None, setting: Setting) -> bool:
    """Whether a row was measured at a setting."""
    return row is not None and (row.get("lr", setting.lr), row.get("strength", setting.strength)) == (
        setting.lr,
        setting.strength,
    )


def run(share: int, of: int) -> None:
    """Case by case: choose settings, then measure seed by seed, so that a stop leaves whole seeds; costly ones last."""
    store = Store("methods")
    for case in CASES:
        for late in (False, True):
            wanted = [arm for arm in ARMS if (arm in LATE) == late]
            for arm in [arm for arm in wanted if arm in METHODS][share::of]:
                tuned(store, case, arm)
            for seed, alpha in list(itertools.product(SEEDS, ALPHAS))[share::of]:
                group = Group(store, case, alpha, seed)
                for arm in wanted:
                    group.measure(arm)
