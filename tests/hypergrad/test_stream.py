"""A stream agrees with whole runs at every depth, stops and goes on to the same bits, and carries tangents on."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from safetensors.torch import load, save

from sparing import hypergrad as hg
from sparing.errors import UserError

X = torch.linspace(-1, 1, 12, dtype=torch.float64).reshape(4, 3)
METHOD = hg.ForwardGradient(directions=4, law=hg.Orthonormal())


def problem(steps: int = 6, optimizer: hg.SGD | hg.Adam | None = None) -> hg.Bilevel:
    return hg.Bilevel(
        inner=lambda theta, phi, batch: (phi * (torch.tanh(X @ theta) - batch).square()).mean(),
        outer=lambda theta, phi: (X @ theta).square().sum(),
        init=torch.tensor([0.3, -0.2, 0.5], dtype=torch.float64),
        optimizer=optimizer or hg.SGD(lr=0.2, momentum=0.9),
        steps=steps,
        batches=lambda step: torch.tensor([0.1, 0.5, -0.3, 0.2], dtype=torch.float64) * (1 + step),
    )


PHI = torch.tensor([0.5, 1.0, 1.5, 2.0], dtype=torch.float64)


@pytest.mark.parametrize("optimizer", [hg.SGD(lr=0.2, momentum=0.9), hg.Adam(lr=0.05)], ids=["sgd", "adam"])
def test_every_depth_of_one_stream_is_the_reverse_gradient_of_a_run_of_that_depth(optimizer):
    stream = hg.Stream(problem(optimizer=optimizer), PHI, METHOD)
    for depth in range(1, 7):
        stream.step()
        whole = hg.hypergradient(problem(depth, optimizer), PHI, hg.Reverse())
        seen = stream.peek()
        # float64, a few hundred operations: rounding only
        torch.testing.assert_close(seen.grad, whole.grad, rtol=1e-12, atol=1e-14)
        torch.testing.assert_close(seen.value, whole.value, rtol=1e-13, atol=0)
        assert seen.report.steps == depth
        assert len(seen.report.growth) == depth


def test_peeking_leaves_the_stream_as_it_was():
    looked, blind = hg.Stream(problem(), PHI, METHOD), hg.Stream(problem(), PHI, METHOD)
    for _ in range(4):
        looked.step()
        looked.peek()
        blind.step()
    assert torch.equal(looked.peek().grad, blind.peek().grad)


def test_a_sampled_stream_equals_the_sampled_run_of_the_same_seed():
    method = hg.ForwardGradient(directions=3)
    stream = hg.Stream(problem(), PHI, method, seed=4)
    for _ in range(6):
        stream.step()
    whole = hg.hypergradient(problem(), PHI, method, seed=4)
    torch.testing.assert_close(stream.peek().grad, whole.grad, rtol=1e-13, atol=1e-15)


def test_saved_and_loaded_it_goes_on_to_the_same_bits():
    straight, broken = hg.Stream(problem(), PHI, METHOD, seed=1), hg.Stream(problem(), PHI, METHOD, seed=1)
    for _ in range(3):
        straight.step()
        broken.step()
    held = load(save(broken.state_dict()))
    resumed = hg.Stream(problem(), PHI, METHOD, seed=1)
    resumed.load_state_dict(held)
    for _ in range(3):
        straight.step()
        resumed.step()
    assert torch.equal(straight.peek().grad, resumed.peek().grad)
    assert straight.peek().report.growth == resumed.peek().report.growth


def test_another_seed_is_not_loaded():
    held = hg.Stream(problem(), PHI, METHOD, seed=1).state_dict()
    with pytest.raises(UserError, match="another seed"):
        hg.Stream(problem(), PHI, METHOD, seed=2).load_state_dict(held)


@pytest.mark.parametrize(
    ("method", "late"), [(hg.ForwardGradient(directions=4, law=hg.Rademacher()), 0), (METHOD, 2)], ids=["law", "late"]
)
def test_tangents_along_other_directions_are_not_loaded(method, late):
    stream = hg.Stream(problem(), PHI, METHOD)
    stream.step()
    with pytest.raises(UserError, match="another seed, law or number of directions"):
        hg.Stream(problem(), PHI, method, late=late).load_state_dict(stream.state_dict())


def test_carried_over_a_window_the_gradient_is_that_of_the_whole_run_dropped_that_of_the_window():
    carried, dropped = hg.Stream(problem(), PHI, METHOD), hg.Stream(problem(), PHI, METHOD)
    for stream, carry in ((carried, True), (dropped, False)):
        for step in range(6):
            if step == 3:
                stream.turn(PHI, carry=carry)  # the same φ: carrying is then exact
            stream.step()
    torch.testing.assert_close(
        carried.peek().grad, hg.hypergradient(problem(), PHI, hg.Reverse()).grad, rtol=1e-12, atol=1e-14
    )
    truncated = hg.hypergradient(problem(), PHI, hg.Truncated(steps=3)).grad
    torch.testing.assert_close(dropped.peek().grad, truncated, rtol=1e-12, atol=1e-14)


def test_a_late_start_is_truncation():
    stream = hg.Stream(problem(), PHI, METHOD, late=2)
    for _ in range(6):
        stream.step()
    truncated = hg.hypergradient(problem(), PHI, hg.Truncated(steps=4)).grad
    torch.testing.assert_close(stream.peek().grad, truncated, rtol=1e-12, atol=1e-14)


def test_width_changes_nothing_but_memory():
    whole, pieces = (hg.Stream(problem(), PHI, replace(METHOD, width=width)) for width in (None, 3))
    for _ in range(6):
        whole.step()
        pieces.step()
    torch.testing.assert_close(whole.peek().grad, pieces.peek().grad, rtol=1e-13, atol=1e-15)


def test_what_needs_a_whole_run_is_refused():
    for method in (replace(METHOD, tail=2), replace(METHOD, guides=(hg.HessianFree(),))):
        with pytest.raises(UserError, match="whole run"):
            hg.Stream(problem(), PHI, method)
    with pytest.raises(UserError, match="other shapes"):
        hg.Stream(problem(), PHI, METHOD).turn(PHI[:2])
