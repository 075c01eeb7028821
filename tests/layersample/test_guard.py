"""What the guard takes for a drawn block that was not in the graph, and what for one that was skipped."""

from __future__ import annotations

import gc
import io

import pytest
import torch
from torch import Tensor, nn

import zoo
from lisa_loop import assert_same, assert_same_state, copy_of, setup
from sparing.errors import UserError
from sparing.layersample import Adaptive, LayerSampling, Ordered, Sampler, StepInBackward, Uniform

X = torch.ones(2, 4)


class Net(nn.Module):
    """Blocks called as ``call`` says: "module", past their hooks by "forward", "scripted", or "no" block at all."""

    def __init__(self, call: str) -> None:
        super().__init__()
        self.first, self.last, self.call = nn.Linear(4, 4), nn.Linear(4, 1), call
        blocks = [nn.Sequential(nn.Linear(4, 4), nn.Tanh()) for _ in range(3)]
        self.layers = nn.ModuleList(torch.jit.script(b) if call == "scripted" else b for b in blocks)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for layer in self.layers if self.call != "no" else ():
            x = layer.forward(x) if self.call == "forward" else layer(x)
        return self.last(x).sum()


def made(call: str, **changes) -> tuple[Net, Sampler]:
    model = Net(call)
    settings = LayerSampling(**{"active": 1, "period": 1, "body": "layers"} | changes)
    return model, Sampler(model, torch.optim.AdamW(model.parameters()), settings)


@pytest.mark.filterwarnings("ignore:`torch.jit.script` is:DeprecationWarning")
@pytest.mark.parametrize("call", ["module", "forward", "scripted"])
def test_a_forward_pass_before_begin_step_is_seen_however_blocks_are_called(call: str) -> None:
    model, sampler = made(call)
    loss = model(X)
    sampler.begin_step(0)
    loss.backward()
    with pytest.raises(UserError, match="none in any drawn block that ran"):
        sampler.optimizer.step()


ROLES = {"embed": False, "tail": False, "head": False}


@pytest.mark.parametrize("changes", [{"active": 2}, {"active": 1} | ROLES, {"active": 2, "units": "module"}])
def test_a_block_that_enters_after_the_forward_pass_is_seen_beside_those_that_stay(changes: dict) -> None:
    """Also where nothing else trains, so that no gradient of another tells of the loss."""
    model, sampler = made("module", period=2, sampler=Ordered(), **changes)
    for step in range(3):
        if step < 2:
            sampler.begin_step(step)
        loss = model(X)
        if step == 2:
            sampler.begin_step(step)
        if step < 2 or loss.requires_grad:
            loss.backward()
        if step < 2:
            sampler.optimizer.step()
            sampler.optimizer.zero_grad()
    before = copy_of(model)
    with pytest.raises(
        UserError, match="gradients: got none in a block that was drawn anew; they were not in the graph"
    ):
        sampler.optimizer.step()
    assert_same(before, copy_of(model))


def test_a_step_inside_backward_of_a_forward_pass_before_begin_step_is_refused() -> None:
    model, sampler = made("module", sampler=Ordered())
    step_in = StepInBackward(sampler)
    sampler.begin_step(0)
    step_in.backward(model(X))
    loss = model(X)
    sampler.begin_step(1)
    with pytest.raises(UserError, match="got none in a block that was drawn anew"):
        step_in.backward(loss)


@pytest.mark.parametrize("graph", [False, True])
def test_an_evaluation_between_two_intervals_is_no_forward_pass_of_the_next_step(graph: bool) -> None:
    """Even one with a graph, and with a micro-batch whose begin_step comes again before its backward pass."""
    model, sampler = made("module", sampler=Ordered(), **ROLES)
    for step in range(4):
        with torch.set_grad_enabled(graph):
            model(X)
        sampler.begin_step(step)
        loss = model(X)
        sampler.begin_step(step)
        loss.backward()
        sampler.optimizer.step()
        sampler.optimizer.zero_grad()


def test_a_block_that_enters_and_is_skipped_after_an_evaluation_with_a_graph_passes() -> None:
    """As by stochastic depth: others have run since, so begin_step came before the forward pass."""
    model, sampler = made("module", active=2, sampler=Ordered(), **ROLES)
    for step in range(2):
        model(X)
        sampler.begin_step(step)
        x = model.first(X)
        for layer in model.layers[:2]:
            x = layer(x)
        model.last(x).sum().backward()
        sampler.optimizer.step()
        sampler.optimizer.zero_grad()
    assert sampler.active == (0, 2)


def test_an_optimizer_that_takes_the_place_of_the_samplers_is_seen() -> None:
    model, sampler = made("module")
    other = torch.optim.AdamW(model.parameters())
    for step in range(3):
        sampler.begin_step(step)
        model(X).backward()
        (other if step else sampler.optimizer).step()
        other.zero_grad()
    with pytest.raises(UserError, match="optimizer: got one that does not step, while the weights change"):
        sampler.begin_step(3)


def test_weights_written_in_a_step_that_a_gradient_scaler_skips_are_no_other_optimizer() -> None:
    """One skipped step whose weights were loaded or averaged, and any number of skipped steps by themselves."""
    model, sampler = made("module", period=9)
    for step in range(9):
        sampler.begin_step(step)
        model(X).backward()
        if step in {0, 3, 8}:
            sampler.optimizer.step()
        elif step in {2, 4, 6}:
            model.load_state_dict(model.state_dict())
        sampler.optimizer.zero_grad()


