"""A micro-step is timed and leaves no trace: everything a pass changes has the same bits afterwards."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from oracles.processes import answers
from sparing.errors import RunError
from sparing.sharding.network import step_timing
from sparing.sharding.network.mesh import make_mesh
from sparing.sharding.network.step_timing import MicroStep, PassTimes, time_micro_step, time_on_all_ranks


class Noisy(nn.Module):
    """Everything that a pass may change: running statistics, a buffer replaced by another, random numbers."""

    calls: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            nn.Sequential(nn.Linear(6, 6), nn.BatchNorm1d(6), nn.Dropout(0.5)) for _ in range(3)
        )
        self.head = nn.Linear(6, 2)
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        self.calls = self.calls + random.random()  # another tensor in its place
        return self.head(x)


@pytest.fixture
def model() -> Noisy:
    torch.manual_seed(0)
    made = Noisy()
    made.layers[1].eval()
    made.layers[2][0].weight.requires_grad_(False)
    made.head.weight.grad = torch.ones_like(made.head.weight)
    return made


def state(model: nn.Module) -> dict[str, Any]:
    """Bits, identities and modes, next random numbers apart."""
    named = [*model.named_parameters(), *model.named_buffers()]
    return {
        "bits": {name: value.detach().clone() for name, value in named},
        "objects": {name: id(value) for name, value in named},
        "grads": {name: None if p.grad is None else p.grad.clone() for name, p in model.named_parameters()},
        "trains": {name: p.requires_grad for name, p in model.named_parameters()},
        "modes": {name: module.training for name, module in model.named_modules()},
        "hooks": [len(p._post_accumulate_grad_hooks or {}) for p in model.parameters()],
        "torch": torch.get_rng_state(),
        "python": random.getstate(),
    }


def same(one: Any, other: Any) -> bool:
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(same(one[key], other[key]) for key in one)
    return torch.equal(one, other) if isinstance(one, Tensor) else one == other


def micro(model: nn.Module, **more: Any) -> MicroStep:
    x = torch.linspace(-1, 1, 24).view(4, 6)
    return MicroStep(model=model, loss=lambda: model(x).square().sum(), **more)


def test_it_takes_time_and_leaves_no_trace(model: Noisy) -> None:
    before, seen = state(model), []
    found = time_micro_step(micro(model), lambda: seen.append(model.training))
    assert min(found.forward, found.backward) > 0
    assert seen == [True] * (step_timing.TIMED_MICRO_STEPS + 1)
    after = state(model)
    assert {name for name in before if not same(before[name], after[name])} == set()


def test_a_failure_leaves_no_trace_either(model: Noisy) -> None:
    def loss() -> Tensor:
        model(torch.zeros(4, 6))
        raise RuntimeError("broken")

    before = state(model)
    with pytest.raises(RuntimeError, match="broken"):
        time_micro_step(MicroStep(model=model, loss=loss))
    assert same(before, state(model))


def test_gradients_never_stand_beside_each_other_and_resting_blocks_have_none(model: Noisy) -> None:
    came: list[str] = []

    def loss() -> Tensor:
        for name, parameter in model.named_parameters():
            if parameter.requires_grad:
                parameter.register_post_accumulate_grad_hook(lambda p, name=name: came.append(name))
        return model(torch.ones(4, 6)).sum()

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(step_timing, "LONG_SECONDS", 0.0)  # one pass
        time_micro_step(MicroStep(model=model, loss=loss, frozen=["layers.0"], body="layers"))
    assert came
    assert not [name for name in came if name.startswith("layers.0") or name == "layers.2.0.weight"]
    assert model.layers[0][0].weight.grad is None


def test_the_first_pass_warms_up_unless_it_is_long(model: Noisy, monkeypatch: pytest.MonkeyPatch) -> None:
    ticks = iter([0, 4, 8, 10, 12, 15, 20, 21, 22])  # (4, 4), (2, 3), (1, 1)

    def clock(module: nn.Module) -> float:
        return float(next(ticks))

    monkeypatch.setattr(step_timing, "clock", clock)
    monkeypatch.setattr(step_timing, "LONG_SECONDS", 8.0)
    assert time_micro_step(micro(model)) == PassTimes(forward=1.0, backward=1.0)
    ticks = iter([0, 4, 9])
    assert time_micro_step(micro(model)) == PassTimes(forward=4.0, backward=5.0)


@pytest.fixture
def alone() -> Iterator[Any]:
    with make_mesh() as mesh:
        yield mesh


def test_no_room_is_no_time(model: Noisy, alone: Any) -> None:
    def loss() -> Tensor:
        raise torch.OutOfMemoryError

    assert time_on_all_ranks(alone, MicroStep(model=model, loss=loss), label="") is None
    assert time_on_all_ranks(alone, micro(model), label="") is not None


def rank(seconds: list[PassTimes | None]) -> Any:
    """What one of two ranks hears if their micro-steps take so long; None fails."""
    with make_mesh(groups=1) as mesh, pytest.MonkeyPatch.context() as patch:

        def told(micro: MicroStep, advance: object) -> PassTimes:
            mine = seconds[mesh.rank]
            if mine is None:
                raise ValueError("no such row")
            return mine

        patch.setattr(step_timing, "time_micro_step", told)
        try:
            return time_on_all_ranks(mesh, micro(nn.Linear(1, 1)), label="")
        except RunError as error:
            return str(error)


def both() -> list[Any]:
    fast, slow = PassTimes(forward=0.1, backward=0.7), PassTimes(forward=0.3, backward=0.4)
    return [rank([fast, slow]), rank([slow, None])]


@pytest.mark.processes
def test_ranks_agree_on_the_slowest_and_share_a_failure() -> None:
    expected = [PassTimes(forward=0.3, backward=0.7), "rank 1 failed: ValueError: no such row"]
    assert answers(2, both) == [expected] * 2
