"""Formulas against ranks that pass integers: every ring is played hop by hop in plain lists, every element counted."""

from __future__ import annotations

from collections import Counter
from fractions import Fraction
from itertools import product
from math import prod

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sparing.errors import UserError
from sparing.sharding.layout import Layout, coords_of
from sparing.sharding.levels import Plan, effective
from sparing.sharding.planner.traffic import (
    Part,
    Traffic,
    backward_gathers,
    gather_parts,
    kinds,
    rings_of,
    step_parts,
    sync_parts,
)
from sparing.sharding.planner.workload import BucketSpec, Workload

SIZES = st.lists(st.integers(1, 3), min_size=1, max_size=3).map(tuple)


def sent(parts: tuple[Part, ...], sizes: tuple[int, ...]) -> tuple[int, ...]:
    """Elements that a rank sends on each axis."""
    return tuple(sum(part.elements for part in parts if part.axis == axis) for axis in range(len(sizes)))


class Ranks:
    """All ranks of a machine, each with a list of integers; rings move them and count."""

    def __init__(self, sizes: tuple[int, ...]) -> None:
        self.sizes, self.sent, self.messages = sizes, Counter(), Counter()
        self.coords = [coords_of(rank, sizes) for rank in range(prod(sizes))]

    def _ring(self, coords: tuple[int, ...], axis: int) -> list[int]:
        """Ranks along an axis through a place."""
        same = [c[:axis] + c[axis + 1 :] == coords[:axis] + coords[axis + 1 :] for c in self.coords]
        return [rank for rank, in_it in enumerate(same) if in_it]

    def _rings(self, axis: int) -> list[list[int]]:
        return [self._ring(c, axis) for c in self.coords if c[axis] == 0]

    def _count(self, rank: int, axis: int, elements: int) -> None:
        self.sent[rank, axis] += elements
        self.messages[rank, axis] += 1

    def all_gather(self, held: list[list[int]], axis: int) -> list[list[int]]:
        out = [list(part) for part in held]
        for ring in self._rings(axis):
            w = len(ring)
            have = [{at: held[rank]} for at, rank in enumerate(ring)]
            for hop in range(w - 1):
                moving = [have[at][(at - hop) % w] for at in range(w)]
                for at, rank in enumerate(ring):
                    self._count(rank, axis, len(moving[at]))
                    have[(at + 1) % w][(at - hop) % w] = moving[at]
            for at, rank in enumerate(ring):
                out[rank] = [x for chunk in range(w) for x in have[at][chunk]]
        return out

    def reduce_scatter(self, held: list[list[int]], axis: int) -> list[list[int]]:
        out = [list(part) for part in held]
        for ring in self._rings(axis):
            w, run = len(ring), len(held[ring[0]]) // len(ring)
            have = [[held[rank][c * run : (c + 1) * run] for c in range(w)] for rank in ring]
            for hop in range(w - 1):
                moving = [have[at][(at - hop - 1) % w] for at in range(w)]
                for at, rank in enumerate(ring):
                    self._count(rank, axis, len(moving[at]))
                    chunk, to = (at - hop - 1) % w, (at + 1) % w
                    have[to][chunk] = [a + b for a, b in zip(have[to][chunk], moving[at], strict=True)]
            for at, rank in enumerate(ring):
                out[rank] = have[at][at]
        return out

    def per_axis(self) -> tuple[int, ...]:
        """Elements that one rank sent; all must have sent the same."""
        found = {tuple(self.sent[rank, axis] for axis in range(len(self.sizes))) for rank in range(len(self.coords))}
        assert len(found) == 1
        return found.pop()

    def hops(self) -> int:
        return sum(self.messages[0, axis] for axis in range(len(self.sizes)))


def cut(values: list[int], layout: Layout, level: int, coords: tuple[int, ...]) -> list[int]:
    offset, size = layout.slice(level, coords)
    return values[offset : offset + size]


