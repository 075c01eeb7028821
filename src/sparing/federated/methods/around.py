"""A method around another one: what it does not change, it leaves to that."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import nn

from sparing.federated.methods.feddyn import FedDyn
from sparing.federated.methods.interface import Method, Sent, State, Term, Update, Vector
from sparing.federated.settings import Schedule


@dataclass(frozen=True, slots=True)
class Around:
    """Whatever ``method`` does; a subclass names itself, and says what it does otherwise."""

    method: Method

    @property
    def stackable(self) -> bool:
        """As the method."""
        return self.method.stackable

    def check(self, schedule: Schedule) -> None:
        """Refuse what the method refuses."""
        self.method.check(schedule)

    def adapt(self, model: nn.Module) -> nn.Module:
        """As the method."""
        return self.method.adapt(model)

    def client_state(self, params: Vector) -> State:
        """As the method."""
        return self.method.client_state(params)

    def begin(self, sent: Sent, state: State) -> Term:
        """As the method."""
        return self.method.begin(sent, state)

    def finish(
        self, sent: Sent, params: Vector, state: State, steps: int, lr: float, buffers: Vector | None = None
    ) -> tuple[State, State]:
        """As the method."""
        return self.method.finish(sent, params, state, steps, lr, buffers)

    def server_state(self, params: Vector) -> State:
        """As the method."""
        return self.method.server_state(params)

    def buffers(self, global_buffers: Vector, updates: Sequence[Update]) -> Vector:
        """As the method."""
        return self.method.buffers(global_buffers, updates)

    def step_on_mean(
        self, global_params: Vector, mean: Vector, count: int, server_state: State, clients: int
    ) -> tuple[Vector, State, State]:
        """Let the method aggregate ``count`` updates of which only the mean is known."""
        # FedDyn counts models; to the others one does as well.
        copies = count if isinstance(self.method, FedDyn) else 1
        alike = [Update(at, mean) for at in range(copies)]
        return self.method.aggregate(global_params, alike, server_state, clients)
