"""Exact reverse unrolling that keeps few states and recomputes the others."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import Tensor

from sparing.errors import UserError
from sparing.hypergrad.estimate import Estimate
from sparing.hypergrad.replay import affordable_states, next_snapshot, sqrt_schedule
from sparing.hypergrad.reverse import pullback, pullback_init
from sparing.hypergrad.trees import Tree, add, bytes_of, differentiable, leaves, rebuild, zeros_like
from sparing.hypergrad.unroll import State, Unroll
from sparing.memory import parse_bytes


@dataclass(frozen=True, kw_only=True)
class Checkpointed:
    """Exact, in little memory: some states are kept and the steps between are recomputed.

    "sqrt" holds about √T states and the graphs of about √T steps and runs every step twice. A number of states, or a
    budget in bytes, holds the graph of one step and replays by the binomial schedule.

    Source: Chen et al. 2016 for √T; Griewank & Walther 2000 for the binomial schedule.
    """

    states: int | Literal["sqrt"] = "sqrt"
    """Snapshots besides the start of the run (count)."""
    memory: str | int | None = None
    """Budget for states and graph ("200MB", or bytes); sets the number of snapshots."""

    def __post_init__(self) -> None:
        if self.states != "sqrt" and (not isinstance(self.states, int) or self.states < 0):
            raise UserError("states", got=self.states, why="states are counted", do='pass a number >= 0, or "sqrt"')
        if self.memory is not None:
            parse_bytes(self.memory)

    def __str__(self) -> str:
        if self.memory is not None:
            return f"checkpointed in {self.memory}"
        return "checkpointed √T" if self.states == "sqrt" else f"checkpointed {self.states}"

    def schedule(self, unroll: Unroll, psi: Tree, start: State) -> tuple[int, int]:
        """Steps whose graph is held at once, and snapshots.

        Args:
            unroll: The inner run.
            psi: φ or ψ(φ).
            start: Ω₀.

        Returns:
            Both counts.
        """
        if self.memory is not None:
            graph, budget = graph_bytes(unroll, psi, start), parse_bytes(self.memory)
            return 1, affordable_states(budget, unroll.steps, state=bytes_of(start), graph=graph)
        return sqrt_schedule(unroll.steps) if self.states == "sqrt" else (1, min(int(self.states), unroll.steps - 1))

    def estimate(self, unroll: Unroll, psi: Tree, phi: Tree) -> Estimate:
        """The exact hypergradient, bit for bit that of ``Reverse`` where sums have one order."""
        with torch.no_grad():
            start = unroll.start(psi)
        leaf, states = self.schedule(unroll, psi, start)
        backward = _Backward(unroll, psi, phi, leaf, zeros_like(leaves(psi)))
        backward.stretch(0, unroll.steps, start, states)
        assert backward.finish is not None
        assert backward.cotangent is not None
        through = add(backward.through, pullback_init(unroll, psi, backward.cotangent))
        return replace(backward.finish, through=through)


@dataclass
class _Backward:
    """The backward pass: a cotangent, pulled from the end of the run to its start."""

    unroll: Unroll
    psi: Tree
    phi: Tree
    leaf: int  # steps whose graph is held at once
    through: list[Tensor]
    cotangent: State | None = None
    finish: Estimate | None = None

    def stretch(self, first: int, last: int, state: State, states: int) -> None:
        """Pull the cotangent through steps ``first`` … ``last`` − 1, whose first state is given."""
        while True:
            units = -(-(last - first) // self.leaf)
            if units <= 1:
                self._pull(first, last, state)
                return
            # no snapshot is left: the last unit is reached from the first state again, then the one before it
            if states == 0:
                cut = last - ((last - first) % self.leaf or self.leaf)
                self._pull(cut, last, self.unroll.run(self.psi, state=state, first=first, last=cut))
                last = cut
                continue
            cut = first + self.leaf * next_snapshot(units, states)
            self.stretch(cut, last, self.unroll.run(self.psi, state=state, first=first, last=cut), states - 1)
            last = cut

    def _pull(self, first: int, last: int, state: State) -> None:
        cotangent, through, finish = pullback(self.unroll, state, self.psi, first, last, self.cotangent, self.phi)
        self.finish = finish or self.finish
        self.cotangent = cotangent
        self.through = add(self.through, through)


def graph_bytes(unroll: Unroll, psi: Tree, state: State) -> int:
    """Bytes that the graph of the first step saves for its backward pass."""
    # by storage: views share memory, and what is held anyway, state and ψ, costs nothing more
    known = {tensor.untyped_storage().data_ptr() for tensor in [*leaves(state), *leaves(psi)]}
    saved: dict[int, int] = {}

    def note(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in known:
            saved[storage.data_ptr()] = storage.nbytes()
        return tensor

    weights = rebuild(state, differentiable(state))
    inputs = rebuild(psi, differentiable(psi))
    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor), unroll.at(0) as batch:
        unroll.graph_step(0, weights, inputs, batch)
    return sum(saved.values())
