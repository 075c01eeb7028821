"""The planner picks exact methods while they fit, samples where they do not, and says why."""

from __future__ import annotations

import importlib
import time
from dataclasses import replace
from itertools import count
from types import SimpleNamespace

import pytest
import torch

from sparing import hypergrad as hg
from sparing.errors import UserError
from sparing.hypergrad.planning.predict import Price, predict, prices

X = torch.randn(32, 200, generator=torch.Generator().manual_seed(0))
PHI = torch.ones(32)
PLANNER = importlib.import_module("sparing.hypergrad.planning.choose")


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


def lean(elements: int) -> tuple[hg.Bilevel, torch.Tensor, int]:
    """A task and a memory that holds one tangent of Adam, but not the least replay: three states and a graph."""
    task = hg.Bilevel(
        inner=lambda theta, phi, batch: phi.sum() * (X @ theta).square().mean() + theta.square().mean(),
        outer=lambda theta, phi: theta.square().sum(),
        init=torch.ones(200, 16), optimizer=hg.Adam(), steps=200,
    )  # fmt: skip
    phi = torch.ones(elements)
    tangent, replay = (price.bytes for price in prices(task, phi, [hg.Forward(chunk=1), hg.Checkpointed(states=1)]))
    assert tangent < replay
    return task, phi, (tangent + replay) // 2


@pytest.fixture
def a_second_a_step(monkeypatch):
    """A clock that a step moves by a second; what is predicted is predicted once: it does not depend on the limits."""
    monkeypatch.setattr(PLANNER, "time", SimpleNamespace(perf_counter=count().__next__))
    known = []

    def known_prices(*given, **named):
        known.extend([] if known else prices(*given, **named))
        return known

    monkeypatch.setattr(PLANNER, "prices", known_prices)


@pytest.mark.usefixtures("a_second_a_step")
def test_where_time_is_short_it_samples():
    """16 tangents are exact and take twice the time of 8; within less than that there is only the sample."""
    task, phi, memory = lean(16)
    exact, sample = hg.Forward(chunk=1), hg.ForwardGradient(directions=8, chunk=1)
    work = {option.price.method: option.seconds for option in hg.choose(task, phi, memory=memory).options}
    long, short = work[exact], work[sample]
    assert hg.choose(task, phi, memory=memory).pick == exact
    assert hg.choose(task, phi, memory=memory, seconds=1.01 * long).pick == exact
    choice = hg.choose(task, phi, memory=memory, seconds=0.99 * long)
    assert choice.pick == sample
    assert choice.options[0].seconds == pytest.approx(short)
    assert "surest that fits" in choice.why
    assert "times the time" in next(o for o in choice.options if o.price.method == exact).verdict
    with pytest.raises(UserError, match=r"seconds: got .* the quickest option that fits the memory, \(FG\)²U b=8"):
        hg.choose(task, phi, memory=memory, seconds=0.99 * short)


def test_seconds_are_those_of_plain_steps_and_of_pulls_on_this_problem(monkeypatch):
    """A clock by which a plain step takes 2 s and a pull, predicted as two plain steps, 10 s."""
    ticks = iter((0.0, 2.0, 10.0, 20.0))
    monkeypatch.setattr(PLANNER, "time", SimpleNamespace(perf_counter=ticks.__next__))
    seconds = {str(option.price.method): option.seconds for option in hg.choose(problem(), PHI, memory="1GB").options}
    assert seconds["reverse"] == 30 * 10
    replay = predict(problem(), PHI, hg.Checkpointed(states=1))
    assert replay.plain_steps == replay.gradient_steps - 2 * 30
    assert seconds["checkpointed 1"] == 2 * replay.plain_steps + 30 * 10
    assert seconds["truncated 3"] == 2 * 27 + 3 * 10
    assert seconds["Hessian-free"] == 2 * 30 + 10
    # tangents one by one, each of 1.7 gradient steps that take five seconds here
    assert seconds["(FG)²U b=8"] == pytest.approx(30 * (8 * 2 + 8 * 1.7 * 5))


@pytest.mark.parametrize(("steps", "asked"), [(30, (1, 2)), (2, (1, 2)), (1, (0, 1))])
def test_the_pull_that_is_timed_leaves_nothing_out(monkeypatch, steps, asked):
    """Through the first step of a constant start no cotangent of θ is taken, which is half of the work."""
    seen = []

    def pull(unroll, state, psi, first, last, cotangent):
        seen.append((first, last))
        found = known(unroll, state, psi, first, last, torch.utils._pytree.tree_map(torch.ones_like, cotangent))
        assert bool(found[0].theta[0].any()) == (steps > 1)
        return found

    known = PLANNER.pullback
    monkeypatch.setattr(PLANNER, "pullback", pull)
    hg.choose(problem(steps), PHI, memory="1GB")
    assert seen == [asked, asked]


