"""The line between two models, against closed forms in float64 and a plain loop."""

from __future__ import annotations

import copy
import math

import pytest
import torch
from torch import nn

from refusals import refused
from sparing.errors import UserError
from sparing.seeds import stream
from sparing.valley.apply import state_digests
from sparing.valley.scans.interpolate import interpolate, interpolate_tensor


class Quadratic:
    """f(θ) = ½ Σ c (θ − m)², in float64."""

    def __init__(self, curvature: torch.Tensor, minimum: torch.Tensor) -> None:
        self.curvature, self.minimum = curvature, minimum

    def __call__(self, model: nn.Module) -> dict[str, float]:
        theta = torch.nn.utils.parameters_to_vector(model.parameters())
        loss = float((self.curvature * (theta - self.minimum).square()).sum() / 2)
        return {"loss": loss, "error": 2 * loss}


def linear(label: str) -> nn.Linear:
    model = nn.Linear(3, 2).double()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=stream(0, "test-interpolate", label)).double())
    return model


def quadratic(n: int = 8) -> Quadratic:
    generator = stream(0, "test-interpolate", "quadratic")
    return Quadratic(torch.rand(n, generator=generator).double(), torch.randn(n, generator=generator).double())


def normed(label: str) -> nn.Sequential:
    model = nn.Sequential(nn.Linear(4, 5), nn.BatchNorm1d(5), nn.ReLU(), nn.Linear(5, 3)).double()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=stream(0, "test-interpolate", label)).double())
        model[1].num_batches_tracked.fill_(len(label))
    return model


ROWS = torch.randn(40, 4, generator=stream(0, "test-interpolate", "rows")).double()
TEST = torch.randn(30, 4, generator=stream(0, "test-interpolate", "held out")).double()
TARGETS = torch.randint(3, (30,), generator=stream(0, "test-interpolate", "targets"))


def measure(model: nn.Module) -> dict[str, float]:
    logits = model(TEST)
    return {
        "loss": float(nn.functional.cross_entropy(logits, TARGETS)),
        "error": float((logits.argmax(1) != TARGETS).double().mean()),
    }


def test_gap_of_a_quadratic_is_the_closed_form():
    """f(½) − (f(0) + f(1))/2 = −⅛ dᵀ H d, d = b − a: exact to the rounding of a few float64 sums."""
    a, b, evaluate = linear("a"), linear("b"), quadratic()
    found = interpolate(a, b, evaluate)
    d = nn.utils.parameters_to_vector(b.parameters()) - nn.utils.parameters_to_vector(a.parameters())
    expected = -float((evaluate.curvature * d.square()).sum().detach()) / 8
    assert found.gap["loss"] == pytest.approx(expected, rel=1e-13)
    assert found.gap["error"] == pytest.approx(2 * expected, rel=1e-13)
    assert found.barrier["loss"] == 0.0  # a convex function lies under its chord


def test_every_point_of_a_quadratic_also_outside():
    a, b, evaluate = linear("a"), linear("b"), quadratic()
    found = interpolate(a, b, evaluate, lambdas=[-1, 0.3, 2])
    assert found.lambdas == (-1.0, 0.0, 0.3, 0.5, 1.0, 2.0)
    theta, other = (nn.utils.parameters_to_vector(model.parameters()).detach() for model in (a, b))
    for at, value in zip(found.lambdas, found.values["loss"], strict=True):
        point = (1 - at) * theta + at * other
        assert value == pytest.approx(float((evaluate.curvature * (point - evaluate.minimum).square()).sum() / 2))


def test_a_hump_has_a_barrier_and_a_gap():
    """f = 1 − (2λ − 1)² on the line from −1 to 1 rises 1 over its ends, in the middle."""
    a, b = nn.Linear(1, 1, bias=False).double(), nn.Linear(1, 1, bias=False).double()
    a.weight.data.fill_(-1.0)
    b.weight.data.fill_(1.0)
    found = interpolate(a, b, lambda model: {"loss": 1 - model.weight.item() ** 2})
    assert (found.gap, found.barrier) == ({"loss": 1.0}, {"loss": 1.0})
    assert math.isclose(found.agreement.element, 0.0)


