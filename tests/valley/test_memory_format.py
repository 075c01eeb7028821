"""Channels-last scans: the numbers of the layout that users have, and a return to it for models that cannot change."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from sparing.valley.directions.config import Noise
from sparing.valley.scans import points as scans
from sparing.valley.scans.evaluators import Classification
from sparing.valley.scans.scan import scan
from sparing.valley.scans.workers import measure
from valley import walks


class Viewed(nn.Sequential):
    """Raises on activations that are not contiguous."""

    def forward(self, x):
        x = super().forward(x)
        return x.view(len(x), -1)[:, :3]


class Raw(nn.Sequential):
    """Reads memory as if it were contiguous, and so computes something else in another layout."""

    def forward(self, x):
        x = super().forward(x)
        return x.as_strided((len(x), 3), (x[0].numel(), 1))


def convolutions(kind=nn.Sequential):
    layers = [nn.Conv2d(3, 8, 3, bias=False), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 6, 3)]
    end = [nn.Flatten(), nn.Linear(24, 3)] if kind is nn.Sequential else []
    return walks.randomise_(kind(*layers, *end).float()).eval()


def rows(count):
    return torch.randn(count, 3, 6, 6, generator=torch.Generator().manual_seed(count))


MEASURE = Classification(rows(40), walks.classes(40))
OPTIONS = {"calibrate": [rows(30)], "points": 3, "draws": 2}


@pytest.mark.parametrize(("kind", "changes"), [(nn.Sequential, True), (Viewed, False), (Raw, False)])
def test_numbers_are_those_of_the_users_layout(kind, changes, monkeypatch):
    model = convolutions(kind)
    seen = []

    def evaluate(net):
        seen.append(net[0].weight.is_contiguous(memory_format=torch.channels_last))
        return MEASURE(net)

    before = walks.state(model)
    found = scan(model, evaluate, Noise("gaussian"), **OPTIONS)
    assert walks.same(before, walks.state(model))
    assert seen[-1] is changes
    monkeypatch.setattr(scans, "suits_channels_last", lambda *_: False)
    plain = scan(model, MEASURE, Noise("gaussian"), **OPTIONS)
    # float32 sums of some hundred terms in another order
    assert found.values["loss"] == pytest.approx(plain.values["loss"], rel=0 if not changes else 1e-6)
    assert found.values["error"] == pytest.approx(plain.values["error"], abs=1 / 40)


def test_a_worker_gets_the_same_bits(monkeypatch):
    """What another process does with the task, here in this one."""
    model, tasks = convolutions(), []
    inner = scans.measure_all

    def kept(task, points, **options):
        tasks.append((task, points))
        return inner(task, points, **options)

    monkeypatch.setattr(scans, "measure_all", kept)
    found = scan(model, MEASURE, Noise("gaussian"), **OPTIONS)
    ((task, points),) = tasks
    assert task.channels_last
    there, _ = measure(task, points[2:])
    assert [one["loss"] for one in there] == list(found.values["loss"][1, [0, 2]])
