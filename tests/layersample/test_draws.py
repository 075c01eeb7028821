"""Draws are pure, of the right size, and as frequent as they say; seeds are fixed, so no alarm is false twice.

Each statistic would have rung by chance with probability 1e-4 when its seed was chosen.
"""

from __future__ import annotations

import math
from functools import cache

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from sparing.errors import UserError
from sparing.layersample.draws import (
    Adaptive,
    Bernoulli,
    CostAware,
    Draw,
    Fixed,
    Reshuffle,
    Uniform,
    Weighted,
    fill_unseen,
)

COUNT, ACTIVE, ROUNDS = 7, 3, 2000
SCORES = torch.tensor([0.3, 2.0, 1.0, 0.1, torch.nan, 0.7, 4.0], dtype=torch.float64)
WEIGHTS = (1.0, 2.0, 0.0, 3.0, 20.0, 0.5, 1.0)
SAMPLERS: list[Draw] = [
    Uniform(),
    Reshuffle(),
    Fixed(),
    Fixed(blocks=(5, 0, 2)),
    Fixed(blocks="last"),
    Bernoulli(),
    Weighted(weights=WEIGHTS),
    Weighted(weights=WEIGHTS, method="pivotal", floor=0.5),
    Adaptive(temperature=0.7),
    Adaptive(method="pivotal", floor=0.0),
    CostAware(),
    CostAware(forward=0.0, method="pivotal"),
]
VARYING = [s for s in SAMPLERS if not isinstance(s, Fixed | Reshuffle)]
names = {"ids": lambda s: f"{type(s).__name__}-{getattr(s, 'method', '')}"}


@cache
def indicators(sampler: Draw, rounds: int = ROUNDS, seed: int = 0, first: int = 0, stride: int = 1) -> Tensor:
    """0/1 matrix, shape (rounds, COUNT): which blocks were in the draw of each interval."""
    table = torch.zeros(rounds, COUNT, dtype=torch.float64)
    for row in range(rounds):
        table[row, list(sampler.draw(COUNT, ACTIVE, seed=seed, interval=first + stride * row, scores=SCORES))] = 1
    return table


def tail_of_chi_square(statistic: float, degrees: int) -> float:
    """P(χ² > statistic), through the regularised upper incomplete gamma function."""
    halves = torch.tensor([degrees / 2, statistic / 2], dtype=torch.float64)
    return float(torch.special.gammaincc(halves[0], halves[1]))


def chance_of_frequencies(table: Tensor, expected: Tensor) -> float:
    """Hotelling's test that rows have mean π: n·(x̄ − π)ᵀ S⁺ (x̄ − π) is χ² with the rank of S, for many rows.

    A plain χ² would ignore that the blocks of one draw exclude each other.
    """
    free = (expected > 0) & (expected < 1)
    assert torch.equal(table.mean(0)[~free], expected[~free])
    gap, spread = (table.mean(0) - expected)[free], torch.cov(table[:, free].T)
    rank = int(torch.linalg.matrix_rank(spread, hermitian=True, rtol=1e-9))
    inverse = torch.linalg.pinv(spread, hermitian=True, rtol=1e-9)
    return tail_of_chi_square(float(len(table) * gap @ inverse @ gap), rank)


@pytest.mark.parametrize("sampler", VARYING, **names)
def test_blocks_are_drawn_as_often_as_the_exact_probabilities_say(sampler: Draw) -> None:
    expected = sampler.inclusion(COUNT, ACTIVE, scores=SCORES)
    assert chance_of_frequencies(indicators(sampler), expected) > 1e-4


@pytest.mark.parametrize("deal", range(math.ceil(COUNT / ACTIVE)))
def test_each_deal_of_a_shuffled_order_holds_every_block_equally_often(deal: int) -> None:
    """Also the last, which wraps round; deals of one place in the epoch are independent of each other."""
    table = indicators(Reshuffle(), first=deal, stride=math.ceil(COUNT / ACTIVE))
    assert chance_of_frequencies(table, Reshuffle().inclusion(COUNT, ACTIVE)) > 1e-4


