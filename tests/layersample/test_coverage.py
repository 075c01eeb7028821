"""Coverage and depth against enumeration, inclusion and exclusion, and the draws themselves."""

from __future__ import annotations

import math
from fractions import Fraction
from itertools import combinations, product

import pytest

from sparing.layersample.draws import Adaptive, Bernoulli, CostAware, Draw, Fixed, Reshuffle, Uniform, Weighted
from sparing.layersample.price.coverage import coverage, expected_lowest, lowest_drawn, most_drawn

SMALL = [(5, 2, 3), (4, 1, 5), (4, 3, 2), (6, 2, 2), (3, 3, 2), (5, 2, 0), (4, 0, 3)]


def by_enumeration(count: int, active: int, rounds: int) -> list[Fraction]:
    """Distribution of the number of blocks reached, from all sequences of sets."""
    sets = list(combinations(range(count), active))
    chances = [Fraction(0)] * (count + 1)
    for run in product(sets, repeat=rounds):
        chances[len(set().union(*run))] += Fraction(1, len(sets) ** rounds)
    return chances


def by_markov_chain(count: int, active: int, rounds: int) -> list[float]:
    """The same for many rounds: with c reached, h new ones come with chance ``C(N−c, h)·C(c, γ−h)/C(N, γ)``."""
    chances = [1.0] + [0.0] * count
    for _ in range(rounds):
        after = [0.0] * (count + 1)
        for reached, chance in enumerate(chances):
            for new in range(max(0, active - reached), min(active, count - reached) + 1 if chance else 0):
                ways = math.comb(count - reached, new) * math.comb(reached, active - new)
                after[reached + new] += chance * (ways / math.comb(count, active))
        chances = after
    return chances


@pytest.mark.parametrize(("count", "active", "rounds"), SMALL)
def test_the_distribution_of_blocks_reached_is_that_of_all_sequences(count: int, active: int, rounds: int) -> None:
    exact = [float(chance) for chance in by_enumeration(count, active, rounds)]
    assert by_markov_chain(count, active, rounds) == pytest.approx(exact, abs=1e-14)


@pytest.mark.parametrize(("count", "active", "rounds"), [*SMALL, (32, 2, 10), (32, 2, 60), (80, 4, 100)])
def test_mean_and_full_coverage_have_their_closed_forms(count: int, active: int, rounds: int) -> None:
    """The mean is N(1 − (1 − γ/N)^R); all N are reached with Σ (−1)^j C(N, j) (C(N−j, γ)/C(N, γ))^R."""
    chances = by_markov_chain(count, active, rounds)
    mean = math.fsum(i * chance for i, chance in enumerate(chances))
    assert mean == pytest.approx(count * coverage(Uniform(), count, active, rounds), abs=1e-10)
    assert math.fsum(chances) == pytest.approx(1.0, abs=1e-12)
    terms = (
        (-1) ** j * math.comb(count, j) * Fraction(math.comb(count - j, active), math.comb(count, active)) ** rounds
        for j in range(count + 1)
    )
    assert chances[-1] == pytest.approx(float(sum(terms)), abs=1e-12)


def test_the_paper_s_runs_leave_half_of_the_layers_untouched() -> None:
    """T = 122 steps, K of 10 to 13, γ = 2, N = 32: 46 to 52 % never updated."""
    missed = [1 - coverage(Uniform(), 32, 2, rounds) for rounds in (math.ceil(122 / 13), math.ceil(122 / 10) - 1)]
    assert missed == pytest.approx([0.524, 0.461], abs=1e-3)


WEIGHTS = (1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0)
SAMPLERS: list[Draw] = [
    Uniform(),
    Reshuffle(),
    Fixed(),
    Fixed(blocks="last"),
    Bernoulli(),
    Weighted(weights=WEIGHTS),
    Weighted(weights=WEIGHTS, method="pivotal"),
    Adaptive(),
    CostAware(),
]
NAMES = [f"{type(s).__name__}-{getattr(s, 'method', '')}" for s in SAMPLERS]


@pytest.mark.parametrize("rounds", [1, 2, 3, 5])
@pytest.mark.parametrize("sampler", SAMPLERS, ids=NAMES)
def test_the_expected_share_is_that_of_many_runs(sampler: Draw, rounds: int) -> None:
    """Within 4.5 standard errors of 300 runs, each with its own seed."""
    shares = []
    for seed in range(300):
        reached = {b for i in range(rounds) for b in sampler.draw(7, 3, seed=seed, interval=i)}
        shares.append(len(reached) / 7)
    mean = math.fsum(shares) / len(shares)
    error = math.sqrt(math.fsum((s - mean) ** 2 for s in shares) / len(shares) / (len(shares) - 1))
    assert abs(mean - coverage(sampler, 7, 3, rounds)) <= 4.5 * error + 1e-12


@pytest.mark.parametrize(("count", "active"), [(5, 2), (7, 3), (8, 1), (6, 5), (4, 4), (5, 0)])
def test_the_expected_lowest_block_is_the_mean_over_all_sets(count: int, active: int) -> None:
    sets = list(combinations(range(count), active))
    mean = Fraction(sum(min(blocks, default=count) for blocks in sets), len(sets))
    assert expected_lowest(count, active) == pytest.approx(float(mean), abs=1e-14)


def test_the_lowest_coin_is_the_mean_over_all_outcomes() -> None:
    """Seven coins of 3/7: all 2^7 sets with their chances, the empty one counting 7."""
    share, mean = Fraction(3, 7), Fraction(0)
    for coins in product([0, 1], repeat=7):
        chance = math.prod(share if coin else 1 - share for coin in coins)
        mean += chance * next((i for i, coin in enumerate(coins) if coin), 7)
    assert lowest_drawn(Bernoulli(), 7, 3) == pytest.approx(float(mean), abs=1e-14)


@pytest.mark.parametrize("sampler", SAMPLERS, ids=NAMES)
def test_the_lowest_block_is_that_of_many_draws(sampler: Draw) -> None:
    """Other seeds than the estimate uses; both means have errors, below 2.5/√600 and 2.5/√512 blocks."""
    lows = [min(sampler.draw(7, 3, seed=seed, interval=0), default=7) for seed in range(1, 601)]
    assert abs(sum(lows) / 600 - lowest_drawn(sampler, 7, 3)) < 4.5 * 2.5 * math.sqrt(1 / 600 + 1 / 512)


def test_given_blocks_have_their_lowest() -> None:
    assert lowest_drawn(Fixed(blocks=(4, 2)), 7, 2) == 2.0
    assert lowest_drawn(Fixed(blocks=()), 7, 0) == 7.0


def test_a_draw_of_coins_is_bounded_by_its_quantile_and_others_by_their_size() -> None:
    assert most_drawn(Uniform(), 32, 2) == 2
    bound = most_drawn(Bernoulli(), 32, 2)
    above = sum(math.comb(32, k) * (1 / 16) ** k * (15 / 16) ** (32 - k) for k in range(bound + 1, 33))
    just_above = above + math.comb(32, bound) * (1 / 16) ** bound * (15 / 16) ** (32 - bound)
    assert above < 1e-3 <= just_above
    assert most_drawn(Bernoulli(), 4, 4) == 4
