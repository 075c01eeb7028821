"""A text of a few thousand characters and a model that learns it in no time."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from sparing.jobs.pretrain import Pretrain
from sparing.jobs.pretrain.inputs import Inputs, gather
from sparing.jobs.pretrain.models import config_for, fresh_model
from sparing.jobs.pretrain.settings import Updates
from sparing.jobs.pretrain.state import TrainState, choose_backends_, make_plan, start


def story(count: int = 60) -> str:
    animals, places = ("cat", "dog", "hen", "old fox", "young owl"), ("mat", "log", "high wall", "barn roof")
    lines = [
        f"Once upon a time the {animals[i % 5]} sat down on the {places[i % 4]}, and {i} birds flew by.\n\n"
        for i in range(count)
    ]
    return "".join(lines)


@pytest.fixture(scope="session")
def text_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("text") / "story.txt"
    path.write_text(story(), encoding="utf-8")
    return path


@pytest.fixture
def settings(text_file: Path, tmp_path: Path) -> Pretrain:
    """Six steps of a Llama of two blocks, half as wide again as its base."""
    return Pretrain(
        out=tmp_path / "out",
        data=(str(text_file),),
        tokenizer="char",
        width=16,
        head_dim=8,
        layers=2,
        length=16,
        base_width=8,
        density="1/2",
        batch=2,
        lr=8e-3,
        steps=6,
        warmup=1,
        mask_updates=Updates(every=2, until=1.0),
        evaluate_every=3,
        save_every=0,
        samples=1,
        sample_tokens=12,
    )


@pytest.fixture
def inputs(settings: Pretrain) -> Inputs:
    return gather(settings, settings.length)


@pytest.fixture
def started(settings: Pretrain, inputs: Inputs) -> Callable[..., TrainState]:
    """A run at its first step, with some settings changed."""

    def start_with(*, backends: bool = True, **changes: object) -> TrainState:
        own = replace(settings, **changes)
        model = fresh_model(config_for(own, len(inputs.tokenizer), inputs.tokenizer.eos_token_id), seed=own.seed)
        state = start(own, model, inputs.train, make_plan(own, model))
        if backends:
            choose_backends_(state)
        return state

    return start_with


@pytest.fixture
def same() -> Callable[[dict[str, torch.Tensor], dict[str, torch.Tensor]], bool]:
    """Whether two state dicts agree to the bit."""

    def compare(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> bool:
        return a.keys() == b.keys() and all(torch.equal(value, b[name]) for name, value in a.items())

    return compare


@pytest.fixture(autouse=True)
def _quiet() -> Iterator[None]:
    """The loggers of other libraries as they were."""
    level = logging.getLogger("transformers").level
    yield
    logging.getLogger("transformers").setLevel(level)
