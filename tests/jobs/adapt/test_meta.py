"""Meta-training: the same windows for all, the same bits after a pause, nothing from a run that diverged."""

from __future__ import annotations

import itertools
import math
from types import SimpleNamespace

import pytest
import torch

from sparing.jobs.adapt import meta
from sparing.jobs.adapt.arms import arm
from sparing.jobs.adapt.settings import Adapt

pytestmark = pytest.mark.filterwarnings("ignore:.*torch.jit.script.*:DeprecationWarning")  # torch's own jvp rules

SMALL = Adapt(documents=2, width=4, steps=3, directions=2, lr=0.05, context=20, length=100)


def begun(lm, settings=SMALL):
    return meta.begin(33, settings, dtype=torch.float64)


@pytest.mark.parametrize("name", ["rgu", "fg-psi", "checkpointed"])
def test_a_course_goes_on_to_the_same_bits(lm, data, name):
    whole, way = begun(lm), arm(name, SMALL)
    rows = [meta.outer_step_(whole, lm, data, SMALL, way) for _ in range(3)]
    first = begun(lm)
    meta.outer_step_(first, lm, data, SMALL, way)
    meta.keep_(first, 3.0)
    tree = meta.state_of(first)
    second = begun(lm)
    meta.restore_(second, tree)
    again = [meta.outer_step_(second, lm, data, SMALL, way) for _ in range(2)]
    assert [row["outer"] for row in again] == [row["outer"] for row in rows[1:]]
    assert all(torch.equal(whole.phi[name], second.phi[name]) for name in whole.phi)
    assert second.step == 3
    assert second.objective == 3.0
    assert all(torch.equal(first.phi[name], second.best[name]) for name in first.phi)


def test_exact_methods_agree_where_they_see_the_same_documents(lm, data):
    ends = []
    for name in ("rgu", "checkpointed"):  # two documents are fewer than six, so both see the same window
        course = begun(lm)
        ends.append(meta.outer_step_(course, lm, data, SMALL, arm(name, SMALL)))
    assert ends[0]["outer"] == ends[1]["outer"]
    assert ends[0]["norm"] == pytest.approx(ends[1]["norm"], rel=1e-6)  # Llama normalises in float32


def test_rgu_sees_six_documents():
    assert arm("rgu", Adapt()).documents == 6
    assert arm("checkpointed", Adapt()).documents == 12
    assert not arm("fg-phi", Adapt()).bottleneck


def test_a_hypergradient_that_is_not_finite_changes_nothing(lm, data, monkeypatch):
    course = begun(lm)
    before = {name: value.clone() for name, value in course.phi.items()}

    slopes = {name: torch.full_like(value, math.nan) for name, value in before.items()}
    broken = SimpleNamespace(value=torch.tensor(math.nan), grad=slopes)
    monkeypatch.setattr(meta, "hypergradient", lambda *args, **options: broken)
    row = meta.outer_step_(course, lm, data, SMALL, arm("checkpointed", SMALL))
    assert not row["applied"]
    assert course.step == 1
    assert all(torch.equal(before[name], course.phi[name]) for name in before)


def test_time_and_steps_end_a_course(lm):
    course = begun(lm)
    assert not meta.ended(course, SMALL)
    course.seconds = SMALL.seconds
    assert meta.ended(course, SMALL)
    course.seconds, course.step = 0.0, 3
    assert meta.ended(course, SMALL)


def test_the_best_network_is_kept_as_it_was(lm):
    course = begun(lm)
    meta.keep_(course, math.nan)  # a run that diverged is better than nothing, and worse than anything
    meta.keep_(course, 2.0)
    best = course.phi["head.1.bias"].clone()
    course.phi["head.1.bias"].add_(1.0)
    meta.keep_(course, 2.5)
    assert torch.equal(course.best["head.1.bias"], best)
    assert course.objective == 2.0
    meta.keep_(course, 1.5)
    assert torch.equal(course.best["head.1.bias"], best + 1.0)


def test_looks_are_spread_over_the_budget():
    shares = [step / 10 for step in range(11)]
    found = [meta.due(a, b, 5) for a, b in itertools.pairwise(shares)]
    assert found == [False, True] * 5
    assert not meta.due(1.0, 1.3, 5)
