"""Checkpoints of scaled models: whole round trips, refusals that name the key, and weights that were drawn anew."""

from __future__ import annotations

import functools

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

import zoo
from scaling import models
from sparing.errors import UserError
from sparing.scaling.apply import apply_, restore_
from sparing.scaling.masks.mask_set import masks_of
from sparing.scaling.model.loading import PLAN_HASH
from sparing.scaling.plans.planning import Plan, plan
from sparing.scaling.rules import MuP, SuPar

RULE = SuPar(input=2.0, output=3.0, form="shifted")


def fresh(seed: int = 0) -> nn.Module:
    return models.seeded(lambda: models.llama(64).double(), seed)


@functools.cache
def planned(rule=RULE, density: float = 0.25) -> Plan:
    return plan(fresh(), base=models.llama(32).double(), density=density, rule=rule, init={"*": "constant"})


def scaled(seed: int = 0, **options):
    model = fresh()
    return model, apply_(model, planned(**options), seed=seed)


def trained():
    """A scaled model after three steps of AdamW, so that a checkpoint holds something."""
    model, masks = scaled()
    optimizer = torch.optim.AdamW(masks.plan.groups(model, lr=1e-2))
    steps(model, optimizer, range(3))
    return model, masks, optimizer


def steps(model: nn.Module, optimizer: torch.optim.Optimizer, which: range) -> list[float]:
    losses = []
    for step in which:
        loss = model(**zoo.tokens(seed=step)).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


@pytest.mark.parametrize("prepare", ["restore", "apply with another seed"])
def test_a_run_resumes_to_the_same_bits(tmp_path, prepare):
    """Defects 1 and 5 of the public code: masks, multipliers and what the rule did are all back after a resume."""
    model, masks, optimizer = trained()
    save_file({k: v.clone() for k, v in model.state_dict().items()}, tmp_path / "model.safetensors")
    torch.save(optimizer.state_dict(), tmp_path / "optimizer.pt")
    expected = steps(model, optimizer, range(3, 6))

    other = fresh()
    chosen = planned()
    theirs = restore_(other, chosen) if prepare == "restore" else apply_(other, chosen, seed=9)
    other.load_state_dict(load_file(tmp_path / "model.safetensors"))
    second = torch.optim.AdamW(chosen.groups(other, lr=1e-2))
    second.load_state_dict(torch.load(tmp_path / "optimizer.pt", weights_only=True))
    assert theirs.digest() == masks.digest()
    assert theirs.plan == masks.plan
    assert steps(other, second, range(3, 6)) == expected
    for key, tensor in model.state_dict().items():
        assert torch.equal(tensor, other.state_dict()[key]), key


def test_the_state_dict_holds_masks_multipliers_and_the_mark_of_the_plan():
    model, masks = scaled()
    extra = set(model.state_dict()) - set(fresh().state_dict())
    layer = "model.layers.0.self_attn.q_proj"
    assert {PLAN_HASH, f"{layer}.weight_mask", f"{layer}.forward_scale", "lm_head.forward_scale"} <= extra
    assert {f"{name}_mask" for name in masks} == {key for key in extra if key.endswith("_mask")}
    assert model.state_dict()[f"{layer}.weight_mask"].dtype == torch.bool


MASK = "model.layers.0.self_attn.q_proj.weight_mask"
WEIGHT = "model.layers.0.self_attn.q_proj.weight"


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (lambda s: s.pop(MASK), [MASK, "no such key", "before apply_"]),
        (lambda s: s.update({MASK: s[MASK][:, :32]}), [MASK, r"\(64, 32\)", r"\(64, 64\)"]),
        (lambda s: s.update({MASK: s[MASK].float()}), [MASK, "float32"]),
        (lambda s: s.update({WEIGHT: torch.ones_like(s[WEIGHT])}), [WEIGHT, "off the mask"]),
        (lambda s: s.pop("lm_head.forward_scale"), ["lm_head.forward_scale", "multiplies"]),
        (lambda s: s.pop(PLAN_HASH), [PLAN_HASH, "was not scaled"]),
        (lambda s: s.update({PLAN_HASH: torch.zeros(32, dtype=torch.uint8)}), [PLAN_HASH, "another plan"]),
    ],
)
@pytest.mark.parametrize("strict", [True, False])
def test_a_checkpoint_that_does_not_fit_is_refused_before_anything_is_loaded(damage, words, strict):
    model, _ = scaled()
    state = {key: tensor.clone() for key, tensor in scaled(seed=5)[0].state_dict().items()}
    before = {key: tensor.clone() for key, tensor in model.state_dict().items()}
    damage(state)
    with pytest.raises(UserError) as caught:
        model.load_state_dict(state, strict=strict)
    for word in words:
        assert caught.match(word)
    assert all(torch.equal(before[key], tensor) for key, tensor in model.state_dict().items())


