"""Inclusion probabilities are the solution of their optimality conditions, and both designs honour them."""

from __future__ import annotations

import math
from collections import Counter
from itertools import combinations

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from sparing.layersample import inclusion
from sparing.layersample.inclusion import allocate, pivotal, shuffled, systematic, uniforms
from sparing.seeds import stream

weight = st.one_of(st.just(0.0), st.floats(1e-6, 1e6), st.floats(0.5, 2.0))


@st.composite
def problems(draw: st.DrawFn) -> tuple[list[float], int, float]:
    """Weights, a size and a floor that can be met."""
    weights = draw(st.lists(weight, min_size=1, max_size=40))
    size = draw(st.integers(0, len(weights)))
    return weights, size, draw(st.sampled_from([0.0, 0.1, 0.5, 1.0])) * size / len(weights)


@settings(deadline=None, max_examples=300)
@given(problems())
def test_the_shares_sum_to_the_size_within_their_bounds(problem: tuple[list[float], int, float]) -> None:
    weights, size, floor = problem
    shares = allocate(weights, size, floor=floor)
    assert abs(math.fsum(shares) - size) < 1e-12 * max(size, 1)
    assert all(floor - 1e-15 <= share <= 1.0 for share in shares)


@settings(deadline=None, max_examples=300)
@given(problems())
def test_the_shares_meet_the_optimality_conditions(problem: tuple[list[float], int, float]) -> None:
    """For the maximum of Σ w log π, w/π is one constant inside, not below it at 1, not above it at the floor."""
    weights, size, floor = problem
    assume(0 < size < len(weights))
    assume(sum(w > 0 for w in weights) + sum(w == 0 for w in weights) * floor > size)  # else the limit case below
    shares = allocate(weights, size, floor=floor)
    pairs = [(w / max(weights), p) for w, p in zip(weights, shares, strict=True)]
    inside = [w / p for w, p in pairs if floor + 1e-9 < p < 1 - 1e-9]
    # one product and one quotient of float64 each
    assert all(math.isclose(ratio, inside[0], rel_tol=1e-14) for ratio in inside)
    if inside:
        constant = inside[0]
        assert all(w >= constant * (1 - 1e-6) for w, p in pairs if p >= 1 - 1e-9)
        assert all(w <= constant * p * (1 + 1e-6) + 1e-12 for w, p in pairs if p <= floor + 1e-9)


def test_shares_computed_by_hand() -> None:
    """One block is certain at 1; the rest of the size is shared 1 : 2 : 3 : 4 over 1."""
    assert allocate([1, 2, 3, 4, 50], 2) == pytest.approx([0.1, 0.2, 0.3, 0.4, 1.0], abs=1e-15)


def test_a_floor_takes_from_the_others_in_proportion() -> None:
    """Weights 0, 1, 3 with a floor of 0.2: the first takes 0.2, the rest share 0.8 as 1 : 3."""
    assert allocate([0, 1, 3], 1, floor=0.2) == pytest.approx([0.2, 0.2, 0.6], abs=1e-15)


def test_too_few_positive_weights_leave_the_rest_to_the_others_equally() -> None:
    """The limit of equal vanishing weights: here two blocks share what one certain block leaves of 2."""
    assert allocate([0, 5, 0], 2) == pytest.approx([0.5, 1.0, 0.5])
    assert allocate([1e-150, 5, 1e-150], 2) == pytest.approx([0.5, 1.0, 0.5])
    assert allocate([0.0] * 4, 2) == [0.5] * 4


def test_nothing_and_everything() -> None:
    assert allocate([1, 2, 3], 0) == [0.0] * 3
    assert allocate([0, 2, 3], 3) == [1.0] * 3


@pytest.mark.parametrize("design", [systematic, pivotal])
@settings(deadline=None, max_examples=100)
@given(problem=problems(), seed=st.integers(0, 10_000))
def test_a_design_draws_exactly_the_size(design, problem: tuple[list[float], int, float], seed: int) -> None:
    weights, size, floor = problem
    shares = allocate(weights, size, floor=floor)
    drawn = design(shares, stream(seed, "size"))
    assert len(drawn) == len(set(drawn)) == size
    assert list(drawn) == sorted(drawn)
    assert all(i in drawn for i, p in enumerate(shares) if p == 1.0)
    assert not any(shares[i] == 0.0 for i in drawn)


def test_a_comb_laid_at_every_start_hits_each_block_in_exact_proportion(monkeypatch: pytest.MonkeyPatch) -> None:
    """With π in twentieths, starts in the middle of each twentieth hit block l exactly 20·π_l times, in any order."""
    twentieths = [3, 7, 19, 1, 10, 20]
    for order in ([0, 1, 2, 3, 4], [4, 2, 0, 3, 1]):
        monkeypatch.setattr(inclusion, "shuffled", lambda count, generator, order=order: order)
        hits: Counter[int] = Counter()
        for k in range(20):
            monkeypatch.setattr(inclusion, "uniforms", lambda count, generator, k=k: [(k + 0.5) / 20])
            hits.update(systematic([p / 20 for p in twentieths], torch.Generator()))
        assert [hits[i] for i in range(6)] == twentieths


def test_every_outcome_of_the_duels_weighs_what_it_should(monkeypatch: pytest.MonkeyPatch) -> None:
    """Three duels with luck on a grid of midpoints: exact sums in place of the integral over luck.

    The borders of all duels lie on multiples of 1/12, as the exact result shows, so midpoints integrate exactly.
    """
    shares = [1 / 2, 1 / 4, 3 / 4, 1 / 2]
    monkeypatch.setattr(inclusion, "shuffled", lambda count, generator: list(range(count)))
    hits, grid = Counter(), 12
    for a in range(grid):
        for b in range(grid):
            for c in range(grid):
                lucks = [(a + 0.5) / grid, (b + 0.5) / grid, (c + 0.5) / grid]
                monkeypatch.setattr(inclusion, "uniforms", lambda count, generator, lucks=lucks: lucks[:count])
                hits.update(pivotal(shares, torch.Generator()))
    assert [hits[i] / grid**3 for i in range(4)] == shares


@pytest.mark.parametrize("design", [systematic, pivotal])
def test_every_pair_can_meet(design) -> None:
    """The random order makes each pair possible; without it, neighbours of a comb never meet."""
    seen: set[tuple[int, ...]] = set()
    for i in range(400):
        seen.update(combinations(design([0.4, 0.3, 0.5, 0.2, 0.6], stream(0, "pairs", i)), 2))
    assert seen == set(combinations(range(5), 2))


def test_a_permutation_holds_every_number_and_uses_only_its_generator() -> None:
    before = torch.get_rng_state()
    assert sorted(shuffled(50, stream(0, "p"))) == list(range(50))
    assert shuffled(50, stream(0, "p")) == shuffled(50, stream(0, "p")) != shuffled(50, stream(1, "p"))
    assert torch.equal(before, torch.get_rng_state())
    assert all(0.0 <= u < 1.0 for u in uniforms(1000, stream(0, "u")))
