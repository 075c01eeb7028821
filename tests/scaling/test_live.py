"""``Masks`` as a mapping, and what it does to the plan when masks change."""

from __future__ import annotations

import pytest
import torch

from scaling import models
from sparing.errors import UserError
from sparing.scaling.apply import apply_
from sparing.scaling.plans.planning import plan

NAMES = ["2.weight", "4.weight"]


def scaled(density: float = 0.25):
    model = models.mlp(16)
    return model, apply_(model, plan(model, density=density))


def test_it_is_a_mapping_of_the_buffers():
    model, masks = scaled()
    assert list(masks) == NAMES
    assert len(masks) == 2
    assert masks["2.weight"] is model[2].weight_mask
    assert masks.parameter("4.weight") is model[4].weight
    assert masks.densities == {name: masks.density(name) for name in NAMES} == dict.fromkeys(NAMES, 0.25)
    with pytest.raises(KeyError):
        masks["0.weight"]


def test_the_plan_follows_when_asked():
    model, masks = scaled()
    half = torch.zeros(16, 16, dtype=torch.bool)
    half[:, ::2] = True
    masks.set_("2.weight", half)
    assert masks.plan.entries["2.weight"].density == 0.25
    masks.refresh_()
    assert masks.plan.entries["2.weight"].density == 0.5
    group = next(g for g in masks.plan.groups(model, lr=1.0) if "2.weight" in g["param_names"])
    assert group["lr"] == 2.0  # 1/ρ
    assert masks.dead == {"2.weight": (0, 8)}


@pytest.mark.parametrize("wrong", [torch.ones(16, 8, dtype=torch.bool), torch.ones(16, 16)])
def test_masks_of_another_shape_or_type_are_refused(wrong):
    _, masks = scaled()
    with pytest.raises(UserError, match=r"mask of 2\.weight"):
        masks.set_("2.weight", wrong)


def test_covering_leaves_what_is_masked():
    model, masks = scaled()
    before = masks["2.weight"].clone()
    masks.cover_(["0.weight", "2.weight"])
    assert torch.equal(masks["2.weight"], before)
    assert masks["0.weight"].all()
    assert masks["0.weight"].shape == model[0].weight.shape