def test_batch_norm_follows_the_weights():
    """Against a model built anew at each position, its statistics set to mean and unbiased variance by hand."""
    a, b = normed("a"), normed("bb")
    found = interpolate(a, b, measure, lambdas=[0.25], calibrate=[ROWS[:10], ROWS[10:]])
    for at, loss in zip(found.lambdas, found.values["loss"], strict=True):
        model = copy.deepcopy(a).eval()
        with torch.no_grad():
            for mine, theirs in zip(model.parameters(), b.parameters(), strict=True):
                mine.copy_((1 - at) * mine + at * theirs)
            hidden = model[0](ROWS)
            model[1].running_mean.copy_(hidden.mean(0))
            model[1].running_var.copy_(hidden.var(0))
            assert loss == pytest.approx(measure(model)["loss"], rel=1e-12)


def test_stale_statistics_are_those_of_the_ends():
    a, b = normed("a"), normed("bb")
    for model, shift in ((a, 1.0), (b, 3.0)):
        model[1].running_mean.fill_(shift)
    seen = []

    def spy(model: nn.Module) -> dict[str, float]:
        seen.append((model[1].running_mean[0].item(), int(model[1].num_batches_tracked), model.training))
        return {"loss": 0.0}

    interpolate(a, b, spy, lambdas=[-1, 2], statistics="stale")
    # The first two are the check at λ = 0; outside the line statistics stay at the nearer end
    assert seen[2:] == [(1.0, 2, False), (1.0, 2, False), (2.0, 2, False), (3.0, 2, False), (3.0, 2, False)]


@pytest.mark.parametrize("fails", [False, True])
def test_both_ends_are_as_before(fails: bool):
    a, b = normed("a").train(), normed("bb")
    before = state_digests(a), state_digests(b)
    if fails:
        calls = iter(range(100))

        def evaluate(model: nn.Module) -> dict[str, float]:
            if next(calls) > 3:
                raise RuntimeError("no more")
            return {"loss": 1.0}

        with pytest.raises(RuntimeError, match="no more"):
            interpolate(a, b, evaluate, calibrate=[ROWS])
    else:
        interpolate(a, b, measure, calibrate=[ROWS])
    assert (state_digests(a), state_digests(b)) == before


def test_a_state_beside_a_live_model_either_way():
    a, b, evaluate = linear("a"), linear("b"), quadratic()
    whole = interpolate(a, b, evaluate)
    assert interpolate(a, b.state_dict(), evaluate).values == whole.values
    assert interpolate(a.state_dict(), b, evaluate).values == whole.values


def test_ends_are_met_to_the_bit():
    a, b = torch.randn(100, generator=stream(1)), torch.randn(100, generator=stream(2))
    assert torch.equal(interpolate_tensor("w", a, b, 0.0), a)
    assert torch.equal(interpolate_tensor("w", a, b, 1.0), b)
    assert torch.equal(interpolate_tensor("w", a, a, 0.3), a)
    assert interpolate_tensor("n", torch.tensor(3), torch.tensor(5), 0.0).item() == 5


def test_rows_and_picture():
    found = interpolate(linear("a"), linear("b"), quadratic(), lambdas=[0.5])
    assert found.rows_of()[1] == {"lambda": 0.5, "loss": found.values["loss"][1], "error": found.values["error"][1]}
    assert "better in loss" in found.plot("loss").title
    assert "<svg" in found.plot().svg_light
    refused("measured were loss, error", found.plot, "accuracy")


def test_refusals():
    a, b = normed("a"), normed("bb")
    refused("states only", interpolate, a.state_dict(), b.state_dict(), measure)
    refused(r"'weight': got shape \(2, 3\) in model 1", interpolate, nn.Linear(3, 2), nn.Linear(2, 2), measure)
    refused("statistics must follow the weights", interpolate, a, b, measure)
    refused("positions on a line", interpolate, a, b, measure, lambdas=[float("nan")], calibrate=[ROWS])
    with pytest.raises(UserError, match="the same weights must give the same numbers"):
        interpolate(a, b, lambda model: {"loss": torch.rand(()).item()}, calibrate=[ROWS])
