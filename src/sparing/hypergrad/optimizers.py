"""Inner optimizers as pure updates: (weights, gradients, moments) in, the next ones out; nothing is changed in place.

They follow ``torch.optim`` operation by operation, so an unrolled run has the trajectory of an ordinary one, and every
moment is part of the state that is differentiated. Where a rival leaves the moments out of the unroll, its
hypergradient is wrong. Others, written by hand or learned, follow the protocol ``Optimizer``.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten

from sparing.errors import UserError, require
from sparing.hypergrad.protocol import Leaves, Slots

# A number, (step) -> value or (step, phi) -> value; a value is a number, a tensor, or one of them for each leaf of θ in
# the nesting of θ; step counts from 0.
Setting = float | Callable[..., Any]


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
    require(steps >= 1, "steps", steps, "the rate falls over them", "pass the length of the run, at least 1")
    return lambda step: floor + (lr - floor) * (1 + math.cos(math.pi * min(step, steps) / steps)) / 2


def setting_at(setting: Setting, step: int, phi: Any) -> Any:
    """A setting at a step, which may depend on φ (or ψ)."""
    if not callable(setting):
        return setting
    return setting(step, phi) if accepts_positional(setting, 2) else setting(step)


def by_leaf(setting: Setting, step: int, phi: Any, count: int) -> list[Any]:
    """A setting at a step for each of ``count`` leaves of θ, numbers or tensors."""
    value = setting_at(setting, step, phi)
    if not isinstance(value, dict | list | tuple):
        return [value] * count
    values = tree_flatten(value)[0]
    if len(values) != count:
        raise UserError(
            "optimizer", got=f"a setting of {len(values)} values", why=f"θ has {count} leaves",
            do="return one number, or one for each leaf in the nesting of θ",
        )  # fmt: skip
    return values


def steers(setting: Setting) -> bool:
    """Whether a setting may depend on φ."""
    return callable(setting) and accepts_positional(setting, 2)


def ours(optimizer: Any) -> bool:
    """Whether it is one of ours as it stands; a subclass is the user's own, and may do anything."""
    return type(optimizer) in {SGD, Adam, AdamW}


def settings_of(optimizer: Any) -> dict[str, Setting]:
    """Settings of ``SGD`` and ``Adam`` that may be schedules, by name; none of an optimizer of the user's."""
    if isinstance(optimizer, SGD):
        return {"lr": optimizer.lr, "momentum": optimizer.momentum, "weight_decay": optimizer.weight_decay}
    if isinstance(optimizer, Adam):
        pairs = {f"betas[{place}]": beta for place, beta in enumerate(optimizer.betas)}
        return {"lr": optimizer.lr, **pairs, "weight_decay": optimizer.weight_decay}
    return {}


def _plus(a: Tensor, value: Any, b: Tensor) -> Tensor:
    """A + value·b, in the dtype of a."""
    # one fused kernel for a number, as torch.optim uses: its product is not rounded before the sum
    return (a + value * b).to(a.dtype) if isinstance(value, Tensor) else torch.add(a, b, alpha=value)


def _coupled(setting: Setting, theta: Leaves, step: int, phi: Any) -> list[Tensor]:
    """λθ in the dtype of each leaf."""
    return [(value * w).to(w.dtype) for value, w in zip(by_leaf(setting, step, phi, len(theta)), theta, strict=True)]


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


def _require_number(name: str, value: Any) -> None:
    """Refuse values by leaf or element that do not come from a schedule."""
    if isinstance(value, dict | list | tuple) or (isinstance(value, Tensor) and value.numel() != 1):
        got = f"a tensor of shape {tuple(value.shape)}" if isinstance(value, Tensor) else type(value).__name__
        do = "pass a function of the step that returns them, such as lambda step: ..."
        raise UserError(name, got=got, why="without a schedule it is one number", do=do)


def _check_settings(optimizer: SGD | Adam) -> None:
    """Refuse settings that cannot work."""
    for name, setting in settings_of(optimizer).items():
        if not callable(setting):
            _require_number(name, setting)
    fixed = {
        "lr": (optimizer.lr, "a step goes downhill"),
        "weight_decay": (optimizer.weight_decay, "it shrinks weights"),
    }
    if isinstance(optimizer, SGD):
        fixed["momentum"] = (optimizer.momentum, "it is a share of the last step")
    else:
        fixed["eps"] = (optimizer.eps, "it is added to a root")
    for name, (value, why) in fixed.items():
        fits = callable(value) or 0 <= float(value) < math.inf
        require(fits, name, value, why, f"pass a number >= 0{'' if name == 'eps' else ', or a schedule'}")
    # not `clip <= 0`: NaN must be refused as well
    if optimizer.clip is not None and not optimizer.clip > 0:
        raise UserError("clip", got=optimizer.clip, why="it bounds a norm", do="pass a limit > 0, or None")


