"""The step inside backward equals the step after it, to the last bit, and never holds two gradients."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

import zoo
from lisa_loop import AdamW, assert_same, assert_same_state, block_of, copy_of, setup, train
from sparing.errors import UserError
from sparing.layersample import Adaptive, LayerSampling, Reshuffle, StepInBackward

SETTINGS = LayerSampling(active=2, period=3, sampler=Reshuffle())


def plain(settings=SETTINGS, *, steps: int, max_norm: float | None = None, accumulate: int = 1, **changes):
    """The ordinary loop, with ``clip_grad_norm_``."""
    model, optimizer, sampler = setup(settings, **changes)
    norms = []
    for step in range(steps):
        sampler.begin_step(step)
        for micro in range(accumulate):
            (model(**zoo.tokens(seed=10 * step + micro)).loss / accumulate).backward()
        if max_norm is not None:
            norms.append(float(torch.nn.utils.clip_grad_norm_(model.parameters(), max_norm, foreach=False)))
        optimizer.step()
        optimizer.zero_grad()
    return model, optimizer, norms


def fused(settings=SETTINGS, *, steps: int, accumulate: int = 1, max_norm=None, clip="exact", **changes):
    model, optimizer, sampler = setup(settings, **changes)
    step_in = StepInBackward(sampler, max_norm=max_norm, clip=clip)
    norms = []
    for step in range(steps):
        sampler.begin_step(step)
        for micro in range(accumulate):
            loss = model(**zoo.tokens(seed=10 * step + micro)).loss / accumulate
            norms.append(step_in.backward(loss, last=micro == accumulate - 1))
    return model, optimizer, [n for n in norms if n is not None]


@pytest.mark.parametrize("accumulate", [1, 3])
@pytest.mark.parametrize("max_norm", [None, 0.05, 1e6])
def test_equal_to_the_plain_loop(accumulate: int, max_norm: float | None) -> None:
    """Below, at and above the threshold of clipping; with state that is reset on the way."""
    a = plain(steps=7, max_norm=max_norm, accumulate=accumulate)
    b = fused(steps=7, max_norm=max_norm, accumulate=accumulate)
    assert_same(copy_of(a[0]), copy_of(b[0]))
    assert_same_state(a[1], b[1])


def test_a_step_along_the_momentum_is_that_of_the_plain_loop() -> None:
    """A block has parameters in some of the groups only, each of which has a rate of its own."""

    def grouped(params):
        known = list(params)
        return AdamW([{"params": known[i::12], "lr": 1e-2 / (1 + i)} for i in range(12)])

    settings = LayerSampling(active=2, period=2, sampler=Reshuffle(), momentum_step=True)
    a, b = (loop(settings, steps=7, optimizer=grouped) for loop in (plain, fused))
    assert_same(copy_of(a[0]), copy_of(b[0]))
    assert_same_state(a[1], b[1])


@pytest.mark.parametrize("lazily", [False, True])
@pytest.mark.parametrize("zero", [lambda: 0, lambda: torch.zeros(())], ids=["number", "tensor"])
def test_an_optimizer_that_counts_in_its_groups_is_refused(zero: Any, lazily: bool) -> None:
    """It would count blocks, not steps; one that notes a number which stays what it is passes."""

    class Decaying(torch.optim.SGD):
        counts = True

        def step(self, closure=None):
            for group in self.param_groups:
                group.setdefault("k", zero())
                group["k"] += self.counts
            return super().step(closure)

    def counting(params):
        built = Decaying(params, lr=0.1)
        if not lazily:
            built.param_groups[0]["k"] = zero()
        return built

    model, optimizer, sampler = setup(SETTINGS, optimizer=counting)
    sampler.begin_step(0)
    with pytest.raises(UserError, match="StepInBackward: got Decaying, whose step changes 'k' of its groups"):
        StepInBackward(sampler).backward(model(**zoo.tokens()).loss)
    model, optimizer, sampler = setup(SETTINGS, optimizer=counting)
    optimizer.counts = False
    sampler.begin_step(0)
    StepInBackward(sampler).backward(model(**zoo.tokens()).loss)
    assert optimizer.param_groups[0]["k"] == 0


def test_the_norm_it_reports_is_that_of_clip_grad_norm() -> None:
    _, _, expected = plain(steps=4, max_norm=0.05)
    _, _, norms = fused(steps=4, max_norm=0.05)
    factors = [min(1.0, 0.05 / (n + 1e-6)) for n in expected]  # what was seen in the step walk is before clipping
    assert all(f < 1 for f in factors)
    assert norms == expected


@pytest.mark.parametrize("changes", [{"tied": True}, {"make": zoo.gpt2, "layers": 4}])
def test_tied_weights_step_once(changes: dict) -> None:
    a, b = plain(steps=5, **changes), fused(steps=5, **changes)
    assert_same(copy_of(a[0]), copy_of(b[0]))


def test_with_checkpointing_warmup_masters_and_a_scheduler() -> None:
    """Everything that hooks into the optimizer's step meets one parameter at a time, and does the same."""
    settings = LayerSampling(active=2, period=3, sampler=Reshuffle(), warmup=2, masters=True)
    a = plain(settings, steps=7, dtype=torch.bfloat16)
    model, optimizer, sampler = setup(settings, dtype=torch.bfloat16)
    model.train().activation_checkpointing_enable()
    scheduler = torch.optim.lr_scheduler.ConstantLR(optimizer, factor=1.0)
    step_in = StepInBackward(sampler)
    for step in range(7):
        sampler.begin_step(step)
        step_in.backward(model(**zoo.tokens(seed=10 * step)).loss)
        scheduler.step()
    assert_same(copy_of(a[0]), copy_of(model))
    assert_same_state(a[1], optimizer)


