"""SCAFFOLD: control variates that remove from each client's gradient what differs from the others'."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from sparing.errors import require
from sparing.federated.methods.fedavg import FedAvg, GradientTerm
from sparing.federated.methods.interface import Sent, State, Term, Update, Vector
from sparing.federated.server.defences import Bucketing, CenteredClipping
from sparing.federated.server.robust import Clipped
from sparing.federated.settings import Schedule


@dataclass(frozen=True, slots=True)
class SCAFFOLD(FedAvg):
    """Clients step along ∇L_k + c − c_k; then c_k ← c_k − c + (g − x)/(n η), and the server c ← c + |P|/m · mean Δc_k.

    n η is how far n steps at rate η move along a constant gradient. With momentum β, from a buffer of zero, it is
    η/(1 − β) · (n − β (1 − βⁿ)/(1 − β)); the paper's n η is that of β = 0. The control variates travel both ways: a
    round costs twice the bytes. The server's rate η_g is that of ``server=Replace(lr=...)``.

    Source: Karimireddy et al. 2020 (arXiv:1910.06378), Algorithm 1, option II.
    """

    momentum: float = 0.0
    """Momentum β of the clients' SGD, in [0, 1); it must be that of the schedule."""

    def check(self, schedule: Schedule) -> None:
        """Refuse AdamW, a momentum other than the method's, gradient clipping, and clipped updates."""
        why = "a control variate is read off how far SGD went, and AdamW goes as far along any gradient"
        require(schedule.optimizer == "sgd", "Schedule.optimizer", schedule.optimizer, why, 'pass optimizer="sgd"')
        why = f"SCAFFOLD(momentum={self.momentum:g}) would misjudge the gradient that the clients saw"
        do = f"pass momentum={self.momentum:g} in the schedule, or SCAFFOLD(momentum={schedule.momentum:g})"
        require(schedule.momentum == self.momentum, "Schedule.momentum", schedule.momentum, why, do)
        why = "a control variate is the gradient that explains the way, and a clipped one is shorter"
        require(schedule.clip is None, "Schedule.clip", schedule.clip, why, "pass clip=None")
        why = "the control variates have another scale than the updates whose norm is bounded"
        rule = self.combine.combine if isinstance(self.combine, Bucketing) else self.combine
        clipped = isinstance(rule, Clipped | CenteredClipping)
        require(not clipped, "SCAFFOLD.combine", self.combine, why, "pass combine=Median() or TrimmedMean()")

    def client_state(self, params: Vector) -> State:
        """Return c_k = 0."""
        return {"control": {name: torch.zeros_like(value) for name, value in params.items()}}

    def begin(self, sent: Sent, state: State) -> Term:
        """Return the term whose gradient is c − c_k."""
        common, mine = sent.extras.get("control", {}), state["control"]

        def add(name: str, x: Tensor, grad: Tensor) -> None:
            # No c was sent before the first round.
            if name in common:
                grad.add_(common[name])
            grad.sub_(mine[name])

        return GradientTerm(add)

    def finish(
        self, sent: Sent, params: Vector, state: State, steps: int, lr: float, buffers: Vector | None = None
    ) -> tuple[State, State]:
        """Return the new c_k, and its change to send."""
        # Without a step there is no distance to divide by, and nothing was learnt about the gradient.
        if steps == 0:
            return state, {"control": {name: torch.zeros_like(value) for name, value in params.items()}}
        distance = lr * effective_steps(steps, self.momentum)
        common, old = sent.extras.get("control", {}), state["control"]
        change = {
            name: (sent.params[name] - x.detach()) / distance - common.get(name, 0.0) for name, x in params.items()
        }
        new = {name: old[name] + value for name, value in change.items()}
        return {"control": {**old, **new}}, {"control": change}

    def server_state(self, params: Vector) -> State:
        """Return c = 0, and the state of the server optimizer."""
        return {**self.server.state(params), "control": self.client_state(params)["control"]}

    def aggregate(
        self, global_params: Vector, updates: Sequence[Update], server_state: State, clients: int
    ) -> tuple[Vector, State, State]:
        """Step as FedAvg does, and add |P|/m · mean Δc_k to c, which goes to the clients."""
        combined = self.combine.params(global_params, updates)
        params, state = self.server.step(global_params, combined, server_state)
        changes = [replace(update, params=update.extras["control"], weight=1.0) for update in updates]
        old, control = server_state["control"], {}
        change = self.combine.params({name: torch.zeros_like(value) for name, value in old.items()}, changes)
        for name, value in old.items():
            # |P| counts per tensor: where clients draw blocks, not all of them sent it.
            share = sum(name in update.params for update in changes) / clients
            control[name] = value + share * change[name]
        return params, {**state, "control": control}, {"control": control}


def effective_steps(steps: int, momentum: float) -> float:
    """Return Σ_{i=1}^{n} (1 − βⁱ)/(1 − β): how far n steps of momentum β move along a constant gradient at rate 1.

    Example:
        >>> effective_steps(3, 0.5)  # 1 + 1.5 + 1.75
        4.25
    """
    if momentum == 0:
        return float(steps)
    return (steps - momentum * (1 - momentum**steps) / (1 - momentum)) / (1 - momentum)
