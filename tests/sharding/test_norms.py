"""Every slice counts once, whatever its replicas."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from sparing.sharding.engine.norms import ROW, owners, square, whole_norm
from sparing.sharding.layout import Layout, coords_of

SIZES = [(1,), (3,), (2, 2), (3, 2), (1, 3), (2, 2, 2)]


@pytest.mark.parametrize("sizes", SIZES)
def test_owners_cover_a_tensor_once(sizes: tuple[int, ...]) -> None:
    layout = Layout(sizes=sizes, length=24)
    for level in range(len(sizes) + 1):
        covered = [0] * layout.padded
        for rank in owners(sizes, level):
            offset, length = layout.slice(level, coords_of(rank, sizes))
            for at in range(offset, offset + length):
                covered[at] += 1
        assert set(covered) == {1}


def mesh_of(sizes: tuple[int, ...], rows: torch.Tensor) -> Any:
    return SimpleNamespace(sizes=sizes, gather_scalars_async=lambda _: lambda: rows)


@pytest.mark.parametrize("sizes", SIZES)
def test_norm_of_slices_is_that_of_the_whole(sizes: tuple[int, ...]) -> None:
    """One tensor at each level, against torch's norm of all of them."""
    generator = torch.Generator().manual_seed(1)
    layout = Layout(sizes=sizes, length=24)
    tensors = torch.randn(len(sizes) + 1, layout.padded, generator=generator, dtype=torch.float64)
    rows = torch.zeros(layout.world, len(sizes) + 1, dtype=torch.float64)
    for rank in range(layout.world):
        for level, tensor in enumerate(tensors):
            offset, length = layout.slice(level, coords_of(rank, sizes))
            rows[rank, level] = tensor[offset : offset + length].square().sum()
    found = whole_norm(mesh_of(sizes, rows), [0.0] * (len(sizes) + 1))()
    assert found == pytest.approx(tensors.norm().item(), rel=1e-14)


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_one_bad_share_spoils_the_norm_for_all(bad: float) -> None:
    rows = torch.ones(4, 3, dtype=torch.float64)
    rows[3, 0] = bad  # a replica that no sum reads
    assert math.isnan(whole_norm(mesh_of((2, 2), rows), [1.0, 1.0, 1.0])())


@pytest.mark.parametrize("length", [0, 1, ROW, ROW + 1, 5 * ROW + 3])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
def test_squares_are_those_of_exact_sums(length: int, dtype: torch.dtype) -> None:
    x = torch.randn(length, generator=torch.Generator().manual_seed(length), dtype=torch.float64).to(dtype)
    # single precision within rows: 2⁻²⁴ a term at worst
    assert square(x) == pytest.approx(math.fsum(value * value for value in x.tolist()), rel=3e-7)


def test_squares_that_leave_single_precision_are_finite_in_double() -> None:
    assert square(torch.full((2 * ROW,), 1e30)) == pytest.approx(2 * ROW * 1e60, rel=1e-6)
    assert math.isnan(square(torch.full((2 * ROW,), math.nan)))
