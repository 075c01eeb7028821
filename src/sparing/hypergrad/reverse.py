"""Reverse-mode unrolling: the whole graph, or only the last steps of it."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from sparing.hypergrad.estimate import Estimate
from sparing.hypergrad.inner.offload import Offload, Store, check_offload, opened, place_of
from sparing.hypergrad.inner.packing import Packing, packing_of
from sparing.hypergrad.inner.saved import GraphStore
from sparing.hypergrad.inner.unroll import State, Unroll, vjp
from sparing.hypergrad.settings import require_count
from sparing.hypergrad.trees import Tree, add, differentiable, leaves, rebuild, sum_dtype, zeros_like


def pullback(
    unroll: Unroll,
    state: State,
    psi: Tree,
    first: int,
    last: int,
    cotangent: State | None,
    end: Tree = None,
    store: Store | None = None,
) -> tuple[State, list[Tensor], Estimate | None]:
    """Run steps ``first`` … ``last`` − 1 with their graph and pull a cotangent back through them (eq. 5 and 6).

    Without a cotangent, that of the outer loss at step ``last`` and φ = ``end`` is taken. Returns d at ``first``, what
    the steps add to c (in float32 where a leaf of ψ has 16 bits), and, with the outer loss, its value, its direct part
    and the last state. What the graph saves lies in the store, if there is one.
    """
    start = differentiable(state)
    inputs = [_sum_at(leaf).requires_grad_() for leaf in leaves(psi)]
    current = rebuild(state, start)
    packing = packing_of(unroll.problem.optimizer, state.theta)
    current = pack(packing, current)
    saved = None if store is None else GraphStore(store)
    for step in range(first, last):
        # its batch must be gone before what nothing else holds is moved
        with saved.step() if saved else contextlib.nullcontext():
            current = _graph_step(unroll, step, current, _share(psi, inputs), packing)
    current = split(packing, current)
    ends = leaves(unroll.check_end(last, current))
    finish = None
    if cotangent is None:
        value, cotangent, direct = unroll.outer_gradients(current, end)
        end_state = rebuild(current, [tensor.detach() for tensor in ends])
        finish = Estimate(through=[], direct=direct, value=value, state=end_state)
    # where θ₀ is a constant, its cotangent would be thrown away
    if first == 0 and unroll.constant_start:
        through = vjp(ends, inputs, leaves(cotangent))
        return zeros_like(state), through, finish
    cotangents = vjp(ends, [*start, *inputs], leaves(cotangent))
    return rebuild(state, cotangents[: len(start)]), cotangents[len(start) :], finish


def _sum_at(leaf: Tensor) -> Tensor:
    """Where the parts of the steps add up: a leaf of ψ itself, or a stand-in in float32 for one of 16 bits."""
    wide = sum_dtype(leaf)
    # only the gradient of a stand-in is read, so it has no memory of its own
    return leaf.detach() if wide == leaf.dtype else leaf.new_zeros((), dtype=wide).expand(leaf.shape)


def _share(psi: Tree, inputs: list[Tensor]) -> Tree:
    """ψ for one step, in the graph that leads to ``inputs``."""

    def shared(leaf: Tensor, total: Tensor) -> Tensor:
        if leaf.dtype == total.dtype:
            return total
        found: Tensor = _Share.apply(total, leaf)  # type: ignore[no-untyped-call]
        return found

    with torch.enable_grad():
        return rebuild(psi, [shared(leaf, total) for leaf, total in zip(leaves(psi), inputs, strict=True)])


class _Share(torch.autograd.Function):
    """A leaf of 16 bits whose cotangents add up in 16 bits within a step, and over the steps in its stand-in."""

    @staticmethod
    def forward(ctx: Any, total: Tensor, leaf: Tensor) -> Tensor:
        return leaf.detach()

    @staticmethod
    def backward(ctx: Any, cotangent: Tensor) -> tuple[Tensor, None]:
        return cotangent.float(), None


def _graph_step(unroll: Unroll, step: int, state: State, psi: Tree, packing: Packing | None) -> State:
    with unroll.at(step) as batch:
        return unroll.graph_step(step, state, psi, batch, packing)


def pack(packing: Packing | None, state: State) -> State:
    """A state with small weights and their moments side by side."""
    if packing is None:
        return state
    with torch.enable_grad():
        return state._replace(theta=packing.pack(state.theta), slots=tuple(packing.pack(part) for part in state.slots))


def split(packing: Packing | None, state: State) -> State:
    """The inverse of ``pack``."""
    if packing is None:
        return state
    with torch.enable_grad():
        slots = tuple(packing.split(part) for part in state.slots)
        return state._replace(theta=packing.split(state.theta), slots=slots)


def pullback_init(unroll: Unroll, psi: Tree, cotangent: State) -> list[Tensor]:
    """d₀·∂Ω₀/∂ψ, leaves as of ψ: the part of the gradient that goes through the initial weights."""
    inputs = differentiable(psi)
    if unroll.constant_start:
        return list(zeros_like(inputs))
    with torch.enable_grad():
        start = unroll.start(rebuild(psi, inputs))
    return vjp(leaves(start), inputs, leaves(cotangent), name="init")


@dataclass(frozen=True, kw_only=True)
class Reverse:
    """Exact, by one backward pass through all T steps; memory, or what is offloaded, grows with T (RGU).

    Source: Shen et al. 2024, eq. 5 and 6. Unlike the released code of that paper it unrolls the moments and the first
    step too.
    """

    offload: Offload = None
    """Where the graph is kept, except for that of one step: "cpu" for main memory, if the run is on a device, or a
    folder for an unnamed file, which disappears with the process however it ends; None for the memory of the run. The
    gradient has the same bits."""

    def __post_init__(self) -> None:
        check_offload(self.offload)

    def __str__(self) -> str:
        return f"reverse{place_of(self.offload)}"

    def estimate(self, unroll: Unroll, psi: Tree, phi: Tree) -> Estimate:
        """The exact hypergradient."""
        with torch.no_grad():
            start = unroll.start(psi)
        with opened(self.offload, leaves(start)[0].device) as store:
            cotangent, through, finish = pullback(unroll, start, psi, 0, unroll.steps, None, phi, store)
        assert finish is not None
        through = add(through, pullback_init(unroll, psi, cotangent))
        details = finish.details if store is None else {**finish.details, "offloaded": store.peak}
        return replace(finish, through=through, details=details)


@dataclass(frozen=True, kw_only=True)
class Truncated:
    """Reverse over the last s steps only; biased, cheap (TRGU).

    The bias is at most (1 − ηα)^s/(ηα)·‖d_T‖·max‖B‖ where g is α-strongly convex, and anything where it is not.

    Source: Shen et al. 2024, eq. 21 (its product is printed in the transposed order) and 22.
    """

    steps: int
    """Steps s that the backward pass reaches back (count); at T or beyond it is exact."""

    def __post_init__(self) -> None:
        require_count("Truncated.steps", self.steps, "it reaches back s steps", do="pass steps >= 1, a whole number")

    def __str__(self) -> str:
        return f"truncated {self.steps}"

    def estimate(self, unroll: Unroll, psi: Tree, phi: Tree) -> Estimate:
        """The hypergradient of the last steps, moments at the cut held constant."""
        if self.steps >= unroll.steps:
            return Reverse().estimate(unroll, psi, phi)
        cut = unroll.steps - self.steps
        _, through, finish = pullback(unroll, unroll.run(psi, last=cut), psi, cut, unroll.steps, None, phi)
        assert finish is not None
        return replace(finish, through=through)
