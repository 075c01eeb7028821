"""Measures and models as users bring them: scans, averages, lines and signs against float64, or refused in one line."""

from __future__ import annotations

import copy
import math

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn.utils import prune

from idioms.valley.cells import CELLS
from idioms.valley.pairs import ENDS, OTHERS, ROWS, drawn, net
from sparing.errors import UserError
from sparing.valley.apply import state_digests
from sparing.valley.directions.config import Given, Noise
from sparing.valley.forecast.agreement import sign_agreement
from sparing.valley.merging.linear import TaskArithmetic
from sparing.valley.merging.merge import merge
from sparing.valley.scans.interpolate import interpolate
from sparing.valley.scans.scan import scan


def cells(idiom):
    return pytest.mark.parametrize("cell", [cell for cell in CELLS if cell.idiom == idiom], ids=lambda cell: cell.name)


class Counted(nn.Module):
    """One weight and a buffer."""

    def __init__(self, value=0.0):
        super().__init__()
        self.weight = nn.Parameter(torch.full((1,), value, dtype=torch.float64))
        self.register_buffer("seen", torch.zeros(()))


ALONG = Given({"weight": torch.ones(1)}, norm="raw", name="line")


def with_gradient(model, loss):
    with torch.enable_grad():
        return (model.weight - 0.25).square().sum()


VALUES = {
    "int": lambda model, loss: round(16 * loss),
    "tensor": lambda model, loss: torch.tensor(loss, dtype=torch.float64),
    "tensor that needs a gradient": with_gradient, "NumPy number": lambda model, loss: np.float64(loss),
    "infinite far out": lambda model, loss: math.inf if abs(model.weight.item()) > 0.9 else loss,
    "NaN far out": lambda model, loss: math.nan if abs(model.weight.item()) > 0.9 else loss,
    "draws at random": lambda model, loss: torch.rand(()).item(), "NaN at the model": lambda model, loss: math.nan,
    "infinite at the model": lambda model, loss: math.inf, "text": lambda model, loss: "0.5",
    "a truth value": lambda model, loss: True, "a vector": lambda model, loss: torch.ones(2),
    "a complex number": lambda model, loss: 1j,
}  # fmt: skip


def raises(model):
    raise RuntimeError("mine")


DEEDS = {
    "changes a weight": lambda model: model.weight.data.add_(1.0),
    "changes a buffer": lambda model: model.seen.add_(1.0),
    "leaves training mode on": lambda model: model.train(), "raises": raises,
}  # fmt: skip


def measure(kind):
    """(w − ¼)² in every guise, and what no measure may do."""

    def evaluate(model):
        w = model.weight.item()
        loss = (w - 0.25) ** 2
        DEEDS.get(kind, lambda model: None)(model)
        found = {"loss": VALUES.get(kind, lambda model, loss: loss)(model, loss)}
        if kind == "a name at some points only" and w > 0:
            found["more"] = 1.0
        return {"nothing": {}, "accuracy in per cent": {"accuracy": 93.0 - loss}}.get(kind, found)

    return evaluate


SAID = {
    "draws at random": "the same weights must give the same numbers", "changes a weight": "it must leave the model",
    "changes a buffer": "it must leave the model", "leaves training mode on": "it must leave the model",
    "raises": "mine", "NaN at the model": "rises are counted from there", "nothing": "it must say what it measured",
    "infinite at the model": "rises are counted from there", "a name at some points only": "'more' at some points only",
    "accuracy in per cent": "as a share",
}  # fmt: skip


