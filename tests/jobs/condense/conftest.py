"""A data set of two classes that a small net can learn, and settings that take a second."""

from __future__ import annotations

import dataclasses
import warnings
from pathlib import Path

import pytest
import torch

from sparing.jobs.condense import Condense
from sparing.jobs.condense import job as module
from sparing.jobs.condense.inputs import Inputs
from sparing.jobs.condense.settings import ConjugateGradient, Evaluation, Forward, Neumann, Truncated
from sparing.seeds import stream

SMALL = Condense(
    method="forward-gradient", learn=("images",), start="noise", outer_schedule="linear", average=0.0, clip_medians=0.0,
    width=4, unroll=3, inner_lr=0.1, steps=4, batch=16, outer_lr=0.1, save_every=1,
    forward=Forward(directions=2), truncated=Truncated(steps=1, ends="last"), neumann=Neumann(terms=2),
    conjugate_gradient=ConjugateGradient(iterations=2),
    evaluation=Evaluation(steps=5, nets=2), measurements=2, held_out_images=8,
)  # fmt: skip


@pytest.fixture(scope="session", autouse=True)
def _forward_mode_is_loaded() -> None:
    """Torch's own rules of forward mode warn of their own deprecation, once, when they are first used."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.func.jvp(torch.sin, (torch.ones(1),), (torch.ones(1),))


def pair(count: int, label: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Bright above (class 0) or below (class 1), with noise."""
    generator = stream(0, "tests", "condense", label)
    labels = torch.arange(count) % 2
    images = torch.randint(0, 60, (count, 1, 16, 16), generator=generator, dtype=torch.uint8)
    images[labels == 0, :, :8] += 150
    images[labels == 1, :, 8:] += 150
    return images, labels


@pytest.fixture
def inputs() -> Inputs:
    train, held_out, test = (pair(count, name) for count, name in ((40, "train"), (8, "held out"), (20, "test")))
    return Inputs(name="mnist", train=train, held_out=held_out, test=test, classes=("up", "down"))


@pytest.fixture
def small(tmp_path: Path, inputs: Inputs, monkeypatch: pytest.MonkeyPatch) -> Condense:
    """Settings of a run that takes a second, on made-up data."""
    monkeypatch.setattr(module, "gather", lambda name, held_out: inputs)
    return dataclasses.replace(SMALL, out=tmp_path / "run")
