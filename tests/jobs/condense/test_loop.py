"""The loop looks when it should, turns seconds into steps once, and counts the bytes that a method is known to hold."""

from __future__ import annotations

import dataclasses
import itertools

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st

from sparing import hypergrad as hg
from sparing.errors import RunError
from sparing.jobs.condense import loop as module
from sparing.jobs.condense.loop import (
    UNITS,
    accuracies,
    accuracy,
    bytes_of_a_step,
    fix_length_,
    fresh_net,
    look_steps,
    real_accuracies,
    train,
)
from sparing.jobs.condense.net import init_weights, logits, penalty
from sparing.jobs.condense.settings import Evaluation, TwoPhase
from sparing.jobs.condense.state import start
from sparing.report import Record
from sparing.seeds import stream


def empty(settings) -> Record:
    return Record(question="", settings=settings, seed=0, units=dict(UNITS), environment={})


@given(steps=st.integers(1, 300), looks=st.integers(1, 12))
def test_looks_are_even_and_reach_both_ends(steps: int, looks: int) -> None:
    found = look_steps(steps, looks)
    assert (found[0], found[-1]) == (0, steps)
    gaps = {b - a for a, b in itertools.pairwise(found)}
    assert len(found) == min(looks, steps) + 1
    assert max(gaps) - min(gaps) <= 1


def test_a_run_fills_its_tables(small, inputs) -> None:
    settings = dataclasses.replace(small, method="truncated")
    state, record = start(settings, inputs), empty(settings)
    train(state, record)
    kept = state.kept
    assert [row["step"] for row in record.table("train")] == [1, 2, 3, 4]
    assert [row["step"] for row in record.table("curve")] == sorted(kept) == [0, 2, 4]
    assert torch.equal(kept[4], state.images)
    assert not torch.equal(kept[0], kept[2])
    (row,) = record.table("methods")
    assert row["accuracy_low"] <= row["accuracy"] <= row["accuracy_high"]
    assert (row["n"], row["steps"]) == (2, 4)
    assert record.table("curve")[0]["seconds"] == 0
    assert record.table("curve")[-1]["seconds"] == row["seconds"] > 0


@pytest.mark.slow  # a net learns
def test_the_images_come_to_teach_the_classes(small, inputs) -> None:
    """Bright above against bright below is learnt from one image of each; noise does not teach it."""
    settings = dataclasses.replace(
        small, method="checkpointed", unroll=5, steps=25, measurements=0, evaluation=Evaluation(steps=5, lr=0.1, nets=2)
    )
    record = empty(settings)
    train(start(settings, inputs), record)
    assert record.table("methods")[0]["accuracy"] == 100  # nets see what they were condensed for: five steps at 0.1
    assert record.table("train")[-1]["loss"] < 0.2 < record.table("train")[0]["loss"]  # chance is 0.69
    assert record.table("curve") == []


def test_seconds_become_steps_once(small, inputs, monkeypatch) -> None:
    monkeypatch.setattr(
        module, "seconds_of_a_step", lambda state, method: 3.0 if type(method) is hg.HessianFree else 2.0
    )
    settings = dataclasses.replace(small, seconds=60.0)
    state, record = start(settings, inputs), empty(settings)
    fix_length_(state, record)
    assert (state.steps, state.turn) == (30, 0)
    state = start(dataclasses.replace(settings, method="two-phase", two_phase=TwoPhase(first=0.25)), inputs)
    fix_length_(state, record)
    assert (state.steps, state.turn) == (5 + 22, 5)  # 15 s at 3 s, then 45 s at 2 s
    assert [row["steps"] for row in record.table("length")] == [30, 27]


def test_a_number_of_steps_is_kept(small, inputs) -> None:
    state, record = start(dataclasses.replace(small, method="two-phase"), inputs), empty(small)
    fix_length_(state, record)
    assert (state.steps, state.turn) == (4, 2)


def test_reverse_holds_more_the_longer_it_unrolls_and_forward_does_not(small, inputs) -> None:
    held = {}
    for unroll in (4, 16):
        state = start(dataclasses.replace(small, unroll=unroll, batch=2), inputs)
        for method in (hg.Reverse(), hg.ForwardGradient(directions=2)):
            held[type(method), unroll] = bytes_of_a_step(state, method)
    assert held[hg.Reverse, 16] > 2.5 * held[hg.Reverse, 4]
    # constant in T but for what a step leaves until the next one replaces it
    assert held[hg.ForwardGradient, 16] < 1.1 * held[hg.ForwardGradient, 4]
    assert held[hg.ForwardGradient, 16] < 0.5 * held[hg.Reverse, 16]


