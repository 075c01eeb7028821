"""FedDyn: a linear and a quadratic term that make the clients' optima meet at the optimum of their mean loss."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from sparing.errors import require
from sparing.federated.methods.fedavg import FedAvg, GradientTerm
from sparing.federated.methods.interface import Sent, State, Term, Update, Vector
from sparing.federated.server.optimizers import Replace
from sparing.federated.settings import Schedule


@dataclass(frozen=True, slots=True)
class FedDyn(FedAvg):
    """Clients minimise L_k(x) − ⟨λ_k, x⟩ + (α/2) ‖x − g‖²; the server sends mean x_k − h/α.

    After its round a client takes λ_k ← λ_k − α (x − g), and the server h ← h − (α/m) Σ (x_k − g) over those who took
    part, m being all clients. λ_k and h start at zero and cover trainable parameters only. The optimum is that of the
    unweighted mean of the clients' losses, also with ``Schedule.weights="size"``. Where a rule other than the mean
    combines the models, h is updated by the same rule.

    Source: Acar et al. 2021, "Federated Learning Based on Dynamic Regularization" (arXiv:2111.04263), Algorithm 1.
    """

    alpha: float = 0.01
    """Strength of the quadratic term α, > 0; the usual grid is 0.001, 0.01, 0.1."""

    def __post_init__(self) -> None:
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
        """Return λ_k = 0."""
        return {"lam": {name: torch.zeros_like(value) for name, value in params.items()}}

    def begin(self, sent: Sent, state: State) -> Term:
        """Return the term whose gradient is α (x − g) − λ_k."""
        g, lam = sent.params, state["lam"]
        return GradientTerm(lambda name, x, grad: grad.add_(x - g[name], alpha=self.alpha).sub_(lam[name]))

    def finish(
        self, sent: Sent, params: Vector, state: State, steps: int, lr: float, buffers: Vector | None = None
    ) -> tuple[State, State]:
        """Return λ_k − α (x − g), and nothing to send."""
        moved = {name: state["lam"][name] - self.alpha * (x.detach() - sent.params[name]) for name, x in params.items()}
        return {"lam": {**state["lam"], **moved}}, {}

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
