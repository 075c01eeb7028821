"""Parameter groups: options and state that differ between them, and the forms in which torch takes them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from oracles import group_ranks
from oracles.group_ranks import ASGD, NADAM, apart, engine_of, grouped, made, one_process, trained_
from oracles.processes import answers
from sparing import sharding as sh
from sparing.errors import UserError
from sparing.sharding import checkpoint
from sparing.sharding.engine.refusals import check_elementwise


class Trust(torch.optim.Optimizer):
    """A step as long as the tensor where the group decays, as LAMB of timm has it."""

    def __init__(self, params: Any, lr: float = 0.01, weight_decay: float = 0.0) -> None:
        super().__init__(params, {"lr": lr, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        del closure
        for group in self.param_groups:
            for p in group["params"]:
                update = p.grad + group["weight_decay"] * p
                if group["weight_decay"]:
                    update = update * p.norm() / update.norm().clamp_min(1e-12)
                p.add_(update, alpha=-group["lr"])


@pytest.fixture
def mesh() -> Iterator[sh.Mesh]:
    with sh.make_mesh(groups=1) as found:
        yield found


@pytest.mark.parametrize("case", [NADAM, ASGD], ids=["product of betas", "decaying rate"])
@pytest.mark.parametrize("change", ["plan", "checkpoint", "gradient"])
def test_scalar_state_that_groups_do_not_share_goes_on(
    mesh: sh.Mesh, tmp_path: Path, case: group_ranks.Case, change: str
) -> None:
    """Over a change of the plan, over a checkpoint, and where a parameter without a gradient has a segment alone."""
    engine = engine_of(case, "IIG", mesh)
    trained_(engine, range(3))
    if change == "plan":
        engine.set_plan("NNI")
    elif change == "checkpoint":
        checkpoint.save(engine, tmp_path / "a")
        engine = engine_of(case, "GGG", mesh)
        checkpoint.load_(engine, tmp_path / "a")
    unused = {3} if change == "gradient" else set()
    trained_(engine, range(3, 6), unused)
    assert apart(engine.full_state_dict(), one_process(case, range(6), 1, unused)) <= 1e-12


@pytest.mark.processes
@pytest.mark.slow
def test_scalar_state_that_groups_do_not_share_goes_on_under_either_engine(tmp_path: Path) -> None:
    for told in answers(2, group_ranks.continued, tmp_path):
        assert {what: far for what, far in told.items() if far > 1e-12} == {}


def test_an_optimizer_is_tried_with_the_options_of_every_group() -> None:
    assert check_elementwise(Trust, [{}, {"lr": 0.1}]) == "Trust"
    with pytest.raises(UserError, match="optimizer: got Trust; its step on a slice is not the slice of its step"):
        check_elementwise(Trust, [{}, {"weight_decay": 0.1}])


def test_a_group_in_which_an_optimizer_is_not_elementwise_is_refused(mesh: sh.Mesh) -> None:
    model = made()
    groups = grouped(model, ({"weight_decay": 0.1}, {}))
    with pytest.raises(UserError, match="optimizer: got Trust"):
        sh.shard_(model, "IIG", mesh, optimizer=Trust, groups=groups)


def test_a_parameter_in_two_groups_is_refused_as_torch_does(mesh: sh.Mesh) -> None:
    model = made()
    groups = [{"params": list(model.parameters())}, {"params": model[3].parameters(), "lr": 1.0}]
    with pytest.raises(UserError, match=r"groups: got 3\.weight in groups 0 and 1; one of them would step it"):
        sh.shard_(model, "IIG", mesh, optimizer=torch.optim.AdamW, groups=groups)


FORMS: dict[str, Callable[[nn.Module], Any]] = {
    "parameters": lambda model: list(model.parameters()),
    "a generator": lambda model: model.parameters(),
    "named parameters": lambda model: model.named_parameters(),
    "a group of named parameters": lambda model: [{"params": list(model.named_parameters())}],
    "a group of one tensor": lambda model: [
        {"params": model[0].weight},  # type: ignore[index]
        {"params": [p for p in model.parameters() if p is not model[0].weight]},  # type: ignore[index]
    ],
}


@pytest.mark.parametrize("form", FORMS)
def test_groups_may_have_every_form_that_torch_takes(mesh: sh.Mesh, form: str) -> None:
    adamw = partial(torch.optim.AdamW, lr=0.01)
    model, own = made(), made()
    engine = sh.shard_(model, "IIG", mesh, optimizer=adamw, groups=FORMS[form](model))
    optimizer = adamw(FORMS[form](own))
    trained_(engine, range(2))
    group_ranks.train_(own, optimizer, range(2), 1)
    assert len(engine.optimizer.param_groups) == len(optimizer.param_groups)
    assert apart(engine.full_state_dict(), dict(own.state_dict())) <= 1e-14
