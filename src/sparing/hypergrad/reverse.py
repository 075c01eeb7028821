"""Reverse-mode unrolling: the whole graph, or only the last steps of it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from sparing.errors import UserError
from sparing.hypergrad.estimate import Estimate
from sparing.hypergrad.trees import Tree, add, leaves, rebuild
from sparing.hypergrad.unroll import State, Unroll, reproducible, vjp


def flatten_state(state: State) -> list[Tensor]:
    """All tensors of a state: weights, then moments."""
    return [*state.theta, *(tensor for slot in state.slots for tensor in slot)]


def unflatten_state(state: State, tensors: Sequence[Tensor]) -> State:
    """The inverse of ``flat``: tensors in the shape of ``state``."""
    count = len(state.theta)
    slots = tuple(list(tensors[count * (k + 1) : count * (k + 2)]) for k in range(len(state.slots)))
    return State(list(tensors[:count]), slots)


def pullback(
    unroll: Unroll, state: State, psi: Tree, first: int, last: int, cotangent: State | None, end: Tree = None
) -> tuple[State, list[Tensor], Estimate | None]:
    """Run steps with their graph and pull a cotangent back through them (eq. 5 and 6)."""
    start = [tensor.detach().requires_grad_() for tensor in flatten_state(state)]
    given = [leaf.detach().requires_grad_() for leaf in leaves(psi)]
    watched, now = rebuild(psi, given), unflatten_state(state, start)
    for step in range(first, last):
        with unroll.at(step) as batch:
            now = unroll.graph_step(step, now, watched, batch)
    ends = flatten_state(unroll.check_end(last, now))
    finish = None
    if cotangent is None:
        value, grads, direct = unroll.outer_gradients(now, end)
        cotangent = State(grads, tuple([torch.zeros_like(w) for w in slot] for slot in now.slots))
        ended = unflatten_state(now, [tensor.detach() for tensor in ends])
        finish = Estimate(through=[], direct=direct, value=value, state=ended)
    if first == 0 and not callable(unroll.problem.init):  # nobody asks for the cotangent of a constant
        through = vjp(ends, given, flatten_state(cotangent))
        return unflatten_state(state, [torch.zeros_like(part) for part in start]), through, finish
    found = vjp(ends, [*start, *given], flatten_state(cotangent))
    return unflatten_state(state, found[: len(start)]), found[len(start) :], finish


def pullback_init(unroll: Unroll, psi: Tree, cotangent: State) -> list[Tensor]:
    """d₀·∂Ω₀/∂ψ: what the initial weights owe to φ."""
    given = [leaf.detach().requires_grad_() for leaf in leaves(psi)]
    if not callable(unroll.problem.init):
        return [torch.zeros_like(leaf) for leaf in given]
    with torch.enable_grad(), reproducible(unroll.seed, "init"):
        theta = leaves(unroll.problem.start(rebuild(psi, given), unroll.seed))
    return vjp(theta, given, cotangent.theta, name="init")


@dataclass(frozen=True)
class Reverse:
    """Exact, by one backward pass through all T steps; memory grows with T (RGU).

    Source: Shen et al. 2024, eq. 5 and 6. Unlike the released code of that paper it unrolls the moments and the first
    step too.
    """

    def __str__(self) -> str:
        return "reverse"

    def estimate(self, unroll: Unroll, psi: Tree, phi: Tree) -> Estimate:
        """The exact hypergradient."""
        start = _begin(unroll, psi)
        cotangent, through, finish = pullback(unroll, start, psi, 0, unroll.steps, None, phi)
        assert finish is not None
        through = add(through, pullback_init(unroll, psi, cotangent))
        return Estimate(through=through, direct=finish.direct, value=finish.value, state=finish.state)


@dataclass(frozen=True, kw_only=True)
class Truncated:
    """Reverse over the last s steps only; biased, cheap (TRGU).

    The bias is at most (1 − ηα)^s/(ηα)·‖d_T‖·max‖B‖ where g is α-strongly convex, and anything where it is not.

    Source: Shen et al. 2024, eq. 21 (its product is printed in the transposed order) and 22.
    """

    steps: int
    """Steps s that the backward pass reaches back (count); at T or beyond it is exact."""

    def __post_init__(self) -> None:
        if self.steps < 1:
            raise UserError("Truncated.steps", got=self.steps, why="it reaches back s steps", do="pass steps >= 1")

    def __str__(self) -> str:
        return f"truncated {self.steps}"

    def estimate(self, unroll: Unroll, psi: Tree, phi: Tree) -> Estimate:
        """The hypergradient of the last steps, moments at the cut held constant."""
        if self.steps >= unroll.steps:
            return Reverse().estimate(unroll, psi, phi)
        cut = unroll.steps - self.steps
        _, through, finish = pullback(unroll, unroll.run(psi, last=cut), psi, cut, unroll.steps, None, phi)
        assert finish is not None
        return Estimate(through=through, direct=finish.direct, value=finish.value, state=finish.state)


def _begin(unroll: Unroll, psi: Tree) -> State:
    with torch.no_grad():
        return unroll.start(psi)
