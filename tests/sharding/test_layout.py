"""Slices against set arithmetic: who holds which element is derived here element by element."""

from __future__ import annotations

from itertools import product
from math import prod

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sparing.errors import UserError
from sparing.sharding.layout import Layout, block_index, coords_of

SIZES = st.lists(st.integers(1, 4), min_size=1, max_size=3).map(tuple)
LENGTHS = st.integers(0, 200)


def held(sizes: tuple[int, ...], elements: int, level: int, coords: tuple[int, ...]) -> list[int]:
    """Elements of a rank, by dealing: every axis in turn splits what is left into equal runs."""
    left = list(range(elements))
    for axis in range(level):
        run = len(left) // sizes[axis]
        left = [x for at, x in enumerate(left) if at // run == coords[axis]]
    return left


def everyone(sizes: tuple[int, ...]) -> list[tuple[int, ...]]:
    return [coords_of(rank, sizes) for rank in range(prod(sizes))]


@given(SIZES, LENGTHS)
def test_slices_are_those_that_dealing_gives(sizes: tuple[int, ...], length: int):
    layout = Layout(sizes, length)
    for level, coords in product(range(len(sizes) + 1), everyone(sizes)):
        offset, size = layout.slice(level, coords)
        assert list(range(offset, offset + size)) == held(sizes, layout.padded, level, coords)


@given(SIZES, LENGTHS)
def test_each_level_covers_all_and_repeats_over_the_other_axes(sizes: tuple[int, ...], length: int):
    layout = Layout(sizes, length)
    for level in range(len(sizes) + 1):
        count = [0] * layout.padded
        for coords in everyone(sizes):
            offset, size = layout.slice(level, coords)
            for at in range(offset, offset + size):
                count[at] += 1
        assert count == [prod(sizes[level:])] * layout.padded


@given(SIZES, LENGTHS)
def test_finer_inside_coarser(sizes: tuple[int, ...], length: int):
    layout = Layout(sizes, length)
    for coords in everyone(sizes):
        for outer in range(len(sizes) + 1):
            for inner in range(outer, len(sizes) + 1):
                coarse = held(sizes, layout.padded, outer, coords)
                offset, size = layout.within(inner, outer, coords)
                assert coarse[offset : offset + size] == held(sizes, layout.padded, inner, coords)


@given(SIZES, LENGTHS)
def test_gathering_along_an_axis_arrives_in_order(sizes: tuple[int, ...], length: int):
    """Pieces of the ranks along axis l, in the order of their places, make up the slice at the level before."""
    layout = Layout(sizes, length)
    for coords, axis in product(everyone(sizes), range(len(sizes))):
        pieces: list[int] = []
        for place in range(sizes[axis]):
            offset, size = layout.slice(axis + 1, (*coords[:axis], place, *coords[axis + 1 :]))
            pieces += range(offset, offset + size)
        offset, size = layout.slice(axis, coords)
        assert pieces == list(range(offset, offset + size))


@given(SIZES, LENGTHS)
def test_padding(sizes: tuple[int, ...], length: int):
    layout = Layout(sizes, length)
    assert layout.padded % layout.world == 0
    assert 0 <= layout.padded - length < layout.world
    for level, coords in product(range(len(sizes) + 1), everyone(sizes)):
        true = [x for x in held(sizes, layout.padded, level, coords) if x < length]
        assert layout.real(level, coords) == len(true)


@given(SIZES)
def test_finest_slice_is_the_block_of_that_number(sizes: tuple[int, ...]):
    layout = Layout(sizes, 5 * prod(sizes))
    found = [block_index(coords, sizes) for coords in everyone(sizes)]
    assert sorted(found) == list(range(prod(sizes)))
    assert [layout.slice(len(sizes), coords)[0] // 5 for coords in everyone(sizes)] == found


def test_the_authors_example():
    """Two nodes of two GPUs, four blocks: groups hold {0, 1} and {2, 3}; global blocks are 0, 2 on node 0 and 1, 3."""
    layout = Layout((2, 2), 4)
    assert [layout.slice(1, coords_of(rank, (2, 2))) for rank in range(4)] == [(0, 2), (2, 2), (0, 2), (2, 2)]
    assert [layout.slice(2, coords_of(rank, (2, 2)))[0] for rank in range(4)] == [0, 2, 1, 3]


def test_intra_major_numbers():
    """GPU(i, j) of g groups of m owns block j·g + i and is rank i·m + j."""
    m, g = 8, 4
    for i, j in product(range(g), range(m)):
        assert coords_of(i * m + j, (m, g)) == (j, i)
        assert block_index((j, i), (m, g)) == j * g + i


def test_refusals():
    layout = Layout((2, 3), 7)
    with pytest.raises(UserError, match="at least one rank"):
        Layout((2, 0), 7)
    with pytest.raises(UserError, match="at least one rank"):
        Layout((), 7)
    with pytest.raises(UserError, match="no negative size"):
        Layout((2, 2), -1)
    with pytest.raises(UserError, match="there are 2 axes"):
        layout.size(3)
    with pytest.raises(UserError, match="one place per axis"):
        layout.slice(1, (2, 0))
    with pytest.raises(UserError, match="finer level first"):
        layout.within(0, 1, (0, 0))
    with pytest.raises(UserError, match="there are 6 ranks"):
        coords_of(6, (2, 3))
