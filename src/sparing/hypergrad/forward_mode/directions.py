"""Laws of random directions v with E[v vᵀ] = I, regenerated from a seed whenever they are wanted and never stored.

A forward-gradient estimate of a gradient g ∈ R^N from b directions is ĝ = (1/b) Σ (g·v_i) v_i. It is unbiased under
every law here, and its relative error E‖ĝ − g‖²/‖g‖² is a closed formula, `excess`, whatever g is. Laws differ only in
that formula and in memory: take `Rademacher` where N ≫ b, `Orthonormal` or `Hadamard` where b is a fair share of N.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor

from sparing.errors import UserError, require
from sparing.seeds import stream

__all__ = ["Coordinate", "Gaussian", "Hadamard", "Law", "Orthonormal", "Rademacher", "Sphere"]


@runtime_checkable
class Law(Protocol):
    """A law of directions. Any frozen value with these four methods is one."""

    def rows(
        self,
        numbers: Sequence[int],
        *,
        count: int,
        size: int,
        seed: int,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
    ) -> Tensor:
        """Directions of some of the numbers 0 … count − 1, shape (len(numbers), size).

        Row i depends on the law, ``seed``, i, ``count`` and ``size`` only: every chunking and rank gives the same.
        """
        ...

    def limit(self, size: int) -> int | None:
        """Most directions there are for length ``size``; None where there is no end of them."""
        ...

    def excess(self, count: int, size: int) -> float:
        """Relative mean squared error E‖ĝ − g‖²/‖g‖² of an estimate from ``count`` directions of length ``size``."""
        ...

    def cosine(self, count: int, size: int) -> float:
        """Expected cosine of ĝ with g, as 1/√(1 + excess)."""
        ...


@dataclass(frozen=True, slots=True)
class _Law(Law):
    """What all laws share."""

    def rows(
        self,
        numbers: Sequence[int],
        *,
        count: int,
        size: int,
        seed: int,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
    ) -> Tensor:
        """Directions of the given numbers, shape (len(numbers), size)."""
        _check(self, numbers, count, size)
        # drawn on the CPU, whose generators give the same bits on every machine
        return self._draw(numbers, count, size, seed, dtype).to(device)

    def _draw(self, numbers: Sequence[int], count: int, size: int, seed: int, dtype: torch.dtype) -> Tensor:
        raise NotImplementedError

    def cosine(self, count: int, size: int) -> float:
        """Expected cosine of ĝ with g, as 1/√(1 + excess); exact in the root mean square for orthogonal directions.

        For independent ones it is within 3 % from b = 8 on; for b = 1 the truth is a factor √(2/π) ≈ 0.80 below it.
        """
        # E ĝ·g = ‖g‖² and E‖ĝ‖² = (1 + excess)‖g‖²: the ratio of means stands for the mean ratio
        return 1 / math.sqrt(1 + self.excess(count, size))


@dataclass(frozen=True, slots=True)
class _Independent(_Law):
    """Laws of independent rows: no limit, and one generator for each row."""

    def _draw(self, numbers: Sequence[int], count: int, size: int, seed: int, dtype: torch.dtype) -> Tensor:
        out = torch.empty(len(numbers), size, dtype=dtype)
        for row, number in zip(out, numbers, strict=True):
            self._fill(row, stream(seed, "direction", number))
        return out

    def _fill(self, row: Tensor, generator: torch.Generator) -> None:
        raise NotImplementedError

    def limit(self, size: int) -> int | None:
        """None: independent draws never run out."""
        return None

    def excess(self, count: int, size: int) -> float:
        """Relative mean squared error (N − 1)/b."""
        return (size - 1) / count


@dataclass(frozen=True, slots=True)
class _Exhaustive(_Law):
    """Laws of b orthogonal rows of length √N: exact at b = N."""

    def limit(self, size: int) -> int | None:
        """N: no more than N vectors of R^N are orthogonal."""
        return size

    def excess(self, count: int, size: int) -> float:
        """Relative mean squared error N/b − 1."""
        return size / count - 1


@dataclass(frozen=True, slots=True)
class Rademacher(_Independent):
    """Independent signs ±1: relative error (N − 1)/b, the least of the laws with independent entries.

    Source: Shen et al. 2024, Lemma 3.1 (arXiv:2406.14095).

    Example:
        >>> Rademacher().rows([0, 1], count=8, size=4, seed=0).abs()
        tensor([[1., 1., 1., 1.],
                [1., 1., 1., 1.]])
        >>> Rademacher().excess(count=16, size=321)
        20.0
    """

    def _fill(self, row: Tensor, generator: torch.Generator) -> None:
        row.copy_(_signs(row.numel(), generator))


@dataclass(frozen=True, slots=True)
class Gaussian(_Independent):
    """Independent standard normal entries: relative error (N + 1)/b.

    Source: Baydin et al. 2022 (arXiv:2202.08587); the error is that of Isserlis' theorem.
    """

    def _fill(self, row: Tensor, generator: torch.Generator) -> None:
        row.copy_(torch.randn(row.numel(), generator=generator))

    def excess(self, count: int, size: int) -> float:
        """Relative mean squared error (N + 1)/b."""
        return (size + 1) / count


@dataclass(frozen=True, slots=True)
class Sphere(_Independent):
    """√N times a point uniform on the unit sphere: relative error (N − 1)/b, as Rademacher's."""

    def _fill(self, row: Tensor, generator: torch.Generator) -> None:
        point = torch.randn(row.numel(), generator=generator).double()
        row.copy_(point * (math.sqrt(row.numel()) / point.norm()))