def level_pairs(tiers: int) -> list[tuple[int, int]]:
    return [(a, b) for a, b in product(range(tiers + 1), repeat=2) if a <= b]


@settings(max_examples=40)
@given(SIZES, st.integers(1, 40))
def test_gathering(sizes: tuple[int, ...], length: int):
    layout = Layout(sizes, length)
    values = [7 * at + 1 for at in range(layout.padded)]
    for to, frm in level_pairs(len(sizes)):
        ranks = Ranks(sizes)
        held = [cut(values, layout, frm, coords) for coords in ranks.coords]
        for axis in range(frm - 1, to - 1, -1):
            held = ranks.all_gather(held, axis)
        assert held == [cut(values, layout, to, coords) for coords in ranks.coords]
        assert sent(gather_parts(layout.padded, sizes, frm, to), sizes) == ranks.per_axis()
        parts = gather_parts(layout.padded, sizes, frm, to)
        assert sum(part.messages for part in parts) == ranks.hops()
        assert [part.axis for part in parts] == [axis for axis in range(frm - 1, to - 1, -1) if sizes[axis] > 1]


@settings(max_examples=40)
@given(SIZES, st.integers(1, 40))
def test_reducing_and_completing(sizes: tuple[int, ...], length: int):
    """Per micro-step to level g, then to level os complete: every rank ends with its slice of the world's sum."""
    layout, tiers = Layout(sizes, length), len(sizes)
    full = [[(rank + 2) * at % 11 + rank for at in range(layout.padded)] for rank in range(prod(sizes))]
    whole = [sum(column) for column in zip(*full, strict=True)]
    for g, os in level_pairs(tiers):
        ranks = Ranks(sizes)
        held = full
        for axis in range(g):
            held = ranks.reduce_scatter(held, axis)
        assert sent(step_parts(layout.padded, sizes, g), sizes) == ranks.per_axis()
        ranks = Ranks(sizes)
        for axis in range(g, tiers):
            held = ranks.reduce_scatter(held, axis)
        for axis in range(tiers - 1, os - 1, -1):
            held = ranks.all_gather(held, axis)
        assert held == [cut(whole, layout, os, coords) for coords in ranks.coords]
        assert sent(sync_parts(layout.padded, sizes, g, os), sizes) == ranks.per_axis()
        parts = sync_parts(layout.padded, sizes, g, os)
        assert sum(part.messages for part in parts) == ranks.hops()
        order = [*range(g, tiers), *range(tiers - 1, os - 1, -1)]
        assert [part.axis for part in parts] == [axis for axis in order if sizes[axis] > 1]


def rates(m: int, g: int) -> dict[str, tuple[Fraction, Fraction]]:
    """Volumes of the paper's collectives as shares of the tensor: (intra, inter); global ones are two-level."""
    intra, inter = Fraction(m - 1, m), Fraction(g - 1, g * m)
    both, none = (intra, inter), (Fraction(0), Fraction(0))
    return {
        "-": none,
        "intra": (intra, Fraction(0)),
        "inter": (Fraction(0), inter),
        "inter AR": (Fraction(0), 2 * inter),
        "intra RS, inter AR": (intra, 2 * inter),
        "global": both,
        "global AR": (2 * intra, 2 * inter),
    }


PROCEDURE = {
    "NNN": ("-", "-", "global AR", "-"),
    "NNI": ("-", "-", "intra RS, inter AR", "intra"),
    "NNG": ("-", "-", "global", "global"),
    "NII": ("-", "intra", "inter AR", "intra"),
    "NIG": ("-", "intra", "inter", "global"),
    "NGG": ("-", "global", "-", "global"),
    "INI": ("intra", "-", "intra RS, inter AR", "-"),
    "ING": ("intra", "-", "global", "inter"),
    "III": ("intra", "intra", "inter AR", "-"),
    "IIG": ("intra", "intra", "inter", "inter"),
    "IGG": ("intra", "global", "-", "inter"),
    "GNG": ("global", "-", "global", "-"),
    "GIG": ("global", "intra", "inter", "-"),
    "GGG": ("global", "global", "-", "-"),
}
"""The paper's training procedure: parameters per pass, gradients per micro-step, gradients and parameters once."""