def test_a_random_fixed_set_holds_every_block_equally_often_over_seeds() -> None:
    rows = [Fixed().draw(COUNT, ACTIVE, seed=seed, interval=0) for seed in range(ROUNDS)]
    table = torch.zeros(ROUNDS, COUNT, dtype=torch.float64)
    for row, blocks in enumerate(rows):
        table[row, list(blocks)] = 1
    assert chance_of_frequencies(table, Fixed().inclusion(COUNT, ACTIVE)) > 1e-4


def test_the_frequency_test_would_notice_naive_weighted_choice() -> None:
    """Drawing one after the other with rescaled weights, as numpy's ``choice`` does, misses π = γ·w/Σw."""
    weights = torch.tensor([1.0, 1.0, 1.0, 1.0, 1.0, 1.0, 2.0], dtype=torch.float64)
    generator = torch.Generator().manual_seed(0)
    table = torch.zeros(ROUNDS, COUNT, dtype=torch.float64)
    for row in range(ROUNDS):
        table[row, torch.multinomial(weights, ACTIVE, generator=generator)] = 1
    exact = Weighted(weights=tuple(weights.tolist())).inclusion(COUNT, ACTIVE)
    assert chance_of_frequencies(table, exact) < 1e-12


@pytest.mark.parametrize("sampler", VARYING, **names)
def test_intervals_are_independent(sampler: Draw) -> None:
    """Σ over following draws of the product of deviations is normal, with the product of variances, for each block."""
    expected = sampler.inclusion(COUNT, ACTIVE, scores=SCORES)
    free = (expected > 0) & (expected < 1)
    gaps = (indicators(sampler) - expected)[:, free]
    variance = (expected * (1 - expected))[free]
    scores = (gaps[:-1] * gaps[1:]).sum(0) / (variance * math.sqrt(ROUNDS - 1))
    assert float(scores.abs().max()) < 4.5  # two-sided 7e-6 per block, below 1e-4 for all


@pytest.mark.parametrize("sampler", VARYING, **names)
def test_seeds_give_independent_runs(sampler: Draw) -> None:
    expected = sampler.inclusion(COUNT, ACTIVE, scores=SCORES)
    free = (expected > 0) & (expected < 1)
    a, b = (indicators(sampler, rounds=1000, seed=seed)[:, free] - expected[free] for seed in (0, 1))
    scores = (a * b).sum(0) / ((expected * (1 - expected))[free] * math.sqrt(1000))
    assert float(scores.abs().max()) < 4.5


@pytest.mark.parametrize("sampler", [s for s in SAMPLERS if not isinstance(s, Bernoulli)], **names)
def test_every_draw_has_exactly_the_asked_number_of_distinct_sorted_blocks(sampler: Draw) -> None:
    for interval in range(200):
        blocks = sampler.draw(COUNT, ACTIVE, seed=3, interval=interval, scores=SCORES)
        assert len(blocks) == len(set(blocks)) == ACTIVE
        assert set(blocks) <= set(range(COUNT))
        assert list(blocks) == sorted(blocks)
        assert all(type(block) is int for block in blocks)


@pytest.mark.parametrize("sampler", SAMPLERS, **names)
def test_a_draw_depends_on_its_arguments_alone(sampler: Draw) -> None:
    """Neither on the order of asking, nor on the global generator, which it leaves as it was."""
    torch.manual_seed(0)
    forwards = [sampler.draw(COUNT, ACTIVE, seed=5, interval=i, scores=SCORES) for i in range(20)]
    torch.manual_seed(1)
    torch.rand(3)
    before = torch.get_rng_state()
    backwards = [sampler.draw(COUNT, ACTIVE, seed=5, interval=i, scores=SCORES) for i in reversed(range(20))]
    assert forwards == backwards[::-1]
    assert torch.equal(before, torch.get_rng_state())


@settings(deadline=None, max_examples=100)
@given(count=st.integers(1, 40), active=st.integers(1, 40), seed=st.integers(0, 100), epoch=st.integers(0, 3))
def test_every_epoch_of_a_shuffled_order_reaches_every_block(count: int, active: int, seed: int, epoch: int) -> None:
    active = min(active, count)
    deals = math.ceil(count / active)
    drawn = [Reshuffle().draw(count, active, seed=seed, interval=epoch * deals + i) for i in range(deals)]
    assert all(len(set(blocks)) == active for blocks in drawn)
    times = [sum(block in blocks for blocks in drawn) for block in range(count)]
    assert set(times) <= {1, 2}
    assert times.count(2) == deals * active - count


