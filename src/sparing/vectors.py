"""Vectors of named tensors: what a model's parameters, gradients and directions have in common.

Every function raises ``UserError`` if a tensor is not floating, and, given two vectors, if their names or shapes
differ; the order of the names does not matter. Nothing is broadcast, nothing is changed in place.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping

import torch
from torch import Tensor

from sparing.errors import UserError

Vector = Mapping[str, Tensor]  # parameter name -> floating tensor


def dot(a: Vector, b: Vector) -> Tensor:
    """Return the inner product, summed in float64.

    Products and sums are exact to float64 whatever the dtypes, at the price of a float64 copy of one pair of tensors
    at a time. Differentiable.

    Example:
        >>> x = {"w": torch.tensor([1.0, 2.0]), "b": torch.tensor(3.0)}
        >>> dot(x, x).item()
        14.0
    """
    return _total([(x.double() * y.double()).sum() for x, y in _pairs(a, b)])


def norm(a: Vector) -> Tensor:
    """Return the Euclidean norm over all elements, summed in float64."""
    _require_floating(a)
    # not the root of dot(a, a), whose derivative at zero is infinite: this one's is zero
    parts = [torch.linalg.vector_norm(x.double()) for x in a.values()]
    return torch.linalg.vector_norm(torch.stack([part.to(parts[0].device) for part in parts])) if parts else _total([])


def axpy(alpha: float | Tensor, x: Vector, y: Vector) -> dict[str, Tensor]:
    """Return ``alpha · x + y``; the arguments keep their values.

    Example:
        >>> axpy(2, {"w": torch.tensor([1.0])}, {"w": torch.tensor([0.5])})
        {'w': tensor([2.5000])}
    """
    return {name: alpha * left + right for name, (right, left) in zip(y, _pairs(y, x), strict=True)}


def sign_agreement(a: Vector, b: Vector) -> Tensor:
    """Return the share of elements whose signs agree, among those where both vote.

    An exact zero votes for nobody: where either element is zero the pair is left out of the count and of the whole.
    (A masked or never-trained weight then says nothing.) A NaN votes and agrees with nothing.

    Example:
        >>> a = {"w": torch.tensor([1.0, -1.0, 0.0, 2.0])}
        >>> b = {"w": torch.tensor([3.0, 1.0, -5.0, 0.0])}
        >>> sign_agreement(a, b).item()  # two pairs vote, one agrees
        0.5
    """
    pairs = list(_pairs(a, b))
    agree = _total([((x > 0) & (y > 0) | (x < 0) & (y < 0)).sum().double() for x, y in pairs])
    votes = _total([((x != 0) & (y != 0)).sum().double() for x, y in pairs])
    return agree / votes


def flatten(x: Vector) -> Tensor:
    """Join all elements into one tensor, in the order of the names."""
    _require_floating(x)
    return torch.cat([value.reshape(-1) for value in x.values()]) if x else torch.empty(0)


def like(flat: Tensor, template: Vector) -> dict[str, Tensor]:
    """Cut a flat tensor into named tensors.

    Example:
        >>> x = {"w": torch.ones(2, 2), "b": torch.zeros(3)}
        >>> {name: tuple(value.shape) for name, value in like(flatten(x), x).items()}
        {'w': (2, 2), 'b': (3,)}
    """
    _require_floating({"flat": flat, **template})
    sizes = [math.prod(value.shape) for value in template.values()]
    if flat.shape != (sum(sizes),):
        raise UserError(
            "flat tensor", got=f"shape {tuple(flat.shape)}", why=f"the template has {sum(sizes)} elements",
            do="pass the template of the vector that was flattened",
        )  # fmt: skip
    pieces = zip(template.items(), torch.split(flat, sizes), strict=True)
    return {name: piece.view(value.shape).to(value) for (name, value), piece in pieces}


def _pairs(a: Vector, b: Vector) -> Iterator[tuple[Tensor, Tensor]]:
    """Pair the tensors of two vectors by name, in the order of the first, after checking that they fit."""
    _require_floating(a)
    _require_floating(b)
    if odd := sorted(a.keys() ^ b.keys()):
        raise UserError(
            "vectors", got=f"{len(odd)} names in only one of them, such as {odd[0]!r}", why="both need the same names",
            do="restrict them to their common names",
        )  # fmt: skip
    for name, value in a.items():
        if value.shape != b[name].shape:
            raise UserError(
                f"vectors at {name!r}", got=f"shapes {tuple(value.shape)} and {tuple(b[name].shape)}",
                why="nothing is broadcast", do="pass vectors of the same model",
            )  # fmt: skip
    return ((value, b[name]) for name, value in a.items())


def _require_floating(a: Vector) -> None:
    """Refuse tensors that arithmetic would truncate or misread."""
    for name, value in a.items():
        if not value.is_floating_point():
            raise UserError(
                f"vector at {name!r}", got=str(value.dtype), why="a vector holds real floating numbers",
                do="leave integer, boolean and complex tensors out",
            )  # fmt: skip


def _total(parts: list[Tensor]) -> Tensor:
    """Add float64 scalars that may lie on several devices."""
    if not parts:
        return torch.zeros((), dtype=torch.float64)
    return torch.stack([part.to(parts[0].device) for part in parts]).sum()