@cells("scan with a measure that returns or does")
def test_measure(cell):
    """Points are (λ − ¼)² to the bit, whatever carries the number; after a refusal the model is as before."""
    model = Counted().train()
    before = state_digests(model)
    if cell.outcome == "equal":
        found = scan(model, measure(cell.subject), ALONG, points=5)
        at = np.array([-1.0, -0.5, 0.0, 0.5, 1.0])
        expected = (at - 0.25) ** 2
        if cell.subject == "int":
            expected = np.round(16 * expected)
        if cell.subject.endswith("far out"):
            expected[np.abs(at) > 0.9] = math.inf if "inf" in cell.subject else math.nan
            assert math.isnan(found.asymmetry["loss"].value)
            assert "not finite" in found.plot("loss").title
        np.testing.assert_array_equal(found.values["loss"][0], expected)
    else:
        with pytest.raises(
            RuntimeError if cell.subject == "raises" else UserError, match=SAID.get(cell.subject, "real")
        ):
            scan(model, measure(cell.subject), ALONG, points=5)
    assert state_digests(model) == before


@cells("scan with")
def test_setting(cell):
    model = Counted(0.5)
    asked = {
        "floor for a metric that is not there": ({"floors": {"eror": 0.1}}, "measured were loss"),
        "direction for a metric that is not there": ({"better": {"eror": "lower"}}, "measured were loss"),
        "a direction that is no direction": ({"better": {"loss": "up"}}, 'pass "lower" or "higher"'),
        "a negative floor": ({"floors": {"loss": -1.0}}, "a noise floor is a height"),
        "a zero direction": ({}, "it leads nowhere"),
    }
    if cell.outcome == "refused":
        settings, said = asked[cell.subject]
        line = Given({"weight": torch.zeros(1)}, norm="raw") if cell.subject == "a zero direction" else ALONG
        with pytest.raises(UserError, match=said):
            scan(model, measure("float"), line, points=3, **settings)
        return
    model = nn.Linear(20, 10, bias=cell.subject != "masked weights").double()
    before = state_digests(model)
    if cell.subject == "masked weights":
        with torch.no_grad():
            model.weight[:, ::2] = 0.0
        before, hidden = (
            state_digests(model),
            lambda model: {"loss": float(model.weight[:, ::2].abs().sum()), "norm": 1.0},
        )
        assert scan(model, hidden, Noise("gaussian"), points=3, draws=2).values["loss"].tolist() == [[0.0] * 3] * 2
    elif cell.subject == "frozen weights":
        model.bias.requires_grad_(False)
        start = model.bias.detach().clone()
        still = lambda model: {"loss": float((model.bias - start).abs().sum())}  # noqa: E731
        assert scan(model, still, Noise("gaussian"), points=3, draws=2).values["loss"].tolist() == [[0.0] * 3] * 2
    else:
        calls = iter(range(100))

        def fails(model):
            if next(calls) > 4:
                raise KeyboardInterrupt
            return {"loss": 1.0}

        with pytest.raises(KeyboardInterrupt):
            scan(model, fails, Noise("gaussian"), points=5, draws=2)
    assert state_digests(model) == before


def in_dtype(state, dtype):
    return {name: value.to(dtype) if value.is_floating_point() else value for name, value in state.items()}


def modules(a, b):
    return net("a").train(), net("b").eval()


def frozen(a, b):
    model = net("a")
    model[0].weight.requires_grad_(False)
    return model, b


def tied(a, b):
    models = [nn.ModuleDict({"one": nn.Linear(3, 3), "two": nn.Linear(3, 3)}).double() for _ in range(2)]
    for model in models:
        model["two"].weight = model["one"].weight
    return models


def counters(a, b):
    models = net("a"), net("b")
    for model, count in zip(models, (3, 7), strict=True):
        model[1].num_batches_tracked.fill_(count)
        model[1].running_var.fill_(count / 2)
    return models


def pruned(a, b):
    models = nn.Linear(4, 4), nn.Linear(4, 4)
    for seed, model in enumerate(models):
        prune.custom_from_mask(model, "weight", (drawn(4, 4, label=f"mask {seed}") > 0).float())
    return models


def both(name, one, other):
    return lambda a, b: (a | {name: one}, b | {name: other})


