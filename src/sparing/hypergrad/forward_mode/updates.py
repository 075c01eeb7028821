"""Tangents of an optimizer's update: by its own code where that is linear, by formula for Adam, else by autograd."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from sparing.hypergrad.inner.unroll import State
from sparing.hypergrad.optimizers import SGD, Adam, AdamW, by_leaf, steers
from sparing.hypergrad.trees import Tree

# (function, primals, rows) -> its value and derivatives along the rows
Jvp = Callable[[Callable[..., Any], tuple[Any, ...], tuple[Any, ...]], tuple[Any, Any]]


def update_with_tangents(
    optimizer: Any,
    step: int,
    primals: tuple[State, list[Tensor], Tree],
    rows: tuple[State, list[Tensor], Tree],
    jvp: Jvp,
) -> tuple[State, State]:
    """The next state and its tangents, leaves (b, *leaf), both without the path; primals and rows: (Ω, ∇_θ g, ψ)."""
    state, grads, psi = primals
    tangents, grad_tangents, psi_rows = rows
    # a subclass is the user's own, and need not be linear
    if type(optimizer) is SGD and optimizer.linear:
        # a linear update takes its tangents by the same code as its state
        following = State(*optimizer.update(state.theta, grads, state.slots, step, psi))
        moved = State(*optimizer.update(tangents.theta, grad_tangents, tangents.slots, step, psi))
        if optimizer.steered:
            _turn(optimizer, step, primals, psi_rows, moved, jvp)
        return following, moved
    if type(optimizer) in {Adam, AdamW} and optimizer.clip is None and not _steered(optimizer):
        following = State(*optimizer.update(state.theta, grads, state.slots, step, psi))
        return following, _adam(optimizer, step, primals, (tangents, grad_tangents), following)
    return by_jvp(optimizer, step, primals, rows, jvp)


def by_jvp(
    optimizer: Any,
    step: int,
    primals: tuple[State, list[Tensor], Tree],
    rows: tuple[State, list[Tensor], Tree],
    jvp: Jvp,
) -> tuple[State, State]:
    """As above, for any update."""
    state, grads, psi = primals
    tangents, grad_tangents, psi_rows = rows
    update = lambda theta, grads, slots, psi: optimizer.update(theta, grads, slots, step, psi)  # noqa: E731
    following, moved = jvp(
        update, (state.theta, grads, state.slots, psi), (tangents.theta, grad_tangents, tangents.slots, psi_rows)
    )
    return State(*following), State(*moved)


def _turn(
    optimizer: SGD, step: int, primals: tuple[State, list[Tensor], Tree], rows: Tree, moved: State, jvp: Jvp
) -> None:
    """Product rule: a rate that depends on φ moves tangents by −η̇ along the step as well."""
    state, grads, psi = primals
    steps, _ = optimizer.moves(state.theta, grads, state.slots, step, psi)
    rates_of = lambda at: [  # noqa: E731
        torch.as_tensor(rate) for rate in by_leaf(optimizer.lr, step, at, len(state.theta))
    ]
    _, rates = jvp(rates_of, (psi,), (rows,))
    for place, (move, rate) in enumerate(zip(steps, rates, strict=True)):
        # each of the b rates multiplies a whole leaf
        wide = rate.reshape(len(rate), *[1] * (move.dim() + 1 - rate.dim()), *rate.shape[1:])
        moved.theta[place] = (moved.theta[place] - wide * move).to(move.dtype)


def _steered(optimizer: Adam) -> bool:
    return any(steers(setting) for setting in (optimizer.lr, *optimizer.betas, optimizer.weight_decay))


def _adam(
    optimizer: Adam,
    step: int,
    primals: tuple[State, list[Tensor], Tree],
    rows: tuple[State, list[Tensor]],
    after: State,
) -> State:
    """Tangents of ``Adam.update`` at settings that do not depend on φ; ``after``: the state that it returned."""
    state, grads, psi = primals
    tangents, count = rows[0], len(primals[1])
    rates, ones, twos = (by_leaf(setting, step, psi, count) for setting in (optimizer.lr, *optimizer.betas))
    weight_rows, grad_rows = tangents.theta, rows[1]
    if optimizer.weight_decay:
        decays = by_leaf(optimizer.weight_decay, step, psi, count)
        if isinstance(optimizer, AdamW):
            shrunk = zip(weight_rows, rates, decays, strict=True)
            weight_rows = [(row * (1 - lr * value)).to(row.dtype) for row, lr, value in shrunk]
        else:
            grads = [(g + value * w).to(g.dtype) for g, value, w in zip(grads, decays, state.theta, strict=True)]
            pulled = zip(grad_rows, decays, weight_rows, strict=True)
            grad_rows = [(row + value * w).to(row.dtype) for row, value, w in pulled]
    first, second, moved = [], [], []
    for place, (weight, grad) in enumerate(zip(weight_rows, grad_rows, strict=True)):
        lr, one, two = rates[place], ones[place], twos[place]
        mean, square = after.slots[0][place], after.slots[1][place]
        first.append((one * tangents.slots[0][place] + (1 - one) * grad).to(grad.dtype))
        second.append((two * tangents.slots[1][place] + 2 * (1 - two) * grads[place] * grad).to(grad.dtype))
        size, scale = lr / (1 - one ** (step + 1)), 1 - two ** (step + 1)
        scale = scale.sqrt() if isinstance(scale, Tensor) else math.sqrt(scale)
        root = square.sqrt()
        over = root / scale + optimizer.eps
        # ∂(m/(√v/s + ε))/∂v; zero where v = 0, as the update's own derivative
        bend = torch.where(root == 0, torch.zeros_like(root), mean / (over * over * (2 * scale * root)))
        moved.append((weight - size * (first[-1] / over - bend * second[-1])).to(weight.dtype))
    return State(moved, (first, second))
