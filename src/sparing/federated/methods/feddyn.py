"""FedDyn: a linear and a quadratic term that make the clients' optima meet at the optimum of their mean loss."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Final, get_args

import torch
from torch import Tensor

from sparing.errors import require
from sparing.federated.methods.fedavg import FedAvg, GradientTerm
from sparing.federated.methods.interface import Sent, State, Term, Update, Vector
from sparing.federated.server.optimizers import Replace
from sparing.federated.settings import Schedule, Weights

_SHARE: Final = "share"  # of a client's state: its rows over the mean rows of all clients


@dataclass(frozen=True, slots=True)
class FedDyn(FedAvg):
    """Clients minimise L_k(x) − ⟨λ_k, x⟩ + (α/2) ‖x − g‖²; the server sends mean x_k − h/α.

    After its round a client takes λ_k ← λ_k − α (x − g), and the server h ← h − (α/m) Σ (x_k − g) over those who took
    part, m being all clients. λ_k and h start at zero and cover trainable parameters only. The optimum is that of the
    unweighted mean of the clients' losses, also with ``Schedule.weights="size"``; ``weights`` here gives that of the
    mean over rows. Where a rule other than the mean combines the models, h is updated by the same rule.

    Source: Acar et al. 2021, "Federated Learning Based on Dynamic Regularization" (arXiv:2111.04263), Algorithm 1; α_k
    as in the authors' code (alpemreacar/FedDyn).
    """

    alpha: float = 0.01
    """Strength of the quadratic term α, > 0; the usual grid is 0.001, 0.01, 0.1."""

    weights: Weights = "uniform"
    """What counts the same: every client, or with "size" every row. Then client k has α_k = α n̄/n_k in place of α, n_k
    being its rows and n̄ their mean over all clients; the server stays as it is. Only ``simulate`` tells clients n̄."""

    def __post_init__(self) -> None:
        known = self.weights in get_args(Weights)
        require(known, "FedDyn.weights", repr(self.weights), "no such choice", 'pass "uniform" or "size"')
        require(self.alpha > 0, "FedDyn.alpha", self.alpha, "the server divides by it", "pass alpha > 0, such as 0.01")
        why = "the server's step is the method itself"
        require(self.server == Replace(), "FedDyn.server", self.server, why, "leave server= out")

    def check(self, schedule: Schedule) -> None:
        """Refuse a decay that is no part of the objective whose gradient λ_k becomes."""
        plain = schedule.optimizer == "sgd" or not schedule.weight_decay
        why = "AdamW's decay is no gradient, and λ_k would come to hold it"
        got, do = f"{schedule.weight_decay:g} with adamw", 'pass weight_decay=0, or optimizer="sgd"'
        require(plain, "Schedule.weight_decay", got, why, do)

    def client_state(self, params: Vector) -> State:
        """Return λ_k = 0, and where rows count a share of them that is not known yet (``with_rows``)."""
        state = {"lam": {name: torch.zeros_like(value) for name, value in params.items()}}
        first = next(iter(params.values()))
        return state if self.weights == "uniform" else {**state, _SHARE: {"rows": first.new_full((), math.nan)}}

    def begin(self, sent: Sent, state: State) -> Term:
        """Return the term whose gradient is α (x − g) − λ_k."""
        g, lam = sent.params, state["lam"]
        if self.weights == "uniform":
            return GradientTerm(lambda name, x, grad: grad.add_(x - g[name], alpha=self.alpha).sub_(lam[name]))
        share = state[_SHARE]["rows"]
        why, do = "a client does not know how many rows the others have", "run it by simulate"
        require(not bool(share.isnan().any()), "FedDyn.weights", '"size"', why, do)

        def add(name: str, x: Tensor, grad: Tensor) -> None:
            # One share for each of the stacked clients, if they are.
            alpha = self.alpha / share.view((*share.shape, *[1] * (x.ndim - share.ndim)))
            grad.add_(alpha * (x - g[name])).sub_(lam[name])

        return GradientTerm(add)

    def finish(
        self, sent: Sent, params: Vector, state: State, steps: int, lr: float, buffers: Vector | None = None
    ) -> tuple[State, State]:
        """Return λ_k − α (x − g), and nothing to send."""
        alpha = self.alpha if self.weights == "uniform" else self.alpha / state[_SHARE]["rows"]
        moved = {name: state["lam"][name] - alpha * (x.detach() - sent.params[name]) for name, x in params.items()}
        return {**state, "lam": {**state["lam"], **moved}}, {}

    def server_state(self, params: Vector) -> State:
        """Return h = 0."""
        return {"h": {name: torch.zeros_like(value) for name, value in params.items()}}

    def aggregate(
        self, global_params: Vector, updates: Sequence[Update], server_state: State, clients: int
    ) -> tuple[Vector, State, State]:
        """Return mean x_k − h/α with the new h."""
        combined = self.combine.params(global_params, updates)
        # h is a sum over clients, not over rows, also where the models are averaged by rows.
        unweighted = self.combine.params(global_params, [replace(update, weight=1.0) for update in updates])
        h, params = {}, {}
        for name, value in global_params.items():
            sent = sum(name in update.params for update in updates)
            h[name] = server_state["h"][name] - self.alpha * (sent / clients) * (unweighted[name] - value)
            # A tensor that nobody trained stays: h did not change, and g already has its share of it.
            params[name] = combined[name] - h[name] / self.alpha if sent else value
        return params, {"h": h}, {}


def with_rows(state: State, share: Callable[[], float]) -> State:
    """Return a new client's state with its rows over the mean rows of all clients, where the method asks for them."""
    if _SHARE not in state:
        return state
    return {**state, _SHARE: {"rows": torch.full_like(state[_SHARE]["rows"], share())}}
