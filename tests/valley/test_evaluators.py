"""Loss and error against hand-made logits; measures that cannot be trusted are refused."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
import torch
from torch import nn

from refusals import refused
from sparing.errors import UserError
from sparing.seeds import stream
from sparing.valley.scans.evaluators import Classification, NextToken, check_evaluate, logits_of, run_evaluate
from valley import walks


class Given(nn.Module):
    """Returns the logits it is given as inputs."""

    def __init__(self, wrap=lambda logits: logits):
        super().__init__()
        self.wrap = wrap

    def forward(self, x):
        return self.wrap(x)


LOGITS = torch.randn(50, 4, generator=stream(0, "logits"), dtype=torch.float64) * 3


def by_hand(logits, targets):
    f = logits.double().numpy()
    top = f.max(1, keepdims=True)
    log = top[:, 0] + np.log(np.exp(f - top).sum(1)) - f[np.arange(len(f)), targets.numpy()]
    return log.mean(), (f.argmax(1) != targets.numpy()).mean()


@pytest.mark.parametrize("size", [1, 7, 50, 512])
def test_classification_by_hand(size):
    targets = walks.classes(50, count=4)
    found = Classification(LOGITS, targets, batch_size=size)(Given())
    loss, error = by_hand(LOGITS, targets)
    assert found == {"loss": pytest.approx(loss, rel=1e-14), "error": error}
    assert Classification(LOGITS, targets).rows == 50


def test_logits_that_are_not_finite():
    bad = LOGITS.clone()
    bad[0, 0], bad[1, 2], bad[2, 1] = math.nan, math.inf, math.nan
    targets = LOGITS.argmax(1)
    targets[0] = 0  # argmax takes a NaN for the largest
    found = Classification(bad[[0, *range(3, 50)]], targets[[0, *range(3, 50)]])(Given())
    assert math.isnan(found["loss"])
    assert found["error"] == 1 / 48
    far = Classification(torch.tensor([[1e38, -1e38]]), torch.tensor([1]))(Given())
    assert far == {"loss": pytest.approx(2e38), "error": 1.0}  # raw, not clipped
    half = Classification(torch.tensor([[12.0, 0.0]], dtype=torch.float16), torch.tensor([1]))(Given())
    assert half["loss"] == pytest.approx(12 + math.log1p(math.exp(-12)), rel=1e-6)  # in float32: float16 has 3 digits


def test_next_token_by_hand():
    tokens = walks.classes(24, "tokens", count=5).view(4, 6)
    table = torch.randn(5, 5, generator=stream(0, "table"), dtype=torch.float64)

    class Bigram(nn.Module):
        def __init__(self):
            super().__init__()
            self.table = nn.Parameter(table)

        def forward(self, x):
            return {"logits": self.table[x]}

    loss, error = by_hand(table[tokens[:, :-1].flatten()], tokens[:, 1:].flatten())
    for size in (1, 3, 16):
        found = NextToken(tokens, batch_size=size)(Bigram())
        assert found == {"loss": pytest.approx(loss, rel=1e-14), "error": error}
    assert NextToken(tokens).rows == 20


def test_outputs_of_all_kinds():
    class Output:
        logits = LOGITS

    for output in (LOGITS, Output(), {"logits": LOGITS}, (LOGITS, None), [Output()]):
        assert logits_of(output) is LOGITS
    refused("logits", logits_of, {"scores": LOGITS})


def test_evaluators_use_eval_mode_and_put_flags_back():
    model = walks.normed().train()
    model[1].eval()
    flags = [m.training for m in model.modules()]
    before = model[1].running_mean.clone(), model[6].num_batches_tracked.clone()
    measure = Classification(walks.images(9), walks.classes(9))
    assert measure(model) == measure(model)
    assert [m.training for m in model.modules()] == flags
    assert torch.equal(model[1].running_mean, before[0])
    assert torch.equal(model[6].num_batches_tracked, before[1])


def test_numbers_of_many_kinds_become_floats():
    found = run_evaluate(lambda _: {"a": 1, "b": torch.tensor(0.5), "c": np.float32(2), "d": math.inf}, nn.Linear(1, 1))
    assert found == {"a": 1.0, "b": 0.5, "c": 2.0, "d": math.inf}
    assert all(type(value) is float for value in found.values())


@pytest.mark.parametrize(
    "value", [None, 0.3, {}, {"loss": "0.3"}, {"loss": None}, {"loss": torch.zeros(2)}, {"loss": [1.0]},
              {"loss": True}, {"loss": 1j}],
)  # fmt: skip
def test_what_is_no_number_is_refused(value):
    refused("evaluate", run_evaluate, lambda _: value, nn.Linear(1, 1))


def test_measures_run_without_gradients():
    seen = []
    run_evaluate(lambda model: seen.append(torch.is_grad_enabled()) or {"loss": 1.0}, nn.Linear(1, 1))
    assert seen == [False]


def stepping(model):
    with torch.no_grad():
        model[0].weight -= 0.1
    return {"loss": 1.0}


def flipping(model):
    with torch.no_grad():
        model[0].weight[0, 0, 0, 0] *= -1
    return {"loss": 1.0}


def counting(model):
    model[1].num_batches_tracked += 1
    return {"loss": 1.0}


def training(model):
    model.train()
    return {"loss": 1.0}


def halving(model):
    model.half()
    return {"loss": 1.0}


def dropping(model):
    model[1].register_buffer("extra", torch.zeros(1))
    return {"loss": 1.0}


@pytest.mark.parametrize(
    ("measure", "match"),
    [
        (stepping, "parameter 0.weight"),
        (flipping, "parameter 0.weight;"),
        (counting, "buffer 1.num_batches_tracked"),
        (training, "training flag of the model and 9 more"),
        (halving, "parameter 0.weight and 12 more"),
        (dropping, "buffer 1.extra"),
    ],
)
def test_a_measure_that_changes_the_model_is_refused(measure, match):
    refused(match, check_evaluate, measure, walks.normed())


def test_a_measure_that_is_not_deterministic_is_refused():
    clock = itertools.count()
    with pytest.raises(UserError, match=r"'loss': got 0.0 and then 1.0; the same weights"):
        check_evaluate(lambda _: {"error": 0.5, "loss": float(next(clock))}, walks.plain())
    values = iter([1.0, 1.0 + 2**-52])
    refused("same weights", check_evaluate, lambda _: {"loss": next(values)}, walks.plain())
    names = iter(["loss", "cost"])
    refused("None", check_evaluate, lambda _: {next(names): 1.0}, walks.plain())


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_what_is_not_finite_at_the_start_is_refused(value):
    refused("λ = 0", check_evaluate, lambda _: {"error": 0.0, "loss": value}, walks.plain())


@pytest.mark.parametrize(
    "make",
    [
        lambda: Classification(torch.zeros(2, 3), torch.zeros(3)),
        lambda: Classification(torch.zeros(0, 3), torch.zeros(0)),
        lambda: Classification(torch.zeros(2, 3), torch.zeros(2, 1)),
        lambda: Classification(torch.zeros(2, 3), torch.zeros(2), batch_size=0),
        lambda: NextToken(torch.zeros(3)),
        lambda: NextToken(torch.zeros(3, 1)),
        lambda: NextToken(torch.zeros(3, 2), batch_size=0),
    ],
)
def test_rows_that_cannot_be(make):
    with pytest.raises(UserError):
        make()
