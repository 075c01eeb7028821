"""Models of clients' own: Ditto, FedAvg tuned locally, FedAvg as it is, and every client alone; on clients' own rows.

A client's own rows to judge by are test rows with the shares of classes that it trains on. One run of Ditto, whose
global model is FedAvg's to the bit, gives three of the four; alone a client trains for as many epochs as in an average
run. The strength of Ditto, and rate and epochs of the others, are chosen on validation rows of a seed of their own,
from the values below to their neighbours, until the best has beaten all of its own.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import fmean
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.federated.arms import Setting
from benchmarks.federated.cases import CLIENTS, EPOCHS, PARTICIPATION, TUNING_ALPHA, Case
from benchmarks.federated.store import Store
from sparing.federated import Client, FedAvg, simulate
from sparing.federated.client.train import buffers_of, client_setup, initial_model, load_
from sparing.federated.engines.batched import Batched
from sparing.federated.methods.ditto import Ditto
from sparing.federated.methods.interface import Sent, Vector
from sparing.federated.metrics import Accuracy
from sparing.federated.packing import detached_copy
from sparing.seeds import stream

TUNING_SEED = 100
ROWS = 50
"""Rows that a client's model is judged on (count)."""
STACKED = 10
"""Clients that train at once (count)."""
LAMBDAS = (0.1,)
TUNES = tuple((rate, epochs) for rate in (0.005, 0.02, 0.05) for epochs in (1, 4, 16))
"""Rates and local epochs of tuning the global model."""
ALONE = (0.01, 0.02, 0.05)
"""Rates of a client alone, for as many epochs as a client of a federation has on average."""

Models = Mapping[int, tuple[Vector, Vector]]
"""Client -> parameters and buffers."""


@dataclass(frozen=True, slots=True, eq=False)
class World:
    """The clients of a seed, and what each is judged on."""

    case: Case
    setting: Setting
    """Of FedAvg."""
    seed: int
    clients: Sequence[Client]
    judges: Sequence[Accuracy]

    def accuracy(self, models: Models) -> float:
        """Mean accuracy over clients, each on its own rows."""
        model, found = self.model(), []
        for at, judge in enumerate(self.judges):
            load_(model, *models[at])
            found.append(judge(model)["accuracy"])
        return fmean(found)

    def model(self) -> nn.Module:
        """The net with the weights that every method starts from."""
        return initial_model(FedAvg(), self.case.make_model(), self.seed)

    def federation(self, lam: float) -> tuple[Sent, Models]:
        """FedAvg's model after a run of Ditto, and the clients' own."""
        setting = self.setting
        run = simulate(
            self.case.make_model(), self.clients, Ditto(lam=lam), self.case.schedule(setting.lr, setting.momentum),
            every=self.case.rounds, members=False, seed=self.seed, engine="batched",
        )  # fmt: skip
        sent = Sent(run.params, buffers=run.buffers)
        fresh = {"personal": run.params}  # who never took part has FedAvg's
        states = {at: run.state.clients.get(at, fresh) for at in range(len(self.clients))}
        return sent, {at: Ditto(lam=lam).personal(state, sent) for at, state in states.items()}

    def tuned(self, sent: Sent, rate: float, epochs: int) -> Models:
        """What every client makes of a model on its own rows."""
        plan = replace(self.case.schedule(rate), rounds=1, warmup_rounds=0, local_epochs=epochs)
        engine = Batched(client_setup(self.model(), FedAvg(), plan, seed=self.seed), self.clients)
        found: dict[int, tuple[Vector, Vector]] = {}
        # By size, so that clients that train at once are done at once.
        order = sorted(range(len(self.clients)), key=lambda at: len(self.clients[at]))
        for start in range(0, len(order), STACKED):
            ids = sorted(order[start : start + STACKED])
            results, faults = engine.train_clients(0, ids, sent, {at: {} for at in ids}, {})
            assert not faults, faults
            found |= {result.update.client: (result.update.params, result.update.buffers) for result in results}
        return found

    def start(self) -> Sent:
        """The initial model."""
        model = self.model()
        return Sent(detached_copy(dict(model.named_parameters())), buffers=detached_copy(buffers_of(model)))


def world(case: Case, setting: Setting, alpha: float, seed: int, *, test: bool) -> World:
    """The clients of a seed, judged on test or on validation rows."""
    clients, whole = case.clients(alpha, seed), case.rows.test if test else case.rows.validation
    judges = [Accuracy(*own_rows(whole, client.targets, seed, at)) for at, client in enumerate(clients)]
    return World(case, setting, seed, clients, judges)