@settings(deadline=None, max_examples=50)
@given(count=st.integers(2, 20), active=st.integers(1, 6), start=st.integers(0, 30))
def test_any_window_of_two_epochs_less_one_reaches_every_block(count: int, active: int, start: int) -> None:
    active = min(active, count)
    window = 2 * math.ceil(count / active) - 1
    reached = {b for i in range(window) for b in Reshuffle().draw(count, active, seed=0, interval=start + i)}
    assert reached == set(range(count))


def test_the_number_of_coins_that_fall_has_the_binomial_mean_and_variance() -> None:
    sizes = indicators(Bernoulli()).sum(1)
    share = ACTIVE / COUNT
    variance = COUNT * share * (1 - share)
    assert abs(float(sizes.mean()) - ACTIVE) < 4.5 * math.sqrt(variance / ROUNDS)
    kurtosis = 3 + (1 - 6 * share * (1 - share)) / variance
    assert abs(float(sizes.var()) - variance) < 4.5 * variance * math.sqrt((kurtosis - 1) / ROUNDS)
    assert sizes.min() == 0  # expected 40 times in 2000
    assert sizes.max() == COUNT  # expected five times


@pytest.mark.parametrize(
    "sampler", [Uniform(), Reshuffle(), Fixed(), Fixed(blocks="last"), Bernoulli(), Adaptive(), CostAware()], **names
)
def test_no_active_block_and_all_active_blocks(sampler: Draw) -> None:
    assert sampler.draw(5, 0, seed=0, interval=3) == ()
    assert sampler.draw(5, 5, seed=0, interval=3) == tuple(range(5))
    assert sampler.inclusion(5, 5).tolist() == [1.0] * 5


def test_a_fixed_set_stays_and_differs_between_seeds() -> None:
    assert len({Fixed().draw(32, 2, seed=0, interval=i) for i in range(50)}) == 1
    assert len({Fixed().draw(32, 2, seed=seed, interval=0) for seed in range(50)}) > 40
    assert Fixed(blocks=[5, 2]).draw(8, 2, seed=0, interval=7) == (2, 5)


def test_the_last_blocks_stay_the_last() -> None:
    assert {Fixed(blocks="last").draw(8, 3, seed=seed, interval=i) for seed in range(3) for i in range(5)} == {
        (5, 6, 7)
    }
    assert Fixed(blocks="last").inclusion(8, 3).tolist() == [0.0] * 5 + [1.0] * 3


def test_scores_raise_chances_and_a_block_never_seen_counts_as_the_best() -> None:
    chances = Adaptive().inclusion(COUNT, ACTIVE, scores=SCORES)
    assert chances[4] == chances[6] == chances.max()  # NaN, and the largest
    assert chances[3] == chances.min()
    assert chances[3] >= 0.1 * ACTIVE / COUNT
    assert torch.equal(fill_unseen(torch.full((3,), torch.nan), 3), torch.ones(3, dtype=torch.float64))


def test_the_softmax_of_scores_is_what_the_formula_says() -> None:
    """π = γ·softmax(s/(τ·mean s)) as long as no bound is touched."""
    scores = torch.tensor([1.0, 2.0, 3.0, 4.0], dtype=torch.float64)
    expected = 2 * torch.softmax(scores / (2.5 * 4.0), 0)
    torch.testing.assert_close(Adaptive(temperature=4.0).inclusion(4, 2, scores=scores), expected)


def test_the_unit_of_scores_does_not_matter_and_no_scores_mean_uniform() -> None:
    chances = Adaptive().inclusion(COUNT, ACTIVE, scores=SCORES)
    torch.testing.assert_close(Adaptive().inclusion(COUNT, ACTIVE, scores=1e-9 * SCORES), chances)
    for scores in (None, torch.zeros(4), torch.ones(4)):
        assert Adaptive().inclusion(4, 2, scores=scores).tolist() == pytest.approx([0.5] * 4)


def test_temperature_goes_from_greedy_to_uniform() -> None:
    scores = torch.tensor([1.0, 2.0, 3.0, 4.0])
    assert Adaptive(temperature=1e-3, floor=0.0).draw(4, 2, seed=0, interval=0, scores=scores) == (2, 3)
    assert Adaptive(temperature=1e9).inclusion(4, 2, scores=scores).tolist() == pytest.approx([0.5] * 4)


