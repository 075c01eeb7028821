"""Meta-training: the same windows for all, the same bits after a pause, nothing from a run that diverged."""

from __future__ import annotations

import dataclasses
import itertools
import math

import pytest
import torch

from sparing.jobs.adapt import meta
from sparing.jobs.adapt.meta import arm_of
from sparing.jobs.adapt.settings import Adapt, Forward

pytestmark = pytest.mark.filterwarnings("ignore:.*torch.jit.script.*:DeprecationWarning")  # torch's own jvp rules

SMALL = Adapt(
    documents=2, width=4, steps=3, forward=Forward(directions=2), inner_lr=0.05, question_length=20, length=100
)


def fresh_state(lm, settings=SMALL):
    return meta.start(33, settings, dtype=torch.float64)


@pytest.mark.parametrize("name", ["rgu", "fg-psi", "checkpointed"])
def test_a_course_goes_on_to_the_same_bits(lm, data, name):
    whole, arm = fresh_state(lm), arm_of(name, SMALL)
    rows = [meta.outer_step_(whole, lm, data, SMALL, arm) for _ in range(3)]
    first = fresh_state(lm)
    meta.outer_step_(first, lm, data, SMALL, arm)
    meta.keep_best_(first, 3.0)
    tree = first.tree()
    second = fresh_state(lm)
    meta.restore_(second, tree)
    again = [meta.outer_step_(second, lm, data, SMALL, arm) for _ in range(2)]
    assert [row["outer"] for row in again] == [row["outer"] for row in rows[1:]]
    assert all(torch.equal(whole.phi[name], second.phi[name]) for name in whole.phi)
    assert second.step == 3
    assert second.objective == 3.0
    assert all(torch.equal(first.phi[name], second.best[name]) for name in first.phi)


def test_exact_methods_agree_where_they_see_the_same_documents(lm, data):
    ends = []
    for name in ("rgu", "checkpointed"):  # two documents are fewer than six, so both see the same window
        state = fresh_state(lm)
        ends.append(meta.outer_step_(state, lm, data, SMALL, arm_of(name, SMALL)))
    assert ends[0]["outer"] == ends[1]["outer"]
    assert ends[0]["norm"] == pytest.approx(ends[1]["norm"], rel=1e-6)  # Llama normalises in float32


def test_rgu_sees_six_documents():
    assert arm_of("rgu", Adapt()).documents == 6
    assert arm_of("checkpointed", Adapt()).documents == 12
    assert not arm_of("fg-phi", Adapt()).bottleneck


@pytest.mark.parametrize("name", ["fg-psi", "checkpointed"])
def test_a_window_that_overflows_changes_nothing_and_is_counted(lm, data, name):
    wild = dataclasses.replace(SMALL, inner_lr=1e200, inner_clip=1e300)
    state = fresh_state(lm, wild)
    before = {name: value.clone() for name, value in state.phi.items()}
    row = meta.outer_step_(state, lm, data, wild, arm_of(name, wild))
    assert (row["applied"], row["step"], state.step) == (False, 1, 1)
    assert math.isnan(row["outer"])
    assert row["seconds"] == state.seconds > 0
    assert all(torch.equal(before[name], state.phi[name]) for name in before)
    assert not state.optimizer.state


def test_time_and_steps_end_a_course(lm):
    state = fresh_state(lm)
    assert not meta.ended(state, SMALL)
    state.seconds = SMALL.seconds
    assert meta.ended(state, SMALL)
    state.seconds, state.step = 0.0, 3
    assert meta.ended(state, SMALL)


def test_the_best_network_is_kept_as_it_was(lm):
    state = fresh_state(lm)
    meta.keep_best_(state, math.nan)  # a run that diverged is better than nothing, and worse than anything
    meta.keep_best_(state, 2.0)
    best = state.phi["head.1.bias"].clone()
    state.phi["head.1.bias"].add_(1.0)
    meta.keep_best_(state, 2.5)
    assert torch.equal(state.best["head.1.bias"], best)
    assert state.objective == 2.0
    meta.keep_best_(state, 1.5)
    assert torch.equal(state.best["head.1.bias"], best + 1.0)


def test_looks_are_spread_over_the_budget():
    shares = [step / 10 for step in range(11)]
    found = [meta.evaluation_due(a, b, 5) for a, b in itertools.pairwise(shares)]
    assert found == [False, True] * 5
    assert not meta.evaluation_due(1.0, 1.3, 5)
