"""Groups carry the plan's factors, and every way to lose their ratios is seen."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.optim.lr_scheduler import LambdaLR, OneCycleLR, ReduceLROnPlateau

from scaling import models
from sparing.blocks import named_parameters
from sparing.errors import UserError
from sparing.scaling.plans.planning import APPLIED, plan
from sparing.scaling.rules import SP, SuPar
from sparing.scaling.spectral import Spectral


def planned(density=1 / 16, optimizer="adam", rule=None, width=128, base=64):
    model = models.mlp(width)
    return model, plan(model, base=models.mlp(base), density=density, optimizer=optimizer, rule=rule)


def by_name(groups):
    return {name: group for group in groups for name in group["param_names"]}


def test_options_of_every_parameter():
    """m_d = 2, ρ = 1/16: rate × 8, decay ÷ 8, ε ÷ 2; vectors do not decay; the output's bias is not wide."""
    model, found = planned()
    groups = by_name(found.groups(model, lr=0.01, weight_decay=0.1, eps=1e-6, betas=(0.9, 0.95)))
    got = {n: (g["lr"], g["weight_decay"], g["eps"], g["lr_scale"]) for n, g in groups.items()}
    hidden, vector = (0.08, 0.0125, 5e-7, 8.0), (0.01, 0.0, 5e-7, 1.0)
    assert got == {
        "0.weight": (0.01, 0.1, 5e-7, 1.0),
        "2.weight": hidden,
        "4.weight": hidden,
        "6.weight": (0.01, 0.1, 5e-7, 1.0),
        **{f"{at}.bias": vector for at in (0, 2, 4)},
        "6.bias": (0.01, 0.0, 1e-6, 1.0),
    }
    assert {g["betas"] for g in groups.values()} == {(0.9, 0.95)}
    params = dict(model.named_parameters())
    assert all(p is params[n] for g in groups.values() for n, p in zip(g["param_names"], g["params"], strict=True))


def test_decay_of_a_step_is_the_bases_in_every_group():
    """Independent decay: what one step of AdamW without gradient takes off is lr λ of the base, in all layers."""
    model, found = planned()
    model = model.double()
    optimizer = torch.optim.AdamW(found.groups(model, lr=0.01, weight_decay=0.1))
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    for name, parameter in model.named_parameters():
        shrunk = 1 - 0.01 * 0.1 if parameter.ndim > 1 else 1.0
        torch.testing.assert_close(parameter.detach(), before[name] * shrunk, rtol=1e-15, atol=0)  # one rounding


def test_eps_is_adams_alone():
    model, found = planned(optimizer="sgd")
    assert not any("eps" in group for group in found.groups(model, lr=0.1))
    model, found = planned()
    assert {group["eps"] for group in found.groups(model, lr=0.1)} == {1e-8, 5e-9}


def test_groups_can_be_of_some_parameters():
    model, found = planned(optimizer="muon", density=1.0)
    hidden = [n for n, e in found.entries.items() if e.role == "hidden"]
    ours = found.groups(model, lr=0.02, names=hidden, momentum=0.9)
    rest = found.groups(model, lr=0.001, names=set(found.entries) - set(hidden), eps=1e-8)
    assert sorted(n for g in ours + rest for n in g["param_names"]) == sorted(found.entries)
    assert "eps" not in ours[0]
    assert by_name(rest)["0.weight"]["eps"] == 5e-9
    muon, adam = torch.optim.Muon(ours), torch.optim.AdamW(rest)
    found.check_optimizer(muon, adam)
    with pytest.raises(UserError, match="missing"):
        found.check_optimizer(muon)


def test_tied_weights_are_stepped_once():
    model = models.gpt2(32)
    names = [n for g in plan(model, base=16).groups(model, lr=0.1) for n in g["param_names"]]
    assert sorted(names) == sorted(named_parameters(model))
    assert len(names) == len(set(names))


def test_layers_that_hold_their_live_weights_in_a_row_decay_as_matrices():
    """A sparse layer's parameter has one dimension, and yet it is a weight."""
    model, found = planned()
    model[2].weight = nn.Parameter(model[2].weight.detach().flatten()[:99])
    groups = by_name(found.groups(model, lr=0.01, weight_decay=0.1))
    assert groups["2.weight"]["weight_decay"] == groups["4.weight"]["weight_decay"] == 0.0125


