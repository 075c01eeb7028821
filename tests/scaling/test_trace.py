"""A forward pass as data, on nets of which every operation is known."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from scaling import models
from sparing.scaling.roles.trace import Ref, Trace, Untraceable, trace


class Small(nn.Module):
    """A product, a number, a number in a buffer, a write in place, and attention."""

    def __init__(self) -> None:
        super().__init__()
        self.mix, self.last = nn.Linear(4, 4, bias=False), nn.Linear(4, 2)
        self.register_buffer("divisor", torch.tensor(9.0))

    def forward(self, x):
        y = self.mix(x) * 3
        z = y[..., :2]
        y.mul_(0.5)
        y = F.scaled_dot_product_attention(y, y, y, scale=0.25)
        return self.last(y / self.divisor.sqrt()), z


def names(seen: Trace) -> list[str]:
    return [done.name for done in seen.operations]


def test_operations_are_in_order_with_their_operands():
    seen = trace(Small(), torch.empty(2, 5, 4))
    arithmetic = {"mm", "mul", "bmm", "_softmax", "_safe_softmax", "div", "addmm"}
    assert [name for name in names(seen) if name in arithmetic] == [
        "mm", "mul", "mul", "mul", "mul", "bmm", "_safe_softmax", "bmm", "div", "addmm"
    ]  # fmt: skip
    first = next(done for done in seen.operations if done.name == "mm")
    weight = next(number for number, name in seen.parameters.items() if name == "mix.weight")
    turned = next(done for done in seen.operations if done.name == "t")
    assert turned.operands == (weight,)
    assert first.operands[1] == turned.results[0]
    assert (first.module, turned.module) == ("mix", "mix")
    assert seen.shapes[first.results[0]] == (10, 4)
    assert len(seen.outputs) == 2


def test_attention_shows_its_numbers():
    """Torch puts the root of the scale on queries and on keys."""
    seen = trace(Small(), torch.empty(2, 5, 4))
    scalars = [done.args[1] for done in seen.operations if done.name == "mul" and not isinstance(done.args[1], Ref)]
    assert scalars == [3, 0.5, 0.5, 0.5]


def test_numbers_in_buffers_are_known_and_what_is_computed_of_them():
    seen = trace(Small(), torch.empty(2, 5, 4))
    divided = next(done for done in seen.operations if done.name == "div")
    assert seen.values[divided.operands[1]] == 3.0


def test_what_looks_at_a_tensor_that_is_written_to_is_another_afterwards():
    seen = trace(Small(), torch.empty(2, 5, 4))
    written = next(done for done in seen.operations if done.name == "written")
    assert written.results[0] in seen.outputs  # z
    assert written.operands[1] in {n for done in seen.operations if done.name == "mul" for n in done.results}


def test_modules_are_noted_with_what_they_are_given_and_return():
    seen = trace(models.mlp(8, depth=2), torch.empty(3, 8))
    assert list(seen.calls) == ["0", "1", "2", "3", "4", ""]
    ((given, returned),) = seen.calls["2"]
    assert given == seen.calls["1"][0][1]
    assert returned == seen.calls["3"][0][0]


def test_the_model_is_not_run_nor_changed():
    model = models.conv(8)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    state = torch.get_rng_state()
    calls = []
    model.register_forward_hook(lambda *_: calls.append(1))
    trace(model, torch.empty(2, 3, 8, 8))
    assert not calls
    assert torch.equal(torch.get_rng_state(), state)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


def test_a_model_without_numbers_can_be_traced_at_any_size():
    with torch.device("meta"):
        wide = nn.Sequential(nn.Linear(8, 2**17), nn.ReLU(), nn.Linear(2**17, 2**17), nn.Linear(2**17, 2))
    assert names(trace(wide, torch.empty(1, 8, device="meta"))).count("addmm") == 3


class Fickle(nn.Module):
    """Chooses its path by a number in a tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x):
        return self.a(x) if float(x.sum()) > 0 else self.b(x)


@pytest.mark.parametrize(
    ("model", "example", "words"),
    [(Fickle(), torch.empty(2, 4), "DataDependent"), (Small(), torch.empty(2, 5, 3), "RuntimeError")],
)
def test_what_cannot_be_traced_says_so(model, example, words):
    with pytest.raises(Untraceable, match=words):
        trace(model, example)


def test_a_copy_can_be_edited_before_it_runs():
    model = Small()
    seen = trace(model, torch.empty(2, 5, 4), edit=lambda modules: modules[""].divisor.fill_(1.0))
    assert model.divisor == 9.0
    assert math.prod(seen.shapes[next(iter(seen.outputs))]) > 0
