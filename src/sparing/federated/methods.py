"""What a federated method is: what a client adds to its gradient, keeps and sends, and what the server makes of it.

Every function here is pure, tensors in and tensors out, but for ``Term.add_``, which adds to gradients in place. A
vector holds trainable parameters by canonical name (``sparing.blocks.named_parameters``); buffers travel apart and no
method's penalty, control variate or state has them.
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

    params: Vector
    """The global model, g."""

    extras: State = field(default_factory=dict)
    """What goes beside it, as ``Method.aggregate`` returned it; empty in the first round."""

    buffers: Vector = field(default_factory=dict)
    """Buffers of the global model."""


@dataclass(frozen=True, slots=True)
class Update:
    """What one client sends back."""

    client: int
    """Its number."""

    params: Vector
    """Its model x after local training; only those names that trained, where clients draw blocks."""

    weight: float = 1.0
    """How much it counts in a mean, > 0: 1, or its rows."""

    extras: State = field(default_factory=dict)
    """What goes beside it, as ``Method.finish`` returned it."""

    buffers: Vector = field(default_factory=dict)
    """Its buffers after local training."""


class Term(Protocol):
    """What a method adds to a client's objective during one round."""

    def add_(self, params: Mapping[str, Tensor], grads: Mapping[str, Tensor], lr: float) -> None:
        """Add the gradient of the term to the gradients, in place; after backward and before clipping.

        The tensors may have a leading client dimension that the model sent does not have, if the method is
        ``stackable``: the arithmetic broadcasts over it.

        Args:
            params: The client's parameters now, detached.
            grads: Gradients of its loss, by the same names or some of them; only these are changed.
            lr: Learning rate of the step.
        """
        ...

    def loss(self, model: nn.Module, inputs: Tensor, outputs: Tensor) -> Tensor | None:
        """Return what is added to the loss of a batch before backward, where it needs the model itself.

        Args:
            model: The client's model, adapted; left as it was.
            inputs: The batch, shape (rows, ...).
            outputs: What the model gave for it.

        Returns:
            Shape (), or None for methods whose term is a gradient.
        """
        ...


@runtime_checkable
class Method(Protocol):
    """A federated method. Its value holds settings only; all that changes is passed in and returned."""

    @property
    def name(self) -> str:
        """Name for tables and files, such as "fedprox"."""
        ...

    @property
    def stackable(self) -> bool:
        """Whether a client's round may run on stacked parameters: ``Term.loss`` is None and ``add_`` broadcasts."""
        ...

    def check(self, schedule: Schedule) -> None:
        """Refuse a schedule under which the method would not be what its paper describes.

        Args:
            schedule: That of the run; engines call this once before the first round.

        Raises:
            UserError: If the two do not fit.
        """
        ...

    def adapt(self, model: nn.Module) -> nn.Module:
        """Return the architecture that the method trains; the model itself, unless the method changes it.

        Args:
            model: As the user made it; left as it was.

        Returns:
            A model with the same parameter names. Engines must call its modules, not only read their weights: the
            change may be in forward hooks.
        """
        ...

    def client_state(self, params: Vector) -> State:
        """Return the state of a client that was never visited.

        Args:
            params: The initial global model, that before the first round, whenever the first visit is.

        Returns:
            Empty for methods without state.
        """
        ...

    def begin(self, sent: Sent, state: State) -> Term:
        """Return the term of a client's round.

        Args:
            sent: What the server sent; what the term needs of it is copied or kept, so it must not change.
            state: The client's; its tensors have a leading client dimension where the round is stacked.

        Returns:
            A value used for all steps of this round.
        """
        ...

    def finish(
        self, sent: Sent, params: Vector, state: State, steps: int, lr: float, buffers: Vector | None = None
    ) -> tuple[State, State]:
        """Return the client's state after its round, and what travels beside its model.

        Args:
            sent: As at the start.
            params: The client's model after its last step, one client, not stacked. Names that did not train may be
                missing: their part of the state stays.
            state: As at the start.
            steps: Optimizer steps made (count).
            lr: Their learning rate.
            buffers: The client's, for methods that keep a whole model.

        Returns:
            New state, kept by the engine only if the server received the update; and ``Update.extras``.
        """
        ...

    def server_state(self, params: Vector) -> State:
        """Return the server's state before the first round.

        Args:
            params: The initial global model.

        Returns:
            Empty for methods without state.
        """
        ...

    def aggregate(
        self, global_params: Vector, updates: Sequence[Update], server_state: State, clients: int
    ) -> tuple[Vector, State, State]:
        """Return the next global model.

        The order of the updates changes nothing, not even a bit.

        Args:
            global_params: The model that these clients received, g.
            updates: One of each client that answered, at least one.
            server_state: The server's.
            clients: All clients, also those that did not take part (count), m.

        Returns:
            New model, new server state, and ``Sent.extras`` of the next round.
        """
        ...

    def buffers(self, global_buffers: Vector, updates: Sequence[Update]) -> Vector:
        """Return the buffers of the next global model, for ``Schedule.batch_norm="average"``.

        Args:
            global_buffers: Those that were sent: their names, and their values where no client sent any.
            updates: As for ``aggregate``.

        Returns:
            Floating buffers combined as the parameters are; the largest of integer ones; dtypes kept.
        """
        ...
