"""Tangents pushed through the inner run beside it: y_t = A_t·y_{t−1} + B_t·v for many directions v at once."""

from __future__ import annotations

import importlib
import warnings
from collections.abc import Callable, Sequence
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor
from torch.func import jvp, vmap
from torch.utils._pytree import tree_map

from sparing.hypergrad.optimizers import SGD, lr_at
from sparing.hypergrad.refusals import forward_mode_refusal
from sparing.hypergrad.reverse import flatten_state, unflatten_state
from sparing.hypergrad.trees import Tree, leaves
from sparing.hypergrad.unroll import State, Unroll, reproducible
from sparing.seeds import stream


def batched_jvp(function: Callable[..., Any], primals: tuple[Any, ...], tangents: tuple[Any, ...]) -> tuple[Any, Any]:
    """A function and its derivatives along a batch of directions; the function itself runs once."""

    def along(*directions: Any) -> tuple[Any, Any]:
        value, tangent = jvp(function, primals, directions)[:2]
        return value, tangent

    _load_rules()
    try:
        with torch.no_grad():
            pair: tuple[Any, Any] = vmap(along, out_dims=(None, 0), randomness="same")(*tangents)  # type: ignore[arg-type]
            return pair
    except (RuntimeError, NotImplementedError) as failure:
        refusal = forward_mode_refusal(failure)
        if refusal is None:
            raise
        raise refusal from failure


@cache
def _load_rules() -> None:
    """Load torch's rules for forward mode without its own warning that what they are written in is deprecated."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        importlib.import_module("torch._decomp.decompositions_for_jvp")


def start(unroll: Unroll, psi: Tree, rows: Tree) -> tuple[State, State]:
    """Ω₀ and y₀ = B₀v."""
    with reproducible(unroll.seed, "init"):
        if callable(unroll.problem.init):
            made = partial(unroll.start, generator=stream(unroll.seed, "init"))  # setting a state is no pure operation
            state, tangents = _as_states(batched_jvp(made, (psi,), (rows,)))
            return state, unflatten_state(tangents, [part.contiguous() for part in flatten_state(tangents)])
        state = unroll.start(psi)
    count = len(_first(rows))
    zeros = [[torch.zeros(count, *w.shape, dtype=w.dtype, device=w.device) for w in part] for part in _parts(state)]
    return state, State(zeros[0], tuple(zeros[1:]))


def pushforward(unroll: Unroll, step: int, state: State, tangents: State, psi: Tree, rows: Tree, width: int) -> Any:
    """One inner step for the state and all its tangents, taken at the old θ (eq. 8)."""
    count = len(_first(rows))
    for low in range(0, count, width):
        piece = _slice((tangents, rows), low, low + width) if width < count else (tangents, rows)
        with unroll.at(step) as batch:
            following, moved, loss = _step_with_tangents(unroll, step, batch, (state, psi), piece)
        unroll.check_same("loss", step, loss)
        if width >= count:
            return _as_states((following, moved))
        for place, part in zip(flatten_state(piece[0]), flatten_state(State(*moved)), strict=True):
            place.copy_(part)  # a piece depends on itself alone, so b tangents never exist twice
        del moved
    return State(*following), tangents


def _step_with_tangents(
    unroll: Unroll, step: int, batch: Any, primals: tuple[State, Tree], piece: Any
) -> tuple[Any, Any, Tensor]:
    """A step for state and tangents, and its loss; only the gradient is lifted where the update itself is linear."""
    (state, psi), (tangents, rows) = primals, piece
    optimizer = unroll.problem.optimizer
    if not isinstance(optimizer, SGD) or not optimizer.linear:
        (following, loss), (moved, _) = batched_jvp(partial(_step, unroll, step, batch), primals, piece)
        return following, moved, loss
    (grads, loss), (grad_tangents, _) = batched_jvp(
        partial(unroll.inner_gradient, batch), (state.theta, psi), (tangents.theta, rows)
    )
    with torch.no_grad():
        following = optimizer.update(state.theta, grads, state.slots, step, psi)
        moved, slots = optimizer.update(tangents.theta, grad_tangents, tangents.slots, step, psi)
        if not optimizer.steered:
            return following, (moved, slots), loss
        steps, _ = optimizer.moves(state.theta, grads, state.slots, step)
        _, faster = batched_jvp(lambda at: torch.as_tensor(lr_at(optimizer.lr, step, at)), (psi,), (rows,))
        turned = [part - _broadcast_rates(faster, move) * move for part, move in zip(moved, steps, strict=True)]
        return following, (turned, slots), loss


def _broadcast_rates(rates: Tensor, move: Tensor) -> Tensor:
    """Rates of b directions, shaped so that each multiplies a whole leaf."""
    missing = move.dim() - (rates.dim() - 1)
    return rates.reshape(len(rates), *[1] * missing, *rates.shape[1:])


def _step(unroll: Unroll, step: int, batch: Any, state: State, psi: Tree) -> tuple[State, Tensor]:
    return unroll.step(step, state, psi, batch)


def row_norms(rows: Sequence[Tensor]) -> Tensor:
    """‖y‖ of each direction, over all leaves."""
    parts = [torch.linalg.vector_norm(row.unsqueeze(-1), dim=tuple(range(1, row.dim() + 1))) for row in rows]
    whole: Tensor = torch.linalg.vector_norm(torch.stack(parts), dim=0)
    return whole


def growth(sizes: Sequence[Tensor], first: Tensor) -> tuple[float, ...]:
    """‖y_t‖/‖v‖ after each step, root mean square over the directions that stayed finite all along."""
    if not sizes or not len(first):
        return ()
    table, first = torch.stack(list(sizes)).double(), first.double()
    finite = torch.isfinite(table).all(0)
    kept = finite if finite.any() else torch.ones_like(finite)
    ratios = torch.linalg.vector_norm(table[:, kept], dim=1) / torch.linalg.vector_norm(first[kept])
    return tuple(ratios.tolist())


def _as_states(pair: tuple[Any, Any]) -> tuple[State, State]:
    return State(*pair[0]), State(*pair[1])


def _parts(state: State) -> list[list[Tensor]]:
    return [state.theta, *state.slots]


def _first(rows: Tree) -> Tensor:
    return leaves(rows)[0]


def _slice(tree: Tree, low: int, high: int) -> Any:
    return tree_map(lambda leaf: leaf[low:high], tree)
