"""Optimizers and schedulers on a plan's groups: ratios that stay those of the plan, or a step that is refused."""

from __future__ import annotations

from functools import partial

import mup
import pytest
import torch
from torch import nn
from torch.optim import lr_scheduler

from idioms.scaling.cells import KIND_OF, KINDS, LATE, LATER, SCHEDULERS, SCHEDULES, STEPPED, STEPPERS
from scaling import models
from sparing.errors import UserError
from sparing.scaling.apply import apply_
from sparing.scaling.plans.planning import Plan, plan

CONSTANT = {"*": "constant"}


def planned(kind: str = "adam", density: float = 1.0) -> tuple[nn.Module, Plan]:
    model, base = (models.constant_mlp(width, bias=False) for width in (32, 8))
    return model, plan(model, base=base, optimizer=kind or "adam", density=density, init=CONSTANT)


def build(name: str, chosen: Plan, model: nn.Module) -> torch.optim.Optimizer:
    groups = chosen.groups(model, lr=0.1)
    if name == "LBFGS":  # one group is all it takes
        groups = [{"params": list(model.parameters()), "param_names": list(chosen.entries), "lr_scale": 1.0}]
    for group in groups if name in {"SGD", "ASGD", "Rprop", "LBFGS", "Adafactor", "Muon"} else ():
        group.pop("eps", None)
    options = {"momentum": 0.9} if name == "SGD" else {}
    return getattr(torch.optim, name)(groups, lr=0.1, **options)


@pytest.mark.parametrize("name", [name for name, kind in KIND_OF.items() if kind], ids=lambda name: f"{KINDS}-{name}")
def test_an_optimizer_has_the_rates_that_mup_gives_its_kind(name: str):
    """mup makes an optimizer of any class out of two rules; what Muon's rule is, test_rules.py says."""
    kind = KIND_OF[name]
    model, chosen = planned(kind)
    ours = build(name, chosen, model)
    chosen.check_optimizer(ours)
    rates = {id(p): group["lr"] for group in ours.param_groups for p in group["params"]}
    if kind == "muon":
        assert set(rates.values()) == {0.1}  # square, or a stem and a readout that are Adam's
    else:
        mup.set_base_shapes(model, models.constant_mlp(8, bias=False), rescale_params=False, do_assert=False)
        impl = partial(getattr(torch.optim, name))
        theirs = (mup.MuAdam if kind == "adam" else mup.MuSGD)(model.parameters(), impl=_bare(impl), lr=0.1)
        expected = {id(p): group["lr"] for group in theirs for p in group["params"]}
        assert rates == pytest.approx(expected, rel=1e-14)
    if name != "SparseAdam":
        other = {"adam": "sgd", "sgd": "adam", "muon": "sgd"}[kind]
        with pytest.raises(UserError, match=rf"plan was made for {other}"):
            planned(other)[1].check_optimizer(build(name, planned(other)[1], model))


def _bare(impl):
    """Take mup's groups before its optimizer looks at options that this class does not have."""
    return lambda groups, **_: groups


@pytest.mark.parametrize(
    "name", [name for name, kind in KIND_OF.items() if not kind], ids=lambda name: f"{KINDS}-{name}"
)
def test_an_optimizer_without_a_rule_is_refused(name: str):
    model, chosen = planned()
    with pytest.raises(UserError, match=rf"{name}.*use one of Adam's"):
        chosen.check_optimizer(build(name, chosen, model))


class Lion(torch.optim.SGD):
    """Known by its name."""


@pytest.mark.parametrize("name", STEPPERS, ids=lambda name: f"{STEPPED}-{name}")
def test_a_step_by_the_rates_of_another_kind_is_refused(name: str):
    """Without a call of ``check_optimizer``."""
    model, chosen = planned()
    kind = {"SGD": torch.optim.SGD, "Adafactor": torch.optim.Adafactor}.get(name, Lion)
    optimizer = kind(chosen.groups(model, lr=0.1))
    model(torch.ones(2, 8)).sum().backward()
    with pytest.raises(UserError, match=rf"optimizer: got {name.split()[0]}"):
        optimizer.step()


MAKE = {
    "LambdaLR": lambda o: lr_scheduler.LambdaLR(o, lambda step: 1 / (1 + step)),
    "CosineAnnealingLR": lambda o: lr_scheduler.CosineAnnealingLR(o, 10),
    "LinearLR": lr_scheduler.LinearLR,
    "OneCycleLR, one max_lr": lambda o: lr_scheduler.OneCycleLR(o, 0.1, total_steps=20),
    "CosineAnnealingLR with eta_min": lambda o: lr_scheduler.CosineAnnealingLR(o, 10, eta_min=1e-3),
    "CyclicLR": lambda o: lr_scheduler.CyclicLR(o, 0.01, 0.1, cycle_momentum=False),
}


@pytest.mark.parametrize("name", SCHEDULERS, ids=lambda name: f"{SCHEDULES}-{name}")
def test_a_scheduler_keeps_the_ratios_or_the_step_is_refused(name: str):
    """Without a call of ``check_optimizer``: hidden rates are a quarter of the others at every step of ten."""
    model, chosen = planned()
    optimizer = torch.optim.AdamW(chosen.groups(model, lr=0.1))
    scheduler = MAKE[name](optimizer)

    def train() -> None:
        for _ in range(10):
            model(torch.ones(2, 8)).sum().backward()
            optimizer.step()
            scheduler.step()
            rates = {n: g["lr"] for g in optimizer.param_groups for n in g["param_names"]}
            if SCHEDULERS[name] == "equal":
                assert rates["2.weight"] == pytest.approx(rates["0.weight"] / 4, rel=1e-12)

    if SCHEDULERS[name] == "equal":
        train()
    else:
        with pytest.raises(UserError, match=r"beside the other groups|in every group"):
            train()


def test_adapters_around_masked_layers_are_refused_until_they_are_accepted():
    """As LoRA wraps a layer: its weight has another name, so that the plan no longer knows it."""
    model, chosen = planned(density=0.25)
    masks = apply_(model, chosen)
    model[2] = nn.Sequential(model[2])
    with pytest.raises(UserError, match=r"2\.weight.*adapters"):
        model(torch.ones(2, 8))
    masks.accept_()
    model(torch.ones(2, 8)).sum().backward()
    assert not model[2][0].weight.grad[~masks["2.weight"]].any()


@pytest.mark.parametrize("how", LATER[:2], ids=lambda how: f"{LATE}-{how}")
@pytest.mark.parametrize("ran", [False, True])
def test_what_takes_a_masked_weight_away_is_refused(how: str, ran: bool):
    model, chosen = planned(density=0.25)
    apply_(model, chosen)
    if ran:
        model(torch.ones(2, 8))
    if how == "torch.nn.utils.prune":
        from torch.nn.utils import prune

        prune.l1_unstructured(model[2], "weight", amount=0.5)
    else:
        nn.utils.parametrizations.weight_norm(model[2])
    with pytest.raises(UserError, match="in its place"):
        model(torch.ones(2, 8))
