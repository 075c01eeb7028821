"""Stretches of flat tensors out of shards, against the tensor itself."""

from __future__ import annotations

import json

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import save_file
from torch import Tensor

from sparing.errors import UserError
from sparing.sharding.checkpoint.ranges import Piece, Shards, joined

WHOLE = torch.arange(23.0)


@pytest.fixture(scope="module")
def shards(tmp_path_factory: pytest.TempPathFactory) -> Shards:
    """Elements 0-7, 8-15 and 16-22 of x, in three files as torch writes them."""
    folder = tmp_path_factory.mktemp("shards")
    for index, part in enumerate(WHOLE.split(8)):
        told = {"DCP_SHARDING_INFO": json.dumps({"x": {"saved_offsets": [8 * index]}})}
        save_file({"x": part.clone()}, folder / f"shard-{index}.safetensors", metadata=told)
    return Shards(folder)


def piece(begin: int, target: Tensor, at: int, length: int) -> Piece:
    return Piece(source="x", begin=begin, target=target, at=at, length=length)


@given(begin=st.integers(0, 22), length=st.integers(1, 23), at=st.integers(0, 5))
def test_any_stretch(shards: Shards, begin: int, length: int, at: int) -> None:
    length = min(length, 23 - begin)
    target = torch.full((30,), -1.0)
    shards.read_([piece(begin, target, at, length)])
    assert torch.equal(target[at : at + length], WHOLE[begin : begin + length])
    assert torch.cat([target[:at], target[at + length :]]).eq(-1).all()


def test_values_are_cast_to_the_target(shards: Shards) -> None:
    target = torch.zeros(4, dtype=torch.bfloat16)
    shards.read_([piece(6, target, 0, 4)])
    assert target.tolist() == [6, 7, 8, 9]


def test_what_the_files_lack_is_refused(shards: Shards) -> None:
    with pytest.raises(UserError, match="got 3 elements of x; 5 elements of it are asked for"):
        shards.read_([piece(20, torch.zeros(5), 0, 5)])
    with pytest.raises(UserError, match="0 elements of y"):
        shards.read_([Piece(source="y", begin=0, target=torch.zeros(5), at=0, length=1)])


def test_neighbours_are_joined_and_no_others() -> None:
    one, other = torch.zeros(9), torch.zeros(9)
    pieces = [piece(0, one, 0, 2), piece(2, one, 2, 3), piece(5, other, 5, 1)]
    pieces += [piece(6, other, 7, 1), piece(8, other, 8, 1)]
    found = [(made.begin, made.at, made.length) for made in joined(pieces)]
    assert found == [(0, 0, 5), (5, 5, 1), (6, 7, 1), (8, 8, 1)]
    assert list(joined([])) == []
