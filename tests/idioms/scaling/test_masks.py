"""Masks under all that writes to weights: every optimizer class of torch, edits, averages, copies, loads.

The oracle of a training step is an ordinary model, whose gradients are multiplied by the masks before the optimizer's
step and whose weights are after it, by hand; equal means to the bit, signs of zeros included.
"""

from __future__ import annotations

import copy
import inspect
import io

import pytest
import torch
from torch import nn

from idioms.scaling.cells import FORMS, KEEPERS, KEEPS, OPTIMIZERS, STEPS, TRAINED, TRAINERS, WRITERS, WRITES
from scaling import models
from sparing.errors import UserError
from sparing.scaling.apply import apply_
from sparing.scaling.masks.mask_set import Masks, masks_of
from sparing.scaling.model.fold import remove_
from sparing.scaling.plans.planning import plan

BASE = {"init": {"*": "constant"}, "density": 0.25, "least_fan_in": 0}


def scaled() -> tuple[nn.Module, Masks]:
    """A perceptron without biases, since torch's Muon takes matrices only."""
    model, base = (models.constant_mlp(width, bias=False).double() for width in (16, 8))
    return model, apply_(model, plan(model, base=base, **BASE))


def table() -> tuple[nn.Module, Masks]:
    """A masked table with sparse gradients, which is all that SparseAdam takes."""

    def build(width: int) -> nn.Module:
        return nn.Sequential(nn.Embedding(12, width, sparse=True, dtype=torch.float64), nn.Flatten())

    model = models.seeded(lambda: build(16))
    return model, apply_(model, plan(model, base=models.seeded(lambda: build(8)), sparse=["0.weight"], **BASE))


def inputs(step: int, model: nn.Module) -> torch.Tensor:
    generator = torch.Generator().manual_seed(step)
    if isinstance(model[0], nn.Embedding):
        return torch.randint(12, (5,), generator=generator)
    return torch.randn(6, 8, generator=generator, dtype=torch.float64)


def loss_of(model: nn.Module, step: int) -> torch.Tensor:
    return model(inputs(step, model)).square().mean()


def off(model: nn.Module, masks: Masks) -> torch.Tensor:
    """Bits of all weights off the masks: zero, of the positive sign, is no bit."""
    return torch.cat([model.get_parameter(n).detach()[~mask].view(torch.int64) for n, mask in masks.items()])


def optimizer_of(name: str, model: nn.Module) -> torch.optim.Optimizer:
    kind, options = FORMS.get(name, (name, {}))
    return getattr(torch.optim, kind)(model.parameters(), lr=0.05, **options)


def test_every_optimizer_of_torch_is_here():
    found = {n for n, c in vars(torch.optim).items() if inspect.isclass(c) and issubclass(c, torch.optim.Optimizer)}
    assert found == {*OPTIMIZERS, "Optimizer"}


@pytest.mark.parametrize("name", [*OPTIMIZERS, *FORMS], ids=lambda name: f"{STEPS}-{name}")
def test_masks_hold_to_the_bit_under_every_optimizer(name: str):
    """Three steps. LBFGS takes its inner ones without hooks between: its oracle masks gradients in the closure."""
    model, masks = (table if name == "SparseAdam" else scaled)()
    plain = copy.deepcopy(model)
    keep = {n: mask.clone() for n, mask in masks.items()}
    remove_(plain)
    if name != "SparseAdam":
        plain[-1].register_forward_pre_hook(lambda _, args: (args[0] * 0.5,))  # width 16 on a base of 8
    ours, theirs = optimizer_of(name, model), optimizer_of(name, plain)

    def closure(net: nn.Module, optimizer: torch.optim.Optimizer, step: int):
        optimizer.zero_grad()
        loss = loss_of(net, step)
        loss.backward()
        if net is plain:
            for n, mask in keep.items():
                net.get_parameter(n).grad = net.get_parameter(n).grad * mask
        return loss

    for step in range(3):
        for net, optimizer in ((model, ours), (plain, theirs)):
            closure(net, optimizer, step)
            optimizer.step(lambda n=net, o=optimizer, s=step: closure(n, o, s) if name.startswith("LBFGS") else None)
        with torch.no_grad():
            for n, mask in keep.items():
                plain.get_parameter(n).masked_fill_(~mask, 0)
        assert not off(model, masks).any()
    for (n, p), q in zip(model.named_parameters(), plain.parameters(), strict=True):
        assert torch.equal(p, q), n
        assert bool(p.isfinite().all())


def add(model: nn.Module) -> None:
    with torch.no_grad():
        for p in model.parameters():
            p.add_(0.1)