@dataclass(frozen=True, kw_only=True)
class SGD:
    """Gradient descent with momentum, as ``torch.optim.SGD``.

    A rate, momentum or decay may be a schedule (step) or (step, phi) and so part of φ: it gives a number, a tensor, or
    one of these for each leaf of θ in the nesting of θ.

    Source: tangents in Shen et al. 2024, eq. 8; the moment is part of the inner state.
    """

    lr: Setting = 0.01
    """Learning rate η."""
    momentum: Setting = 0.0
    """μ of m' = μm + (1 − τ)g."""
    nesterov: bool = False
    """Whether the step is g + μm' in place of m'."""
    dampening: float = 0.0
    """τ; as in torch the first moment is g undamped."""
    weight_decay: Setting = 0.0
    """λ added to the gradient as λθ."""
    clip: float | None = None
    """Largest global norm of the gradient; None for none."""

    def __post_init__(self) -> None:
        _check_settings(self)
        idle = not callable(self.momentum) and self.momentum <= 0
        if self.nesterov and (idle or self.dampening):
            raise UserError("nesterov", got="no momentum", why="it looks ahead along it", do="pass momentum > 0")

    @property
    def linear(self) -> bool:
        """Whether the update is linear in (θ, g, m) at a given rate, so that tangents take the very same step."""
        return self.clip is None and not steers(self.momentum) and not steers(self.weight_decay)

    @property
    def steered(self) -> bool:
        """Whether the rate depends on φ; tangents then also move by −η̇ along the step."""
        return steers(self.lr)

    def start(self, theta: Leaves, phi: Any) -> Slots:
        """Moments before the first step.

        Args:
            theta: θ₀.
            phi: Not used.

        Returns:
            Zeros, or nothing without momentum.
        """
        return ([torch.zeros_like(weight) for weight in theta],) if self.momentum else ()

    def coupled(self, theta: Leaves, step: int, phi: Any) -> list[Tensor]:
        """λθ, the part of the gradient that is a quadratic term of the inner loss.

        Args:
            theta: Weights.
            step: From 0.
            phi: What λ may depend on.

        Returns:
            Leaves as of θ.
        """
        return _coupled(self.weight_decay, theta, step, phi)

    def update(self, theta: Leaves, grads: Leaves, slots: Slots, step: int, phi: Any) -> tuple[list[Tensor], Slots]:
        """One step.

        Args:
            theta: Weights.
            grads: ∇_θ g, same shapes.
            slots: Moments of the step before.
            step: From 0.
            phi: What a setting may depend on.

        Returns:
            The next weights and moments.
        """
        rates = by_leaf(self.lr, step, phi, len(theta))
        moves, slots = self.moves(theta, grads, slots, step, phi)
        return [_plus(weight, -lr, move) for weight, lr, move in zip(theta, rates, moves, strict=True)], slots

    def moves(self, theta: Leaves, grads: Leaves, slots: Slots, step: int, phi: Any) -> tuple[list[Tensor], Slots]:
        """The step before it is scaled by the rate.

        Args:
            theta: Weights.
            grads: ∇_θ g, same shapes.
            slots: Moments of the step before.
            step: From 0.
            phi: What a setting may depend on.

        Returns:
            What is subtracted, over η; the next moments.
        """
        moves = _clip(grads, self.clip)
        if self.weight_decay:
            decays = by_leaf(self.weight_decay, step, phi, len(theta))
            moves = [_plus(g, value, weight) for g, value, weight in zip(moves, decays, theta, strict=True)]
        if not self.momentum:
            return moves, ()
        momenta = by_leaf(self.momentum, step, phi, len(theta))
        # as in torch, the first moment is the gradient itself, undamped
        if step == 0:
            kept = moves
        else:
            fresh = moves if not self.dampening else [(1 - self.dampening) * move for move in moves]
            kept = [_plus(move, mu, moment) for move, mu, moment in zip(fresh, momenta, slots[0], strict=True)]
        if not self.nesterov:
            return kept, (list(kept),)
        ahead = [_plus(move, mu, moment) for move, mu, moment in zip(moves, momenta, kept, strict=True)]
        return ahead, (list(kept),)


