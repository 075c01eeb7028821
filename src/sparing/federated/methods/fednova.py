"""FedNova: updates are divided by how far their clients' steps go, so that more steps are no larger say."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from torch import Tensor

from sparing.errors import require
from sparing.federated.methods.fedavg import FedAvg
from sparing.federated.methods.interface import State, Update, Vector
from sparing.federated.methods.scaffold import effective_steps
from sparing.federated.settings import Schedule


@dataclass(frozen=True, slots=True)
class FedNova(FedAvg):
    """The server takes g + τ Σ w_k (x_k − g)/a_k with τ = Σ w_k a_k; the weights w_k are the mean's, and add up to 1.

    a_k is how far the n steps of client k go along a constant gradient at rate 1: n, and with momentum β
    (n − β (1 − βⁿ)/(1 − β))/(1 − β). FedAvg converges to the optimum of a mean in which a client counts by its a_k too;
    here it counts by w_k alone, while both move equally far. Clients train and send as in FedAvg; where all make the
    same number of steps the result is FedAvg's to the bit. Where clients draw blocks, mean and τ of a tensor are over
    its senders. The update of a client with few steps is stretched, whatever it is, so Flower's server takes no
    client's word for its steps and asks for ``rows=``. Other rules than the mean see updates of equal steps.

    Source: Wang et al. 2020, "Tackling the Objective Inconsistency Problem in Heterogeneous Federated Optimization"
    (arXiv:2007.07481), section 4, where a_k is ‖a_i‖₁, w_k is p_i and τ is τ_eff.
    """

    momentum: float = 0.0
    """Momentum β of the clients' SGD, in [0, 1); it must be that of the schedule."""

    def check(self, schedule: Schedule) -> None:
        """Refuse AdamW, and a momentum other than the method's."""
        why = "AdamW goes as far along any gradient, so steps do not say how far"
        require(schedule.optimizer == "sgd", "Schedule.optimizer", schedule.optimizer, why, 'pass optimizer="sgd"')
        why = f"FedNova(momentum={self.momentum:g}) would misjudge how far the clients went"
        do = f"pass momentum={self.momentum:g} in the schedule, or FedNova(momentum={schedule.momentum:g})"
        require(schedule.momentum == self.momentum, "Schedule.momentum", schedule.momentum, why, do)

    def aggregate(
        self, global_params: Vector, updates: Sequence[Update], server_state: State, clients: int
    ) -> tuple[Vector, State, State]:
        """Combine the models that the clients would have after equally far steps, and step as FedAvg does."""
        for update in updates:
            why, do = "an update is divided by how far its steps go", "on Flower pass rows= to the server"
            require(update.steps > 0, "FedNova", f"client {update.client} with unknown steps", why, do)
        far = [effective_steps(update.steps, self.momentum) for update in updates]
        usual = {name: _usual(name, updates, far) for name in global_params}

        def alike(name: str, value: Tensor, a: float) -> Tensor:
            # Of equal steps exactly FedAvg's.
            tau = usual[name]
            return value if tau is None else _stretched(global_params[name], value, tau / a)

        moved = [
            replace(update, params={name: alike(name, value, a) for name, value in update.params.items()})
            for update, a in zip(updates, far, strict=True)
        ]
        return FedAvg.aggregate(self, global_params, moved, server_state, clients)


def _usual(name: str, updates: Sequence[Update], far: Sequence[float]) -> float | None:
    """Return τ of a tensor over the clients that send it; None where all go equally far."""
    senders = [(update.weight, a) for update, a in zip(updates, far, strict=True) if name in update.params]
    if len({a for _, a in senders}) < 2:
        return None
    # Exactly rounded, so the order of the updates changes nothing.
    return math.fsum(weight * a for weight, a in senders) / math.fsum(weight for weight, _ in senders)


def _stretched(center: Tensor, value: Tensor, factor: float) -> Tensor:
    """Return g + factor (x − g) in float64, as the sums that follow are."""
    return center.double() + factor * (value.double() - center.double())