def test_adaptive_scores_are_the_same() -> None:
    settings = LayerSampling(active=2, period=2, sampler=Adaptive())
    a, b = plain(settings, steps=9), fused(settings, steps=9)
    assert_same(copy_of(a[0]), copy_of(b[0]))


@pytest.mark.parametrize("max_norm", [None, 0.05])
def test_gradients_of_one_block_are_alive_and_the_optimizer_is_called_once_for_it(max_norm: float | None) -> None:
    model, optimizer, sampler = setup(SETTINGS)
    step_in = StepInBackward(sampler, max_norm=max_norm)
    alive: list[set] = []
    calls: list[int] = []

    def note(*_: object) -> None:
        alive.append({block_of(name) for name, p in model.named_parameters() if p.grad is not None})

    sampler.begin_step(0)
    optimizer.register_step_pre_hook(lambda opt, *_: calls.append(sum(len(g["params"]) for g in opt.param_groups)))
    for p in sampler.trainable.values():
        p.register_post_accumulate_grad_hook(note)  # before ours, which comes with the first backward
    step_in.backward(model(**zoo.tokens()).loss)
    assert {len(blocks) for blocks in alive} == {1}
    assert calls == [1, 1, 9, 9, 1]  # head, norm, two blocks of nine parameters, embedding
    assert all(p.grad is None for p in model.parameters())


def test_a_block_with_a_parameter_that_nothing_reached_is_stepped_too() -> None:
    """Its count of gradients never completes; what came is stepped when the walk is over."""
    changed = []
    for stepped in (plain, fused):

        def make(**changes):
            model = zoo.llama(**changes)
            model.model.layers[1].register_parameter("spare", torch.nn.Parameter(torch.ones(2, dtype=torch.float64)))
            return model

        changed.append(copy_of(stepped(steps=7, make=make)[0]))
    assert_same(*changed)


def test_delayed_clipping_says_when_a_gradient_spoilt_the_weights() -> None:
    model, _, sampler = setup(SETTINGS)
    step_in = StepInBackward(sampler, max_norm=1.0, clip="delayed")
    sampler.begin_step(0)
    step_in.backward(model(**zoo.tokens()).loss)
    sampler.begin_step(1)
    with pytest.raises(UserError, match="weights are spoilt"):
        step_in.backward(model(**zoo.tokens()).loss * math.nan)


def test_delayed_clipping_uses_the_norm_of_the_step_before() -> None:
    """By hand: measure each step's norm, clip by the last one, and by its own where the interval begins."""
    model, optimizer, sampler = setup(SETTINGS)
    last = 0.0
    for step in range(7):
        sampler.begin_step(step)
        model(**zoo.tokens(seed=10 * step)).loss.backward()
        grads = [p.grad for p in sampler.trainable.values()]
        norm = torch.linalg.vector_norm(torch.stack([torch.linalg.vector_norm(g) for g in grads]))
        used = norm if step % 3 == 0 else torch.tensor(last)
        for grad in grads:
            grad.mul_((0.05 / (used + 1e-6)).clamp(max=1.0))
        optimizer.step()
        optimizer.zero_grad()
        last = float(norm)
    assert_same(copy_of(model), copy_of(fused(steps=7, max_norm=0.05, clip="delayed")[0]))