@dataclass(frozen=True, kw_only=True)
class Adam:
    """Adam with L2 decay in the gradient, as ``torch.optim.Adam``.

    A rate, β or decay may be a schedule and part of φ, as those of ``SGD``; like torch, the correction of the moments
    takes the β of its step.

    Where the second moment is zero (a dead unit) the derivative of its root is taken as zero, which leaves the
    trajectory as it is and keeps every derivative finite.

    Source: Kingma & Ba 2015; tangents by differentiating the update.
    """

    lr: Setting = 1e-3
    """Learning rate η."""
    betas: tuple[Setting, Setting] = (0.9, 0.999)
    """Decay of the first and second moment β₁, β₂."""
    eps: float = 1e-8
    """ε added to the root."""
    weight_decay: Setting = 0.0
    """λ added to the gradient as λθ."""
    clip: float | None = None
    """Largest global norm of the gradient; None for none."""

    def __post_init__(self) -> None:
        require(len(self.betas) == 2, "betas", self.betas, "there is one for each moment", "pass two numbers in [0, 1)")
        _check_settings(self)
        if not all(callable(beta) or 0 <= beta < 1 for beta in self.betas):
            raise UserError("betas", got=self.betas, why="they are decays", do="pass two numbers in [0, 1)")

    def start(self, theta: Leaves, phi: Any) -> Slots:
        """Moments before the first step.

        Args:
            theta: θ₀.
            phi: Not used.

        Returns:
            Zeros for both.
        """
        return tuple([torch.zeros_like(weight) for weight in theta] for _ in range(2))

    def coupled(self, theta: Leaves, step: int, phi: Any) -> list[Tensor]:
        """λθ, the part of the gradient that is a quadratic term of the inner loss.

        Args:
            theta: Weights.
            step: From 0.
            phi: What λ may depend on.

        Returns:
            Leaves as of θ.
        """
        return _coupled(self.weight_decay, theta, step, phi)

    def _decay(
        self, theta: Leaves, grads: Leaves, rates: list[Any], decays: list[Any]
    ) -> tuple[list[Tensor], list[Tensor]]:
        """Weights and gradients after decay: here λθ joins the gradient."""
        added = zip(grads, decays, theta, strict=True)
        return list(theta), [(g + value * weight).to(g.dtype) for g, value, weight in added]

    def update(self, theta: Leaves, grads: Leaves, slots: Slots, step: int, phi: Any) -> tuple[list[Tensor], Slots]:
        """One step.

        Args:
            theta: Weights.
            grads: ∇_θ g, same shapes.
            slots: First and second moments of the step before.
            step: From 0.
            phi: What a setting may depend on.

        Returns:
            The next weights and moments.
        """
        count, grads = len(theta), _clip(grads, self.clip)
        rates, ones, twos = (by_leaf(setting, step, phi, count) for setting in (self.lr, *self.betas))
        if self.weight_decay:
            theta, grads = self._decay(theta, grads, rates, by_leaf(self.weight_decay, step, phi, count))
        first, second, moved = [], [], []
        parts = zip(theta, grads, *slots, rates, ones, twos, strict=True)
        for weight, grad, mean, square, lr, one, two in parts:
            # fused kernels for numbers, as torch.optim has them
            near = one * mean + (1 - one) * grad if isinstance(one, Tensor) else torch.lerp(mean, grad, 1 - one)
            first.append(near.to(mean.dtype))
            fresh = (1 - two) * grad * grad if isinstance(two, Tensor) else None
            kept = torch.addcmul(two * square, grad, grad, value=1 - two) if fresh is None else two * square + fresh
            second.append(kept.to(square.dtype))
            size, scale = lr / (1 - one ** (step + 1)), 1 - two ** (step + 1)
            scale = scale.sqrt() if isinstance(scale, Tensor) else math.sqrt(scale)
            after = weight - size * (first[-1] / (_safe_sqrt(second[-1]) / scale + self.eps))
            moved.append(after.to(weight.dtype))
        return moved, (first, second)


@dataclass(frozen=True, kw_only=True)
class AdamW(Adam):
    """Adam with decay apart from the gradient, θ ← (1 − ηλ)θ, as ``torch.optim.AdamW``.

    Source: Loshchilov & Hutter 2019.
    """

    weight_decay: Setting = 0.01
    """λ of θ ← (1 − ηλ)θ."""

    def coupled(self, theta: Leaves, step: int, phi: Any) -> list[Tensor]:
        """Zero: this decay is no term of the inner loss.

        Args:
            theta: Weights.
            step: From 0.
            phi: Not used.

        Returns:
            Leaves as of θ.
        """
        return [torch.zeros_like(weight) for weight in theta]

    def _decay(
        self, theta: Leaves, grads: Leaves, rates: list[Any], decays: list[Any]
    ) -> tuple[list[Tensor], list[Tensor]]:
        """Weights and gradients after decay: here the weights shrink."""
        shrunk = zip(theta, rates, decays, strict=True)
        return [(weight * (1 - lr * value)).to(weight.dtype) for weight, lr, value in shrunk], list(grads)
