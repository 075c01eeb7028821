"""One step: its rows, its rates, and what a loss that is not finite leaves alone."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch.nn import functional as F

from sparing.jobs.pretrain.state import TrainState, batch_of, summed_loss, take_step_
from sparing.jobs.schedule import rate
from sparing.jobs.step import DivergedError


def test_the_loss_is_that_of_every_token(started: Callable[..., TrainState]):
    state = started()
    inputs, targets = batch_of(state, 0)
    rows = [F.log_softmax(state.model(row[None]).logits[0].double(), -1) for row in inputs]
    expected = -torch.stack([r[range(16), t] for r, t in zip(rows, targets, strict=True)]).sum()
    # float32: 32 losses near 3.6, each good to 1e-6
    assert summed_loss(state.model, inputs, targets).item() == pytest.approx(expected.item(), abs=4e-4)
    assert summed_loss(state.model, inputs[:0], targets[:0]).item() == 0


def test_rates_are_the_schedule_times_the_plan(started: Callable[..., TrainState]):
    state = started(width=32, density=0.5, warmup=3, schedule="linear")
    for step in range(6):
        expected = rate(step, peak=8e-3, steps=6, warmup=3, schedule="linear")
        assert take_step_(state)["lr"] == expected
        by_name = {name: group["lr"] for group in state.groups for name in group["param_names"]}
        for name, entry in state.plan.entries.items():
            assert by_name[name] == pytest.approx(expected * entry.factors.lr, rel=1e-12)
    assert len(set(by_name.values())) == 2
    state.plan.check_optimizer(state.optimizer)


def test_rows_differ_between_steps_and_seeds(started: Callable[..., TrainState]):
    state, other = started(), started(seed=1)
    assert torch.equal(batch_of(state, 3)[0], batch_of(state, 3)[0])
    assert not torch.equal(batch_of(state, 3)[0], batch_of(state, 4)[0])
    assert not torch.equal(batch_of(state, 3)[0], batch_of(other, 3)[0])


def test_a_loss_that_is_no_number_changes_nothing(started: Callable[..., TrainState]):
    state = started()
    take_step_(state)
    with torch.no_grad():
        state.model.model.norm.weight.fill_(torch.inf)
    before = {name: p.detach().clone() for name, p in state.model.named_parameters()}
    with pytest.raises(DivergedError, match="step 2: loss nan"):
        take_step_(state)
    assert all(torch.equal(p, before[name]) for name, p in state.model.named_parameters())
    assert state.step == 1
    assert all(p.grad is None for p in state.model.parameters())


def test_gradients_are_clipped_to_their_norm(started: Callable[..., TrainState]):
    """SGD without momentum moves by lr · gradient, so the step shows the norm it used."""
    state = started(optimizer="sgd", betas=(0.0, 0.95), weight_decay=0.0, lr=1.0, warmup=0, rule="sp", clip=0.01)
    before = [p.detach().clone() for p in state.model.parameters()]
    row = take_step_(state)
    moved = torch.cat([(p - b).flatten() for p, b in zip(state.model.parameters(), before, strict=True)])
    assert row["grad_norm"] > 0.01
    assert moved.norm().item() == pytest.approx(0.01, rel=1e-3)