@dataclass(frozen=True, slots=True)
class Coordinate(_Exhaustive):
    """√N e_j with j drawn without replacement: relative error N/b − 1, exact at b = N.

    Its estimate keeps b entries of g, scaled by N/b, and zeroes the others.
    """

    def _draw(self, numbers: Sequence[int], count: int, size: int, seed: int, dtype: torch.dtype) -> Tensor:
        drawn = _sample_subset(count, size, seed)
        out = torch.zeros(len(numbers), size, dtype=dtype)
        out[range(len(numbers)), [drawn[number] for number in numbers]] = math.sqrt(size)
        return out


@dataclass(frozen=True, slots=True)
class Orthonormal(_Exhaustive):
    """√N times the rows of a uniformly random orthonormal frame: relative error N/b − 1, exact at b = N.

    The frame is the Q of a Gaussian matrix, with the signs that make R's diagonal positive: O(b²N) work. It has to
    exist whole, in float64, to give any row, so the latest one is kept for the next chunk: 8bN bytes. `Hadamard` needs
    neither.

    Source: Feng & Wang 2022 (arXiv:2205.14737); sign correction: Mezzadri 2007 (arXiv:math-ph/0609050).
    """

    def _draw(self, numbers: Sequence[int], count: int, size: int, seed: int, dtype: torch.dtype) -> Tensor:
        return _orthogonal_frame(count, size, seed)[list(numbers)].to(dtype)


