"""From weights to a gradient: unbiased, with an interval that covers and a control variate that converges."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cache

import pytest
import torch
from torch import Tensor

from oracles.quadratic import random
from sparing.hypergrad.forward_mode.directions import (
    Coordinate,
    Gaussian,
    Hadamard,
    Law,
    Orthonormal,
    Rademacher,
    Sphere,
)
from sparing.hypergrad.forward_mode.sampled import (
    Directions,
    combine,
    combine_with_control,
    confidence,
    draw_directions,
    exponent,
)

SIZE = 12
G = random(SIZE, seed=1) * torch.linspace(0.2, 2, SIZE, dtype=torch.float64)
H = random(SIZE, seed=2)
NONE = torch.zeros(SIZE, dtype=torch.float64)
INDEPENDENT: list[Law] = [Rademacher(), Gaussian(), Sphere()]
LIMITED: list[Law] = [Coordinate(), Orthonormal(), Hadamard()]


def name(law: object) -> str:
    return type(law).__name__


@dataclass(frozen=True)
class Given(Directions):
    """Directions made here: independent of the laws under test elsewhere, and a tenth of their cost."""

    table: Tensor = field(default_factory=lambda: NONE)

    def rows(self, numbers: Sequence[int]) -> Tensor:
        return self.table[list(numbers)]


def table(law: Law, count: int, generator: torch.Generator) -> Tensor:
    normal = torch.randn(count, SIZE, generator=generator, dtype=torch.float64)
    match law:
        case Rademacher():
            return normal.sign()
        case Sphere():
            return normal / normal.norm(dim=1, keepdim=True) * math.sqrt(SIZE)
        case Coordinate():
            rows = torch.randperm(SIZE, generator=generator)[:count]
            return math.sqrt(SIZE) * torch.eye(SIZE, dtype=torch.float64)[rows]
        case Orthonormal():
            return math.sqrt(SIZE) * torch.linalg.qr(normal.T).Q.T
        case Hadamard():
            two, whole = torch.tensor([[1.0, 1.0], [1.0, -1.0]], dtype=torch.float64), torch.ones(1, 1).double()
            for _ in range(4):
                whole = torch.kron(whole, two)
            return whole[torch.randperm(16, generator=generator)[:count], :SIZE] * normal[0].sign()
    return normal


@cache
def generator_of(law: Law, count: int) -> torch.Generator:
    return torch.Generator().manual_seed(SIZE * count)


@pytest.fixture(autouse=True)
def from_the_beginning() -> None:
    """Each test has the same numbers, whichever ran before."""
    generator_of.cache_clear()


def weights(law: Law, count: int, seed: int | None = None) -> tuple[Directions, Tensor]:
    """A draw and its weights: of the library for a seed, else the next of a stream made here."""
    if seed is not None:
        draw = draw_directions(law, count, G, seed)
    else:
        draw = Given(law, count, SIZE, 0, G, table(law, count, generator_of(law, count)))
    return draw, draw.rows(range(count)) @ G


def unbiased(samples: Tensor) -> None:
    """z-test per coordinate: of 12 one may reach 3.5 standard errors by chance once in 180 cases."""
    error = samples.std(0) / math.sqrt(len(samples))
    assert ((samples.mean(0) - G).abs() <= 3.5 * error + 1e-12).all()


@pytest.mark.parametrize("law", INDEPENDENT + LIMITED, ids=name)
def test_the_estimate_is_the_mean_of_w_v(law: Law) -> None:
    draw, found = weights(law, 5, seed=3)
    rows = draw.rows(range(5))
    estimate, cross = combine(draw, found, H)
    torch.testing.assert_close(estimate, torch.einsum("b,bn->n", found, rows) / 5, rtol=1e-13, atol=1e-14)
    torch.testing.assert_close(cross, rows @ H, rtol=1e-13, atol=1e-14)


def test_more_directions_than_a_block_are_summed_once_each() -> None:
    draw, found = weights(Rademacher(), 37, seed=3)
    expected = found @ draw.rows(range(37)) / 37
    torch.testing.assert_close(combine(draw, found, NONE)[0], expected, rtol=1e-13, atol=1e-14)


def test_lost_directions_are_left_out_of_sum_and_count() -> None:
    draw, found = weights(Rademacher(), 8, seed=4)
    rows = draw.rows(range(8))
    found[2], found[5] = math.nan, math.inf
    kept = [0, 1, 3, 4, 6, 7]
    torch.testing.assert_close(combine(draw, found, NONE)[0], found[kept] @ rows[kept] / 6, rtol=1e-13, atol=1e-14)


@pytest.mark.parametrize("law", INDEPENDENT + LIMITED, ids=name)
@pytest.mark.parametrize("count", [2, 7])
def test_a_control_variate_of_any_kind_leaves_no_bias(law: Law, count: int) -> None:
    """H has nothing to do with G; the multiplier must not see the direction that it multiplies."""
    unbiased(torch.stack([combine_with_control(*weights(law, count), H)[0] for _ in range(600)]))


@pytest.mark.parametrize("law", [Coordinate(), Orthonormal()], ids=name)
def test_all_directions_are_exact_beside_any_control_variate(law: Law) -> None:
    found, following = combine_with_control(*weights(law, SIZE, seed=5), H)
    torch.testing.assert_close(found, G, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(following, G, rtol=1e-12, atol=1e-12)


def test_the_control_variate_learns_what_the_directions_show() -> None:
    """h + P_V(g − h): right along the directions, unchanged across them."""
    draw, found = weights(Rademacher(), 4, seed=6)
    _, following = combine_with_control(draw, found, H)
    rows = draw.rows(range(4))
    torch.testing.assert_close(rows @ following, found, rtol=1e-11, atol=1e-11)
    across = torch.linalg.qr(rows.T, mode="complete").Q[:, 4:].T
    torch.testing.assert_close(across @ following, across @ H, rtol=1e-11, atol=1e-11)


def test_a_stale_control_variate_costs_little() -> None:
    """The multiplier falls to zero where h is of no use; without it the error would be (N − 1)/b·‖g − h‖²."""
    far = -20 * G
    errors = [(combine_with_control(*weights(Rademacher(), 6), far)[0] - G).square().sum().item() for _ in range(300)]
    assert sum(errors) / 300 < 1.5 * (SIZE - 1) / 6 * G.square().sum()


@pytest.mark.parametrize("law", INDEPENDENT + LIMITED, ids=name)
def test_the_estimate_of_the_squared_norm_is_unbiased(law: Law) -> None:
    found = []
    for _ in range(600):
        draw, w = weights(law, 4)
        found.append(confidence(draw, w, NONE, NONE[:4])["norm_squared"])
    sample = torch.tensor(found, dtype=torch.float64)
    assert abs(sample.mean() - G.square().sum()) <= 3.5 * sample.std() / math.sqrt(600)


@pytest.mark.parametrize("law", [*INDEPENDENT, Hadamard()], ids=name)
@pytest.mark.parametrize("count", [4, 16])
def test_the_interval_covers_at_least_as_often_as_it_says(law: Law, count: int) -> None:
    hits = 0
    for _ in range(400):
        draw, w = weights(law, count)
        interval = confidence(draw, w, NONE, torch.zeros(count, dtype=torch.float64))["norm_squared_interval"]
        assert interval is not None
        hits += interval[0] <= G.square().sum() <= interval[1]
    # 95 % of 400 less 3 standard errors of a binomial
    assert hits >= 400 * 0.95 - 3 * math.sqrt(400 * 0.95 * 0.05)


def test_the_interval_of_gaussian_directions_is_no_wider_than_it_need_be() -> None:
    hits = 0
    for _ in range(400):
        draw, w = weights(Gaussian(), 8)
        low, high = confidence(draw, w, NONE, NONE[:8])["norm_squared_interval"]
        hits += low <= G.square().sum() <= high
    assert hits <= 400 * 0.95 + 3 * math.sqrt(400 * 0.95 * 0.05)


@pytest.mark.parametrize("law", INDEPENDENT + LIMITED, ids=name)
@pytest.mark.parametrize("exact", [False, True])
def test_the_expected_cosine_is_that_of_the_estimate_with_its_exact_part(law: Law, exact: bool) -> None:
    known = 0.5 * H + 0.5 * G if exact else NONE  # the cross term counts
    cosines, reported = [], []
    for _ in range(200):
        draw, w = weights(law, 8)
        rows = draw.rows(range(8))
        cosines.append(torch.cosine_similarity(combine(draw, w, known)[0] + known, G + known, dim=0).item())
        reported.append(confidence(draw, w, known, rows @ known)["cosine"])
    # a ratio of means for the mean of a ratio: 3 % at b ≥ 8 (Coordinate: root mean square, of an uneven g)
    assert sum(reported) / 200 == pytest.approx(sum(cosines) / 200, rel=0.06)


def test_neither_lost_directions_nor_coordinates_have_an_interval() -> None:
    draw, w = weights(Rademacher(), 3, seed=0)
    sure = confidence(draw, torch.full_like(w, math.nan), NONE, NONE[:3])
    assert math.isnan(sure["norm_squared"])
    draw, w = weights(Coordinate(), 4, seed=0)
    assert confidence(draw, w, NONE, NONE[:4])["norm_squared_interval"] is None
    assert sure["norm_squared_interval"] is None


def test_growth_per_step_is_the_slope_of_its_logarithm() -> None:
    assert exponent([0.5 * 1.3**t for t in range(10)]) == pytest.approx(math.log(1.3), rel=1e-12)
    assert exponent([9.0, 9.0, 9.0, 9.0, 1.0, 2.0, 4.0, 8.0]) == pytest.approx(math.log(2), rel=1e-12)
    assert exponent([1.0, 2.0]) is None
    assert exponent([0.0] * 9) is None
    assert exponent([math.inf] * 9) is None
