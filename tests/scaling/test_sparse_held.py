"""Whoever holds a sparse layer's parameter (optimizers, hooks, lists, copies) while its places change, or converts."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import clip_grad_norm_
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from sparing.errors import UserError
from sparing.scaling.apply import apply_
from sparing.scaling.masks.dynamic import GMP, SET, RigL
from sparing.scaling.masks.evolve import Evolution
from sparing.scaling.plans.planning import plan
from sparing.scaling.sparse.backends import convert_
from sparing.scaling.sparse.layers import SparseLinear

METHODS = {"set": SET(every=2), "rigl": RigL(every=2), "gmp": GMP(initial=0.25, final=0.05, start=0.1, every=2)}


def net(width: int) -> nn.Sequential:
    return nn.Sequential(nn.Linear(8, width), nn.Tanh(), nn.Linear(width, width), nn.Tanh(), nn.Linear(width, 2))


def made(seed: int = 0):
    torch.manual_seed(1)
    model = net(32).double()
    chosen = plan(model, base=lambda: net(16), density=1 / 4)
    return model, chosen, apply_(model, chosen, seed=seed)


def data(step: int) -> tuple[Tensor, Tensor]:
    x = torch.randn(16, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(step))
    return x, x[:, :2] * x[:, 2:4]


def loss_of(model: nn.Module, step: int) -> Tensor:
    x, y = data(step)
    return (model(x) - y).square().mean()


class Run:
    """A model whose masks change, and its parameters as they were listed before the first step."""

    def __init__(self, backend: str, method: str = "set"):
        self.model, chosen, self.masks = made()
        self.optimizer = torch.optim.AdamW(chosen.groups(self.model, lr=1e-2))
        self.evolution = Evolution(self.model, self.masks, self.optimizer, METHODS[method], steps=12)
        convert_(self.model, self.masks, backend=backend, optimizer=self.optimizer)
        self.listed = list(self.model.parameters())

    def step(self, step: int, clip: float | None = None) -> float:
        self.optimizer.zero_grad()
        loss = loss_of(self.model, step)
        loss.backward()
        if clip is not None:
            clip_grad_norm_(self.listed, clip)
        self.optimizer.step()
        self.evolution.step(step)
        return loss.item()


@pytest.mark.parametrize("method", METHODS)
def test_a_list_of_parameters_made_before_the_run_is_clipped_as_in_dense_layers(method):
    dense, sparse = Run("dense", method), Run("csr", method)
    found = [[run.step(step, clip=1e-2) for step in range(9)] for run in (dense, sparse)]
    assert all(one is other for one, other in zip(sparse.listed, sparse.model.parameters(), strict=True))
    assert found[1] == pytest.approx(found[0], rel=1e-9)  # rounding, grown by nine steps of Adam


@pytest.mark.parametrize("method", METHODS)
def test_a_loss_that_is_still_held_does_not_stop_the_next_pass(method):
    run, losses = Run("csr", method), []
    for step in range(6):
        losses.append(loss_of(run.model, step))  # its graph lives on
        losses[-1].backward()
        run.optimizer.step()
        run.evolution.step(step)
    assert run.model[2].weight.grad.shape == run.model[2].weight.shape


def test_a_backward_pass_that_waits_while_places_change_is_refused():
    run = Run("csr")
    waiting = loss_of(run.model, 0)
    run.step(1)
    run.evolution.step(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        waiting.backward()


def test_hooks_stay_through_conversions_and_moves():
    model, chosen, masks = made()
    seen: list[str] = []
    model[2].weight.register_hook(lambda grad: (seen.append("hook"), grad * 2)[1])
    model[2].weight.register_post_accumulate_grad_hook(lambda held: seen.append("after"))
    plain = copy.deepcopy(model)  # copies have no hooks
    optimizer = torch.optim.AdamW(chosen.groups(model, lr=1e-2))
    for backend in ("csr", "dense", "csr"):
        convert_(model, masks, backend=backend, optimizer=optimizer)
        model.zero_grad()
        seen.clear()
        loss_of(model, 0).backward()
        assert seen == ["hook", "after"]
    loss_of(plain, 0).backward()
    expected = 2 * model[2].gather(plain[2].weight.grad)
    torch.testing.assert_close(model[2].weight.grad, expected, rtol=1e-12, atol=1e-15)  # rounding


def other_mask() -> dict[str, Tensor]:
    """A state dict of the same plan under other masks."""
    return made(seed=7)[0].state_dict()


def test_a_loaded_mask_is_trained_by_a_fresh_optimizer_as_in_dense_layers():
    found = []
    for backend in ("dense", "csr"):
        model, chosen, masks = made()
        optimizer = torch.optim.AdamW(chosen.groups(model, lr=1e-2))
        convert_(model, masks, backend=backend, optimizer=optimizer)
        model.load_state_dict(other_mask())
        for step in range(4):
            optimizer.zero_grad()
            loss_of(model, step).backward()
            optimizer.step()
        found.append(loss_of(model, 9).item())
    assert found[1] == pytest.approx(found[0], rel=1e-10)  # rounding


def test_what_an_optimizer_kept_of_other_places_is_refused_until_it_is_loaded_too():
    run = Run("csr")
    run.optimizer.zero_grad()
    loss_of(run.model, 0).backward()
    run.optimizer.step()
    run.model.load_state_dict(other_mask())
    loss_of(run.model, 1).backward()
    with pytest.raises(UserError, match="averages of weights that have moved"):
        run.optimizer.step()
    run.optimizer.load_state_dict(run.optimizer.state_dict())  # as of the same checkpoint
    run.optimizer.step()


def test_an_optimizer_without_averages_follows_a_loaded_mask():
    model, _, masks = made()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
    convert_(model, masks, backend="csr", optimizer=optimizer)
    for _ in range(2):
        loss_of(model, 0).backward()
        optimizer.step()
        model.load_state_dict(other_mask())
        before = model[2].weight.detach().clone()
    loss_of(model, 0).backward()
    optimizer.step()
    assert not torch.equal(before, model[2].weight)


@pytest.mark.parametrize("begun", [0, 5])  # averaging from the start, and after the places have moved
def test_averages_by_order_of_moving_places_are_refused(begun):
    run = Run("csr")
    average = AveragedModel(run.model, multi_avg_fn=get_ema_multi_avg_fn(0.5))
    for step in range(8):
        run.step(step)
        if step >= begun:
            average.update_parameters(run.model)
    for use in (lambda: loss_of(average, 0), average.state_dict):
        with pytest.raises(UserError, match="an average of parameters"):
            use()


def test_averages_of_state_dicts_are_those_that_masked_dense_layers_have():
    dense, sparse = Run("dense"), Run("csr")
    average, mine = AveragedModel(dense.model, multi_avg_fn=get_ema_multi_avg_fn(0.5)), dict[str, Tensor]()
    for step in range(8):
        for run in (dense, sparse):
            run.step(step)
        average.update_parameters(dense.model)
        now = {name: value.clone() for name, value in sparse.model.state_dict().items()}
        kept = {name for name in mine if name.endswith(("weight", "bias"))}
        mine = {name: mine[name].lerp(value, 0.5) if name in kept else value for name, value in now.items()}
    for name in [name for name in mine if name.endswith("weight_mask")]:
        mine[name.removesuffix("_mask")] *= mine[name]
    twin = copy.deepcopy(sparse.model)
    twin.load_state_dict(mine)
    assert loss_of(twin, 0).item() == pytest.approx(loss_of(average, 0).item(), rel=1e-9)  # rounding, over eight steps
    assert loss_of(twin, 0).item() != pytest.approx(loss_of(sparse.model, 0).item(), rel=1e-3)


def test_averages_of_places_that_stay_are_those_of_dense_layers():
    found = []
    for backend in ("dense", "csr"):
        model, chosen, masks = made()
        convert_(model, masks, backend=backend)
        optimizer = torch.optim.AdamW(chosen.groups(model, lr=1e-2))
        average = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.5))
        for step in range(4):
            optimizer.zero_grad()
            loss_of(model, step).backward()
            optimizer.step()
            average.update_parameters(model)
        found.append(loss_of(average, 9).item())
    assert found[1] == pytest.approx(found[0], rel=1e-10)  # rounding


def test_a_copy_that_is_trained_on_its_own_is_not_taken_for_an_average():
    run = Run("csr")
    twin = copy.deepcopy(run.model)
    optimizer = torch.optim.SGD(twin.parameters(), lr=1e-2)
    for step in range(4):
        run.step(step)
        optimizer.zero_grad()
        loss_of(twin, step).backward()
        optimizer.step()
    assert torch.isfinite(loss_of(twin, 0))


def test_a_static_input_that_is_overwritten_is_refused_where_all_gradients_are_wanted():
    layer = SparseLinear(torch.eye(4), torch.eye(4, dtype=torch.bool))
    layer.keep_dense_gradient, buffer = True, torch.randn(3, 4)
    layer(buffer).square().sum().backward()
    expected = (2 * layer(buffer).detach()).T @ buffer
    torch.testing.assert_close(layer.dense_gradient, expected)
    buffer.copy_(torch.randn(3, 4))
    with pytest.raises(UserError, match="an input that was overwritten"):
        _ = layer.dense_gradient


@pytest.mark.parametrize("backend", ["dense", "csr"])
def test_weights_drawn_anew_are_refused_after_conversion_too(backend):
    model, _, masks = made()
    convert_(model, masks, backend=backend)
    nn.init.normal_(model[2].weight)
    with pytest.raises(UserError, match="drew or replaced the weights"):
        loss_of(model, 0)
