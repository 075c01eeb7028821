"""An outer step: a function of (seed, step), Adam with a falling rate, images kept between 0 and 1, restorable."""

from __future__ import annotations

import dataclasses

import pytest
import torch
import torch.nn.functional as F

from sparing.errors import RunError
from sparing.jobs.condense import state as module
from sparing.jobs.condense.inputs import draw
from sparing.jobs.condense.methods import build_method
from sparing.jobs.condense.net import init_weights, logits
from sparing.jobs.condense.state import (
    hypergradient_at,
    inner_problem,
    problem_at,
    restore_,
    start,
    take_step_,
)
from sparing.seeds import stream


@pytest.fixture
def settings(small):
    return dataclasses.replace(small, method="reverse")


def test_it_may_begin_with_grey(settings, inputs) -> None:
    assert torch.equal(start(dataclasses.replace(settings, start="grey"), inputs).images.unique(), torch.tensor([0.5]))


def test_it_begins_with_uniform_noise_of_its_seed(settings, inputs) -> None:
    state, other = start(settings, inputs), start(dataclasses.replace(settings, seed=1), inputs)
    assert state.images.shape == (2, 1, 16, 16)
    assert 0 <= state.images.min() < 0.05
    assert 0.95 < state.images.max() <= 1
    assert torch.equal(state.images, start(settings, inputs).images)
    assert not torch.equal(state.images, other.images)
    assert start(dataclasses.replace(settings, per_class=3), inputs).labels.tolist() == [0, 0, 0, 1, 1, 1]


def test_the_hypergradient_is_that_of_training_by_torch(settings, inputs) -> None:
    """The whole outer loss, with torch's own SGD arithmetic, differentiated by plain autograd."""
    settings = dataclasses.replace(settings, shift=0)  # shifts are compared with a loop of their own in test_learned
    state = start(settings, inputs)
    images = state.images.clone().requires_grad_()
    weights = init_weights(state.shape, stream(0, "condense", "net", 2))
    moments = {name: torch.zeros_like(weight) for name, weight in weights.items()}
    weights = {name: weight.requires_grad_() for name, weight in weights.items()}
    for rate in (0.1, 0.075, 0.025):  # half a cosine over three steps: 1, 3/4, 1/4
        squares = sum((weight**2).sum() for weight in weights.values())
        loss = F.cross_entropy(logits(weights, images), state.labels) + 1e-4 * squares
        slopes = torch.autograd.grad(loss, list(weights.values()), create_graph=True)
        moments = {name: 0.9 * moments[name] + slope for name, slope in zip(weights, slopes, strict=True)}
        weights = {name: weight - rate * moments[name] for name, weight in weights.items()}
    real, targets = draw(inputs.train, 16, stream(0, "condense", "real", 2))
    value = F.cross_entropy(logits(weights, real), targets)
    (expected,) = torch.autograd.grad(value, images)
    result = hypergradient_at(state, 2, build_method(settings))
    # float32, three steps of a small net in another order of sums
    torch.testing.assert_close(result.value, value.detach(), rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(result.grad["images"], expected, rtol=1e-3, atol=1e-6 * float(expected.norm()) + 1e-8)


def test_each_outer_step_has_its_own_net_and_batch(settings, inputs) -> None:
    state = start(settings, inputs)
    one, same, other = (problem_at(state, step) for step in (1, 1, 2))
    assert all(torch.equal(one.init[name], same.init[name]) for name in one.init)
    assert not torch.equal(one.init["linear.weight"], other.init["linear.weight"])
    theta, phi = one.init, {"images": state.images}
    assert one.outer(theta, phi) == same.outer(theta, phi) != other.outer(theta, phi)


def test_a_step_is_adams_then_a_projection(settings, inputs) -> None:
    """Adam's first step moves every pixel by the rate against the sign of its slope; what leaves 0 to 1 comes back."""
    state = start(settings, inputs)
    before, slope = state.images.clone(), hypergradient_at(state, 0, build_method(settings)).grad["images"]
    row = take_step_(state)
    moved = (before - 0.1 * slope.sign()).clamp(0, 1)
    sure = slope.abs() > 1e-5  # where Adam's ε of 1e-8 does not matter
    torch.testing.assert_close(state.images[sure], moved[sure], rtol=0, atol=1e-3)
    assert 0 <= state.images.min() <= state.images.max() <= 1
    assert (row["step"], state.step) == (1, 1)
    assert row["grad_norm"] == pytest.approx(slope.norm().item(), rel=1e-6)


def test_the_outer_rate_falls_to_zero_in_a_line(settings, inputs) -> None:
    state, rates = start(settings, inputs), []
    for _ in range(4):
        take_step_(state)
        rates.append(state.adam.param_groups[0]["lr"])
    assert rates == pytest.approx([0.1, 0.075, 0.05, 0.025])


@pytest.mark.parametrize("method", ["reverse", "forward-gradient", "two-phase"])
def test_a_restored_course_goes_on_to_the_same_bits(settings, inputs, method: str) -> None:
    settings = dataclasses.replace(settings, method=method)
    whole, first = start(settings, inputs), start(settings, inputs)
    for _ in range(4):
        take_step_(whole)
    for _ in range(2):
        take_step_(first)
    second = start(settings, inputs)
    restore_(second, first.tree())
    for _ in range(2):
        take_step_(second)
    assert torch.equal(second.images, whole.images)


def test_a_hypergradient_that_is_not_finite_stops_the_run(settings, inputs, monkeypatch) -> None:
    state = start(settings, inputs)
    before = state.images.clone()
    found = hypergradient_at(state, 0, build_method(settings))
    found.grad["images"][0] = float("nan")
    monkeypatch.setattr(module, "hypergradient_at", lambda *_: found)
    with pytest.raises(RunError, match="outer step 0"):
        take_step_(state)
    assert torch.equal(state.images, before)


def test_the_inner_rate_falls_along_half_a_cosine(settings, inputs) -> None:
    state = start(settings, inputs)
    run = inner_problem(settings, state.labels, {}, steps=4, lr=1.0)
    assert [round(run["optimizer"].lr(step), 4) for step in range(4)] == [1.0, 0.8536, 0.5, 0.1464]
