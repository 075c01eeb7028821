"""Tangents of the inner run: y_t = A_t·y_{t−1} + B_t·v for b directions v at once, on a leading axis."""

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

from sparing.hypergrad.forward_mode.double_backward import along, gradient_along
from sparing.hypergrad.forward_mode.updates import update_with_tangents
from sparing.hypergrad.inner.refusals import forward_mode_refusal
from sparing.hypergrad.inner.unroll import State, Unroll, reproducible, vjp
from sparing.hypergrad.trees import Tree, differentiable, leaves, rebuild, row_products
from sparing.seeds import stream


def batched_jvp(
    function: Callable[..., Any], primals: tuple[Any, ...], tangents: tuple[Any, ...], name: str = "inner"
) -> tuple[Any, Any]:
    """A function's value, and its derivatives along b directions; it runs once. ``name``: the argument it is."""

    def along(*directions: Any) -> tuple[Any, Any]:
        value, tangent = jvp(function, primals, directions)[:2]
        return value, tangent

    _load_rules()
    try:
        with torch.no_grad():
            pair: tuple[Any, Any] = vmap(along, out_dims=(None, 0), randomness="same")(*tangents)  # type: ignore[arg-type]
            return pair
    except (RuntimeError, NotImplementedError) as failure:
        refusal = forward_mode_refusal(failure, name)
        if refusal is None:
            raise
        raise refusal from failure


def jvp_of(function: Callable[..., Any], primals: tuple[Any, ...], tangents: tuple[Any, ...]) -> tuple[Any, Any]:
    """As ``batched_jvp``, by two backward passes where these give it: less than half the time on small tensors."""
    return along(function, primals, tangents) or batched_jvp(function, primals, tangents)


@cache
def _load_rules() -> None:
    """Import torch's forward-mode rules early, without the warning that TorchScript, which they use, is deprecated."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        importlib.import_module("torch._decomp.decompositions_for_jvp")


def start(unroll: Unroll, psi: Tree, rows: Tree) -> tuple[State, State]:
    """Ω₀, and y₀ = B₀v (zero where θ₀ is a constant); ``rows``: directions, leaves (b, *leaf)."""
    with reproducible(unroll.seed, "init"):
        if not unroll.constant_start:
            # the generator is made outside: torch.func does not let a transformed function set a generator's state
            init = partial(unroll.start, generator=stream(unroll.seed, "init"))
            state, tangents = batched_jvp(init, (psi,), (rows,))
            return state, rebuild(tangents, _apart(leaves(tangents), leaves(rows)))
        state = unroll.start(psi)
    count = len(leaves(rows)[0])
    return state, rebuild(state, [w.new_zeros(count, *w.shape) for w in leaves(state)])


def _apart(tangents: Sequence[Tensor], rows: Sequence[Tensor]) -> list[Tensor]:
    """Tangents in memory of their own, since they are overwritten: of θ₀ = φ they are the directions themselves."""
    held, found = {row.untyped_storage()._cdata for row in rows}, []
    for tangent in tangents:
        part = tangent.contiguous()
        part = part.clone() if part.untyped_storage()._cdata in held else part
        held.add(part.untyped_storage()._cdata)
        found.append(part)
    return found


def pushforward(unroll: Unroll, step: int, state: State, tangents: State, psi: Tree, rows: Tree, width: int) -> Any:
    """One inner step for the state and its tangents, at the old θ (eq. 8); ``width`` directions pass at a time."""
    count = len(leaves(rows)[0])
    for low in range(0, count, width):
        piece = (tangents, rows)
        if width < count:
            piece = tree_map(lambda leaf, low=low: leaf[low : low + width], piece)
        with unroll.at(step) as batch:
            following, moved, loss = _step_with_tangents(unroll, step, batch, (state, psi), piece)
            following, moved = _along(unroll, step, (state, psi), following, piece, moved)
        unroll.check_same("loss", step, loss)
        if width >= count:
            return following, moved
        # an update may hand on an old leaf as a moment
        held = {old.untyped_storage()._cdata for old in leaves(piece[0])}
        fresh = [new.clone() if new.untyped_storage()._cdata in held else new for new in leaves(moved)]
        # a piece depends on itself alone, so it is overwritten in place: the b tangents never exist twice
        for old, new in zip(leaves(piece[0]), fresh, strict=True):
            old.copy_(new)
        del moved, fresh
    return following, tangents


def _step_with_tangents(
    unroll: Unroll, step: int, batch: Any, primals: tuple[State, Tree], piece: Any
) -> tuple[State, State, Tensor]:
    """The next state, its tangents, both without the path, and the loss."""
    (state, psi), (tangents, rows) = primals, piece
    found = gradient_along(unroll, batch, state.theta, psi, tangents.theta, rows)
    if found is None:
        # masks are drawn anew, so from where they began
        with reproducible(unroll.seed, "step", step):
            (grads, loss), (grad_tangents, _) = batched_jvp(
                partial(unroll.inner_gradient, batch), (state.theta, psi), (tangents.theta, rows)
            )
    else:
        grads, loss, grad_tangents = found
    with torch.no_grad():
        optimizer = unroll.problem.optimizer
        following, moved = update_with_tangents(
            optimizer, step, (state, grads, psi), (tangents, grad_tangents, rows), jvp_of
        )
    return following, moved, loss


def _along(
    unroll: Unroll, step: int, primals: tuple[State, Tree], following: State, piece: Any, moved: State
) -> tuple[State, State]:
    """The next state and its tangents with the outer loss along the run, by one backward pass through that."""
    (state, psi), (tangents, rows) = primals, piece
    if not state.path:
        return following, moved
    with torch.enable_grad():
        theta, inputs = differentiable(following.theta), differentiable(psi)
        value = unroll.observed(step, following._replace(theta=theta), rebuild(psi, inputs))
    slopes = vjp(value, [*theta, *inputs], name="path")
    slope = row_products([*moved.theta, *leaves(rows)], slopes)
    total, totals = state.path[0] + value.detach(), tangents.path[0] + slope.to(tangents.path[0])
    return following._replace(path=(total,)), moved._replace(path=(totals,))


def row_norms(rows: Sequence[Tensor]) -> Tensor:
    """‖y‖ of each direction over all leaves, shape (b,)."""
    # the axis added last keeps a leaf of shape (b,) from an empty ``dim``, which would mean all axes
    parts = [torch.linalg.vector_norm(row.unsqueeze(-1), dim=tuple(range(1, row.dim() + 1))) for row in rows]
    whole: Tensor = torch.linalg.vector_norm(torch.stack(parts), dim=0)
    return whole


def growth(sizes: Sequence[Tensor], first: Tensor) -> tuple[float, ...]:
    """‖y_t‖/‖v‖ after each step, from ‖y_t‖ of each direction and step and ‖v‖ of each direction.

    Root mean square over the directions that stayed finite all along; over all where none did.
    """
    if not sizes or not len(first):
        return ()
    table, first = torch.stack(list(sizes)).double(), first.double()
    finite = torch.isfinite(table).all(0)
    kept = finite if finite.any() else torch.ones_like(finite)
    ratios = torch.linalg.vector_norm(table[:, kept], dim=1) / torch.linalg.vector_norm(first[kept])
    return tuple(ratios.tolist())