@dataclass(frozen=True, slots=True)
class Hadamard(_Law):
    """Rows of a Hadamard matrix, cut and randomly signed: relative error ((N − 1)/b)(P − b)/(P − 1), memory O(N + b).

    Of the P = 2^k ≥ N rows of Sylvester's matrix, H_rc = (−1)^(bits that r and c share), b are drawn without
    replacement; columns are cut to N and each gets a random sign, the same for all rows. Entries are ±1. Cut rows are
    not orthogonal to one another, yet v vᵀ summed over all P of them is P·I, so the error falls to zero at b = P.

    Example:
        >>> Hadamard().limit(320), Hadamard().excess(512, 320)
        (512, 0.0)
    """

    def _draw(self, numbers: Sequence[int], count: int, size: int, seed: int, dtype: torch.dtype) -> Tensor:
        drawn = _sample_subset(count, _next_power_of_two(size), seed)
        signs = _signs(size, stream(seed, "direction", "signs"))
        out = torch.empty(len(numbers), size, dtype=dtype)
        for row, number in zip(out, numbers, strict=True):
            row.copy_(_sylvester(drawn[number], size) * signs)
        return out

    def limit(self, size: int) -> int | None:
        """P, the least power of two that is no less than N."""
        return _next_power_of_two(size)

    def excess(self, count: int, size: int) -> float:
        """Relative mean squared error ((N − 1)/b)(P − b)/(P − 1)."""
        order = _next_power_of_two(size)
        return (size - 1) / count * (order - count) / max(order - 1, 1)


def _check(law: _Law, numbers: Sequence[int], count: int, size: int) -> None:
    """Refuse what no law can draw."""
    require(size >= 1, "size", size, "a direction needs an entry", "differentiate by at least one number")
    require(count >= 1, "directions", count, "an estimate needs a direction", "pass directions >= 1")
    name, limit = type(law).__name__, law.limit(size)
    if limit is not None and count > limit:
        why = f"{name} has {limit} directions for {size} numbers and is exact with them"
        raise UserError("directions", got=count, why=why, do=f"pass directions <= {limit}, or Rademacher()")
    strays = [number for number in numbers if not 0 <= number < count]
    if strays:
        raise UserError(
            "numbers", got=strays[0], why=f"directions are 0 to {count - 1}", do="pass numbers in that range"
        )


def _signs(size: int, generator: torch.Generator) -> Tensor:
    """Random signs as int8, shape (size,)."""
    return torch.empty(size, dtype=torch.int8).random_(0, 2, generator=generator).mul_(2).sub_(1)


def _next_power_of_two(size: int) -> int:
    """Least power of two that is no less than ``size``."""
    return 1 << (size - 1).bit_length()


def _sylvester(row: int, size: int) -> Tensor:
    """First ``size`` entries of a row of Sylvester's matrix, int8: (−1) to the parity of ``row & column``."""
    # columns that share all bits but the highest differ by that bit's sign alone, so each doubling copies what is there
    out = torch.ones(size, dtype=torch.int8)
    for bit in range((size - 1).bit_length()):
        half, end = 1 << bit, min(2 << bit, size)
        out[half:end] = out[: end - half]
        if row >> bit & 1:
            out[half:end].neg_()
    return out


# chunks of one estimate need the same frame, and each costs a QR decomposition
@lru_cache(maxsize=1)
def _orthogonal_frame(count: int, size: int, seed: int) -> Tensor:
    """Uniformly random orthogonal rows of length √N, float64, shape (count, size)."""
    normal = torch.randn(size, count, generator=stream(seed, "direction", "frame"), dtype=torch.float64)
    frame, triangle = torch.linalg.qr(normal)
    # LAPACK's signs are not random: with R's diagonal positive, Q is uniform on the orthogonal group (Mezzadri 2007)
    rows: Tensor = math.sqrt(size) * (frame * triangle.diagonal().sign()).T
    return rows


# likewise the same b integers
@lru_cache(maxsize=8)
def _sample_subset(count: int, of: int, seed: int) -> tuple[int, ...]:
    """First ``count`` entries of a random permutation of ``range(of)``; a larger count continues a smaller one."""
    # Fisher-Yates shuffle that stores only the entries it has moved: O(count) memory where N may be millions
    draws = torch.empty(count, dtype=torch.int64).random_(generator=stream(seed, "direction", "subset")).tolist()
    moved: dict[int, int] = {}
    chosen = []
    for place, draw in enumerate(draws):
        other = place + draw % (of - place)  # modulo bias: of/2⁶³
        chosen.append(moved.get(other, other))
        moved[other] = moved.get(place, place)
    return tuple(chosen)