def test_wrapped_models_are_checked_under_their_own_keys():
    model, _ = scaled()
    wrapper = nn.DataParallel(model)
    state = wrapper.state_dict()
    wrapper.load_state_dict(state)
    state.pop(f"module.{MASK}")
    with pytest.raises(UserError, match=rf"module\.{MASK}"):
        wrapper.load_state_dict(state)


REDRAWS = {
    "init_weights": lambda model: model.apply(lambda m: redraw(m, "weight")),
    "one dense layer": lambda model: redraw(model.lm_head, "weight"),
    "reset_parameters": lambda model: model.model.layers[1].mlp.up_proj.reset_parameters(),
    "another tensor": lambda model: setattr(
        model.model.layers[0].mlp.up_proj, "weight", nn.Parameter(torch.ones(192, 64).double())
    ),
}


def redraw(module: nn.Module, name: str) -> None:
    if isinstance(module, nn.Linear):
        nn.init.normal_(getattr(module, name), std=0.02, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("how", REDRAWS)
def test_weights_drawn_anew_after_scaling_are_found_at_the_first_pass(how):
    """The readout is dense; its init is constant, so only a rule that rescales it lets a fresh draw be seen."""
    model = fresh()
    init = {"lm_head*": "fan_in", "*": "constant"}
    chosen = plan(model, base=models.llama(32).double(), density=0.25, rule=SuPar(), init=init)
    masks = apply_(model, chosen)
    REDRAWS[how](model)
    with pytest.raises(UserError, match="apply_ last"):
        model(**zoo.tokens())
    masks.accept_()
    model(**zoo.tokens()).loss.backward()
    for name, mask in masks.items():
        assert not model.get_parameter(name).grad[~mask].any()


def test_an_untouched_model_passes_once_and_is_not_looked_at_again():
    model, masks = scaled()
    assert masks.watched
    model(**zoo.tokens())
    assert not masks.watched
    redraw(model.lm_head, "weight")
    model(**zoo.tokens())


def test_parameters_that_loading_assigns_are_masked_too():
    model, masks = scaled()
    model.load_state_dict({key: tensor.clone() for key, tensor in scaled(seed=4)[0].state_dict().items()}, assign=True)
    assert masks.digest() == scaled(seed=4)[1].digest()
    model(**zoo.tokens()).loss.backward()
    for name, mask in masks.items():
        assert not model.get_parameter(name).grad[~mask].any()


def test_parameters_replaced_after_loading_are_found():
    """As sharding replaces them: the hooks stay on the old ones."""
    model, _ = scaled()
    model.load_state_dict(model.state_dict())
    layer = model.model.layers[0].mlp.up_proj
    layer.weight = nn.Parameter(layer.weight.detach().clone())
    with pytest.raises(UserError, match="another parameter"):
        model(**zoo.tokens())


def test_masks_that_appear_in_a_checkpoint_are_taken_over():
    """A run that began dense and was pruned: its masks did not exist when the model was built."""
    dense, masks = scaled(density=1.0)
    assert len(masks) == 0
    masks.cover_([WEIGHT])
    half = torch.zeros(64, 64, dtype=torch.bool)
    half[:, :16] = True
    masks.set_(WEIGHT, half)
    other, _ = scaled(density=1.0)
    other.load_state_dict(dense.state_dict())
    assert torch.equal(masks_of(other)[WEIGHT], half)
    assert masks_of(other).plan.entries[WEIGHT].density == 0.25
    other(**zoo.tokens()).loss.backward()
    assert not other.get_parameter(WEIGHT).grad[~half].any()


def test_checkpoints_of_dense_models_and_of_other_rules_are_refused():
    model, _ = scaled()
    with pytest.raises(UserError, match="was not scaled"):
        model.load_state_dict(fresh().state_dict())
    with pytest.raises(UserError, match="another plan"):
        model.load_state_dict(scaled(rule=MuP(input=2.0, output=3.0))[0].state_dict())
