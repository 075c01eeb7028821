"""Inner optimizers as pure updates: (weights, gradients, moments) in, the next ones out; nothing is changed in place.

They follow ``torch.optim`` operation by operation, so an unrolled run has the trajectory of an ordinary one, and every
moment is part of the state that is differentiated. Where a rival leaves the moments out of the unroll, its
hypergradient is wrong.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from sparing.errors import UserError

Leaves = Sequence[Tensor]
Slots = tuple[list[Tensor], ...]
Rate = float | Callable[..., Any]  # η, (step) -> η, or (step, phi) -> η, a number or a tensor; step counts from 0


def cosine(lr: float, steps: int, *, floor: float = 0.0) -> Callable[[int], float]:
    """Cosine decay from ``lr`` at step 0 to ``floor`` at step ``steps``.

    Args:
        lr: First rate.
        steps: Length T of the run (count).
        floor: Rate after the last step.

    Returns:
        step -> rate.

    Example:
        >>> [round(cosine(0.1, 4)(step), 4) for step in range(5)]
        [0.1, 0.0854, 0.05, 0.0146, 0.0]
    """
    return lambda step: floor + (lr - floor) * (1 + math.cos(math.pi * min(step, steps) / steps)) / 2


def lr_at(rate: Rate, step: int, phi: Any) -> Any:
    """The learning rate of a step, a number or a tensor that may depend on φ (or ψ)."""
    if not callable(rate):
        return rate
    return rate(step, phi) if accepts_positional(rate, 2) else rate(step)


def accepts_positional(function: Callable[..., Any], count: int) -> bool:
    """Whether a function requires ``count`` positional arguments; true also where its signature cannot be read."""
    try:
        parameters = inspect.signature(function).parameters.values()
    except ValueError:
        return True
    positional = [one for one in parameters if one.kind in {one.POSITIONAL_ONLY, one.POSITIONAL_OR_KEYWORD}]
    # parameters with a default are the user's own, such as a loop variable bound by ``lambda step, k=k: ...``
    required = sum(one.default is one.empty for one in positional)
    return required >= count or any(one.kind is one.VAR_POSITIONAL for one in parameters)


def _clip(grads: Leaves, limit: float | None) -> list[Tensor]:
    """Gradients scaled to a global norm of at most ``limit``, as ``clip_grad_norm_`` does."""
    if limit is None:
        return list(grads)
    total = torch.linalg.vector_norm(torch.stack([torch.linalg.vector_norm(grad) for grad in grads]))
    factor = (limit / (total + 1e-6)).clamp(max=1.0)
    return [grad * factor for grad in grads]


def _safe_sqrt(square: Tensor) -> Tensor:
    """√s with derivative 0 where s = 0."""
    # A plain root has derivative inf · 0 = NaN there, in both modes. The inner ``where`` keeps the root away from 0,
    # since autograd multiplies the branch not taken by 0.
    dead = square == 0
    return torch.where(dead, torch.zeros_like(square), torch.where(dead, torch.ones_like(square), square).sqrt())


def _check_settings(optimizer: SGD | Adam) -> None:
    """Refuse settings that cannot work."""
    if not callable(optimizer.lr) and not float(optimizer.lr) >= 0:
        raise UserError("lr", got=optimizer.lr, why="a step goes downhill", do="pass a rate >= 0 or a schedule")
    if optimizer.weight_decay < 0:
        raise UserError("weight_decay", got=optimizer.weight_decay, why="it would grow weights", do="pass one >= 0")
    if optimizer.clip is not None and optimizer.clip <= 0:
        raise UserError("clip", got=optimizer.clip, why="it bounds a norm", do="pass a limit > 0, or None")


@dataclass(frozen=True, kw_only=True)
class SGD:
    """Gradient descent with momentum, as ``torch.optim.SGD``.

    Source: tangents in Shen et al. 2024, eq. 8; the moment is part of the inner state.
    """

    lr: Rate = 0.01
    """Learning rate η, or a schedule (step) or (step, phi)."""
    momentum: float = 0.0
    """μ of m' = μm + (1 − τ)g."""
    nesterov: bool = False
    """Whether the step is g + μm' in place of m'."""
    dampening: float = 0.0
    """τ; as in torch the first moment is g undamped."""
    weight_decay: float = 0.0
    """λ added to the gradient as λθ."""
    clip: float | None = None
    """Largest global norm of the gradient; None for none."""

    def __post_init__(self) -> None:
        _check_settings(self)
        if self.nesterov and (self.momentum <= 0 or self.dampening):
            raise UserError("nesterov", got="no momentum", why="it looks ahead along it", do="pass momentum > 0")

    @property
    def slots(self) -> int:
        """Moments per weight k; state and tangents hold (1 + k)·M floats."""
        return 1 if self.momentum else 0

    @property
    def coupled_decay(self) -> float:
        """λ that acts as a quadratic term of the inner loss."""
        return self.weight_decay

    @property
    def linear(self) -> bool:
        """Whether the update is linear in (θ, g, m) at a given rate, so that tangents take the very same step."""
        return self.clip is None

    @property
    def steered(self) -> bool:
        """Whether the rate depends on φ; tangents then also move by −η̇ along the step."""
        return callable(self.lr) and accepts_positional(self.lr, 2)

    def update(self, theta: Leaves, grads: Leaves, slots: Slots, step: int, phi: Any) -> tuple[list[Tensor], Slots]:
        """One step.

        Args:
            theta: Weights.
            grads: ∇_θ g, same shapes.
            slots: Moments of the step before.
            step: From 0.
            phi: What a rate may depend on.

        Returns:
            The next weights and moments.
        """
        lr = lr_at(self.lr, step, phi)
        moves, slots = self.moves(theta, grads, slots, step)
        if isinstance(lr, Tensor):
            return [weight - lr * move for weight, move in zip(theta, moves, strict=True)], slots
        # one fused kernel, as torch.optim uses: its product is not rounded before the difference
        return [torch.add(weight, move, alpha=-lr) for weight, move in zip(theta, moves, strict=True)], slots

    def moves(self, theta: Leaves, grads: Leaves, slots: Slots, step: int) -> tuple[list[Tensor], Slots]:
        """The step before it is scaled by the rate.

        Args:
            theta: Weights.
            grads: ∇_θ g, same shapes.
            slots: Moments of the step before.
            step: From 0.

        Returns:
            What is subtracted, over η; the next moments.
        """
        moves = _clip(grads, self.clip)
        if self.weight_decay:
            moves = [torch.add(g, weight, alpha=self.weight_decay) for g, weight in zip(moves, theta, strict=True)]
        if not self.momentum:
            return moves, ()
        # as in torch, the first moment is the gradient itself, undamped
        if step == 0:
            kept = moves
        else:
            fresh = moves if not self.dampening else [(1 - self.dampening) * move for move in moves]
            kept = [torch.add(move, moment, alpha=self.momentum) for move, moment in zip(fresh, slots[0], strict=True)]
        if not self.nesterov:
            return kept, (list(kept),)
        ahead = [torch.add(move, moment, alpha=self.momentum) for move, moment in zip(moves, kept, strict=True)]
        return ahead, (list(kept),)


