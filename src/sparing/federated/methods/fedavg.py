"""FedAvg: clients train on their own loss, the server averages; and what all methods built on it share."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field

from torch import Tensor, nn

from sparing.federated.methods.interface import Sent, State, Term, Update, Vector
from sparing.federated.server.optimizers import Replace, Server
from sparing.federated.server.robust import Combine, Mean
from sparing.federated.settings import Schedule


@dataclass(frozen=True, slots=True)
class NoTerm:
    """No term: the client's own loss and nothing else."""

    def add_(self, params: Mapping[str, Tensor], grads: Mapping[str, Tensor], lr: float) -> None:
        """Add nothing."""

    def loss(self, model: nn.Module, inputs: Tensor, outputs: Tensor) -> Tensor | None:
        """Return None."""
        return None


@dataclass(frozen=True, slots=True, eq=False)
class GradientTerm(NoTerm):
    """A term given by its gradient: ``add`` takes the name, value and gradient of a parameter, and adds to the last."""

    add: Callable[[str, Tensor, Tensor], object]

    def add_(self, params: Mapping[str, Tensor], grads: Mapping[str, Tensor], lr: float) -> None:
        """Add the gradient of every parameter that trains."""
        for name, grad in grads.items():
            self.add(name, params[name], grad)


@dataclass(frozen=True, slots=True)
class FedAvg:
    """Average the clients' models, each trained from the global model.

    The methods built on it differ from it only in what their own files define.

    Source: McMahan et al. 2017 (arXiv:1602.05629), Algorithm 1; whether the mean is uniform or by rows is
    ``Schedule.weights``.

    Example:
        >>> from sparing.federated.server.optimizers import FedAdam
        >>> FedAvg(server=FedAdam(lr=0.01)).name
        'fedavg'
    """

    _: KW_ONLY

    server: Server = field(default_factory=Replace)
    """What the server does with the combined model."""

    combine: Combine = field(default_factory=Mean)
    """How the models of a round become one."""

    @property
    def name(self) -> str:
        """Name for tables and files."""
        return type(self).__name__.lower()

    @property
    def stackable(self) -> bool:
        """True: the term is arithmetic on elements."""
        return True

    def check(self, schedule: Schedule) -> None:
        """Accept every schedule."""

    def adapt(self, model: nn.Module) -> nn.Module:
        """Return the model itself."""
        return model

    def client_state(self, params: Vector) -> State:
        """Return no state."""
        return {}

    def begin(self, sent: Sent, state: State) -> Term:
        """Return no term."""
        return NoTerm()

    def finish(
        self, sent: Sent, params: Vector, state: State, steps: int, lr: float, buffers: Vector | None = None
    ) -> tuple[State, State]:
        """Return the state as it was, and nothing to send."""
        return state, {}

    def server_state(self, params: Vector) -> State:
        """Return the state of the server optimizer."""
        return self.server.state(params)

    def aggregate(
        self, global_params: Vector, updates: Sequence[Update], server_state: State, clients: int
    ) -> tuple[Vector, State, State]:
        """Combine the models, and let the server optimizer step towards the result."""
        combined = self.combine.params(global_params, updates)
        params, state = self.server.step(global_params, combined, server_state)
        return params, state, {}

    def buffers(self, global_buffers: Vector, updates: Sequence[Update]) -> Vector:
        """Combine the buffers by the same rule; server optimizers leave them alone."""
        return self.combine.buffers(global_buffers, updates)
