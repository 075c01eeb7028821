"""Small weights of one dtype side by side in one vector, so that an update of all of them is a few operations."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from sparing.hypergrad.optimizers import SGD, Adam, AdamW, setting_at, settings_of

# Elements of a leaf up to which a further copy of it takes less time than an operation of its own.
SMALL = 1 << 14
# Elements on which a leaf begins that is more than a row: kernels of products round otherwise where memory is not
# aligned.
ALIGNED = 16


@dataclass(frozen=True)
class Packing:
    """Which leaves of θ share a vector."""

    groups: tuple[tuple[int, ...], ...]  # places of the leaves in each vector; one alone stays as it is
    shapes: tuple[torch.Size, ...]  # of all leaves

    def pack(self, leaves: Sequence[Tensor]) -> list[Tensor]:
        """Leaves -> one tensor for each group."""
        return [
            torch.cat([leaves[place].reshape(-1) for place in group]) if len(group) > 1 else leaves[group[0]]
            for group in self.groups
        ]

    def split(self, vectors: Sequence[Tensor]) -> list[Tensor]:
        """The inverse: leaves as views of the vectors."""
        found: dict[int, Tensor] = {}
        for group, vector in zip(self.groups, vectors, strict=True):
            if len(group) == 1:
                found[group[0]] = vector
                continue
            shapes = [self.shapes[place] for place in group]
            parts = torch.split(vector, [shape.numel() for shape in shapes])
            found |= {place: part.view(shape) for place, part, shape in zip(group, parts, shapes, strict=True)}
        return [found[place] for place in range(len(self.shapes))]

    def update(
        self, optimizer: Any, theta: list[Tensor], grads: Sequence[Tensor], slots: Any, step: int, psi: Any
    ) -> tuple[list[Tensor], Any]:
        """``optimizer.update`` on packed weights, gradients and moments."""
        if _one_value(optimizer, step, psi):
            following: tuple[list[Tensor], Any] = optimizer.update(theta, grads, slots, step, psi)
            return following
        # a schedule may give values by leaf at some steps only
        apart = [self.split(part) for part in slots]
        moved, kept = optimizer.update(self.split(theta), self.split(grads), tuple(apart), step, psi)
        return self.pack(moved), tuple(self.pack(part) for part in kept)


def packing_of(optimizer: Any, theta: Sequence[Tensor]) -> Packing | None:
    """The packing of θ for an optimizer that treats all elements alike; None where nothing would share a vector."""
    # a clipped gradient has a norm over all leaves, whose sums would round otherwise
    if type(optimizer) not in {SGD, Adam, AdamW} or optimizer.clip is not None:
        return None
    shared: dict[Any, list[int]] = {}
    for place, leaf in enumerate(theta):
        small = 0 < leaf.numel() <= SMALL and leaf.is_contiguous()
        key = (leaf.dtype, leaf.device) if small and (leaf.dim() <= 1 or leaf.numel() % ALIGNED == 0) else place
        shared.setdefault(key, []).append(place)
    # aligned leaves first: behind one that is not, none would be
    groups = tuple(
        tuple(sorted(group, key=lambda place: theta[place].numel() % ALIGNED > 0)) for group in shared.values()
    )
    return Packing(groups, tuple(leaf.shape for leaf in theta)) if len(groups) < len(theta) else None


def _one_value(optimizer: Any, step: int, psi: Any) -> bool:
    """Whether each setting is one number for all elements at a step."""
    values = (setting_at(setting, step, psi) for setting in settings_of(optimizer).values())
    return all(
        value.dim() == 0 if isinstance(value, Tensor) else not isinstance(value, dict | list | tuple)
        for value in values
    )
