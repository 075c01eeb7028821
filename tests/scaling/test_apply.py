"""``apply_`` on real models: what it does once, what it keeps at every step, and what it refuses."""

from __future__ import annotations

import copy
import math

import pytest
import torch
from torch import nn

import zoo
from scaling import models
from sparing.blocks import named_parameters
from sparing.errors import UserError
from sparing.scaling.apply import apply_, restore_
from sparing.scaling.masks.laws import Bernoulli, ConstantFanIn, ExactCount
from sparing.scaling.masks.mask_set import masks_of
from sparing.scaling.model.fold import remove_
from sparing.scaling.model.multipliers import factor_of
from sparing.scaling.plans.planning import plan
from sparing.scaling.rules import SP, MuP, SuPar

QUARTER = {"density": 0.25}


def mlp(width: int = 32) -> nn.Sequential:
    return models.constant_mlp(width).double()


def scaled(width: int = 32, *, seed: int = 0, density: float = 0.25, law=None, **rule):
    model = mlp(width)
    chosen = plan(model, base=mlp(16), density=density, rule=SuPar(**rule), init={"*": "constant"})
    return model, chosen, apply_(model, chosen, seed=seed, masks=law)


def inputs(rows: int = 6, seed: int = 0) -> torch.Tensor:
    return torch.randn(rows, 8, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def loss_of(model: nn.Module, step: int) -> torch.Tensor:
    return model(inputs(seed=step)).square().mean()


class Lion(torch.optim.Optimizer):
    """Sign of an interpolated momentum, decoupled decay (Chen et al. 2023): written for this test."""

    def __init__(self, params, lr=1e-3, betas=(0.9, 0.99), weight_decay=0.0):
        super().__init__(params, {"lr": lr, "betas": betas, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                m = self.state[p].setdefault("m", torch.zeros_like(p))
                first, second = group["betas"]
                p.mul_(1 - group["lr"] * group["weight_decay"])
                p.add_((first * m + (1 - first) * p.grad).sign(), alpha=-group["lr"])
                m.lerp_(p.grad, 1 - second)


OPTIMIZERS = {
    "adam": lambda params: torch.optim.Adam(params, lr=1e-2),
    "adamw": lambda params: torch.optim.AdamW(params, lr=1e-2, weight_decay=0.1),
    "amsgrad": lambda params: torch.optim.Adam(params, lr=1e-2, amsgrad=True),
    "sgd": lambda params: torch.optim.SGD(params, lr=1e-2, momentum=0.9, nesterov=True, weight_decay=0.01),
    "lion": lambda params: Lion(params, lr=1e-3, weight_decay=0.1),
}


class Explicit(nn.Module):
    """The oracle: dense weights, multiplied by their masks in every forward pass."""

    def __init__(self, model: nn.Sequential, masks: dict[str, torch.Tensor]) -> None:
        super().__init__()
        self.inner, self.masks = model, masks

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        weights = {n: p * self.masks[n] if n in self.masks else p for n, p in self.inner.named_parameters()}
        return torch.func.functional_call(self.inner, weights, (x,))


@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_twenty_steps_equal_weights_times_mask(kind: str):
    """Bit for bit: the same products in the same order, and zero gradients leave zeros in every optimizer."""
    model, _, masks = scaled()
    for gate in masks:
        assert not model.get_parameter(gate)[~masks[gate]].any()
    bare = copy.deepcopy(model)
    remove_(bare)
    # the readout of width 32 on a base of 16 halves its input: the oracle's hook is written out
    bare[-1].register_forward_pre_hook(lambda module, args: (args[0] * 0.5,))
    oracle = Explicit(bare, {name: mask.clone() for name, mask in masks.items()})
    ours, theirs = OPTIMIZERS[kind](model.parameters()), OPTIMIZERS[kind](oracle.parameters())
    for step in range(20):
        for net, optimizer in ((model, ours), (oracle, theirs)):
            optimizer.zero_grad()
            loss_of(net, step).backward()
            optimizer.step()
        for name in masks:
            assert not model.get_parameter(name).grad[~masks[name]].any()
    for (name, p), q in zip(model.named_parameters(), bare.parameters(), strict=True):
        live = masks.get(name, torch.ones_like(p, dtype=torch.bool))
        assert torch.equal(p * live, q * live), name
        assert torch.equal(p, p * live), name
    masks.check(ours)


def test_an_optimizer_that_moves_masked_weights_is_held_and_its_state_found_by_check():
    """A step along the same direction for all entries, as orthogonalised updates make."""

    class Spread(torch.optim.SGD):
        @torch.no_grad()
        def step(self, closure=None):
            for group in self.param_groups:
                for p in group["params"]:
                    self.state[p]["buffer"] = torch.full_like(p, p.grad.norm().item())
                    p.sub_(self.state[p]["buffer"], alpha=1e-2)

    model, _, masks = scaled()
    optimizer = Spread(model.parameters(), lr=1e-2)
    loss_of(model, 0).backward()
    optimizer.step()
    assert not any(model.get_parameter(n)[~m].any() for n, m in masks.items())
    with pytest.raises(UserError, match="buffer: got state off the mask"):
        masks.check(optimizer)


@pytest.mark.parametrize("build", [models.mlp, models.constant_mlp])
@pytest.mark.parametrize("form", ["rescaled", "shifted"])
def test_live_weights_have_the_planned_scale(build, form):
    """Defect 2 of the public code: the factor acts on the real tensor. 256² weights of density ¼, 4 errors of a std
    that is drawn from a uniform (kurtosis below 3) or a normal law: 4/√(2n)."""
    model = build(256)
    before = {n: p.detach().clone() for n, p in model.named_parameters()}
    chosen = plan(model, base=build(64), density=0.25, rule=SuPar(form=form))
    masks = apply_(model, chosen)
    for name in ("2.weight", "4.weight"):
        live = model.get_parameter(name)[masks[name]].double()
        std, expected = live.std().item(), masks.plan.entries[name].std
        assert abs(std / expected - 1) < 4 / math.sqrt(2 * len(live))
        factor = masks.plan.entries[name].rescale
        torch.testing.assert_close(live, (before[name] * factor)[masks[name]].double(), rtol=1e-6, atol=0)
    hidden = masks.plan.entries["2.weight"]
    # σ/√(m_d m_ρ) in the rescaled form; torch's own init has the width already, so only the density is due
    due = (0.25 if build is models.mlp else 4 * 0.25) ** -0.5
    shifted_due = 2.0 if build is models.mlp else 1.0  # base scale: fan-in init undone
    assert hidden.rescale == pytest.approx(due if form == "rescaled" else shifted_due, rel=1e-12)


@pytest.mark.parametrize("make", [models.gpt2, models.llama, models.mlp])
@pytest.mark.parametrize("rule", [SP(), MuP(), SuPar(), SuPar(form="shifted")])
def test_the_base_itself_is_left_as_it_is(make, rule):
    """Bit for bit, and without any hook that computes."""
    model, twin = make(32), make(32)
    masks = apply_(model, plan(model, base=make(32), rule=rule))
    assert len(masks) == 0
    for name, p in named_parameters(model).items():
        assert torch.equal(p, named_parameters(twin)[name])
    assert set(model.state_dict()) - set(twin.state_dict()) == {"scaling_plan"}


def test_masks_follow_the_seed_and_the_weights_do_not():
    first, _, one = scaled(seed=0)
    second, _, two = scaled(seed=1)
    assert one.digest() != two.digest()
    both = one["2.weight"] & two["2.weight"]
    assert torch.equal(first.get_parameter("2.weight")[both], second.get_parameter("2.weight")[both])
    assert one.digest() == scaled(seed=0)[2].digest()


def test_factors_use_the_density_that_masks_have_in_truth():
    model, chosen, masks = scaled(law=Bernoulli())
    for name in masks:
        real = int(masks[name].sum()) / masks[name].numel()
        assert real != 0.25
        assert masks.plan.entries[name].density == masks.density(name) == real
    group = next(g for g in chosen.groups(model, lr=1.0) if "2.weight" in g["param_names"])
    assert group["lr"] == pytest.approx(1 / (2 * masks.density("2.weight")), rel=1e-12)


def test_redraw_leaves_the_row_of_padding_at_zero():
    """Nothing would ever train it back to zero."""
    build = lambda width: nn.Sequential(nn.Embedding(9, width, padding_idx=2), nn.Linear(width, 3))  # noqa: E731
    model = models.seeded(lambda: build(32))
    apply_(model, plan(model, base=models.seeded(lambda: build(16))), redraw=0.05)
    assert not model[0].weight[2].any()
    assert model[0].weight[3].all()


def test_llama_with_grouped_queries_and_tied_gpt2():
    for make in (models.llama, models.gpt2):
        model = make(64)
        masks = apply_(model, plan(model, base=make(32), density=0.25, rule=SuPar(input=2.0, output=3.0)))
        model(**zoo.tokens()).loss.backward()
        for name, mask in masks.items():
            parameter = named_parameters(model)[name]
            assert parameter.shape == mask.shape
            assert not parameter[~mask].any()
            assert not parameter.grad[~mask].any()
            fan_in = mask if masks.plan.entries[name].transposed else mask.t()
            assert len(fan_in.sum(0).unique()) == 1, name  # constant fan-in, whichever way it is stored
        assert factor_of(model.lm_head, "forward_scale") == 1.5
        assert factor_of(model.get_input_embeddings(), "forward_scale") == 2.0
    assert model.lm_head.weight is model.transformer.wte.weight


def test_a_readout_multiplier_acts_in_evaluation_and_without_targets():
    """Defect 4 of the public code: logits without labels were not multiplied."""
    model = models.llama(64).double()
    plain = copy.deepcopy(model)
    apply_(model, plan(model, base=models.llama(32).double(), rule=SuPar(output=3.0), init={"*": "given"}))
    ids = zoo.tokens()["input_ids"]
    with torch.no_grad():
        logits = model.eval()(input_ids=ids).logits
        assert torch.equal(logits, model(input_ids=ids, labels=ids).logits)
        torch.testing.assert_close(logits, plain.eval()(input_ids=ids).logits * 1.5, rtol=1e-12, atol=1e-13)


def test_a_frozen_weight_is_masked_too_and_may_thaw():
    model = mlp()
    model[2].requires_grad_(False)
    masks = apply_(model, plan(model, density=0.25))
    assert not model[2].weight.requires_grad
    model[2].requires_grad_(True)
    loss_of(model, 0).backward()
    assert not model[2].weight.grad[~masks["2.weight"]].any()
    assert model[2].weight.grad[masks["2.weight"]].any()


@pytest.mark.parametrize("alone", [False, True])
def test_a_deep_copy_masks_its_own_gradients(alone):
    model, _, masks = scaled()
    twin = copy.deepcopy(model)
    layer = copy.deepcopy(model[2]) if alone else twin[2]
    if alone:
        layer(torch.ones(1, 32, dtype=torch.float64)).sum().backward()
    else:
        theirs = masks_of(twin)
        assert theirs is not masks
        assert theirs.digest() == masks.digest()
        theirs.set_("4.weight", torch.zeros_like(theirs["4.weight"]))
        assert masks["4.weight"].any()
        theirs.set_("4.weight", masks["4.weight"])
        twin.load_state_dict(model.state_dict())
        loss_of(twin, 0).backward()
    mask = layer.weight_mask
    assert mask is not masks["2.weight"]
    assert not layer.weight.grad[~mask].any()
    assert layer.weight.grad[mask].any()
    assert model[2].weight.grad is None


def test_nothing_is_left_after_remove():
    model, _, _ = scaled(input=2.0)
    remove_(model)
    assert set(model.state_dict()) == set(mlp().state_dict())
    assert not any(m._forward_hooks or m._forward_pre_hooks or m._load_state_dict_pre_hooks for m in model.modules())
    loss_of(model, 0).backward()
    assert (model[2].weight.grad != 0).double().mean() > 0.5
    apply_(model, plan(model, density=0.5))  # and it may be scaled again


@pytest.mark.parametrize("second", ["same", "other", "restore", "inside"])
def test_a_second_scaling_is_refused_and_changes_nothing(second):
    model, chosen, _ = scaled()
    before = {key: tensor.clone() for key, tensor in model.state_dict().items()}
    outer = nn.Sequential(model, nn.Linear(4, 4).double())
    with pytest.raises(UserError, match="scaled before"):
        {
            "same": lambda: apply_(model, chosen),
            "other": lambda: apply_(model, plan(mlp(), density=0.5)),
            "restore": lambda: restore_(model, chosen),
            "inside": lambda: apply_(outer, plan(outer)),
        }[second]()
    assert all(torch.equal(before[key], tensor) for key, tensor in model.state_dict().items())


def test_models_that_the_plan_is_not_of_are_refused():
    chosen = plan(mlp(), density=0.25)
    with pytest.raises(UserError, match="plan again"):
        apply_(mlp(48), chosen)
    model = mlp()
    model.append(nn.Linear(4, 4).double())
    with pytest.raises(UserError, match=r"7\.\w+ \(4"):
        apply_(model, chosen)
    with torch.device("meta"):
        hollow = models.mlp(32)
    with pytest.raises(UserError, match="meta device"):
        apply_(hollow, plan(models.mlp(32), density=0.25))
    with pytest.raises(UserError, match="was not scaled"):
        masks_of(mlp())


def test_a_mask_without_live_weights_is_refused():
    model = mlp()
    chosen = plan(model, density=0.25)

    class Nothing(ExactCount):
        def draw(self, shape, density, *, seed, name):
            return torch.zeros(*shape, dtype=torch.bool)

    with pytest.raises(UserError, match="without live weights"):
        apply_(model, chosen, masks=Nothing())
    assert set(model.state_dict()) == set(mlp().state_dict())


@pytest.mark.parametrize("law", [ConstantFanIn(balanced=True), ExactCount()], ids=repr)
def test_convolutions_have_masks_in_their_own_orientation(law):
    model = models.conv(16)
    masks = apply_(model, plan(model, base=models.conv(8), density=0.5, init={"*": "given"}), masks=law)
    assert {"conv.weight", "up.weight"} <= set(masks)
    model(torch.randn(1, 3, 8, 8, generator=torch.Generator().manual_seed(0))).sum().backward()
    for name, mask in masks.items():
        assert not model.get_parameter(name).grad[~mask].any()
        if isinstance(law, ConstantFanIn):
            rows = mask.transpose(0, 1) if name == "up.weight" else mask
            assert len(rows.flatten(1).sum(1).unique()) == 1


def test_redraw_gives_every_weight_the_base_scale_times_its_factor():
    model = models.mlp(256)
    chosen = plan(model, base=models.mlp(64), density=1 / 16)
    before = torch.get_rng_state()
    masks = apply_(model, chosen, redraw=0.05)
    assert torch.equal(before, torch.get_rng_state())
    live = model.get_parameter("2.weight")[masks["2.weight"]]
    assert abs(live.std().item() / (0.05 / math.sqrt(4 / 16)) - 1) < 4 / math.sqrt(2 * len(live))
    assert abs(model[0].weight.std().item() / 0.05 - 1) < 4 / math.sqrt(2 * 256 * 8)
