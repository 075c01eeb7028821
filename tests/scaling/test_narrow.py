"""The base in each of its forms has the shapes of the narrower model, and what cannot be one is refused."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from scaling import models
from sparing.errors import UserError
from sparing.scaling.roles.narrow import build_base, narrow


def shapes(model):
    return {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}


FAMILIES = [(models.gpt2, models.gpt2_config), (models.llama, models.llama_config), (models.vit, models.vit_config)]


@pytest.mark.parametrize(("build", "config"), FAMILIES)
def test_every_form_of_a_base_gives_the_narrow_models_shapes(build, config):
    wide, slim = build(96), build(32)
    for base in (slim, config(32), 32, lambda: build(32)):
        assert dict(build_base(wide, base).shapes) == shapes(slim)


def test_no_base_is_the_model_itself():
    model = models.mlp(8)
    assert dict(build_base(model).shapes) == shapes(model)
    assert build_base(model).model is None


def test_building_a_base_leaves_the_global_random_numbers_alone():
    before = torch.get_rng_state()
    build_base(models.gpt2(64), 32)
    build_base(models.mlp(64), lambda: nn.Sequential(*models.mlp(16)))
    assert torch.equal(torch.get_rng_state(), before)


def test_a_large_base_stays_on_the_meta_device(monkeypatch):
    model = models.gpt2(64)
    monkeypatch.setattr("sparing.scaling.roles.narrow.SMALL", 100)
    assert next(build_base(model, 32).model.parameters()).is_meta
    assert dict(build_base(model, 32).shapes) == shapes(models.gpt2(32))


def test_a_factory_that_looks_at_its_weights_is_built_as_it_is():
    def build():
        model = models.mlp(8)
        float(model[0].weight.sum().item())
        return model

    assert dict(build_base(models.mlp(16), build).shapes) == shapes(models.mlp(8))


def test_narrowing_keeps_the_size_of_heads():
    config = narrow(models.llama_config(128, head_dim=16, groups=4), 64)
    assert (config.hidden_size, config.num_attention_heads, config.head_dim) == (64, 4, 16)
    assert (config.intermediate_size, config.num_key_value_heads) == (192, 1)
    config = narrow(models.gpt2_config(96, n_inner=288), 32)
    assert (config.n_embd, config.n_head, config.n_inner) == (32, 2, 96)


def test_key_heads_stay_as_many_where_they_cannot_shrink():
    config = narrow(models.llama_config(128, head_dim=16, groups=8), 64)
    assert (config.num_attention_heads, config.num_key_value_heads) == (4, 1)


def test_narrowing_does_not_touch_the_configuration_it_is_given():
    config = models.gpt2_config(64)
    narrow(config, 32)
    assert (config.n_embd, config.n_head) == (64, 4)


def test_another_depth_is_refused_with_the_first_differences():
    with pytest.raises(
        UserError, match=r"transformer\.h\.2\.attn\.c_attn\.bias \(model only\).* and 9 more.*CompleteP"
    ):
        build_base(models.gpt2(32, layers=3), models.gpt2(16, layers=2))


def test_other_names_and_dimensions_are_refused():
    with pytest.raises(UserError, match=r"0\.bias \(model only\)"):
        build_base(models.mlp(16), models.mlp(8, bias=False))
    with pytest.raises(UserError, match=r"weight of shape \(2, 2, 1\), in the model \(4, 4\)"):
        build_base(nn.Linear(4, 4), nn.Conv1d(2, 2, 1))


@pytest.mark.parametrize(
    ("model", "base", "what"),
    [
        (lambda: models.mlp(16), 8, "no configuration to narrow"),
        (lambda: models.gpt2(64), 24, "num_attention_heads=4 would become 1.5"),
        (lambda: models.gpt2(64), 0, "integer >= 1"),
        (lambda: models.gpt2(64), "small", "no model, configuration, width or function"),
    ],
)
def test_bad_bases(model, base, what):
    with pytest.raises(UserError, match=what):
        build_base(model(), base)