def test_of_two_samples_that_fit_the_surer_is_taken():
    def price(method, held, work, cosine, *, exact=False):
        return Price(method=method, bytes=held, gradient_steps=work, exact=exact, cosine=cosine)

    pace = PLANNER.Pace(1.0, 1.0)

    large, small = hg.ForwardGradient(directions=32), hg.ForwardGradient(directions=8)
    known = [
        price(hg.Reverse(), 900, 5, 1.0, exact=True), price(hg.HessianFree(), 10, 1, None),
        price(hg.Checkpointed(), 100, 30, 1.0, exact=True), price(small, 50, 10, 0.5), price(large, 50, 20, 0.9),
    ]  # fmt: skip
    picks = {limit: PLANNER._pick(known, pace, 500, limit).pick for limit in (None, 30, 25, 15)}
    assert picks == {None: hg.Checkpointed(), 30: hg.Checkpointed(), 25: large, 15: small}
    assert PLANNER._pick(known, pace, 1000, None).pick == hg.Reverse()


def test_where_nothing_fits_the_leanest_is_named():
    with pytest.raises(UserError, match=r"memory: got 9.8 KiB; the leanest option, checkpointed 1"):
        hg.choose(problem(), PHI, memory=10_000)


def test_few_elements_are_taken_forward_where_nothing_else_fits():
    """The leanest exact way for up to 64 elements, also where a sample would fit as well."""
    task, phi, memory = lean(2)
    assert hg.choose(task, phi, memory=memory).pick == hg.Forward(chunk=1)
    forward = [sum(isinstance(m, hg.Forward) for m in PLANNER._candidates(task, count)) for count in (1, 2, 64, 65)]
    assert forward == [1, 2, 2, 0]


@pytest.mark.parametrize("steps", [1, 2, 20])
@pytest.mark.parametrize("along", [False, True], ids=["end", "along the run"])
def test_losses_along_the_run_and_very_short_runs_are_priced_and_picked(steps, along):
    batches = [torch.ones(()) for _ in range(steps)]
    changes = {"batches": batches, "path": (lambda step, theta, phi: theta.square().mean()) if along else None}
    made = replace(problem(steps), **changes)
    choice = hg.choose(made, PHI, memory="1GB")
    assert choice.pick == hg.Reverse()
    names = {row["method"] for row in choice.rows}
    assert ("Hessian-free" in names) != along
    store = [hg.Reverse(offload="cpu"), hg.Checkpointed(states=1, offload="host")]
    for method in (*store, *([] if along else [hg.HessianFree(), hg.Neumann(step=0.01), hg.ConjugateGradient()])):
        assert predict(made, PHI, method).bytes > 0


def test_biased_methods_are_listed_and_never_picked():
    choice = hg.choose(problem(), PHI, memory="1GB")
    free = next(option for option in choice.options if option.price.method == hg.HessianFree())
    assert "nobody knows" in free.verdict
    assert all(option.verdict for option in choice.options)


@pytest.mark.usefixtures("a_second_a_step")
def test_what_a_black_box_holds_is_not_known_and_its_time_counts():
    box = hg.BlackBox(solve=lambda phi: phi**2, outer=lambda u, phi: u.sum())
    choice = hg.choose(box, PHI, memory="1GB", seconds=64)  # 32 directions are 65 solves of a second each
    assert choice.pick.directions == 16
    assert [option.price.bytes for option in choice.options] == [None] * 3
    assert [row["bytes"] for row in choice.rows] == ["not known"] * 3
    assert {option.price.method.directions: option.seconds for option in choice.options} == {4: 9, 16: 33, 32: 65}
    assert "not known" in choice.why
    with pytest.raises(UserError, match=r"seconds: got 8; the quickest .* takes 9 s"):
        hg.choose(box, PHI, memory="1GB", seconds=8)


def test_a_solver_is_looked_at_and_timed():
    box = hg.BlackBox(solve=lambda phi: time.sleep(0.02) or phi, outer=lambda u, phi: u.sum())
    assert min(option.seconds / option.price.gradient_steps for option in hg.choose(box, PHI, memory=1).options) > 0.02
    with pytest.raises(UserError, match=r"solve\(phi\): got a leaf of type ndarray"):
        hg.choose(replace(box, solve=lambda phi: phi.numpy()), PHI, memory="1GB")
