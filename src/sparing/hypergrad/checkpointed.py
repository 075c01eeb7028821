"""Exact reverse unrolling that keeps few states and recomputes the others."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import Tensor

from sparing.errors import UserError
from sparing.hypergrad.estimate import Estimate
from sparing.hypergrad.inner.offload import Offload, Snapshot, Store, check_offload, opened, place_of
from sparing.hypergrad.inner.packing import packing_of
from sparing.hypergrad.inner.ranks import largest
from sparing.hypergrad.inner.unroll import State, Unroll
from sparing.hypergrad.reverse import pack, pullback, pullback_init
from sparing.hypergrad.trees import Tree, add, bytes_of, differentiable, leaves, rebuild
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
    offload: Offload = None
    """Where snapshots are kept, the start of the run among them: "cpu" for main memory, if the run is on a device, or a
    folder for an unnamed file, which disappears with the process however it ends; None for the memory of the run. The
    gradient has the same bits."""

    def __post_init__(self) -> None:
        if self.states != "sqrt" and (not isinstance(self.states, int) or self.states < 0):
            raise UserError("states", got=self.states, why="states are counted", do='pass a number >= 0, or "sqrt"')
        if self.memory is not None:
            parse_bytes(self.memory)
            if self.offload is not None:
                raise UserError(
                    "memory", got="a budget beside offload", why="the snapshots it counts lie elsewhere",
                    do="pass states=, or no offload",
                )  # fmt: skip
        check_offload(self.offload)

    def __str__(self) -> str:
        if self.memory is not None:
            return f"checkpointed in {self.memory}"
        return f"checkpointed {'√T' if self.states == 'sqrt' else self.states}{place_of(self.offload)}"

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
            if unroll.problem.group is not None:  # ranks replay together, whatever the sizes of their parts
                graph = largest(graph, unroll.problem.group, leaves(start)[0].device)
            return 1, affordable_states(budget, unroll.steps, state=bytes_of(start), graph=graph)
        return sqrt_schedule(unroll.steps) if self.states == "sqrt" else (1, min(int(self.states), unroll.steps - 1))

    def estimate(self, unroll: Unroll, psi: Tree, phi: Tree) -> Estimate:
        """The exact hypergradient, bit for bit that of ``Reverse`` where sums have one order."""
        with torch.no_grad():
            start = unroll.start(psi)
        leaf, states = self.schedule(unroll, psi, start)
        cotangent: State | None = None
        through: list[Tensor] | None = None
        finish = None
        with opened(self.offload, leaves(start)[0].device) as store:
            held = hold(store, start)
            del start  # a snapshot in a store is to be the only one
            for first, last, state in backward_stretches(unroll, psi, leaf, 0, unroll.steps, held, states, store):
                cotangent, part, end = pullback(unroll, state, psi, first, last, cotangent, phi)
                finish, through = end or finish, part if through is None else add(through, part)
                del state  # freed before the next one is run: a budget counts on it
        assert finish is not None
        assert cotangent is not None
        assert through is not None
        details = finish.details if store is None else {**finish.details, "offloaded": store.peak}
        return replace(finish, through=add(through, pullback_init(unroll, psi, cotangent)), details=details)


@dataclass(frozen=True)
class Held:
    """A snapshot in the memory of the run."""

    state: State

    def load(self) -> State:
        """The state."""
        return self.state

    def drop(self) -> None:
        """Nothing: it goes with its last reference."""


def hold(store: Store | None, state: State) -> Held | Snapshot:
    """A snapshot in a store, or in the memory of the run."""
    return Held(state) if store is None else Snapshot(store, state)


def backward_stretches(
    unroll: Unroll,
    psi: Tree,
    leaf: int,
    first: int,
    last: int,
    held: Held | Snapshot,
    states: int,
    store: Store | None = None,
) -> Iterator[tuple[int, int, State]]:
    """(first, last, state at first) of stretches of at most ``leaf`` steps, from the end of the run to its start."""
    while (units := -(-(last - first) // leaf)) > 1:
        # where no snapshot is left, the last unit is reached from the first state again, then the one before it
        cut = first + leaf * (next_snapshot(units, states) if states else units - 1)
        inner = unroll.run(psi, state=held.load(), first=first, last=cut)
        if states:
            kept = hold(store, inner)
            del inner
            yield from backward_stretches(unroll, psi, leaf, cut, last, kept, states - 1, store)
            kept.drop()
            del kept
        else:
            yield cut, last, inner
            del inner
        last = cut
    yield first, last, held.load()


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
        packing = packing_of(unroll.problem.optimizer, state.theta)
        unroll.graph_step(0, pack(packing, weights), inputs, batch, packing)
    return sum(saved.values())


# Binomial checkpointing (Griewank & Walther 2000, Algorithm 799). A unit is what is differentiated at once: a step, or
# a block of steps; lengths, snapshots and replays are counts.


def capacity(states: int, replays: int) -> int:
    """Longest run (units) that ``states`` snapshots, start included, reverse with each unit run ``replays`` times."""
    return math.comb(states + replays, states)


def min_replays(length: int, states: int) -> int:
    """Least number of replays r with capacity(states + 1, r) ≥ length; ``states`` besides the start."""
    replays = 0
    while capacity(states + 1, replays) < length:
        replays += 1
    return replays


def next_snapshot(length: int, states: int) -> int:
    """Units before the next snapshot, 1 … length − 1, for least total work; length ≥ 2, states ≥ 1 free."""
    replays = min_replays(length, states)
    # the shortest head of least work: the tail must fit with one snapshot less, the head has one replay less
    fewest = capacity(states + 1, replays - 2) if replays >= 2 else 1
    place = max(fewest, length - capacity(states, replays))
    return min(max(place, 1), length - 1)


def work(length: int, states: int) -> int:
    """Least number of units run in all, without the pass over each unit that builds its graph."""
    if length <= 1:
        return 0
    replays = min_replays(length, states)
    return replays * length - capacity(states + 2, replays - 1)


def sqrt_schedule(steps: int) -> tuple[int, int]:
    """About √T steps whose graph is held at once, and the snapshots besides the start."""
    leaf = math.isqrt(steps - 1) + 1
    return leaf, max(math.ceil(steps / leaf) - 1, 0)


def affordable_states(budget: int, steps: int, *, state: int, graph: int) -> int:
    """Snapshots, at most T − 1, that fit into a budget beside the graph of one step; all sizes in bytes."""
    spare = budget - graph - 2 * state  # the start of the run, and the current state
    if spare < 0:
        need = graph + 2 * state
        raise UserError(
            "memory", got=f"{budget} B", why=f"the graph of one step and two states take {need} B",
            do=f"give at least {need} B, or use ForwardGradient",
        )  # fmt: skip
    return min(spare // max(state, 1), steps - 1)