def test_groups_follow_the_plan_that_was_applied():
    """Masks never have exactly the density that was asked for: what they have counts."""
    model, found = planned()
    model.__dict__[APPLIED] = found.with_densities({"2.weight": 0.07})
    groups = by_name(found.groups(model, lr=1.0))
    assert groups["2.weight"]["lr"] == pytest.approx(1 / (2 * 0.07), rel=1e-15)
    assert groups["4.weight"]["lr"] == 8.0
    found.check_optimizer(torch.optim.AdamW(found.groups(model, lr=1.0)))


def test_parameters_created_after_the_plan_are_refused():
    model, found = planned()
    model.append(nn.Linear(4, 4))
    with pytest.raises(UserError, match=r"7\.weight \(new\), 7\.bias \(new\).*plan again"):
        found.groups(model, lr=0.1)
    with pytest.raises(UserError, match=r"6\.weight \(missing\)"):
        found.groups(model[:6], lr=0.1)


def optimizer_of(model, found, **options):
    return torch.optim.AdamW(found.groups(model, lr=0.01, weight_decay=0.1, **options))


@pytest.mark.parametrize(
    "scheduler",
    [
        lambda o: LambdaLR(o, lambda step: 1 / (1 + step)),
        lambda o: ReduceLROnPlateau(o, patience=0),
        lambda o: OneCycleLR(o, max_lr=[group["lr"] for group in o.param_groups], total_steps=10),
        lambda o: torch.optim.lr_scheduler.LinearLR(o, start_factor=1e-6, total_iters=5),
    ],
    ids=["lambda", "plateau", "one cycle per group", "warm-up"],
)
def test_schedulers_that_multiply_pass(scheduler):
    model, found = planned()
    optimizer = optimizer_of(model, found)
    multiply = scheduler(optimizer)
    for step in range(4):
        optimizer.step()
        multiply.step(1.0) if isinstance(multiply, ReduceLROnPlateau) else multiply.step()
        found.check_optimizer(optimizer)
        assert step == 3 or optimizer.param_groups[0]["lr"] > 0


def test_rates_of_zero_pass():
    model, found = planned()
    optimizer = optimizer_of(model, found)
    for group in optimizer.param_groups:
        group["lr"] = 0.0
    found.check_optimizer(optimizer)


def test_a_scheduler_that_sets_one_rate_for_all_is_seen():
    """nanotron's warm-up bug: the global rate went into every group."""
    model, found = planned()
    optimizer = optimizer_of(model, found)
    OneCycleLR(optimizer, max_lr=0.01, total_steps=10)
    with pytest.raises(UserError, match=r"in every group.*should multiply.*lr_scale"):
        found.check_optimizer(optimizer)


@pytest.mark.parametrize("at", [0, 1, 2])
def test_a_hand_edit_of_one_group_is_seen(at):
    model, found = planned()
    optimizer = optimizer_of(model, found)
    optimizer.param_groups[at]["lr"] *= 1.001
    with pytest.raises(UserError, match="beside the other groups it should be"):
        found.check_optimizer(optimizer)


def test_one_group_at_zero_is_seen():
    model, found = planned()
    optimizer = optimizer_of(model, found)
    optimizer.param_groups[1]["lr"] = 0.0
    with pytest.raises(UserError, match=r"lr 0 for 0\.bias.*should be 0\.01"):
        found.check_optimizer(optimizer)


@pytest.mark.parametrize("params", [lambda m: m.parameters(), lambda m: m.named_parameters()])
def test_an_optimizer_on_the_models_own_parameters_is_seen(params):
    model, found = planned()
    with pytest.raises(UserError, match="not on the plan's groups"):
        found.check_optimizer(torch.optim.AdamW(params(model), lr=0.01))


def test_groups_of_another_plan_are_seen():
    model, found = planned()
    other = plan(model, base=models.mlp(64), rule=SP())
    with pytest.raises(UserError, match=r"2\.weight scaled by 1; the plan says 8"):
        found.check_optimizer(optimizer_of(model, other))


def test_missing_and_extra_parameters_are_seen():
    model, found = planned()
    groups = found.groups(model, lr=0.01)
    with pytest.raises(UserError, match=r"\(missing\)"):
        found.check_optimizer(torch.optim.AdamW(groups[1:]))
    extra = {"params": [nn.Parameter(torch.ones(2))], "param_names": ["late"], "lr_scale": 1.0, "lr": 0.01}
    with pytest.raises(UserError, match=r"late \(new\)"):
        found.check_optimizer(torch.optim.AdamW([*groups, extra]))


