"""A training step waits for its device once: the host reads loss and norm together, before the weights change."""

from __future__ import annotations

import copy
import math

import pytest
import torch

import zoo
from host_reads import HostReads
from lisa_loop import setup
from sparing.jobs.finetune.settings import Full, Training
from sparing.jobs.finetune.state import start, take_step_, window
from sparing.jobs.lm.losses import loss_sum
from sparing.jobs.lm.packing import Packed
from sparing.jobs.step import DivergedError, LocalStepper, apply_
from sparing.jobs.torch_state import to_device
from sparing.layersample import Adaptive, LayerSampling, Reshuffle

METHODS = {
    "full": Full(),
    "lisa": LayerSampling(active=1, period=3, sampler=Reshuffle()),
    "masters": LayerSampling(active=1, period=3, sampler=Reshuffle(), masters=True, warmup=1),
    "scores": LayerSampling(active=1, period=3, sampler=Adaptive()),
    "probe": LayerSampling(active=1, period=3, sampler=Adaptive(), probe=4),
    "badam": LayerSampling.badam(period=3),
}


def rows() -> Packed:
    ids = zoo.tokens(12, 8)["input_ids"]
    return Packed(ids, ids.clone())


def test_what_counts_as_a_read() -> None:
    value = torch.ones(2)
    with HostReads() as reads:
        value.sum().item()
        float(value[0])
        bool(value[0] > 0)
        if value[0] > 0:
            value.tolist()
        value.add_(1).isfinite()
        torch.where(value.isfinite(), value, 0.0)
    assert len(reads.seen) == 5


@pytest.mark.parametrize("method", METHODS.values(), ids=METHODS)
def test_a_step_of_four_micro_batches_reads_once(method) -> None:
    """The second step of an interval; the first one, which draws, reads the scores besides."""
    training = Training(method=method, steps=9, accumulate=4, clip=0.1)
    with start(zoo.llama(layers=2, dtype=torch.bfloat16), training, rows=12) as state:
        take_step_(state, rows())
        with HostReads() as reads:
            take_step_(state, rows())
    assert reads.seen == ["tolist"]


def test_a_draw_reads_all_scores_at_once() -> None:
    """However many blocks there are."""
    seen = []
    for layers in (2, 5):
        training = Training(method=METHODS["scores"], steps=9, accumulate=2)
        with start(zoo.llama(layers=layers), training, rows=12) as state:
            for _ in range(3):
                take_step_(state, rows())
            with HostReads() as reads:
                take_step_(state, rows())
        seen.append(reads.seen)
    assert seen[0] == seen[1]


def test_a_draw_asks_once_whether_held_gradients_are_zero() -> None:
    seen = []
    for layers in (2, 5):
        model, optimizer, sampler = setup(LayerSampling(active=2, period=1), layers=layers)
        for step in range(2):
            sampler.begin_step(step)
            model(**zoo.tokens()).loss.backward()
            optimizer.step()
            optimizer.zero_grad(set_to_none=False)
        with HostReads() as reads:
            sampler.begin_step(2)
        seen.append(reads.seen)
    assert seen == [["tolist"] * 2] * 2  # the gradients; and the numbers of the draw, which are on the host


def test_the_loss_of_a_step_is_the_sum_over_micro_batches_to_the_last_bit() -> None:
    """Added up in float64 on the device, as Python added up numbers."""
    data, model = rows(), zoo.llama(layers=2, dtype=torch.float32)
    twin = copy.deepcopy(model)
    training = Training(method=Full(), steps=2, accumulate=6, seed=0)
    with start(model, training, rows=12) as state:
        read = window(0, rows=12, batch=1, accumulate=6, seed=0)
        total = 0.0
        for micro in read:
            total += loss_sum(twin.train(), data, micro).item()
        row = take_step_(state, data)
    assert row["loss"] == total / row["tokens"]


@pytest.mark.parametrize("loss", [math.nan, math.inf])
@pytest.mark.parametrize("gradient", [1.0, math.nan])
def test_a_diverged_step_is_not_applied(loss: float, gradient: float) -> None:
    model = torch.nn.Linear(2, 1)
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    stepper = LocalStepper(model, torch.optim.AdamW(model.parameters()), clip=1.0)
    for p in model.parameters():
        p.grad = torch.full_like(p, gradient)
    with pytest.raises(DivergedError, match="step 8: loss"):
        apply_(stepper, 7, torch.tensor(loss), 0.1)
    assert all(torch.equal(before[name], p) for name, p in model.named_parameters())
    assert all(p.grad is None for p in model.parameters())
    assert not stepper.optimizer.state


def test_a_cuda_device_gets_pinned_copies_that_nothing_waits_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """There is no such device here: the two calls that make the copy are watched."""
    calls: list[tuple] = []
    monkeypatch.setattr(torch.Tensor, "pin_memory", lambda self: calls.append(("pinned",)) or self)
    monkeypatch.setattr(torch.Tensor, "to", lambda self, *args, **how: calls.append((*args, how)) or self)
    ids = torch.arange(3)
    assert to_device(ids, torch.device("cuda", 1)) is ids
    assert calls == [("pinned",), (torch.device("cuda", 1), {"non_blocking": True})]
    calls.clear()
    to_device(ids, torch.device("cpu"))
    assert calls == [(torch.device("cpu"), {})]
