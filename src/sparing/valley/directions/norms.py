"""Set the length of a direction: as a whole, by filter, by block. Norms are taken in float64.

A direction keeps its dtype. Parts of it that are zero stay zero whatever the weights are.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from sparing import vectors
from sparing.errors import require
from sparing.valley.directions.config import OneD
from sparing.vectors import Vector


@dataclass(frozen=True, slots=True)
class Layout:
    """Where the filters of a tensor are."""

    # outputs are the second dimension, as in Hugging Face's ``Conv1D`` and in transposed convolutions
    transposed: bool = False
    # groups of a transposed convolution (count): filters of different groups share a place in its second dimension
    groups: int = 1


def scaled(direction: Vector, theta: Vector) -> dict[str, Tensor]:
    """Return NS(ε) = ε/‖ε‖ · ‖θ‖ over all tensors together: the direction is kept.

    Source: Im et al. 2016; paper, §3.
    """
    length, size = float(vectors.norm(direction)), float(vectors.norm(theta))
    require(length > 0, "direction", "zero at every parameter that moves", "it leads nowhere", "take another direction")
    do = 'pass norm="raw", or another group'
    require(size > 0, "weights that move", "all zero", "the scaled direction takes its length from them", do)
    return {name: value * (size / length) for name, value in direction.items()}


def grouped(direction: Vector, theta: Vector, parts: Mapping[str, str]) -> dict[str, Tensor]:
    """Scale every block's part of a direction to the norm of that block's weights; parts: name -> block."""
    members: dict[str, list[str]] = {}
    for name in direction:
        members.setdefault(parts[name], []).append(name)
    factors: dict[str, float] = {}
    for names in members.values():
        length = float(vectors.norm({name: direction[name] for name in names}))
        size = float(vectors.norm({name: theta[name] for name in names}))
        factors |= dict.fromkeys(names, size / length if length > 0 else 0.0)
    return {name: value * factors[name] for name, value in direction.items()}


def filtered(direction: Vector, theta: Vector, *, one_d: OneD, layouts: Mapping[str, Layout]) -> dict[str, Tensor]:
    """Scale every filter of a direction to the norm of that filter of the weights.

    A filter is what one output of a layer reads: a row of a linear layer, the kernels of one output channel, the
    vector of one token. Li et al.'s code moves 1-D tensors along +θ by default, a sign-consistent direction in
    disguise; there is no such policy here.

    Source: Li et al. 2018, "Visualizing the loss landscape of neural nets" (arXiv:1712.09913), §4.
    """
    scaled_parts: dict[str, Tensor] = {}
    for name, epsilon in direction.items():
        weight, layout = theta[name], layouts.get(name, Layout())
        if epsilon.ndim > 1:
            size, length = filter_norms(weight, layout), filter_norms(epsilon, layout)
            factor = torch.where(length > 0, size / length, 0.0).to(epsilon.dtype)
            scaled_parts[name] = (filter_view(epsilon, layout) * factor).reshape(epsilon.shape)
        elif one_d == "zero":
            scaled_parts[name] = torch.zeros_like(epsilon)
        elif one_d == "abs":
            scaled_parts[name] = epsilon * weight.abs().to(epsilon.dtype)
        else:
            size, length = (torch.linalg.vector_norm(x.double()) for x in (weight, epsilon))
            scaled_parts[name] = epsilon * torch.where(length > 0, size / length, 0.0).to(epsilon.dtype)
    return scaled_parts


def filter_norms(tensor: Tensor, layout: Layout) -> Tensor:
    """Return the norm of every filter, float64, in a shape that broadcasts over ``filter_view``."""
    wide = filter_view(tensor, layout).double()
    keep = {0} if not layout.transposed else {0, 2}
    norms: Tensor = torch.linalg.vector_norm(wide, dim=[d for d in range(wide.ndim) if d not in keep], keepdim=True)
    return norms


def filter_view(tensor: Tensor, layout: Layout) -> Tensor:
    """Return a view in which every filter is fixed by the first dimension, or, transposed, by the first and third."""
    return tensor.reshape(layout.groups, -1, *tensor.shape[1:]) if layout.transposed else tensor