def load_parts(model: nn.Module) -> None:
    for at in (2, 4):
        model[at].load_state_dict({**model[at].state_dict(), "weight": torch.ones_like(model[at].weight)})


def average(model: nn.Module) -> nn.Module:
    mean = torch.optim.swa_utils.AveragedModel(model)
    for step in range(3):
        optimizer = torch.optim.Muon(model.parameters(), lr=0.1)
        loss_of(model, step).backward()
        optimizer.step()
        mean.update_parameters(model)
    return mean.module


def copy_back(model: nn.Module) -> None:
    with torch.no_grad():
        for p in model.parameters():
            p.copy_(torch.ones_like(p).lerp_(p, 0.5))


class Old(torch.optim.SGD):
    """An optimizer that leaves no trace in the version of what it writes to."""

    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                p.data = p.data + 0.1


def add_to_data(model: nn.Module) -> None:
    for p in model.parameters():
        p.data.add_(0.1)


def vector(model: nn.Module) -> None:
    nn.utils.vector_to_parameters(nn.utils.parameters_to_vector(model.parameters()) + 0.1, model.parameters())


def other_data(model: nn.Module) -> None:
    for p in model.parameters():
        p.data = torch.ones_like(p)


def replace(model: nn.Module) -> None:
    model[2].weight = nn.Parameter(torch.ones_like(model[2].weight))


def noise(model: nn.Module) -> None:
    loss_of(model, 0).backward()
    for p in model.parameters():
        p.grad += 0.1
    torch.optim.Muon(model.parameters(), lr=0.1).step()


WRITTEN = {
    "add_ under no_grad": add, "a part's load_state_dict": load_parts, "AveragedModel of swa_utils": average,
    "exponential moving average copied back": copy_back,
    "an optimizer that writes to .data": lambda model: Old(model.parameters()).step(), "add_ to .data": add_to_data,
    "vector_to_parameters": vector, "another tensor as .data": other_data, "another parameter in its place": replace,
    "noise on gradients before Muon's step": noise,
}  # fmt: skip


def test_every_way_of_writing_is_declared():
    others = {"torch.func.functional_call", "torch.func.grad", "the projection that nn.MultiheadAttention reads itself"}
    assert {*WRITTEN, *others} == set(WRITERS)


def test_a_projection_that_its_owner_reads_itself_is_held_at_the_next_pass():
    """``nn.MultiheadAttention`` never calls its output projection: the model's own pass looks at it."""
    model, base = (models.patches(width).double() for width in (32, 16))
    given = {"roles": {"cls": "embedding", "position": "embedding"}, **BASE}
    masks = apply_(model, plan(model, base=base, **given))
    x = torch.ones(1, 3, 8, 8, dtype=torch.float64)
    expected = model(x)
    with torch.no_grad():
        for name, mask in masks.items():
            model.get_parameter(name)[~mask] = 1.0
    assert any(name.endswith("out_proj.weight") for name in masks)
    assert torch.equal(model(x), expected)
    assert not off(model, masks).any()


@pytest.mark.parametrize("how", WRITTEN, ids=lambda how: f"{WRITES}-{how}")
def test_what_is_written_off_the_masks_is_undone(how: str):
    """The function is that of weights times masks, the gradient is masked, and no state dict holds what was written."""
    model, masks = scaled()
    loss_of(model, 0)  # the first pass, which refuses weights that were drawn anew
    used = WRITTEN[how](model) or model
    masks = masks_of(used)
    oracle = copy.deepcopy(used)
    remove_(oracle)
    oracle[-1].register_forward_pre_hook(lambda _, args: (args[0] * 0.5,))
    with torch.no_grad():
        for n, mask in masks.items():
            oracle.get_parameter(n).mul_(mask)
    x = inputs(7, used)
    assert torch.equal(used(x), oracle(x))
    used.zero_grad()
    loss_of(used, 1).backward()
    assert not any(used.get_parameter(n).grad[~mask].any() for n, mask in masks.items())
    WRITTEN[how](used)
    state = used.state_dict()
    assert not any(state[n][~mask].any() for n, mask in masks.items())
    assert not off(used, masks).any()