def test_l2_in_adams_gradient_is_refused():
    model, found = planned()
    groups = found.groups(model, lr=0.01, weight_decay=0.1)
    with pytest.raises(UserError, match=r"rescaled by Adam.*AdamW"):
        found.check_optimizer(torch.optim.Adam(groups))
    found.check_optimizer(torch.optim.Adam(found.groups(model, lr=0.01, weight_decay=0.1), decoupled_weight_decay=True))
    found.check_optimizer(torch.optim.Adam(found.groups(model, lr=0.01)))


def test_another_kind_of_optimizer_is_refused():
    model, found = planned()
    with pytest.raises(UserError, match=r'made for adam.*optimizer="sgd"'):
        found.check_optimizer(torch.optim.SGD(found.groups(model, lr=0.01)))
    model, found = planned(optimizer="sgd")
    found.check_optimizer(torch.optim.SGD(found.groups(model, lr=0.01, weight_decay=0.1), momentum=0.9))


def test_a_resumed_optimizer_passes():
    model, found = planned(rule=SuPar(form="shifted"))
    first, second = optimizer_of(model, found), optimizer_of(model, found)
    second.load_state_dict(first.state_dict())
    found.check_optimizer(second)


def muon(*, width=256, inner=None, **options):
    """Muon on the hidden matrices of a gated perceptron over a base of 64, whose inner width is three times as much."""
    model, base = models.gated(width, inner), models.gated(64)
    found = plan(model, base=base, optimizer="muon", inputs=torch.zeros(2, 8))
    hidden = [name for name, entry in found.entries.items() if entry.role == "hidden"]
    rest = torch.optim.AdamW(found.groups(model, lr=0.001, names=set(found.entries) - set(hidden)))
    return model, found, torch.optim.Muon(found.groups(model, lr=0.02, names=hidden), **options), rest


@pytest.mark.parametrize(
    ("sizes", "adjust", "by"),
    [({}, "match_rms_adamw", "2 over the base"), ({"inner": 1536}, None, "1.41421 over the base")],
)
def test_a_muon_that_multiplies_the_rates_of_a_rule_once_more_is_refused(sizes, adjust, by):
    """At four times the width 0.2 √max(A, B) is twice the base's; √max(1, A/B) grows with the ratio of the sides."""
    model, found, optimizer, rest = muon(adjust_lr_fn=adjust, **sizes)
    with pytest.raises(UserError, match=by):
        found.check_optimizer(optimizer, rest)
    for parameter in model.parameters():
        parameter.grad = torch.randn_like(parameter)
    with pytest.raises(UserError, match=by):
        optimizer.step()
    found.check_optimizer(Spectral(optimizer, model, found), rest)
    optimizer.step()


def test_a_muon_of_which_the_own_factor_is_the_bases_moves_weights_by_the_rule():
    """The original factor √max(1, A/B) at an equal ratio of the sides; SP and a base take either."""
    _, found, optimizer, rest = muon()
    found.check_optimizer(optimizer, rest)
    _, found, optimizer, rest = muon(width=64, adjust_lr_fn="match_rms_adamw")
    found.check_optimizer(optimizer, rest)
    model = models.gated(256)
    found = plan(model, base=models.gated(64), optimizer="muon", rule=SP())
    matrices = [name for name, entry in found.entries.items() if entry.role == "hidden"]
    groups = found.groups(model, lr=0.02, names=matrices)
    assert not any("muon_growth" in group for group in groups)


@pytest.mark.parametrize("name", ["Adam", "NAdam", "RAdam", "Adamax", "RMSprop", "Adagrad", "Adadelta"])
def test_decay_in_the_gradient_is_refused_where_the_step_divides_it(name):
    model, found = planned()
    groups = found.groups(model, lr=0.01, weight_decay=0.1)
    with pytest.raises(UserError, match=f"{name} with weight_decay=.*rescaled by {name}.*use AdamW"):
        found.check_optimizer(getattr(torch.optim, name)(groups))
    found.check_optimizer(getattr(torch.optim, name)(found.groups(model, lr=0.01)))