def test_accuracy_counts(inputs) -> None:
    shape = begun_shape(inputs)
    weights = init_weights(shape, stream(0, "x"))
    images, labels = inputs.test
    expected = (logits(weights, images.float() / 255).argmax(1) == labels).sum().item() / len(labels)
    assert accuracy(weights, inputs.test) == 100 * expected


def test_a_net_that_diverged_is_not_judged(small, inputs) -> None:
    weights = init_weights(begun_shape(inputs), stream(0, "x"))
    with pytest.raises(RunError, match="not finite"):
        accuracy(weights | {"linear.bias": torch.tensor([torch.nan, 0.0])}, inputs.test)
    state = start(dataclasses.replace(small, evaluation=Evaluation(steps=5, lr=1e30, nets=2)), inputs)
    with pytest.raises(RunError, match=r"judges the images of outer step 0 diverges; pass a smaller --evaluation\.lr"):
        accuracies(state, state.mean, nets=2)


def test_a_rate_at_which_real_images_diverge_is_passed_over(small, inputs) -> None:
    wild = dataclasses.replace(small, evaluation=Evaluation(steps=5, lr=1e5, nets=2))
    lr, scores = real_accuracies(start(wild, inputs))
    assert lr < 1e5
    assert min(scores) > 0
    # nothing to choose by: what diverges counts as 0
    blind = dataclasses.replace(inputs, held_out=tuple(part[:0] for part in inputs.held_out))
    state = start(dataclasses.replace(wild, evaluation=Evaluation(steps=5, lr=1e30, nets=2)), blind)
    assert real_accuracies(state) == (1e30, [0, 0])


def begun_shape(inputs):
    from sparing.jobs.condense import Condense

    return start(Condense(width=4), inputs).shape


def test_a_fresh_net_is_trained_as_torch_does_it(small, inputs) -> None:
    state = start(dataclasses.replace(small, shift=0), inputs)  # torch's loop has no shifts
    weights = {
        name: w.requires_grad_() for name, w in init_weights(state.shape, stream(0, "condense", "judge", 3)).items()
    }
    optimizer = torch.optim.SGD(weights.values(), lr=small.evaluation.lr, momentum=0.9)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=small.evaluation.steps)
    for _ in range(small.evaluation.steps):
        optimizer.zero_grad()
        loss = F.cross_entropy(logits(weights, state.images), state.labels) + small.penalty * penalty(weights)
        loss.backward()
        optimizer.step()
        schedule.step()
    found = fresh_net(state, state.phi, 3)
    for name, weight in weights.items():
        torch.testing.assert_close(found[name], weight.detach(), rtol=1e-4, atol=1e-6)  # float32, five steps


def test_nets_are_the_same_for_every_seed_and_method(small, inputs) -> None:
    state = start(small, inputs)
    other = start(dataclasses.replace(small, seed=9, method="reverse"), inputs)
    assert accuracies(state, state.phi, nets=3) == accuracies(other, state.phi, nets=3)
    assert accuracies(state, state.phi, nets=3)[1:] == accuracies(state, state.phi, nets=2, first=1)


def test_rates_are_chosen_on_images_that_are_not_the_test(small, inputs, monkeypatch) -> None:
    images, labels = inputs.test
    spoilt = dataclasses.replace(inputs, test=(images, 1 - labels))
    chosen = dataclasses.replace(small, judge="held-out")
    image = start(chosen, inputs).phi
    assert accuracies(start(chosen, spoilt), image, nets=2) == accuracies(start(chosen, inputs), image, nets=2)
    test = [accuracies(start(small, part), image, nets=2) for part in (inputs, spoilt)]
    assert [a + b for a, b in zip(*test, strict=True)] == [100, 100]


def test_a_look_is_on_the_first_images(small, inputs) -> None:
    state = start(small, inputs)
    first = dataclasses.replace(inputs, test=tuple(part[:6] for part in inputs.test))
    assert accuracies(state, state.phi, nets=2, most=6) == accuracies(start(small, first), state.phi, nets=2)
