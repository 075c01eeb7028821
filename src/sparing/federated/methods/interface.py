"""What a federated method is: what a client adds to its gradient, keeps and sends, and what the server makes of it.

Every function here is pure, tensors in and tensors out, but for ``Term.add_``, which adds to gradients in place. A
vector holds trainable parameters by canonical name (``sparing.blocks.named_parameters``); buffers are sent separately
and are not part of any method's penalty, control variate or state.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol, runtime_checkable

from torch import Tensor, nn

from sparing.federated.settings import Schedule

Vector = dict[str, Tensor]
"""Trainable parameters, or buffers, by canonical name."""

State = dict[str, Vector]
"""Vectors by what they are, such as the control variate of a client; what a checkpoint keeps."""


@dataclass(frozen=True, slots=True)
class Sent:
    """What the server sends to the clients of a round."""

    params: Vector  # the global model g
    extras: State = field(default_factory=dict)  # as ``Method.aggregate`` returned it; empty in the first round
    buffers: Vector = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Update:
    """What one client sends back."""

    client: int
    params: Vector  # x after local training; only what trained, where clients draw blocks
    weight: float = 1.0  # in a mean, > 0: 1, or the client's rows
    extras: State = field(default_factory=dict)  # as ``Method.finish`` returned it
    buffers: Vector = field(default_factory=dict)
    steps: int = 0  # local steps, as the server knows them; 0 where it does not


class Term(Protocol):
    """What a method adds to a client's objective during one round."""

    def add_(self, params: Mapping[str, Tensor], grads: Mapping[str, Tensor], lr: float) -> None:
        """Add the gradient of the term to ``grads`` in place; after backward and before clipping.

        If the method is ``stackable``, tensors may have a leading client dimension that ``sent`` has not: broadcast.
        """

    def loss(self, model: nn.Module, inputs: Tensor, outputs: Tensor) -> Tensor | None:
        """Return what is added to the loss of a batch, shape (), or None where the term is a gradient."""


@runtime_checkable
class Method(Protocol):
    """A federated method. Its value holds settings only; all that changes is passed in and returned."""

    @property
    def name(self) -> str:
        """Name for tables and files, such as "fedprox"."""

    @property
    def stackable(self) -> bool:
        """Whether a client's round may run on stacked parameters: ``Term.loss`` is None and ``add_`` broadcasts."""

    def check(self, schedule: Schedule) -> None:
        """Raise ``UserError`` for a schedule under which the method would not be what its paper describes."""

    def adapt(self, model: nn.Module) -> nn.Module:
        """Return the architecture that the method trains, with the same parameter names; ``model`` stays as it is.

        Engines must call its modules, not only read their weights: the change may be in forward hooks.
        """

    def client_state(self, params: Vector) -> State:
        """Return the state of a client that has never trained, from the global model before the first round."""

    def begin(self, sent: Sent, state: State) -> Term:
        """Return the term of a client's round; ``sent`` must not change during it."""

    def finish(
        self, sent: Sent, params: Vector, state: State, steps: int, lr: float, buffers: Vector | None = None
    ) -> tuple[State, State]:
        """Return the client's new state after its round, and ``Update.extras``.

        ``params`` is of one client, not stacked; names that did not train may be missing, and keep their state.
        """

    def server_state(self, params: Vector) -> State:
        """Return the server's state before the first round, empty for methods without state."""

    def aggregate(
        self, global_params: Vector, updates: Sequence[Update], server_state: State, clients: int
    ) -> tuple[Vector, State, State]:
        """Return the next global model, the server's next state, and ``Sent.extras`` of the next round.

        The order of the updates changes nothing, not even a bit. ``clients`` counts all of them, K.
        """

    def buffers(self, global_buffers: Vector, updates: Sequence[Update]) -> Vector:
        """Return the next global buffers, combined as the parameters are; of integer ones the largest."""