@dataclass(frozen=True, kw_only=True)
class Adam:
    """Adam with L2 decay in the gradient, as ``torch.optim.Adam``.

    Where the second moment is zero (a dead unit) the derivative of its root is taken as zero, which leaves the
    trajectory as it is and keeps every derivative finite.

    Source: Kingma & Ba 2015; tangents by differentiating the update.
    """

    lr: Rate = 1e-3
    """Learning rate η, or a schedule (step) or (step, phi)."""
    betas: tuple[float, float] = (0.9, 0.999)
    """Decay of the first and second moment β₁, β₂."""
    eps: float = 1e-8
    """ε beside the root."""
    weight_decay: float = 0.0
    """λ added to the gradient as λθ."""
    clip: float | None = None
    """Largest global norm of the gradient; None for none."""

    def __post_init__(self) -> None:
        _check_settings(self)
        if not all(0 <= beta < 1 for beta in self.betas):
            raise UserError("betas", got=self.betas, why="they are decays", do="pass two numbers in [0, 1)")

    @property
    def slots(self) -> int:
        """Moments per weight k; state and tangents hold (1 + k)·M floats."""
        return 2

    @property
    def coupled_decay(self) -> float:
        """λ that acts as a quadratic term of the inner loss."""
        return self.weight_decay

    def _decay(self, theta: Leaves, grads: Leaves, lr: Any) -> tuple[list[Tensor], list[Tensor]]:
        """Weights and gradients after decay: here λθ joins the gradient."""
        if not self.weight_decay:
            return list(theta), list(grads)
        return list(theta), [grad + self.weight_decay * weight for grad, weight in zip(grads, theta, strict=True)]

    def update(self, theta: Leaves, grads: Leaves, slots: Slots, step: int, phi: Any) -> tuple[list[Tensor], Slots]:
        """One step.

        Args:
            theta: Weights.
            grads: ∇_θ g, same shapes.
            slots: First and second moments of the step before.
            step: From 0.
            phi: What a rate may depend on.

        Returns:
            The next weights and moments.
        """
        lr = lr_at(self.lr, step, phi)
        theta, grads = self._decay(theta, _clip(grads, self.clip), lr)
        one, two = self.betas
        first = [torch.lerp(old, grad, 1 - one) for old, grad in zip(slots[0], grads, strict=True)]
        second = [torch.addcmul(two * old, g, g, value=1 - two) for old, g in zip(slots[1], grads, strict=True)]
        size = lr / (1 - one ** (step + 1))
        scale = math.sqrt(1 - two ** (step + 1))
        moved = [
            weight - size * (mean / (_safe_sqrt(square) / scale + self.eps))
            for weight, mean, square in zip(theta, first, second, strict=True)
        ]
        return moved, (first, second)


@dataclass(frozen=True, kw_only=True)
class AdamW(Adam):
    """Adam with decay apart from the gradient, θ ← (1 − ηλ)θ, as ``torch.optim.AdamW``.

    Source: Loshchilov & Hutter 2019.
    """

    weight_decay: float = 0.01
    """λ of θ ← (1 − ηλ)θ."""

    @property
    def coupled_decay(self) -> float:
        """Zero: this decay is no term of the inner loss."""
        return 0.0

    def _decay(self, theta: Leaves, grads: Leaves, lr: Any) -> tuple[list[Tensor], list[Tensor]]:
        """Weights and gradients after decay: here the weights shrink."""
        return [weight * (1 - lr * self.weight_decay) for weight in theta], list(grads)


Optimizer = SGD | Adam
