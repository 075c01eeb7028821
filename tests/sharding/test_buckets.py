"""Flat buckets: slots without gaps, slices of a rank, holes that show."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from sparing.errors import UserError
from sparing.sharding.engine.buckets import Bucket, slots_of
from sparing.sharding.layout import Layout


def params() -> dict[str, nn.Parameter]:
    generator = torch.Generator().manual_seed(0)
    shapes = {"a": (2, 3), "b": (), "c": (4,), "d": (3, 1)}
    return {name: nn.Parameter(torch.randn(shape, generator=generator)) for name, shape in shapes.items()}


GROUPS = {"a": 1, "c": 1}


def bucket(level: int, coords: tuple[int, int] = (1, 0), given: dict[str, nn.Parameter] | None = None) -> Bucket:
    """Of rank ``coords`` on 2×2; nothing is unsharded here."""
    mesh: Any = SimpleNamespace(sizes=(2, 2), coords=coords, layout=lambda length: Layout((2, 2), length))
    return Bucket(
        "x/trainable", given or params(), block="x", groups=GROUPS, mesh=mesh, level=level, dtype=torch.float32,
        trainable=True, root=False,
    )  # fmt: skip


def test_slots_have_no_gaps_and_keep_groups_together() -> None:
    slots = slots_of(params(), GROUPS)
    assert [slot.name for slot in slots] == ["b", "d", "a", "c"]
    assert [slot.offset for slot in slots] == [0, 1, 4, 10]
    assert [slot.numel for slot in slots] == [1, 3, 6, 4]


def flat() -> torch.Tensor:
    given = params()
    return torch.cat([given[name].detach().reshape(-1) for name in "bdac"] + [torch.zeros(2)])


@pytest.mark.parametrize("level", [1, 2])
@pytest.mark.parametrize("coords", [(0, 0), (1, 0), (0, 1), (1, 1)])
def test_the_store_is_the_slice_of_the_layout(level: int, coords: tuple[int, int]) -> None:
    """By hand: rank (j, i) of 2×2 has half j of 16, and of that quarter-block i."""
    j, i = coords
    begin, size = (8 * j, 8) if level == 1 else (8 * j + 4 * i, 4)
    assert torch.equal(bucket(level, coords).store, flat()[begin : begin + size])


def test_a_freed_parameter_refuses_to_be_read_and_takes_no_room() -> None:
    given = params()
    made = bucket(1, given=given)
    assert made.full.untyped_storage().nbytes() == 0
    for name, parameter in given.items():
        assert parameter.shape == params()[name].shape
        with pytest.raises(UserError, match=r"weights: got a use of .*: sum; .*; call engine.full_state_dict"):
            parameter.sum()
        with pytest.raises(UserError, match="weights"):
            torch.zeros(()) + parameter
        with torch._C.DisableTorchFunctionSubclass():  # what is there all the same could train nothing
            assert parameter.isnan().all()
            assert parameter.untyped_storage().nbytes() == 4


def test_a_whole_bucket_is_its_store_and_is_never_freed() -> None:
    given = params()
    made = bucket(0, given=given)
    made.reshard_()
    assert made.store is made.full
    assert all(torch.equal(given[name], value) for name, value in params().items())
    assert given["a"].data_ptr() == made.full[4:].data_ptr()


def test_unflat_gives_names_and_values_back() -> None:
    made, values = bucket(2), params()
    assert {name: torch.equal(view, values[name]) for name, view in made.unflatten(flat())} == dict.fromkeys(
        "bdac", True
    )


@pytest.mark.parametrize("level", [0, 1, 2])
def test_ranges_count_every_element_of_a_group_once(level: int) -> None:
    """Elements of group 0 are the first four; padding belongs to the last group."""
    counts = {0: 0, 1: 0}
    coords = {0: [(0, 0)], 1: [(0, 0), (1, 0)], 2: [(0, 0), (1, 0), (0, 1), (1, 1)]}[level]
    for at in coords:
        end = 0
        for group, offset, length in bucket(level, at).ranges(level):
            assert offset >= end
            end = offset + length
            counts[group] += length
        assert end <= 16 // (1, 2, 4)[level]
    assert counts == {0: 4, 1: 12}
