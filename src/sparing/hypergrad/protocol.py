"""What an inner optimizer is: two pure functions, which any object may have."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

from torch import Tensor

from sparing.errors import UserError

Leaves = Sequence[Tensor]
Slots = Any  # tree of floating tensors


@runtime_checkable
class Optimizer(Protocol):
    """An inner optimizer as two pure functions; any object that has them will do.

    A learned optimizer takes its parameters from φ, a hand-written one may keep state of any shape. Both functions must
    be differentiable, answer alike when asked again, and change nothing in place. ``theta`` and ``grads`` are the
    leaves of θ in their order.

    An optimizer that adds a term of its own to the gradient, as L2 decay does, tells implicit methods of it by a third
    function, ``coupled(theta, step, phi)`` -> a tensor for each leaf of θ, in its shape; without one they take the run
    to end where ∇_θ g = 0.

    Source: Andrychowicz et al. 2016 for optimizers that are learned through their run.

    Example:
        >>> import torch
        >>> from sparing import hypergrad as hg
        >>> class SignedRoots:
        ...     def start(self, theta, phi):
        ...         return ()
        ...     def update(self, theta, grads, state, step, phi):
        ...         moves = [torch.tanh(grad * phi["scale"]) for grad in grads]
        ...         return [weight - 0.1 * move for weight, move in zip(theta, moves)], state
        >>> problem = hg.Bilevel(
        ...     inner=lambda theta, phi, batch: theta.square().sum() / 2, outer=lambda theta, phi: theta.sum(),
        ...     init=torch.ones(2), optimizer=SignedRoots(), steps=1,
        ... )
        >>> hg.hypergradient(problem, {"scale": torch.ones(())}, hg.Reverse()).grad["scale"]
        tensor(-0.0840)
    """

    def start(self, theta: Leaves, phi: Any) -> Slots:
        """State before the first step.

        Args:
            theta: θ₀.
            phi: φ, or ψ(φ) where there is a bottleneck.

        Returns:
            A tree of floating tensors; it may depend on φ, and may be empty.
        """
        ...

    def update(self, theta: Leaves, grads: Leaves, slots: Slots, step: int, phi: Any) -> tuple[list[Tensor], Slots]:
        """One step.

        Args:
            theta: Weights.
            grads: ∇_θ g, same shapes.
            slots: State after the step before.
            step: From 0.
            phi: As of ``start``.

        Returns:
            The next weights and state, in the shapes and dtypes of the old ones.
        """
        ...


@dataclass(frozen=True)
class Composed:
    """An optimizer of ψ as one of φ."""

    optimizer: Optimizer
    through: Callable[[Any], Any]  # φ -> ψ

    def start(self, theta: Leaves, phi: Any) -> Slots:
        """As of ``Optimizer``."""
        return self.optimizer.start(theta, self.through(phi))

    def update(self, theta: Leaves, grads: Leaves, slots: Slots, step: int, phi: Any) -> tuple[list[Tensor], Slots]:
        """As of ``Optimizer``."""
        return self.optimizer.update(theta, grads, slots, step, self.through(phi))

    def coupled(self, theta: Leaves, step: int, phi: Any) -> list[Tensor] | None:
        """As of ``Optimizer``; None where there is none."""
        return coupled_terms(self.optimizer, theta, step, self.through(phi))


def coupled_terms(optimizer: Any, theta: Leaves, step: int, phi: Any) -> list[Tensor] | None:
    """What an optimizer adds to the inner gradient, leaves as of θ; None for nothing."""
    added = optimizer.coupled(theta, step, phi) if hasattr(optimizer, "coupled") else None
    if added is None:
        return None
    listed = list(added) if isinstance(added, list | tuple) else [added]
    wanted = [tuple(weight.shape) for weight in theta]
    fits = isinstance(added, list | tuple) and all(isinstance(one, Tensor) for one in listed)
    # a scalar would be added to every element of its leaf without a word
    if not fits or [tuple(one.shape) for one in listed] != wanted:
        got = f"a {type(added).__name__}"
        if fits:
            got = f"shapes {[tuple(one.shape) for one in listed]}"
        raise UserError(
            "optimizer.coupled", got=got, why="it is added to the inner gradient, leaf by leaf",
            do=f"return a list of a tensor for each leaf of θ, of shapes {wanted}, or None",
        )  # fmt: skip
    return listed