def test_cheap_blocks_near_the_head_are_drawn_more_often_in_proportion_to_gain_per_cost() -> None:
    sampler = CostAware(forward=1.0)
    assert sampler.costs(4).tolist() == [9.0, 8.0, 7.0, 6.0]  # 4 forward, 4 … 1 backward, 1 weight gradient
    chances = sampler.inclusion(4, 1)
    torch.testing.assert_close(chances * sampler.costs(4), (chances * sampler.costs(4))[0].expand(4))
    scored = sampler.inclusion(4, 1, scores=torch.tensor([9.0, 8.0, 7.0, 6.0]))
    assert scored.tolist() == pytest.approx([0.25] * 4)


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: Weighted(weights=(1.0, -1.0)), ("Weighted.weights", ">= 0")),
        (lambda: Weighted(weights=()), ("Weighted.weights",)),
        (lambda: Weighted(weights=(1.0,), method="choice"), ("method", "choice", "'pivotal'")),
        (lambda: Weighted(weights=(1.0,), floor=1.5), ("floor", "1.5")),
        (lambda: Fixed(blocks=(1, 1)), ("Fixed.blocks", "distinct")),
        (lambda: Fixed(blocks=(-1,)), ("Fixed.blocks",)),
        (lambda: Fixed(blocks="first"), ("Fixed.blocks", "'last'")),
        (lambda: Adaptive(temperature=0.0), ("temperature", "got 0.0")),
        (lambda: Adaptive(decay=1.0), ("decay", "got 1.0")),
        (lambda: Adaptive(signal="loss"), ("signal", "'bound'")),
        (lambda: CostAware(forward=-1.0), ("forward", "-1.0")),
        (lambda: CostAware(decay=-0.1), ("decay",)),
        (lambda: CostAware(signal="loss"), ("signal",)),
        (lambda: Adaptive().inclusion(2, 1, scores=torch.ones(3)), ("scores", "2 finite")),
        (lambda: Adaptive().inclusion(2, 1, scores=torch.tensor([1.0, -1.0])), ("scores",)),
        (lambda: Adaptive().inclusion(2, 1, scores=torch.tensor([1.0, torch.inf])), ("scores",)),
    ],
)
def test_settings_without_meaning_are_refused(make, words: tuple[str, ...]) -> None:
    with pytest.raises(UserError) as caught:
        make()
    assert all(word in str(caught.value) for word in words), str(caught.value)


GOLDEN: dict[str, list[tuple[int, ...]]] = {
    "uniform": [(2, 5, 6), (3, 5, 11), (3, 4, 7), (0, 5, 7)],
    "reshuffle": [(0, 5, 10), (4, 9, 11), (1, 7, 8), (2, 3, 6)],
    "fixed": [(1, 5, 11), (1, 5, 11), (1, 5, 11), (1, 5, 11)],
    "bernoulli": [(1, 4, 10, 11), (0, 3, 4, 6, 9, 10, 11), (2, 7), (3, 9, 10)],
    "systematic": [(1, 7, 11), (4, 10, 11), (3, 7, 9), (9, 10, 11)],
    "pivotal": [(1, 3, 11), (0, 6, 10), (8, 10, 11), (7, 9, 10)],
    "adaptive": [(1, 3, 8), (3, 4, 9), (6, 9, 11), (0, 5, 6)],
    "cost": [(5, 7, 11), (4, 8, 10), (8, 9, 11), (3, 10, 11)],
}


def test_draws_of_earlier_releases_come_again() -> None:
    """A resumed run must see the blocks it would have seen: these were drawn with torch 2.13 on one core."""
    scores = torch.linspace(1, 2, 12, dtype=torch.float64)
    samplers = {
        "uniform": Uniform(),
        "reshuffle": Reshuffle(),
        "fixed": Fixed(),
        "bernoulli": Bernoulli(),
        "systematic": Weighted(weights=tuple(range(1, 13))),
        "pivotal": Weighted(weights=tuple(range(1, 13)), method="pivotal"),
        "adaptive": Adaptive(),
        "cost": CostAware(),
    }
    drawn = {
        name: [sampler.draw(12, 3, seed=2024, interval=i, scores=scores) for i in range(4)]
        for name, sampler in samplers.items()
    }
    assert drawn == GOLDEN
