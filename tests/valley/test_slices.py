"""Tensors are cut and put together without loss, and never so that a slice looks like a scalar."""

from __future__ import annotations

import pytest
import torch

from sparing.valley.merging import method as slices
from sparing.valley.merging.method import SLICE, join_slices, slice_lengths, slices_of, zip_slices


@pytest.mark.parametrize("count", [0, 1, 2, SLICE - 1, SLICE, SLICE + 1, 2 * SLICE, 2 * SLICE + 1, 10 * SLICE + 7])
def test_lengths_add_up_and_are_alike(count: int) -> None:
    found = slice_lengths(count)
    assert sum(found) == count
    assert max(found) <= SLICE
    assert max(found) - min(found) <= 1
    assert len(found) == 1 or min(found) >= SLICE // 2


@pytest.mark.parametrize("shape", [(), (0, 3), (7,), (3, 5), (2, 3, 4)])
def test_slices_put_together_are_the_tensor(shape: tuple[int, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(slices, "SLICE", 4)
    tensor = torch.randn(shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    for each in (tensor, tensor.mT if tensor.ndim > 1 else tensor):
        source = slices_of(each)
        for _ in range(2):  # each call begins anew
            again = join_slices(source(), each)
            assert again.equal(each)
            assert again.shape == each.shape


def test_merged_slices_take_the_dtype_and_not_the_memory_of_their_pattern() -> None:
    like = torch.zeros(3, dtype=torch.bfloat16)
    merged = join_slices(iter([torch.tensor([1.0, 2.0]), torch.tensor([3.0])]), like)
    assert (merged.dtype, merged.tolist(), like.tolist()) == (torch.bfloat16, [1, 2, 3], [0, 0, 0])


def test_tensors_of_different_sizes_are_not_read_in_step(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(slices, "SLICE", 4)
    with pytest.raises(ValueError, match="shorter"):
        list(zip_slices([slices_of(torch.zeros(9)), slices_of(torch.zeros(4))]))
