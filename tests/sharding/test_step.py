"""The order of an optimizer's step: nobody waits for a number that decides nothing, nor for the last gradient first."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn

from sparing import sharding as sh
from sparing.sharding.engine import engine as engine_module
from sparing.sharding.engine.gradients import Gradients
from sparing.sharding.engine.norms import Norms


@pytest.fixture
def told(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What happens in a step, in order."""
    events: list[str] = []
    real: Callable[..., Callable[[], Norms]] = engine_module.whole_norms

    def begin(*args: Any) -> Callable[[], Norms]:
        wait = real(*args)
        events.append("norm begins")
        return lambda: events.append("norm is awaited") or wait()  # type: ignore[func-returns-value]

    taking = Gradients.take
    monkeypatch.setattr(engine_module, "whole_norms", begin)
    monkeypatch.setattr(Gradients, "take", lambda self: events.append(self.bucket.name) or taking(self))
    stepping = torch.optim.SGD.step
    monkeypatch.setattr(torch.optim.SGD, "step", lambda self: events.append("update") or stepping(self))
    return events


@pytest.fixture
def mesh() -> Iterator[sh.Mesh]:
    with sh.make_mesh() as made:
        yield made


def stepped(mesh: sh.Mesh, told: list[str] | None = None, **settings: Any) -> float:
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(3, 3, dtype=torch.float64) for _ in range(4)))
    engine = sh.shard_(model, "NNG", mesh, optimizer=partial(torch.optim.SGD, lr=0.1), **settings)
    (told or []).clear()  # shard_ tries the optimizer out
    engine.backward(model(torch.ones(2, 3, dtype=torch.float64)).square().mean())
    norm = engine.step()
    engine.close()
    return norm


def test_the_norm_travels_while_the_weights_change(mesh: sh.Mesh, told: list[str]) -> None:
    stepped(mesh, told)
    assert [event for event in told if "trainable" not in event] == ["norm begins", "update", "norm is awaited"]


@pytest.mark.parametrize("settings", [{"clip": 1.0}, {"loss_scale": 8.0}], ids=str)
def test_a_norm_that_decides_is_awaited_first(mesh: sh.Mesh, told: list[str], settings: dict[str, float]) -> None:
    stepped(mesh, told, **settings)
    assert told.index("norm is awaited") < told.index("update")


def test_gradients_are_taken_as_they_arrive(mesh: sh.Mesh, told: list[str]) -> None:
    stepped(mesh, told)
    taken = [event.split("/")[0] for event in told[: told.index("norm begins")]]
    assert taken == ["2", "1", "head", "embed"]  # as the backward pass leaves them; what is outside the body comes last
