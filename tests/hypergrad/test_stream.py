"""A stream agrees with whole runs at every depth, stops and goes on to the same bits, and carries tangents on."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import replace

import numpy as np
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
    with pytest.raises(UserError, match="chunk: got 2 of 6 directions; the run is not repeated, so all tangents are"):
        hg.Stream(problem(), PHI, replace(METHOD, directions=6, chunk=2))
    with pytest.raises(UserError, match="other shapes"):
        hg.Stream(problem(), PHI, METHOD).turn(PHI[:2])


def two_leaves(steps: int = 4, **changes) -> hg.Bilevel:
    fields = {
        "inner": lambda theta, phi, batch: ((theta - phi["a"]) ** 2).sum() + (theta * phi["b"]).sum(),
        "outer": lambda theta, phi: theta.square().sum(), "init": torch.zeros(2, dtype=torch.float64),
        "optimizer": hg.SGD(lr=0.1), "steps": steps,
    }  # fmt: skip
    return hg.Bilevel(**(fields | changes))


AT = {"a": torch.ones(2, dtype=torch.float64), "b": torch.zeros(2, dtype=torch.float64)}


def test_another_order_of_the_same_phi_is_refused_and_another_kind_of_dict_is_not():
    stream = hg.Stream(two_leaves(), AT, METHOD)
    for _ in range(2):
        stream.step()
    with pytest.raises(UserError, match="phi: got another nesting or order of its keys"):
        stream.turn({name: AT[name] for name in ("b", "a")})
    stream.turn(OrderedDict(AT))
    for _ in range(2):
        stream.step()
    truth = hg.hypergradient(two_leaves(), AT, hg.Reverse()).grad
    torch.testing.assert_close(dict(stream.peek().grad), truth, rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize(
    ("saved", "words"),
    [
        ({"optimizer": hg.Adam(lr=0.1)}, "state: got state.1, state.2, tangents.1, tangents.2 on one side alone"),
        ({"init": torch.zeros(1, dtype=torch.float64)}, r"state 'state.0': got torch.float64 of shape \(1,\)"),
        ({"init": torch.zeros(2)}, r"state 'state.0': got torch.float32 of shape \(2,\); this run has torch.float64"),
    ],
    ids=["Adam", "shape", "dtype"],
)
def test_the_state_of_another_problem_is_not_loaded(saved, words):
    held = hg.Stream(two_leaves(**saved), AT, METHOD).state_dict()
    with pytest.raises(UserError, match=words):
        hg.Stream(two_leaves(), AT, METHOD).load_state_dict(held)


def test_a_state_without_its_counters_is_not_loaded_and_foreign_names_do_no_harm():
    stream = hg.Stream(two_leaves(), AT, METHOD)
    held = stream.state_dict()
    stream.load_state_dict(held | {"epoch": torch.tensor(3)})
    with pytest.raises(UserError, match="state: got seed, sizes, steps on one side alone"):
        stream.load_state_dict({name: part for name, part in held.items() if "." in name})


def test_counts_may_be_numpys_and_are_not_below_zero():
    stream = hg.Stream(two_leaves(), AT, hg.ForwardGradient(directions=np.int64(4)), late=np.int64(0))
    stream.step()
    hg.Stream(two_leaves(), AT, hg.ForwardGradient(directions=4)).load_state_dict(load(save(stream.state_dict())))
    with pytest.raises(UserError, match="late: got -1; steps are counted; pass late >= 0"):
        hg.Stream(two_leaves(), AT, METHOD, late=-1)


def test_steps_beyond_those_of_the_problem_need_a_batch_and_a_fitting_rate():
    short = hg.Stream(two_leaves(2, batches=[0, 1]), AT, METHOD)
    by_leaf = hg.SGD(lr=lambda step: 0.1 if step < 2 else [0.1])
    odd = hg.Stream(two_leaves(2, optimizer=by_leaf), AT, METHOD)
    for stream, words in ((short, "batches: got a list of 2 for step 3"), (odd, "optimizer.lr: got values in another")):
        for _ in range(2):
            stream.step()
        with pytest.raises(UserError, match=words):
            stream.step()
