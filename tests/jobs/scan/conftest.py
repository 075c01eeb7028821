"""A net of two layers with batch norm behind an entry point, and settings for a scan of a second."""

from __future__ import annotations

import sys

import pytest

from sparing.jobs.scan import Settings

ENTRY = """
import torch
from torch import nn

from sparing.valley.scans.evaluators import Classification


def build():
    generator = torch.Generator().manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.ReLU(), nn.Linear(6, 2))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(0.3 * torch.randn(parameter.shape, generator=generator))
        model[1].weight.fill_(1.0)
    return model


def make():
    generator = torch.Generator().manual_seed(1)
    inputs = torch.randn(64, 4, generator=generator)
    return build(), Classification(inputs, (inputs[:, 0] > 0).long()), [inputs]


def wrong():
    return 3


def broken():
    raise RuntimeError("no such\\nfile")


def unsteady():
    model, _, calibrate = make()
    drawn = iter(range(1000))
    return model, lambda net: {"loss": float(next(drawn))}, calibrate


def uncalibrated():
    return make()[:2]


def own():
    generator = torch.Generator().manual_seed(1)
    inputs = torch.randn(64, 4, generator=generator)
    model = nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 2))

    def evaluate(net):
        return {"size": float(net(inputs).square().mean().detach())}

    evaluate.better = {"size": "lower"}
    return model, evaluate
"""


@pytest.fixture
def entry(tmp_path, monkeypatch):
    """The module ``tiny_entry`` in the working directory."""
    (tmp_path / "tiny_entry.py").write_text(ENTRY)
    monkeypatch.chdir(tmp_path)
    monkeypatch.delitem(sys.modules, "tiny_entry", raising=False)
    return "tiny_entry:make"


@pytest.fixture
def small(entry, tmp_path):
    """Settings of a scan of a second."""

    def made(**changes) -> Settings:
        fast = {"model": entry, "out": tmp_path / "run", "points": 3, "draws": 2, "noises": ("gaussian", "one")}
        return Settings(
            **fast | {"ratios": (0.0, 0.5, 1.0), "parameter_groups": ("all", "classifier", "conv")} | changes
        )

    return made