@pytest.mark.parametrize("stop", [3, 4, 5])
def test_delayed_clipping_resumes(stop: int) -> None:
    whole = fused(steps=8, max_norm=0.05, clip="delayed")[0]
    first, second = setup(SETTINGS), setup(SETTINGS)
    before = StepInBackward(first[2], max_norm=0.05, clip="delayed")
    for step in range(stop):
        first[2].begin_step(step)
        before.backward(first[0](**zoo.tokens(seed=10 * step)).loss)
    second[0].load_state_dict(first[0].state_dict())
    second[2].load_state_dict(first[2].state_dict(optimizer=True))
    after = StepInBackward(second[2], max_norm=0.05, clip="delayed")
    after.load_state_dict(before.state_dict())
    for step in range(stop, 8):
        second[2].begin_step(step)
        after.backward(second[0](**zoo.tokens(seed=10 * step)).loss)
    assert_same(copy_of(whole), copy_of(second[0]))


def test_a_norm_that_is_not_finite_touches_no_weight() -> None:
    model, _, sampler = setup(SETTINGS)
    step_in = StepInBackward(sampler, max_norm=1.0)
    sampler.begin_step(0)
    before = copy_of(model)
    with pytest.raises(UserError, match="norm nan"):
        step_in.backward(model(**zoo.tokens()).loss * math.nan)
    assert_same(before, copy_of(model))
    assert all(p.grad is None for p in model.parameters())
    sampler.begin_step(3)


def test_an_ordinary_backward_pass_beside_it_is_ordinary() -> None:
    model, _, sampler = setup(SETTINGS)
    step_in = StepInBackward(sampler)
    sampler.begin_step(0)
    step_in.backward(model(**zoo.tokens()).loss, last=False)
    step_in.close()
    model(**zoo.tokens()).loss.backward()
    assert all(p.grad is not None for p in sampler.trainable.values())


def test_a_shared_weight_under_reentrant_checkpointing_is_refused() -> None:
    """It would be stepped once for each walk, with a part of its gradient each."""
    from torch.utils.checkpoint import checkpoint

    model, _, sampler = setup(SETTINGS)
    step_in = StepInBackward(sampler)
    sampler.begin_step(0)
    weight = model.lm_head.weight
    x = torch.ones(1, 16, dtype=torch.float64, requires_grad=True)
    once = checkpoint(lambda h: h @ weight.T @ weight, x, use_reentrant=True)
    twice = checkpoint(lambda h: h @ weight.T @ weight, once, use_reentrant=True)
    with pytest.raises(UserError, match="arrived twice"):
        step_in.backward(twice.sum())


@pytest.mark.parametrize("wrong", [{"max_norm": 0.0}, {"max_norm": math.nan}, {"max_norm": 1.0, "clip": "soft"}])
def test_settings_without_meaning_are_refused(wrong: dict) -> None:
    _, _, sampler = setup(SETTINGS)
    with pytest.raises(UserError, match="StepInBackward"):
        StepInBackward(sampler, **wrong)


def test_the_optimizer_gets_its_groups_back() -> None:
    model, _, sampler = setup(SETTINGS)
    groups = sampler.optimizer.param_groups
    sampler.begin_step(0)
    StepInBackward(sampler).backward(model(**zoo.tokens()).loss)
    assert sampler.optimizer.param_groups is groups
    assert AdamW(model.parameters()).param_groups[0]["lr"] == groups[0]["lr"]
    train(model, sampler.optimizer, sampler, steps=range(1, 2))


@pytest.mark.parametrize("accumulate", [1, 2])
@pytest.mark.parametrize("clip", ["exact", "delayed"])
def test_a_pass_that_measures_norms_is_not_seen_by_the_bound(clip: str, accumulate: int) -> None:
    scores = []
    for max_norm in (None, 1e6):  # which clips nothing
        model, _, sampler = setup(LayerSampling(active=2, period=2, sampler=Adaptive(signal="bound")))
        step_in = StepInBackward(sampler, max_norm=max_norm, clip=clip)
        for step in range(2):
            sampler.begin_step(step)
            for micro in range(accumulate):
                step_in.backward(model(**zoo.tokens(seed=10 * step + micro)).loss, last=micro == accumulate - 1)
        sampler.begin_step(2)
        scores.append(sampler.scores)
    assert torch.equal(scores[0], scores[1])
    assert (scores[0] > 0).all()