PAIRS = {
    "float64": lambda a, b: (a, b), "float32": lambda a, b: (in_dtype(a, torch.float32), in_dtype(b, torch.float32)),
    "bfloat16": lambda a, b: (in_dtype(a, torch.bfloat16), in_dtype(b, torch.bfloat16)),
    "bfloat16 beside float32": lambda a, b: (in_dtype(a, torch.bfloat16), in_dtype(b, torch.float32)),
    "training mode": modules, "frozen in part": frozen, "tied weights": tied, "batch norm and counters": counters,
    "other order of names": lambda a, b: (a, dict(reversed(b.items()))), "one model twice": lambda a, b: (a, a),
    "base equal to a parent": lambda a, b: (a, b),
    "other names": lambda a, b: (a, {f"module.{name}": value for name, value in b.items()}),
    "other shapes": lambda a, b: (a, b | {"0.weight": drawn(5, 3)}),
    "an extra key": lambda a, b: (a, b | {"more": drawn(2)}),
    "NaN in a weight": lambda a, b: (a, b | {"0.weight": b["0.weight"] * math.nan}),
    "masks that differ": both("mask", torch.tensor([True, False]), torch.tensor([True, True])),
    "pruned by torch, masks that differ": pruned,
    "LoRA factors": lambda a, b: [{"q.lora_A.weight": drawn(2, 3, label=x), "q.lora_B.weight": drawn(3, 2,
        label=x)} for x in "ab"],
    "complex weights": both("c", torch.ones(2, dtype=torch.complex64), torch.ones(2, dtype=torch.complex64)),
    "8-bit weights": both("q", torch.tensor([1, 2], dtype=torch.int8), torch.tensor([2, 1], dtype=torch.int8)),
    "an entry that is no tensor": lambda a, b: (a, b | {"step": 3}),
}  # fmt: skip


REFUSED = {
    "other names": "only models of one architecture", "other shapes": "only models of one architecture",
    "an extra key": "only models of one architecture", "NaN in a weight": "an average with it is not finite",
    "masks that differ": "masks", "pruned by torch, masks that differ": "masks",
    "LoRA factors": "merge the adapters into their weights first", "complex weights": "cannot be averaged",
    "8-bit weights": "have no average", "an entry that is no tensor": "only tensors can be merged",
}  # fmt: skip
ROUNDED = {torch.float64: 2.0**-51, torch.float32: 2.0**-22, torch.bfloat16: 2.0**-8 + 2.0**-22}
"""Share of the larger weight that rounding takes: two steps of the arithmetic, and bfloat16's half unit at the end."""


@cells("average models")
def test_average(cell):
    if cell.subject == "another activation":
        with pytest.raises(UserError, match=OTHERS[cell.subject][1]):
            merge(OTHERS[cell.subject][0]())
        return
    a, b = PAIRS[cell.subject](net("a").state_dict(), net("b").state_dict())
    if cell.outcome == "refused":
        error = RuntimeWarning if cell.subject == "LoRA factors" else UserError  # a warning is an error here
        with pytest.raises(error, match=REFUSED[cell.subject]):
            merge([a, b])
        return
    if cell.subject == "base equal to a parent":
        found = merge([a, b], base=a, method=TaskArithmetic(0.5))
    else:
        found = merge([a, b])
    mine, theirs = (x.state_dict() if isinstance(x, nn.Module) else x for x in (a, b))
    for name, value in found.items():
        if not value.is_floating_point():
            assert value.item() == max(mine[name].item(), theirs[name].item())
            continue
        exact = (mine[name].double() + theirs[name].double()) / 2
        assert value.dtype == mine[name].dtype
        size = torch.maximum(mine[name].double().abs(), theirs[name].double().abs())
        assert bool(((value.double() - exact).abs() <= ROUNDED[value.dtype] * size).all())


def loss_of(model):
    return {"loss": float(model(ROWS).detach().square().mean())}