@pytest.mark.parametrize("name", PROCEDURE)
@pytest.mark.parametrize(("m", "g"), [(2, 2), (8, 4), (3, 2), (1, 4), (4, 1)])
def test_the_papers_procedure(name: str, m: int, g: int):
    """Two blocks, so that one of them is gathered twice a micro-step; float32 gradients on the wire."""
    s, elements = 3, 7 * m * g
    buckets = [BucketSpec(elements=elements, block=0), BucketSpec(elements=elements, block=1)]
    found = Traffic.of_step(name, (m, g), buckets, accumulate=s, gather_bytes=2, reduce_bytes=4)
    params, grads, sync_g, sync_p = (rates(m, g)[op] for op in PROCEDURE[name])

    def bytes_of(shares: tuple[Fraction, Fraction], times: int) -> tuple[int, ...]:
        return tuple(int(share * elements * times) for share in shares)

    assert found.params_forward == bytes_of(params, 2 * 2 * s)
    assert found.params_backward == bytes_of(params, 2 * s)
    assert found.grads == bytes_of(grads, 2 * 4 * s)
    assert found.sync_grads == bytes_of(sync_g, 2 * 4)
    assert found.sync_params == bytes_of(sync_p, 2 * 2)
    causes = (found.params_forward, found.params_backward, found.grads, found.sync_grads, found.sync_params)
    assert found.total == (sum(cause[0] for cause in causes), sum(cause[1] for cause in causes))


def walked(buckets: list[BucketSpec]) -> list[tuple[int, int]]:
    """Gathers by walking one micro-step block by block with a set of what is whole."""
    order = sorted({spec.block for spec in buckets})
    body = [spec.block for spec in buckets if not spec.root]
    whole: set[int] = set()
    count = [[0, 0] for _ in buckets]

    def visit(block: int, phase: int) -> None:
        for at, spec in enumerate(buckets):
            if spec.block == block and at not in whole:
                whole.add(at)
                count[at][phase] += 1

    for block in order:
        visit(block, 0)
        whole -= {at for at, s in enumerate(buckets) if s.block == block and not s.root and block != max(body)}
    for block in reversed(order):
        if any(spec.trainable for spec in buckets if spec.block <= block):
            visit(block, 1)
            whole -= {at for at, s in enumerate(buckets) if s.block == block and not s.root}
    return [(forward, backward) for forward, backward in count]


BUCKETS = st.lists(
    st.builds(
        BucketSpec, elements=st.integers(1, 50), trainable=st.booleans(), root=st.booleans(), block=st.integers(-1, 5)
    ),
    min_size=1,
    max_size=8,
)


@settings(max_examples=40)
@given(BUCKETS)
def test_when_parameters_are_gathered(buckets: list[BucketSpec]):
    if all(spec.root for spec in buckets):
        assert backward_gathers(buckets) == (0,) * len(buckets)
    else:
        assert [(1, times) for times in backward_gathers(buckets)] == walked(buckets)


@settings(max_examples=40)
@given(BUCKETS, st.sampled_from(effective()), SIZES.filter(lambda sizes: len(sizes) == 2), st.integers(1, 3))
def test_a_model_is_the_sum_of_its_buckets(buckets, plan: Plan, sizes, s: int):
    """Frozen buckets send parameters only; padding is sent too."""
    found = Traffic.of_step(plan, sizes, buckets, accumulate=s, gather_bytes=1, reduce_bytes=1)
    p, g, os = plan.levels()
    sums = {name: [0, 0] for name in ("params_forward", "params_backward", "grads", "sync_grads", "sync_params")}
    for spec, backward in zip(buckets, backward_gathers(buckets), strict=True):
        size = Layout(sizes, spec.elements).padded
        moved = {"params_forward": (s, sent(gather_parts(size, sizes, p, 0), sizes))}
        moved["params_backward"] = (s * backward, sent(gather_parts(size, sizes, p, 0), sizes))
        if spec.trainable:
            moved["grads"] = (s, sent(step_parts(size, sizes, g), sizes))
            moved["sync_grads"] = (1, sent(sync_parts(size, sizes, g, os), sizes))
            moved["sync_params"] = (1, sent(gather_parts(size, sizes, os, p), sizes))
        for name, (times, per_axis) in moved.items():
            sums[name] = [a + times * b for a, b in zip(sums[name], per_axis, strict=True)]
    assert {name: list(getattr(found, name)) for name in sums} == sums


