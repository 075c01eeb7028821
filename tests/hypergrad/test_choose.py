"""The planner picks exact methods while they fit, samples where they do not, and says why."""

from __future__ import annotations

import pytest
import torch

from sparing import hypergrad as hg
from sparing.errors import UserError
from sparing.hypergrad.predict import predict

X = torch.randn(32, 200, generator=torch.Generator().manual_seed(0))
PHI = torch.ones(32)


def problem(steps: int = 30) -> hg.Bilevel:
    return hg.Bilevel(
        inner=lambda theta, phi, batch: (phi * (X @ theta).square().mean(1)).mean(),
        outer=lambda theta, phi: theta.square().sum(),
        init=torch.ones(200, 16),
        optimizer=hg.SGD(lr=0.01, momentum=0.9),
        steps=steps,
    )


def test_with_room_the_pick_is_reverse():
    choice = hg.choose(problem(), PHI, memory="1GB")
    assert choice.pick == hg.Reverse()
    assert choice.rows[0]["method"] == "reverse"
    assert "exact" in choice.why


def test_with_less_room_it_replays():
    whole = predict(problem(), PHI, hg.Reverse()).bytes
    choice = hg.choose(problem(), PHI, memory=int(0.9 * whole))
    assert isinstance(choice.pick, hg.Checkpointed)
    picked = next(option for option in choice.options if option.price.method == choice.pick)
    assert picked.price.bytes <= 0.9 * whole
    reverse = next(option for option in choice.options if option.price.method == hg.Reverse())
    assert not reverse.fits
    assert "times the memory" in reverse.verdict


def test_where_time_is_short_it_samples():
    choice = hg.choose(problem(200), PHI, memory=predict(problem(200), PHI, hg.Checkpointed(states=1)).bytes)
    assert isinstance(choice.pick, hg.Checkpointed | hg.ForwardGradient)
    with pytest.raises(UserError, match="leanest option"):
        hg.choose(problem(), PHI, memory=10_000)


def test_few_elements_are_taken_forward_where_nothing_else_fits():
    task = hg.Bilevel(
        inner=lambda theta, phi, batch: phi[0] * (X @ theta).square().mean() + phi[1] * theta.square().mean(),
        outer=lambda theta, phi: theta.square().sum(),
        init=torch.ones(200, 16), optimizer=hg.SGD(lr=0.01), steps=5,
    )  # fmt: skip
    choice = hg.choose(task, torch.ones(2), memory="1GB")
    forward = next(option for option in choice.options if isinstance(option.price.method, hg.Forward))
    assert forward.price.exact


def test_biased_methods_are_listed_and_never_picked():
    choice = hg.choose(problem(), PHI, memory="1GB")
    free = next(option for option in choice.options if option.price.method == hg.HessianFree())
    assert "nobody knows" in free.verdict
    assert all(option.verdict for option in choice.options)


def test_the_predicted_cosine_of_a_sample_is_what_is_measured():
    """Mean over 200 seeds against sqrt(b/(b+N−1)): within 0.03, three standard errors and the bias of a ratio."""
    method = hg.ForwardGradient(directions=8)
    exact = hg.hypergradient(problem(4), PHI, hg.Reverse()).grad
    found = [hg.hypergradient(problem(4), PHI, method, seed=seed).grad for seed in range(200)]
    mean = torch.stack([torch.cosine_similarity(g, exact, dim=0) for g in found]).mean()
    assert predict(problem(4), PHI, method).cosine == pytest.approx(float(mean), abs=0.03)


def test_a_black_box_leaves_only_differences():
    choice = hg.choose(hg.BlackBox(solve=lambda phi: phi**2, outer=lambda u, phi: u.sum()), PHI, memory="1GB")
    assert isinstance(choice.pick, hg.ZerothOrder)
    assert choice.pick.directions == 32
    assert "black box" in choice.why