def tied_pair():
    models = [nn.ModuleDict({"one": nn.Linear(3, 3), "two": nn.Linear(3, 3)}).double() for _ in range(2)]
    states = [copy.deepcopy(model.state_dict()) for model in models]
    for model in models:
        model["two"].weight = model["one"].weight
    return models, states


def flat(model):
    return {"loss": 1.0}


LINES = {
    "float32 states in a bfloat16 model": (
        lambda: interpolate(net("a").bfloat16(), net("b", torch.float32), flat, statistics="stale"),
        r"rounded before they are measured; .* model\.float\(\)",
    ),
    "untied state in a tied model": (
        lambda: interpolate(tied_pair()[0][0], tied_pair()[1][1], flat), "in the live model they are one tensor",
    ),
    "batch norm without calibration": (
        lambda: interpolate(net("a"), net("b"), loss_of), "statistics must follow the weights",
    ),
    "states alone": (lambda: interpolate(net("a").state_dict(), net("b").state_dict(), flat), "pass model="),
} | {name: (lambda make=make: interpolate(*make(), flat), said) for name, (make, said) in OTHERS.items()}  # fmt: skip
"""What is refused, and what the refusal says."""


@cells("interpolate")
def test_line(cell):
    """Against the sum of tied weights, and against a model of half-way weights with statistics made by hand."""
    if cell.outcome == "refused":
        make, said = LINES[cell.subject]
        with pytest.raises(UserError, match=said):
            make()
        return
    if cell.subject == "tied models":
        models, _ = tied_pair()
        found = interpolate(*models, lambda model: {"loss": float(model["two"].weight.sum())}, lambdas=[0.25])
        ends = [float(model["two"].weight.detach().sum()) for model in models]
        expected = [(1 - at) * ends[0] + at * ends[1] for at in found.lambdas]
        assert found.values["loss"] == pytest.approx(expected, abs=1e-13)  # float64 sums of nine terms
        return
    a, b = net("a"), net("b")
    if cell.subject in ENDS:
        a, b = (nn.Sequential(*net, end.double()) for net, end in zip((a, b), ENDS[cell.subject](), strict=True))
    b[1].momentum = 0.01 if "momentum" in cell.subject else 0.1
    for model in (a, b):
        model.train()
    found = interpolate(a, b, loss_of, lambdas=[0.5], calibrate=[ROWS])
    middle = copy.deepcopy(a)
    with torch.no_grad():
        for mine, theirs in zip(middle.parameters(), b.parameters(), strict=True):
            mine.copy_((mine + theirs) / 2)
        hidden = middle[0](ROWS)
        middle[1].running_mean.copy_(hidden.mean(0))
        middle[1].running_var.copy_(hidden.var(0))
    assert found.values["loss"][1] == pytest.approx(loss_of(middle.eval())["loss"], rel=1e-12)
    assert a.training
    assert a[1].training


@cells("compare signs of weights with")
def test_signs(cell):
    """Counted one by one: pairs in which neither is zero, and those of one sign among them."""
    a, b = drawn(30, label="a"), drawn(30, label="b")
    match cell.subject:
        case "zeros":
            a[::3] = 0.0
        case "negative zeros":
            a[::3] = -0.0
        case "bfloat16":
            a, b = a.bfloat16(), b.bfloat16()
        case "all zero":
            a = torch.zeros(30)
        case "NaN":
            a[3] = math.nan
            with pytest.raises(UserError, match="NaN or infinite"):
                sign_agreement({"w": a}, {"w": b})
            return
    pairs = [(x, y) for x, y in zip(a.tolist(), b.tolist(), strict=True) if x and y]
    found = sign_agreement({"w": a}, {"w": b})
    assert found.votes == len(pairs)
    if pairs:
        assert found.element == pytest.approx(sum((x > 0) == (y > 0) for x, y in pairs) / len(pairs), rel=1e-15)
    else:
        assert math.isnan(found.element)
