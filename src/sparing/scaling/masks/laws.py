"""Random masks: shapes, densities and seeds in, boolean tensors out.

Every law ranks the entries of a matrix by numbers that depend on the seed and the parameter's name only, and keeps the
first ones: the mask of a lower density is part of the mask of a higher one, and another density changes nothing else
of a run. Shapes are oriented ``(fan_out, fan_in, ...)``; a caller whose weight is stored otherwise (``Conv1D``,
transposed convolutions, stacks of experts) has ``matrices`` and ``stored``.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from sparing.errors import require
from sparing.seeds import stream


class Law(Protocol):
    """How the live entries of a matrix are chosen; a value.

    ``draw`` returns a boolean mask of ``shape``, (fan_out, fan_in, ...), that depends on nothing but its arguments:
    ``seed`` of the run, ``name`` of the parameter, and ``density``, a live fraction in (0, 1] of what each law says.
    """

    def draw(self, shape: Sequence[int], density: float, *, seed: int, name: str) -> Tensor:
        """Draw a mask."""
        ...


@dataclass(frozen=True, kw_only=True, slots=True)
class Bernoulli:
    """Every entry is live with probability ``density``, independently; counts fluctuate and neurons may be dead.

    Source: the public code of Dey et al. 2024 (arXiv:2405.15743).
    """

    def draw(self, shape: Sequence[int], density: float, *, seed: int, name: str) -> Tensor:
        """Draw a boolean mask of ``shape``; ``density`` is the probability that an entry is live, in steps of 2⁻²⁴."""
        _check(shape, density)
        return _scores(tuple(shape), seed, name) < density


@dataclass(frozen=True, kw_only=True, slots=True)
class ExactCount:
    """Exactly ``round(density · numel)`` entries are live, anywhere in the matrix; at least one.

    Source: the masks of RigL (Evci et al. 2020, arXiv:1911.11134).
    """

    def draw(self, shape: Sequence[int], density: float, *, seed: int, name: str) -> Tensor:
        """Draw a boolean mask of ``shape``; ``density`` is the live fraction of all entries."""
        _check(shape, density)
        scores = _scores((1, math.prod(shape)), seed, name)
        return _first(scores, _count(density, scores.shape[1])).view(*shape)


@dataclass(frozen=True, kw_only=True, slots=True)
class ConstantFanIn:
    """Every neuron keeps exactly ``round(density · fan_in)`` inputs, at least one: no neuron is dead.

    For convolutions the fan-in counts kernel positions: ``in · Π kernel``.

    Source: the structured sparsity of Lasby et al. 2024 (arXiv:2305.02299); nested and balanced form our own.
    """

    balanced: bool = False
    """Also keep the fan-out of every input equal to within one. Rows of one square part of the matrix are then shifts
    of one random set under random permutations (a shuffled cyclic Latin square), which is what lets exact balance and
    nesting hold together at every shape."""

    def draw(self, shape: Sequence[int], density: float, *, seed: int, name: str) -> Tensor:
        """Draw a boolean mask of ``shape``; ``density`` is the live fraction of each neuron's inputs."""
        _check(shape, density)
        fan_out, fan_in = shape[0], math.prod(shape[1:])
        count = _count(density, fan_in)
        if self.balanced:
            # Strips of at most fan_in rows: the first k ranks of all rows then use each input equally, for every k.
            generator = stream(seed, "mask", name)
            sizes = [fan_in] * (fan_out // fan_in) + ([fan_out % fan_in] if fan_out % fan_in else [])
            mask = torch.cat([_strip_ranks(rows, fan_in, generator) for rows in sizes]) < count
        else:
            mask = _first(_scores((fan_out, fan_in), seed, name), count)
        return mask.view(*shape)


@dataclass(frozen=True, kw_only=True, slots=True)
class Blocks:
    """Square blocks are live or masked as a whole; every row of blocks keeps the same number of them, at least one.

    Where the matrix is not a multiple of the block, the last row or column of blocks is cut, and neurons may differ by
    the cut part of one block.
    """

    size: int = 16
    """Edge of a block (count of entries)."""

    def __post_init__(self) -> None:
        """Reject a block without entries."""
        require(self.size >= 1, "Blocks.size", self.size, "a block holds at least one entry", "pass size >= 1")

    def draw(self, shape: Sequence[int], density: float, *, seed: int, name: str) -> Tensor:
        """Draw a boolean mask of ``shape``; ``density`` is the live fraction of each row of blocks."""
        _check(shape, density)
        fan_out, fan_in = shape[0], math.prod(shape[1:])
        grid = (math.ceil(fan_out / self.size), math.ceil(fan_in / self.size))
        blocks = _first(_scores(grid, seed, name), _count(density, grid[1]))
        full = blocks.repeat_interleave(self.size, 0).repeat_interleave(self.size, 1)
        return full[:fan_out, :fan_in].reshape(*shape)


@dataclass(frozen=True, kw_only=True, slots=True)
class NofM:
    """Of every ``m`` neighbouring inputs of a neuron ``n`` are live, such as 2:4, which some GPUs execute faster."""

    n: int = 2
    """Live inputs in a group (count)."""
    m: int = 4
    """Inputs in a group (count)."""

    def __post_init__(self) -> None:
        """Reject empty and overfull groups."""
        require(1 <= self.n <= self.m, "NofM", f"{self.n}:{self.m}", "a group keeps 1 to m of m", "pass 1 <= n <= m")

    def draw(self, shape: Sequence[int], density: float, *, seed: int, name: str) -> Tensor:
        """Draw a boolean mask of ``shape``, whose fan-in m divides; ``density`` is n/m, or 1: nothing is masked."""
        _check(shape, density)
        if density == 1:
            return torch.ones(*shape, dtype=torch.bool)
        # A law that fixes the density must be planned with it: the factors would be those of another one.
        fixed = self.n / self.m
        require(
            abs(density - fixed) < 1e-9, name, density, f"{self.n}:{self.m} has density {fixed}", f"plan with {fixed}"
        )
        fan_in = math.prod(shape[1:])
        do = "leave the layer dense in the plan, or choose another law"
        require(fan_in % self.m == 0, name, f"fan-in {fan_in}", f"{self.m} does not divide it", do)
        return _first(_scores((math.prod(shape) // self.m, self.m), seed, name), self.n).view(*shape)


def realised(mask: Tensor) -> float:
    """Return the live fraction of a mask's entries, in [0, 1]."""
    return int(mask.sum()) / mask.numel()


def matrices(tensor: Tensor, *, transposed: bool = False, stacked: bool = False, groups: int = 1) -> Tensor:
    """Return what is as a weight is stored as matrices, (count, fan_out, fan_in, ...), of experts or of groups."""
    rows = tensor if stacked else tensor.reshape(groups, len(tensor) // groups, *tensor.shape[1:])
    return rows.transpose(1, 2) if transposed else rows


def stored(rows: Tensor, *, transposed: bool = False, stacked: bool = False) -> Tensor:
    """Return matrices as their weight is stored."""
    turned = rows.transpose(1, 2) if transposed else rows
    return (turned if stacked else turned.flatten(0, 1)).contiguous()


def dead(mask: Tensor, **layout: Any) -> tuple[Tensor, Tensor]:
    """Return indices of neurons without input and of inputs (channels) that no neuron reads; the mask is as stored.

    ``layout`` is what ``matrices`` takes; indices go through all matrices of a stack, and through all groups.
    """
    rows = matrices(mask, **layout)
    per_neuron, per_input = (found.flatten(0, 1).flatten(1).any(1) for found in (rows, rows.transpose(1, 2)))
    return (~per_neuron).nonzero().flatten(), (~per_input).nonzero().flatten()


def digest(masks: Mapping[str, Tensor]) -> str:
    """Return the SHA-256 of names, shapes and bits, to tell whether two runs or processes have the same masks."""
    total = hashlib.sha256()
    for name in sorted(masks):
        mask = masks[name]
        total.update(f"{name}\0{tuple(mask.shape)}\0".encode())
        total.update(mask.detach().cpu().contiguous().view(torch.uint8).numpy().tobytes())
    return total.hexdigest()


def _check(shape: Sequence[int], density: float) -> None:
    do = "pass (fan_out, fan_in, ...)"
    require(len(shape) >= 2 and min(shape) > 0, "mask shape", tuple(shape), "a mask needs fan-out and fan-in", do)
    require(0 < density <= 1, "density", density, "it is the live fraction of a layer", "pass a number in (0, 1]")


def _scores(shape: tuple[int, ...], seed: int, name: str) -> Tensor:
    """Return uniform numbers in [0, 1) that are the same at every density."""
    return torch.rand(shape, generator=stream(seed, "mask", name), dtype=torch.float32)


def _count(density: float, entries: int) -> int:
    return min(entries, max(1, round(density * entries)))


def _first(scores: Tensor, count: int) -> Tensor:
    """Mark the ``count`` lowest scores of each row."""
    # Stable: float32 scores collide in large matrices, and ties in another order would break the nesting.
    order = torch.sort(scores, dim=1, stable=True).indices[:, :count]
    return torch.zeros(scores.shape, dtype=torch.bool).scatter_(1, order, value=True)


def _strip_ranks(rows: int, columns: int, generator: torch.Generator) -> Tensor:
    """Rank a strip of at most as many rows as columns.

    At rank k row i takes the place ``i + (k mod b)·rows + T[k div b]`` on a circle of ``columns`` places, with g the
    greatest common divisor, b = columns/g and T a random order of 0 … g − 1: b successive ranks cover the circle
    rows/g times without a gap, and no row takes a place twice. Rows and columns are then shuffled.
    """
    shared = math.gcd(rows, columns)
    turns = columns // shared
    shifts = torch.randperm(shared, generator=generator)
    rank = torch.arange(columns)
    offset = (rank % turns) * rows + shifts[rank // turns]
    rank_of = torch.empty(columns, dtype=torch.int32)
    rank_of[offset % columns] = rank.int()
    start, place = torch.randperm(rows, generator=generator), torch.randperm(columns, generator=generator)
    return rank_of[(place[None, :] - start[:, None]) % columns]
