"""Every slice counts once, whatever its replicas."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from sparing.sharding.layout import Layout, coords_of
from sparing.sharding.norms import owners, whole_norm

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
    return SimpleNamespace(sizes=sizes, gather_scalars=lambda _: rows)


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
    found = whole_norm(mesh_of(sizes, rows), [0.0] * (len(sizes) + 1))
    assert found == pytest.approx(tensors.norm().item(), rel=1e-14)


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_one_bad_share_spoils_the_norm_for_all(bad: float) -> None:
    rows = torch.ones(4, 3, dtype=torch.float64)
    rows[3, 0] = bad  # a replica that no sum reads
    assert math.isnan(whole_norm(mesh_of((2, 2), rows), [1.0, 1.0, 1.0]))
