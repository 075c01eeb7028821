"""Settings: refused early, spelled on the command line, turned into values."""

from __future__ import annotations

import math
from dataclasses import fields
from pathlib import Path

import pytest
import tyro

from sparing.errors import UserError
from sparing.jobs.finetune import Finetune
from sparing.jobs.finetune.settings import Lisa, Pace, Training
from sparing.jobs.lm.adapters import Lora
from sparing.layersample import Adaptive, Bernoulli, CostAware, Fixed, LayerSampling, Reshuffle, Uniform
from sparing.layersample.price.predict import Full

PLACES = {"model": Path("m"), "data": Path("d.jsonl")}

WRONG = [
    ({"lr": 0.0}, "lr"),
    ({"lr": -1e-5}, "lr"),
    ({"lr": math.nan}, "lr"),
    ({"lr": math.inf}, "lr"),
    ({"steps": 0}, "steps"),
    ({"epochs": 0.0}, "epochs"),
    ({"epochs": math.nan}, "epochs"),
    ({"batch": 0}, "batch"),
    ({"accumulate": 0}, "accumulate"),
    ({"warmup": -1}, "warmup"),
    ({"evaluate_every": -1}, "evaluate_every"),
    ({"weight_decay": -0.1}, "weight_decay"),
    ({"clip": math.nan}, "clip"),
    ({"length": 1}, "length"),
    ({"held_out": 1.0}, "held_out"),
    ({"save_every": -1}, "save_every"),
    ({"max_new_tokens": -1}, "max_new_tokens"),
    ({"loss_tokens": 64, "plan": "NNN"}, "loss_tokens"),
    ({"resume": True, "overwrite": True}, "resume"),
]


@pytest.mark.parametrize(("changes", "name"), WRONG, ids=[str(changes) for changes, _ in WRONG])
def test_what_cannot_work_is_refused_by_name(changes: dict, name: str) -> None:
    with pytest.raises(UserError) as caught:
        Finetune(**PLACES, **changes)
    assert str(caught.value).startswith(f"{name}: got ")


@pytest.mark.parametrize("changes", [{"period": 0}, {"active": -1}, {"warmup": 21}, {"blocks": (1,)}])
def test_layer_sampling_that_could_not_train_is_refused_with_the_rest(changes: dict) -> None:
    with pytest.raises(UserError):
        Finetune(**PLACES, lisa=Lisa(**changes))
    Finetune(**PLACES, method="full", lisa=Lisa(**changes))  # not used, not judged


@pytest.mark.parametrize(
    "changes", [{"rank": 0}, {"alpha": 0.0}, {"alpha": math.inf}, {"dropout": 1.0}, {"targets": " ,"}]
)
def test_lora_that_adds_nothing_is_refused(changes: dict) -> None:
    with pytest.raises(UserError, match=rf"lora\.{next(iter(changes))}"):
        Lora(**changes)


def test_every_spelling_of_a_draw_is_a_value() -> None:
    values = {
        "uniform": Uniform(),
        "reshuffle": Reshuffle(),
        "bernoulli": Bernoulli(),
        "adaptive": Adaptive(),
        "last": Fixed(blocks="last"),
    }
    for name, value in values.items():
        assert Lisa(sampler=name, active=3).sampling() == LayerSampling(active=3, sampler=value)
    assert Lisa(sampler="cost-aware", embed=False).sampling().sampler == CostAware()
    fixed = Lisa(sampler="fixed", blocks=(4, 1, 2)).sampling()
    assert (fixed.active, fixed.sampler) == (3, Fixed(blocks=(1, 2, 4)))
    assert Lisa(sampler="fixed").sampling().sampler == Fixed(blocks=None)


def test_the_shared_names_of_layer_sampling_mean_the_same() -> None:
    """Same defaults, so that the command line and the library agree on what LISA is."""
    assert Lisa().sampling() == LayerSampling()


def test_the_library_gets_what_the_command_line_was_given() -> None:
    given = {
        "steps": 7,
        "lr": 0.5,
        "batch": 3,
        "accumulate": 2,
        "warmup": 1,
        "clip": 0.0,
        "seed": 9,
        "checkpointing": True,
    }
    made = Finetune(**PLACES, **given, method="lora", lora=Lora(rank=3)).training()
    assert made == Training(method=Lora(rank=3), **given)
    assert {f.name for f in fields(Training)} == {f.name for f in fields(Pace)} | {"method", "optimizer", "seconds"}


def test_each_method_has_its_own_rate() -> None:
    assert [Training(method=m).peak for m in (Full(), LayerSampling(), Lora())] == [2e-5, 5e-5, 2e-4]
    assert Training(method=Full(), lr=0.25).peak == 0.25


def test_the_command_line_reads_them() -> None:
    words = ["m", "d.jsonl", "--method", "lora", "--lora.rank", "4", "--no-packing", "--steps", "5"]
    words += ["--prompts", "a", "b", "--lisa.no-embed"]
    got = tyro.cli(Finetune, args=words)
    assert got == Finetune(
        **PLACES, method="lora", lora=Lora(rank=4), packing=False, steps=5, prompts=("a", "b"), lisa=Lisa(embed=False)
    )