@pytest.mark.parametrize("how", ["torch.func.functional_call", "torch.func.grad"], ids=lambda how: f"{WRITES}-{how}")
def test_tensors_that_stand_in_for_weights_are_masked(how: str):
    """Bit for bit: the same call with weights times masks; the model has its own weights back."""
    model, masks = scaled()
    before = {n: p.detach().clone() for n, p in model.named_parameters()}
    stand_ins = {n: p.detach() + 0.1 for n, p in model.named_parameters()}
    times = {n: p * masks[n] if n in masks else p for n, p in stand_ins.items()}

    def loss(params):
        return torch.func.functional_call(model, params, (inputs(1, model),)).square().mean()

    if how == "torch.func.grad":
        got, expected = torch.func.grad(loss)(stand_ins), torch.func.grad(loss)(times)
        assert all(torch.equal(got[n], expected[n]) for n in got)
        assert not any(got[n][~mask].any() for n, mask in masks.items())
    else:
        assert torch.equal(loss(stand_ins), loss(times))
    assert not torch.equal(loss(stand_ins), loss(before))
    for n, p in model.named_parameters():
        assert isinstance(p, nn.Parameter)
        assert torch.equal(p, before[n])


@pytest.mark.parametrize("how", TRAINERS, ids=lambda how: f"{TRAINED}-{how}")
def test_a_model_that_was_trained_before_its_first_call_is_not_taken_for_one_drawn_anew(how: str):
    """The averages are those of weights by hand, to the bit; a call of the trained model is one of its layers."""
    model, masks = scaled()
    other = copy.deepcopy(model)
    mean = torch.optim.swa_utils.AveragedModel(model) if how.startswith("Averaged") else None
    expected = [p.detach().clone() for p in model.parameters()]
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
    for step in range(5):
        optimizer.zero_grad()
        x = inputs(step, model)
        for layer in model:  # a call of the parts, as a training_step has it
            x = layer(x)
        x.square().mean().backward()
        optimizer.step()
        for at, (kept_, p) in enumerate(zip(other.parameters(), model.parameters(), strict=True)):
            with torch.no_grad():
                kept_.lerp_(p, 0.1)
                expected[at] = (
                    p.detach().clone() if mean and not step else expected[at].lerp(p, 1 / (step + 1) if mean else 0.1)
                )
        if mean:
            mean.update_parameters(model)
    used = mean.module if mean else other if how == "a target network" else model
    x = inputs(9, model)
    assert bool(used(x).isfinite().all())
    if used is not model:
        for got, want in zip(used.parameters(), expected, strict=True):
            assert torch.allclose(got, want, rtol=1e-12, atol=1e-15)  # one is a lerp, the other a weighted sum
    assert not off(used, masks).any()


def test_weights_drawn_anew_are_refused_by_the_first_step_and_in_copies():
    for copied in (False, True):
        model, _ = scaled()
        for p in model.parameters():
            nn.init.normal_(p)
        if copied:
            with pytest.raises(UserError, match="drew or replaced"):
                copy.deepcopy(model)(inputs(0, model))
        else:
            model[0](inputs(0, model)).sum().backward()
            with pytest.raises(UserError, match="drew or replaced"):
                torch.optim.SGD(model.parameters(), lr=0.1).step()


def kept(how: str, model: nn.Module) -> nn.Module:
    """Do what a user does with a scaled model."""
    if how == "deepcopy":
        return copy.deepcopy(model)
    if how == "torch.save of the model":
        held = io.BytesIO()
        torch.save(model, held)
        held.seek(0)
        return torch.load(held, weights_only=False)
    if how == "to(bfloat16)":
        return model.to(torch.bfloat16).double()
    if how == "load_state_dict":
        other, _ = scaled()
        other.load_state_dict(model.state_dict(), assign=True)
        return other
    return nn.DataParallel(model) if how == "DataParallel" else torch.compile(model, backend="eager", fullgraph=True)


@pytest.mark.parametrize("how", KEEPERS, ids=lambda how: f"{KEEPS}-{how}")
def test_masks_hold_in_what_a_model_becomes(how: str):
    """Gradients are masked and Muon moves no masked weight; the function is the model's, in double precision."""
    model, masks = scaled()
    x = inputs(1, model)
    expected = model(x)
    used = kept(how, model)
    inner = getattr(used, "module", getattr(used, "_orig_mod", used))
    found = masks_of(inner)
    assert found.digest() == masks.digest()
    if how == "to(bfloat16)":  # three roundings of relative 2^-9 by which outputs of about 0.3 differ
        torch.testing.assert_close(used(x), expected, rtol=0, atol=0.3 * 3 * 2**-9)
    else:
        assert torch.equal(used(x), expected)
    optimizer = torch.optim.Muon(inner.parameters(), lr=0.1)
    for step in range(2):
        optimizer.zero_grad()
        used(inputs(step, model)).square().mean().backward()
        assert not any(inner.get_parameter(n).grad[~mask].any() for n, mask in found.items())
        optimizer.step()
        assert not off(inner, found).any()
