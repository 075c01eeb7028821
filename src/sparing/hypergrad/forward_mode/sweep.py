"""Derivatives of the outer loss along given directions, chunk by chunk, for all forward methods."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from sparing.hypergrad.estimate import Estimate
from sparing.hypergrad.forward_mode.tangents import growth, pushforward, row_norms, start
from sparing.hypergrad.inner.unroll import State, Unroll
from sparing.hypergrad.reverse import pullback, pullback_init
from sparing.hypergrad.trees import Tree, leaves, ravel, row_products, unravel, zeros_like


@dataclass(frozen=True, kw_only=True)
class Sweep:
    """Result of one pass over the directions."""

    weights: Tensor  # w_i = d·y_i by position in ``numbers``, shape (len(numbers),)
    known: list[Tensor]  # exact part, from the reversed tail; leaves as of ψ
    finish: Estimate  # value, direct part and end of the run
    growth: tuple[float, ...]  # ‖y_t‖/‖v‖ after each step of the head, over all directions that stayed finite


def carry_tangents(
    unroll: Unroll, psi: Tree, rows: Tree, steps: int, width: int | None
) -> tuple[State, State, list[Tensor]]:
    """Run the first ``steps`` steps with tangents; also ‖y_t‖ of each direction after each step, shape (b,) each."""
    state, tangents = start(unroll, psi, rows)
    sizes = []
    for step in range(steps):
        state, tangents = pushforward(unroll, step, state, tangents, psi, rows, width or len(leaves(rows)[0]))
        sizes.append(row_norms(tangents.theta))
    return unroll.check_end(steps, state), tangents, sizes


def sweep(
    unroll: Unroll,
    psi: Tree,
    phi: Tree,
    make_rows: Callable[[Sequence[int]], Tensor],
    numbers: Sequence[int],
    *,
    chunk: int | None = None,
    width: int | None = None,
    tail: int = 0,
) -> Sweep:
    """Push directions to step T − s, reverse the last s steps and the outer loss once, take inner products.

    The primal run repeats for each chunk, so memory is that of one chunk; inside a chunk it runs once. ``make_rows``:
    numbers -> directions, shape (len, N); ``chunk``, ``width`` and ``tail`` are those of ``ForwardGradient``.
    """
    head = unroll.steps - tail
    step = chunk or max(len(numbers), 1)
    chunks = [numbers[low : low + step] for low in range(0, len(numbers), step)]
    back: tuple[list[Tensor], list[Tensor], Estimate] | None = None
    weights: list[Tensor] = []
    sizes: list[list[Tensor]] = []
    first: list[Tensor] = []
    for part in chunks:
        rows = unravel(make_rows(part), psi)
        state, tangents, norms = carry_tangents(unroll, psi, rows, head, width)
        back = back or reverse_tail(unroll, state, psi, phi, head, unroll.steps)
        weights.append(row_products(leaves(tangents), back[0]))
        sizes.append(norms)
        first.append(row_norms(leaves(rows)))
        del rows, state, tangents  # free them before the next chunk allocates its own
    # A rank without directions still runs, with one direction that is thrown away: its run is compared with that of the
    # other ranks, so it must use the same kernels.
    if back is None:
        state = carry_tangents(unroll, psi, unravel(make_rows(range(1)), psi), head, None)[0]
        back = reverse_tail(unroll, state, psi, phi, head, unroll.steps)
    like = ravel(psi)
    all_weights = torch.cat(weights).to(like) if weights else like.new_zeros(0)
    ratios = growth([torch.cat(chunks) for chunks in zip(*sizes, strict=True)], torch.cat(first)) if first else ()
    return Sweep(weights=all_weights, known=back[1], finish=back[2], growth=ratios)


def reverse_tail(
    unroll: Unroll, state: State, psi: Tree, phi: Tree, head: int, last: int
) -> tuple[list[Tensor], list[Tensor], Estimate]:
    """D at step ``head``, the exact part of the steps from there to ``last``, and the end of the run."""
    cotangent, known, finish = pullback(unroll, state, psi, head, last, None, phi)
    assert finish is not None
    # only θ₀ would be left to sample, and its part costs one backward pass: the whole is exact
    if head == 0:
        known = [a + b for a, b in zip(known, pullback_init(unroll, psi, cotangent), strict=True)]
        return leaves(zeros_like(cotangent)), known, finish
    return leaves(cotangent), known, finish
