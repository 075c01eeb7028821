"""Updates of masks against sorted lists, schedules against their formulas, κ against integrals and samples."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from sparing.errors import UserError
from sparing.scaling.masks.dynamic import GMP, SET, RigL, energy, exchange, prefill, prune, retained_gaussian

TABLE = {1 / 2: 0.929, 1 / 4: 0.724, 1 / 8: 0.502, 1 / 16: 0.325, 1 / 32: 0.200, 1 / 64: 0.119, 1 / 128: 0.0695}
"""κ of a magnitude mask of a Gaussian (spec 6.2)."""


def layer(seed: int = 0, shape: tuple[int, ...] = (6, 8), density: float = 0.4):
    generator = torch.Generator().manual_seed(seed)
    weight = torch.randn(shape, generator=generator, dtype=torch.float64)
    mask = torch.rand(shape, generator=generator) < density
    return weight * mask, mask, torch.randn(shape, generator=generator, dtype=torch.float64)


def by_hand(weight, mask, score, count):
    """Lists and ``sorted``: what drops and grows, by flat index."""
    w, live, s = weight.flatten().tolist(), mask.flatten().tolist(), score.flatten().tolist()
    drop = sorted((i for i in range(len(w)) if live[i]), key=lambda i: (abs(w[i]), i))[:count]
    kept = {i for i in range(len(w)) if live[i]} - set(drop)
    grow = sorted((i for i in range(len(w)) if i not in kept), key=lambda i: (-s[i], i))[:count]
    return kept | set(grow)


@settings(max_examples=60)
@given(seed=st.integers(0, 1000), fraction=st.floats(0, 0.9), density=st.floats(0.05, 1.0))
def test_exchange_is_what_sorted_lists_give_and_keeps_the_count(seed, fraction, density):
    weight, mask, gradient = layer(seed, density=density)
    new = exchange(weight, mask, gradient.abs(), fraction=fraction)
    assert set(new.flatten().nonzero().flatten().tolist()) == by_hand(
        weight, mask, gradient.abs(), int(fraction * int(mask.sum()))
    )
    assert new.sum() == mask.sum()


def test_rigl_grows_the_largest_gradients_and_ignores_their_sign():
    weight, mask, gradient = layer()
    dead = (~mask).nonzero()[0]
    gradient[tuple(dead)] = -1e3
    new = RigL(every=10).update(weight, mask, gradient, step=10, steps=100, generator=torch.Generator())
    assert new[tuple(dead)]
    assert new.sum() == mask.sum()


def test_set_grows_at_random_from_its_stream_only():
    weight, mask, _ = layer(shape=(30, 30))

    def grown(seed):
        generator = torch.Generator().manual_seed(seed)
        return SET().update(weight, mask, None, step=100, steps=1000, generator=generator) & ~mask

    before = torch.get_rng_state()
    assert torch.equal(grown(0), grown(0))
    assert not torch.equal(grown(0), grown(1))
    assert torch.equal(before, torch.get_rng_state())
    # of k grown entries a share about (masked)/(masked + dropped) is new; 0 would mean that nothing grows
    assert grown(0).sum() > 0.5 * int(0.3 * int(mask.sum()))


@settings(max_examples=40)
@given(seed=st.integers(0, 1000), density=st.floats(0.01, 1.0))
def test_prune_keeps_the_largest_and_never_revives(seed, density):
    weight, mask, _ = layer(seed)
    new = prune(weight, mask, density)
    count = min(int(mask.sum()), max(1, round(density * mask.numel())))
    assert int(new.sum()) == count
    assert not (new & ~mask).any()
    if count < int(mask.sum()):
        assert weight[new].abs().min() >= weight[mask & ~new].abs().max()


def test_rigl_schedule():
    """α/2 (1 + cos πt/T_end) at its ends and middle."""
    method = RigL(share=0.4, every=100, until=0.5)
    assert [method.fraction(t, 1000) for t in (0, 250, 500, 900)] == pytest.approx([0.4, 0.2, 0.0, 0.0], abs=1e-15)
    assert [t for t in range(1000) if method.due(t, 1000)] == [100, 200, 300, 400]
    assert method.density(100, 1000) is None


def test_set_schedule():
    method = SET(share=0.25, every=7, until=0.5)
    assert [t for t in range(60) if method.due(t, 60)] == [7, 14, 21, 28]
    assert method.fraction(3, 60) == 0.25


def test_gmp_schedule():
    """Cubic between the ends, zero slope at the last, and the final density is reached."""
    method = GMP(final=0.1, start=0.25, until=0.75, every=30)
    assert [t for t in range(400) if method.due(t, 400)] == [130, 160, 190, 220, 250, 280, 300]
    assert method.density(0, 400) == method.density(100, 400) == 1.0
    assert method.density(200, 400) == pytest.approx(0.1 + 0.9 / 8, rel=1e-15)
    assert method.density(300, 400) == method.density(399, 400) == 0.1
    assert GMP(final=0.1, until=1.0).due(399, 400)


def retained(weight, mask):
    """Share of the second moment that a mask keeps."""
    return energy(weight, mask) / energy(weight, torch.ones_like(mask))


@pytest.mark.parametrize("density", TABLE)
def test_retained_variance_of_a_gaussian(density):
    """Formula against the published table, and samples against the formula."""
    kappa = retained_gaussian(density)
    assert kappa == pytest.approx(TABLE[density], abs=6e-4)  # the table has three digits
    n = 400_000
    weight = torch.randn(n, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    found = retained(weight, prune(weight, torch.ones(n, dtype=torch.bool), density))
    # Var of the mean of z²·1[|z|>t] is below E z⁴ / n = 3/n; the mean of all z² has √(2/n): 5 errors together
    assert abs(found - kappa) <= 5 * math.sqrt(3 / n)


def test_retained_variance_against_an_integral():
    t = torch.linspace(1.0, 12.0, 2_000_001, dtype=torch.float64)
    density = 2 * torch.trapezoid(torch.exp(-t * t / 2) / math.sqrt(2 * math.pi), t).item()
    kappa = 2 * torch.trapezoid(t * t * torch.exp(-t * t / 2) / math.sqrt(2 * math.pi), t).item()
    assert retained_gaussian(density) == pytest.approx(kappa, rel=1e-9)  # the rule errs as step² = 3e-11
    assert retained_gaussian(1.0) == 1.0


def test_prefill_is_the_row_mean_or_the_layer_mean_or_the_floor():
    second = torch.tensor([[1.0, 3.0, 0.0, 0.0], [0.0, 0.0, 0.0, 0.0]], dtype=torch.float64)
    kept = torch.tensor([[True, True, False, False], [False] * 4])
    grown = torch.tensor([[False, False, True, False], [True, False, False, False]])
    expected = torch.tensor([[1.0, 3.0, 2.0, 0.0], [2.0, 0.0, 0.0, 0.0]], dtype=torch.float64)
    assert torch.equal(prefill(second, kept, grown), expected)
    floor = torch.full_like(second, 2.5)
    assert prefill(second, kept, grown, floor)[0].tolist() == [1.0, 3.0, 2.5, 0.0]


@pytest.mark.parametrize(
    "call",
    [
        lambda: RigL(share=0.0),
        lambda: SET(share=1.0),
        lambda: RigL(every=0),
        lambda: RigL(until=0.0),
        lambda: GMP(final=0.0),
        lambda: GMP(final=0.5, initial=0.4),
        lambda: GMP(final=0.5, start=0.8),
        lambda: retained_gaussian(0.0),
    ],
)
def test_refusals(call):
    with pytest.raises(UserError):
        call()