def test_blocks_that_ran_in_a_step_nobody_took_may_be_skipped_in_the_next() -> None:
    """A gradient scaler skips the optimizer's step; the next one's blocks are looked at by themselves."""
    model, sampler = made("module", period=9)
    sampler.begin_step(0)
    model(X).backward()
    sampler.optimizer.zero_grad()
    model.call = "no"
    for step in (1, 2):
        sampler.begin_step(step)
        model(X).backward()
        sampler.optimizer.step()
        sampler.optimizer.zero_grad()


def test_a_step_without_begin_step_after_loading_is_refused() -> None:
    model, sampler = made("module")
    sampler.begin_step(0)
    sampler.load_state_dict(sampler.state_dict())
    model(X).backward()
    with pytest.raises(UserError, match="no begin_step yet"):
        sampler.optimizer.step()


def test_a_model_is_saved_whole_under_the_sampler_and_has_no_hook_afterwards() -> None:
    model = zoo.llama()
    sampler = Sampler(model, torch.optim.AdamW(model.parameters()), LayerSampling(active=1, period=1))
    sampler.begin_step(0)
    torch.save(model, io.BytesIO())
    sampler.close()
    assert not any(module._forward_hooks for module in model.modules())


@pytest.mark.parametrize("changes", [{}, {"warmup": 1}, {"masters": True}])
def test_a_lost_sampler_leaves_no_hook(changes: dict) -> None:
    model, sampler = made("module", **changes)
    optimizer = sampler.optimizer
    sampler.begin_step(0)
    del sampler
    gc.collect()
    assert not optimizer._optimizer_step_pre_hooks
    assert not optimizer._optimizer_step_post_hooks
    assert not any(module._forward_hooks for module in model.modules())


@pytest.mark.parametrize("masters", [False, True])
def test_gradients_that_a_step_has_used_do_not_block_a_switch(masters: bool) -> None:
    model, sampler = made("module", masters=masters)
    model.bfloat16()
    for step in range(3):
        sampler.begin_step(step)
        sampler.optimizer.zero_grad()
        model(X.bfloat16()).backward()
        sampler.optimizer.step()
    assert len(sampler.history) == 3


@pytest.mark.parametrize("zero", [False, True])
def test_gradients_that_came_after_the_step_block_a_switch(zero: bool) -> None:
    """Added to those that the step has used, or in tensors of their own."""
    model, sampler = made("module")
    sampler.begin_step(0)
    model(X).backward()
    sampler.optimizer.step()
    if zero:
        sampler.optimizer.zero_grad()
    model(X).backward()
    with pytest.raises(UserError, match="accumulation window"):
        sampler.begin_step(1)


def test_the_same_step_again_and_again_is_refused() -> None:
    """Once more is a run that starts again, also after a checkpoint was loaded; a third time is a step that stands."""
    model, sampler = made("module")

    def train() -> None:
        sampler.begin_step(0)
        sampler.optimizer.zero_grad()
        model(X).backward()
        sampler.optimizer.step()

    train()
    saved = sampler.state_dict()
    train()
    with pytest.raises(UserError, match=r"step: got 0 for the third time running; .*pass the number of the step"):
        train()
    for _ in range(3):
        sampler.load_state_dict(saved)
        train()


@pytest.mark.parametrize("keyword", [False, True])
@pytest.mark.parametrize("sampler", [Uniform(), Adaptive(temperature=0.1), Adaptive(temperature=0.1, signal="bound")])
def test_a_step_with_a_closure_is_that_after_a_backward_pass(sampler: Uniform | Adaptive, keyword: bool) -> None:
    """Masters and scores get what the closure computes, which clears gradients as Lightning's does."""
    settings = LayerSampling(active=1, period=2, masters=True, warmup=1, sampler=sampler)
    runs = []
    for closed in (False, True):
        model, optimizer, sampling = setup(settings, dtype=torch.bfloat16)
        losses = []
        for step in range(6):
            sampling.begin_step(step)

            def closure(model=model, optimizer=optimizer, step=step) -> Tensor:
                loss = model(**zoo.tokens(seed=step)).loss
                optimizer.zero_grad()
                loss.backward()
                return loss

            if closed:
                losses.append(optimizer.step(closure=closure) if keyword else optimizer.step(closure))
            else:
                losses.append(closure())
                optimizer.step()
        runs.append((model, optimizer, losses, sampling.state_dict()))
    assert_same(copy_of(runs[0][0]), copy_of(runs[1][0]))
    assert_same_state(runs[0][1], runs[1][1])
    assert runs[0][2] == runs[1][2]
    states = [{key: value for key, value in run[3].items() if key != "tensors"} for run in runs]
    assert repr(states[0]) == repr(states[1])  # scores that nothing has seen are NaN
    assert_same(runs[0][3]["tensors"], runs[1][3]["tensors"])
    assert all(any(name.startswith("master/") for name in run[3]["tensors"]) for run in runs)


def test_a_closure_is_checked_as_a_backward_pass_is() -> None:
    model, sampler = made("module")
    loss = model(X)
    sampler.begin_step(0)
    with pytest.raises(UserError, match="none in any drawn block that ran"):
        sampler.optimizer.step(loss.backward)


class Twice(torch.optim.SGD):
    """Steps, and asks for the loss where that leads."""

    def step(self, closure):
        super().step()
        return closure()


def test_an_optimizer_that_asks_for_the_loss_elsewhere_is_refused() -> None:
    model = Net("module")
    sampler = Sampler(model, Twice(model.parameters(), lr=0.1), LayerSampling(active=1, period=1, body="layers"))
    sampler.begin_step(0)

    def closure() -> Tensor:
        sampler.optimizer.zero_grad()
        model(X).backward()
        return model(X)

    with pytest.raises(UserError, match="calls the closure after weights have moved"):
        sampler.optimizer.step(closure)
