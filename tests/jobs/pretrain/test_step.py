"""One step: its rows, its rates, and what a loss that is not finite leaves alone."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch.nn import functional as F

from sparing.jobs.pretrain.course import Course
from sparing.jobs.pretrain.step import batch_of, mean_loss, set_rates_, take_step_
from sparing.jobs.schedule import rate
from sparing.jobs.step import DivergedError


def test_the_mean_loss_is_that_of_every_token(begun: Callable[..., Course]):
    course = begun()
    inputs, targets = batch_of(course, 0)
    rows = [F.log_softmax(course.model(row[None]).logits[0].double(), -1) for row in inputs]
    expected = -torch.stack([r[range(16), t] for r, t in zip(rows, targets, strict=True)]).mean()
    # float32: sixteen losses near 3.6, each good to 1e-6
    assert mean_loss(course.model, inputs, targets).item() == pytest.approx(expected.item(), abs=1e-5)


def test_rates_are_the_schedule_times_the_plan(begun: Callable[..., Course]):
    course = begun(width=32, density=0.5, warmup=3, schedule="linear")
    for step in range(6):
        course.step = step
        expected = rate(step, peak=8e-3, steps=6, warmup=3, schedule="linear")
        assert set_rates_(course) == expected
        by_name = {name: group["lr"] for group in course.groups for name in group["param_names"]}
        for name, entry in course.plan.entries.items():
            assert by_name[name] == pytest.approx(expected * entry.factors.lr, rel=1e-12)
    assert len(set(by_name.values())) == 2
    course.plan.check_optimizer(course.optimizer)


def test_rows_differ_between_steps_and_seeds(begun: Callable[..., Course]):
    course, other = begun(), begun(seed=1)
    assert torch.equal(batch_of(course, 3)[0], batch_of(course, 3)[0])
    assert not torch.equal(batch_of(course, 3)[0], batch_of(course, 4)[0])
    assert not torch.equal(batch_of(course, 3)[0], batch_of(other, 3)[0])


def test_a_loss_that_is_no_number_changes_nothing(begun: Callable[..., Course]):
    course = begun()
    take_step_(course)
    with torch.no_grad():
        course.model.model.norm.weight.fill_(torch.inf)
    before = {name: p.detach().clone() for name, p in course.model.named_parameters()}
    with pytest.raises(DivergedError, match="step 2: loss nan"):
        take_step_(course)
    assert all(torch.equal(p, before[name]) for name, p in course.model.named_parameters())
    assert course.step == 1
    assert all(p.grad is None for p in course.model.parameters())


def test_gradients_are_clipped_to_their_norm(begun: Callable[..., Course]):
    """SGD without momentum moves by lr · gradient, so the step shows the norm it used."""
    course = begun(optimizer="sgd", betas=(0.0, 0.95), weight_decay=0.0, lr=1.0, warmup=0, rule="sp", clip=0.01)
    before = [p.detach().clone() for p in course.model.parameters()]
    row = take_step_(course)
    moved = torch.cat([(p - b).flatten() for p, b in zip(course.model.parameters(), before, strict=True)])
    assert row["grad_norm"] > 0.01
    assert moved.norm().item() == pytest.approx(0.01, rel=1e-3)