def own_rows(whole: Accuracy, targets: Tensor, seed: int, at: int) -> tuple[Tensor, Tensor]:
    """Rows with the classes of a client's targets, drawn with replacement, and then without it inside a class."""
    source = stream(seed, "own rows", at)
    wanted = targets[torch.randint(len(targets), (ROWS,), generator=source)].bincount()
    order = torch.randperm(len(whole.targets), generator=source)
    rows = torch.cat([order[whole.targets[order] == c][:count] for c, count in enumerate(wanted.tolist())])
    return whole.inputs[rows], whole.targets[rows]


def _alone_epochs(case: Case) -> int:
    """Local epochs of a client in a whole run, on average."""
    return round(case.rounds * PARTICIPATION * EPOCHS)


def _row(store: Store, key: str, about: Mapping[str, Any], score: Callable[[], float]) -> float:
    def measured() -> dict[str, Any]:
        began = time.process_time()
        found = score()
        return {**about, "accuracy": found, "seconds": time.process_time() - began}

    return float(store.once(key, measured)["accuracy"])


def chosen(store: Store, case: Case, setting: Setting, *, measure: bool = True) -> dict[str, Any]:
    """Ditto's λ, rate and epochs of local tuning, and the rate alone, by validation rows; or by what is measured."""
    about = {"case": case.name, "alpha": TUNING_ALPHA, "seed": TUNING_SEED, "on": "own validation rows"}
    kept: dict[float, tuple[Sent, Models]] = {}
    of = world(case, setting, TUNING_ALPHA, TUNING_SEED, test=False) if measure else None

    def score(arm: str, label: str, value: Any, make: Callable[[World], Models]) -> float:
        key = f"tune, {case.name}, {arm}, {setting.label}, {label}"
        if of is None:
            return float(store.rows[key]["accuracy"]) if key in store.rows else -math.inf
        return _row(store, key, {**about, "arm": arm, "value": value}, lambda: of.accuracy(make(of)))

    def federation(of: World, lam: float) -> tuple[Sent, Models]:
        if lam not in kept:
            kept[lam] = of.federation(lam)
        return kept[lam]

    return {
        "ditto": climbed(
            LAMBDAS, lambda lam: (lam / 10, lam * 10),
            lambda lam: score("ditto", f"{lam:g}", lam, lambda of: federation(of, lam)[1]),
        ),
        "tuned": climbed(
            TUNES, lambda at: ((at[0] / 2.5, at[1]), (at[0] * 2.5, at[1]), (at[0], at[1] // 4), (at[0], at[1] * 4)),
            lambda at: score(
                "tuned", f"{at[0]:g} {at[1]}", list(at), lambda of: of.tuned(federation(of, LAMBDAS[0])[0], *at)
            ),
        ),
        "alone": climbed(
            ALONE, lambda rate: (rate / 2, rate * 2),
            lambda rate: score("alone", f"{rate:g}", rate, lambda of: of.tuned(of.start(), rate, _alone_epochs(case))),
        ),
    }  # fmt: skip


def climbed(first: Sequence[Any], neighbours: Callable[[Any], Sequence[Any]], score: Callable[[Any], float]) -> Any:
    """The best of some values, once it has beaten all of its neighbours; what has no epochs is none."""
    known = {value: score(value) for value in first}
    while True:
        best = max(known, key=known.__getitem__)
        near = map(_rounded, neighbours(best))
        fresh = [one for one in near if one not in known and not (isinstance(one, tuple) and one[1] == 0)]
        if not fresh:
            return best
        known |= {value: score(value) for value in fresh}


def _rounded(value: Any) -> Any:
    """Without the digits of binary fractions, so that a neighbour's neighbour is the value itself."""
    return (_rounded(value[0]), value[1]) if isinstance(value, tuple) else float(f"{value:.6g}")


def measure(store: Store, case: Case, setting: Setting, alpha: float, seed: int) -> None:
    """The four rows of a seed, on clients' own test rows."""
    values = chosen(store, case, setting)
    of = world(case, setting, alpha, seed, test=True)
    about = {"case": case.name, "alpha": alpha, "seed": seed, "on": "own test rows"}
    ran: list[tuple[Sent, Models]] = []

    def federation() -> tuple[Sent, Models]:
        if not ran:
            ran.append(of.federation(values["ditto"]))
        return ran[0]

    def everybody() -> Models:
        sent = federation()[0]
        return dict.fromkeys(range(CLIENTS), (sent.params, sent.buffers))

    models: dict[str, Callable[[], Models]] = {
        "ditto": lambda: federation()[1],
        "fedavg": everybody,
        "tuned": lambda: of.tuned(federation()[0], *values["tuned"]),
        "alone": lambda: of.tuned(of.start(), values["alone"], _alone_epochs(case)),
    }
    for arm, make in models.items():
        key = f"{case.name}, {alpha:g}, {seed}, own, {arm}, {setting.label}"
        _row(store, key, {**about, "arm": arm, "value": values.get(arm)}, lambda make=make: of.accuracy(make()))
