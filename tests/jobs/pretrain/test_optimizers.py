"""Every optimizer stands on the plan's groups, and two joined ones step and resume as two."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from torch import nn

from sparing.jobs.pretrain.choices import Both
from sparing.jobs.pretrain.state import TrainState, take_step_


@pytest.mark.parametrize("name", ["adamw", "sgd", "muon"])
def test_the_plan_accepts_it_before_and_after_steps(started: Callable[..., TrainState], name: str):
    state = started(optimizer=name, width=32)
    state.check()
    for _ in range(2):
        take_step_(state)
    state.check()
    trained = {name for group in state.groups for name in group["param_names"]}
    assert trained == set(state.plan.entries)
    moved = {id(p) for p in state.optimizer.state}
    assert moved == {id(p) for p in state.model.parameters()}


def test_muon_moves_hidden_weights_by_their_share_of_the_rate(started: Callable[..., TrainState]):
    state = started(optimizer="muon", width=32, lr=0.5, weight_decay=0.0, clip=0.0)
    name = "model.layers.0.mlp.up_proj.weight"
    weight = state.model.get_parameter(name)
    before = weight.detach().clone()
    take_step_(state)
    step = weight.detach() - before
    ratio = (weight.shape[0] / weight.shape[1]) ** 0.5
    # power iterations approach the norm from below: sixteen of them in a first step leave a few per cent
    assert torch.linalg.matrix_norm(step, ord=2).item() == pytest.approx(0.5 * ratio, rel=0.05)
    assert not step[~state.masks[name]].any()


def joined(parameters: list[nn.Parameter]) -> Both:
    first = torch.optim.SGD(parameters[:1], lr=0.1, momentum=0.9)
    return Both(first, torch.optim.AdamW(parameters[1:], lr=0.2))


def test_two_joined_optimizers_are_the_two(started: Callable[..., TrainState]):
    generator = torch.Generator().manual_seed(0)
    start = [torch.randn(3, generator=generator, dtype=torch.float64) for _ in range(2)]
    pair, alone = ([nn.Parameter(t.clone()) for t in start] for _ in range(2))
    both = joined(pair)
    two = (torch.optim.SGD(alone[:1], lr=0.1, momentum=0.9), torch.optim.AdamW(alone[1:], lr=0.2))
    for step in range(6):
        if step == 3:  # a resumed run: new objects, loaded state
            state, both = copy.deepcopy(both.state_dict()), joined(pair)
            both.load_state_dict(state)
        for group in both.param_groups:
            group["lr"] *= 0.9
        for group in (*two[0].param_groups, *two[1].param_groups):
            group["lr"] *= 0.9
        for parameters in (pair, alone):
            for p in parameters:
                p.grad = p.detach() ** 3
        both.step()
        for part in two:
            part.step()
    for a, b in zip(pair, alone, strict=True):
        assert torch.equal(a, b)
