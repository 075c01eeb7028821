"""Masks: exact counts, nesting, pairing, balance, and the law of dead neurons."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from sparing.errors import UserError
from sparing.scaling.masks.laws import (
    Bernoulli,
    Blocks,
    ConstantFanIn,
    ExactCount,
    NofM,
    dead,
    digest,
    matrices,
    realised,
    stored,
)
from sparing.seeds import stream

FREE = [Bernoulli(), ExactCount(), ConstantFanIn(), ConstantFanIn(balanced=True), Blocks(size=3)]
shapes = st.one_of(
    st.tuples(st.integers(1, 40), st.integers(1, 40)),
    st.tuples(st.integers(1, 8), st.integers(1, 5), st.integers(1, 3), st.integers(1, 3)),
)
densities = st.floats(1e-3, 1.0)


@settings(max_examples=40)
@given(shape=shapes, pair=st.tuples(densities, densities), seed=st.integers(0, 2**40), law=st.sampled_from(FREE))
def test_a_lower_density_is_part_of_a_higher_one(shape, pair, seed, law):
    low, high = (law.draw(shape, density, seed=seed, name="w") for density in sorted(pair))
    assert low.dtype == torch.bool
    assert low.shape == torch.Size(shape)
    assert not (low & ~high).any()


@settings(max_examples=40)
@given(shape=shapes, density=densities, balanced=st.booleans())
def test_constant_fan_in_is_exact_and_balance_is_within_one(shape, density, balanced):
    mask = ConstantFanIn(balanced=balanced).draw(shape, density, seed=1, name="w").flatten(1)
    assert set(mask.sum(1).tolist()) == {min(mask.shape[1], max(1, round(density * mask.shape[1])))}
    columns = mask.sum(0)
    if balanced:
        assert columns.max() - columns.min() <= 1


def test_balanced_rows_are_not_all_alike():
    """Overlaps of two rows average what two random sets of k of n share: k(k − 1)/(n − 1) for shifts of one set."""
    n, k = 64, 16
    mask = ConstantFanIn(balanced=True).draw((n, n), k / n, seed=3, name="w").double()
    shared = mask @ mask.T
    off = shared[~torch.eye(n, dtype=torch.bool)]
    assert off.mean().item() == pytest.approx(k * (k - 1) / (n - 1), rel=1e-12)
    assert off.max() < k


@settings(max_examples=40)
@given(shape=shapes, density=densities)
def test_exact_count_is_exact(shape, density):
    mask = ExactCount().draw(shape, density, seed=5, name="w")
    assert int(mask.sum()) == min(mask.numel(), max(1, round(density * mask.numel())))
    assert realised(mask) == int(mask.sum()) / mask.numel()


@pytest.mark.parametrize(("density", "fan_in"), [(1 / 16, 64), (1 / 32, 128), (1 / 64, 64), (1 / 128, 256)])
def test_bernoulli_neurons_die_as_often_as_they_must(density, fan_in):
    """P(dead) = (1 − ρ)^fan_in, spec 4.7; 4000 neurons, 4 binomial standard errors: wrong 1 time in 16,000, seeded."""
    neurons = 4000
    mask = Bernoulli().draw((neurons, fan_in), density, seed=11, name="w")
    found, expected = len(dead(mask)[0]) / neurons, (1 - density) ** fan_in
    assert abs(found - expected) <= 4 * math.sqrt(expected * (1 - expected) / neurons)


def test_bernoulli_density_is_the_probability():
    mask = Bernoulli().draw((400, 500), 0.1, seed=2, name="w")
    assert abs(realised(mask) - 0.1) <= 4 * math.sqrt(0.09 / mask.numel())


@pytest.mark.parametrize("law", FREE, ids=repr)
def test_density_one_masks_nothing(law):
    assert law.draw((10, 14), 1.0, seed=0, name="w").all()


@pytest.mark.parametrize("law", [*FREE, NofM()], ids=repr)
def test_streams_belong_to_seed_and_name(law):
    def draw(seed, name):
        return law.draw((20, 24), 0.5, seed=seed, name=name)

    assert torch.equal(draw(0, "a"), draw(0, "a"))
    assert not torch.equal(draw(0, "a"), draw(1, "a"))
    assert not torch.equal(draw(0, "a"), draw(0, "b"))


def test_drawing_leaves_the_global_generator_and_the_init_stream_alone():
    before, init = torch.get_rng_state(), torch.rand(3, generator=stream(0, "init", "w"))
    Bernoulli().draw((4, 4), 0.5, seed=0, name="w")
    assert torch.equal(before, torch.get_rng_state())
    assert torch.equal(init, torch.rand(3, generator=stream(0, "init", "w")))


def test_blocks_are_whole_and_equal_in_number():
    mask = Blocks(size=4).draw((12, 32), 0.25, seed=0, name="w")
    blocks = mask.view(3, 4, 8, 4).float().mean((1, 3))
    assert set(blocks.unique().tolist()) == {0.0, 1.0}
    assert blocks.sum(1).tolist() == [2.0, 2.0, 2.0]


def test_n_of_m_keeps_n_in_every_group():
    two, one = (NofM(n=n, m=4).draw((6, 16), n / 4, seed=0, name="w") for n in (2, 1))
    assert set(two.view(-1, 4).sum(1).tolist()) == {2}
    assert not (one & ~two).any()
    assert NofM().draw((3, 5), 1.0, seed=0, name="w").all()


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: NofM().draw((4, 8), 0.25, seed=0, name="a.weight"), "plan with 0.5"),
        (lambda: NofM().draw((4, 6), 0.5, seed=0, name="a.weight"), "4 does not divide it"),
        (lambda: NofM(n=5, m=4), "1 <= n <= m"),
        (lambda: Blocks(size=0), "size >= 1"),
        (lambda: Bernoulli().draw((4, 4), 0.0, seed=0, name="w"), r"\(0, 1\]"),
        (lambda: ExactCount().draw((4, 4), 1.5, seed=0, name="w"), r"\(0, 1\]"),
        (lambda: ConstantFanIn().draw((4, 4), math.nan, seed=0, name="w"), r"\(0, 1\]"),
        (lambda: ConstantFanIn().draw((4,), 0.5, seed=0, name="w"), "fan-out and fan-in"),
    ],
)
def test_refusals(call, words):
    with pytest.raises(UserError, match=words):
        call()


def test_dead_and_orientation():
    mask = torch.ones(3, 4, 2, dtype=torch.bool)
    mask[1], mask[:, 3] = False, False
    assert [found.tolist() for found in dead(mask)] == [[1], [3]]
    turned = stored(mask[None], transposed=True)
    assert turned.shape == (4, 3, 2)
    assert [found.tolist() for found in dead(turned, transposed=True)] == [[1], [3]]
    assert torch.equal(matrices(turned, transposed=True)[0], mask)


@pytest.mark.parametrize("stacked", [True, False], ids=["experts", "groups"])
@pytest.mark.parametrize("transposed", [True, False])
def test_the_dead_of_stacks_and_groups_are_counted_through(transposed, stacked):
    """Two matrices of 3 neurons and 4 inputs: neuron 1 of the second and input 3 of the first are cut off."""
    rows = torch.ones(2, 3, 4, 2, dtype=torch.bool)
    rows[1, 1], rows[0, :, 3] = False, False
    mask = stored(rows, transposed=transposed, stacked=stacked)
    first, second = (4, 3) if transposed else (3, 4)
    assert mask.shape == ((2, first, second, 2) if stacked else (2 * first, second, 2))
    layout = {"transposed": transposed, "stacked": stacked, "groups": 1 if stacked else 2}
    assert torch.equal(matrices(mask, **layout), rows)
    assert [found.tolist() for found in dead(mask, **layout)] == [[4], [3]]


def test_digest_sees_name_shape_and_bits():
    mask = torch.tensor([[True, False], [True, True]])
    known = digest({"a": mask, "b": mask})
    assert known == digest({"b": mask.clone(), "a": mask})
    other = mask.clone()
    other[0, 1] = True
    assert (
        len(
            {
                known,
                digest({"a": mask, "c": mask}),
                digest({"a": mask.view(1, 4), "b": mask}),
                digest({"a": mask, "b": other}),
            }
        )
        == 4
    )