def test_messages():
    """IIG on 2 × 3, a ring of w sends w − 1: three gathers and two reductions a micro-step, two rings a bucket once."""
    buckets = [BucketSpec(elements=60, block=0), BucketSpec(elements=60, block=1)]
    found = Traffic.of_step("IIG", (2, 3), buckets, accumulate=4)
    assert found.messages == (4 * 3 + 4 * 2, 2 * (2 + 2))


def test_a_bucket_may_have_its_own_plan():
    mixed = [BucketSpec(elements=12, block=0), BucketSpec(elements=12, block=1, plan=Plan("NNN"))]
    alone = Traffic.of_step("NNN", (2, 2), [BucketSpec(elements=12)])
    other = Traffic.of_step("GGG", (2, 2), [BucketSpec(elements=12, block=0), BucketSpec(elements=0, block=1)])
    total = Traffic.of_step("GGG", (2, 2), mixed).total
    assert total == tuple(a + b for a, b in zip(alone.total, other.total, strict=True))


def test_three_tiers():
    """IMG: parameters gather on axis 0; gradients reduce over 0 and 1; the rest once on axis 2 and back on 2 and 1."""
    work = Workload(params=120, blocks=1)
    found = Traffic.of_step("IMG", (2, 3, 5), work.buckets(), gather_bytes=1, reduce_bytes=1)
    assert found.params_forward == (60, 0, 0)
    assert found.grads == (60, 40, 0)
    assert found.sync_grads == (0, 0, 16)
    assert found.sync_params == (0, 40, 16)


def test_letters_must_fit_the_machine():
    with pytest.raises(UserError, match="a machine of 2 tiers"):
        Traffic.of_step("MMG", (2, 2), [BucketSpec(elements=12)])


REPEATED = st.lists(
    st.builds(
        BucketSpec, elements=st.sampled_from([7, 24]), trainable=st.booleans(), root=st.booleans(),
        block=st.integers(0, 3), plan=st.sampled_from([None, Plan("III")]),
    ),
    min_size=1, max_size=12,
)  # fmt: skip


@settings(deadline=None)
@given(REPEATED, st.sampled_from(effective()), st.tuples(st.integers(1, 3), st.integers(1, 3)), st.integers(1, 3))
def test_equal_buckets_priced_once_are_buckets_priced_one_by_one(specs, plan: Plan, sizes, accumulate: int):
    """Every bucket on its own, added up; no two kinds are alike."""
    total, messages = [0, 0], [0, 0]
    for spec, backward in zip(specs, backward_gathers(specs), strict=True):
        rings = rings_of(spec, plan, sizes)
        for parts, times in zip(rings, (accumulate * (1 + backward), accumulate, 1, 1), strict=True):
            for part in parts:
                total[part.axis] += 2 * times * part.elements
                messages[part.axis] += times * part.messages
    found = Traffic.of_step(plan, sizes, specs, accumulate=accumulate)
    assert (found.total, found.messages) == (tuple(total), tuple(messages))
    same = [(kind.backward, kind.spec.elements, kind.spec.trainable, kind.spec.plan) for kind in kinds(specs)]
    assert len(set(same)) == len(same)
    assert sum(kind.copies for kind in kinds(specs)) == len(specs)
