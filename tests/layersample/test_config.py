"""The settings refuse what could never train, and describe themselves as plain JSON."""

from __future__ import annotations

import dataclasses
import json

import pytest
import torch

from sparing.errors import UserError
from sparing.layersample.config import LayerSampling
from sparing.layersample.draws import Adaptive, Bernoulli, CostAware, Fixed, Reshuffle, Weighted


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"period": 0}, ("period", "got 0", "pass an integer >= 1")),
        ({"period": 2.0}, ("period", "got 2.0")),
        ({"period": True}, ("period", "got True")),
        ({"active": -1}, ("active", "got -1", ">= 0")),
        ({"warmup": -1}, ("warmup", "got -1")),
        ({"warmup": 21}, ("warmup", "got 21", "20 steps", "warmup <= 20")),
        ({"state": "forget"}, ("state", "got forget", "reset, keep, offload, reset_all")),
        ({"sampler": "uniform"}, ("sampler", "got uniform", "Uniform()")),
        ({"active": 0, "embed": False, "head": False, "tail": False}, ("train nothing",)),
        ({"sampler": Bernoulli(), "embed": False, "head": False, "tail": False}, ("train nothing",)),
        ({"sampler": CostAware()}, ("CostAware", "embed=False")),
    ],
)
def test_a_setting_that_cannot_work_is_one_line_with_what_got_why_and_do(changes: dict, words: tuple[str, ...]) -> None:
    with pytest.raises(UserError) as caught:
        LayerSampling(**changes)
    assert all(word in str(caught.value) for word in words), str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "settings",
    [
        {"active": 0},
        {"warmup": 20},
        {"period": 1, "warmup": 1},
        {"state": "reset_all"},
        {"embed": False, "head": False, "tail": False},
    ],
)
def test_the_borders_are_allowed(settings: dict) -> None:
    LayerSampling(**settings)


def test_more_active_blocks_than_the_model_has_names_both_numbers() -> None:
    LayerSampling(active=4).validate_for(4)
    with pytest.raises(UserError, match=r"active: got 5; the model has only 4 body blocks; pass active <= 4"):
        LayerSampling(active=5).validate_for(4)


@pytest.mark.parametrize(
    ("sampler", "words"),
    [
        (Fixed(blocks=(1, 9)), ("got 9", "4 body blocks")),
        (Fixed(blocks=(1,)), ("got 1 blocks", "active is 2")),
        (Weighted(weights=(1.0, 2.0)), ("2 weights", "4 body blocks")),
    ],
)
def test_a_sampler_that_does_not_fit_the_model_is_refused_at_application(
    sampler: object, words: tuple[str, ...]
) -> None:
    with pytest.raises(UserError) as caught:
        LayerSampling(sampler=sampler).validate_for(4)
    assert all(word in str(caught.value) for word in words), str(caught.value)


@pytest.mark.parametrize(
    "settings",
    [
        LayerSampling(),
        LayerSampling(sampler=Weighted(weights=[3, 1, 2], method="pivotal"), body=("h.0", "h.1", "h.2")),
        LayerSampling(sampler=Fixed(blocks=[2, 0]), state="offload", masters=True),
        LayerSampling(sampler=Adaptive(temperature=0.5)),
    ],
)
def test_the_description_survives_json_and_tells_settings_apart(settings: LayerSampling) -> None:
    described = settings.describe()
    assert json.loads(json.dumps(described)) == described
    assert described["sampler"]["name"] == type(settings.sampler).__name__
    assert dataclasses.replace(settings).describe() == described
    assert dataclasses.replace(settings, period=7).describe() != described
    assert dataclasses.replace(settings, sampler=Reshuffle()).describe() != described


def test_a_sampler_of_the_user_needs_only_the_two_methods() -> None:
    class Last:
        def draw(self, count, active, *, seed, interval, scores=None):
            return tuple(range(count - active, count))

        def inclusion(self, count, active, *, scores=None):
            return torch.cat([torch.zeros(count - active), torch.ones(active)]).double()

    settings = LayerSampling(sampler=Last())
    settings.validate_for(3)
    assert settings.describe()["sampler"] == {"name": "Last"}
