"""Soups are means, greedy ones in the right order, and their batch-norm statistics their own."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from refusals import refused
from sparing.errors import UserError
from sparing.report.pairs import mcnemar
from sparing.seeds import stream
from sparing.valley.apply import state_digests
from sparing.valley.merging.soup import WeightAverage, soup
from sparing.valley.scans.evaluators import Classification, NextToken


def scalar(value: float) -> nn.Linear:
    model = nn.Linear(1, 1, bias=False).double()
    model.weight.data.fill_(value)
    return model


def near(target: float):
    """Distance of the one weight from a target."""
    return lambda model: {"error": abs(model.weight.item() - target)}


def normed(label: str) -> nn.Sequential:
    model = nn.Sequential(nn.Linear(4, 5), nn.BatchNorm1d(5), nn.Linear(5, 2)).double()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=stream(0, "test-soup", label)).double())
        model[1].num_batches_tracked.fill_(len(label))
    return model


ROWS = torch.randn(32, 4, generator=stream(0, "test-soup", "rows")).double()


def test_uniform_is_the_mean():
    models = [normed(label) for label in ("a", "bb", "ccc")]
    found = soup(models)
    for name, value in found.state.items():
        stacked = torch.stack([model.state_dict()[name] for model in models])
        if value.is_floating_point():
            torch.testing.assert_close(value, stacked.mean(0), rtol=1e-14, atol=1e-15)  # float64 rounding
        else:
            assert (value.dtype, value.item()) == (torch.int64, 3)
    assert (found.members, found.record, found.refreshed) == ((0, 1, 2), (), False)


def test_statistics_of_a_soup_are_its_own():
    """Mean and unbiased variance of what its first layer gives on the calibration rows; the members' are another."""
    models = [normed("a"), normed("bb")]
    before = [state_digests(model) for model in models]
    found = soup(models, calibrate=[ROWS[:16], ROWS[16:]])
    hidden = nn.functional.linear(ROWS, found.state["0.weight"], found.state["0.bias"])
    torch.testing.assert_close(found.state["1.running_mean"], hidden.mean(0), rtol=1e-12, atol=1e-13)
    torch.testing.assert_close(found.state["1.running_var"], hidden.var(0), rtol=1e-12, atol=1e-13)
    assert found.refreshed
    assert [state_digests(model) for model in models] == before
    states = [model.state_dict() for model in models]
    alone = soup(states, calibrate=[ROWS[:16], ROWS[16:]], model=normed("host"))
    assert all(torch.equal(alone.state[name], value) for name, value in found.state.items())


def test_greedy_order_by_hand():
    """Weights 4, 1, −3, 2 and a target of 1.6: alone 2.4, 0.6, 4.6, 0.4, so the order is 3, 1, 0, 2.

    2 alone 0.4; with 1 the mean is 1.5, off by 0.1: kept; with 4 it is 7/3, off by 0.73: left; with −3 it is 0: left.
    """
    models = [scalar(value) for value in (4.0, 1.0, -3.0, 2.0)]
    found = soup(models, "greedy", evaluate=near(1.6))
    assert (found.members, found.state["weight"].item()) == ((3, 1), 1.5)
    rows = [(row["members"], row["kept"], round(row["error"], 12)) for row in found.record]
    assert rows == [
        ("0", True, 2.4), ("1", True, 0.6), ("2", True, 4.6), ("3", True, 0.4),
        ("3 + 1", True, 0.1), ("3 + 1 + 0", False, round(7 / 3 - 1.6, 12)), ("3 + 1 + 2", False, 1.6),
    ]  # fmt: skip


def test_greedy_goes_on_after_a_member_that_hurts():
    """Target 0: 1 alone 1; with 2 worse; with −3 the mean is −1, as good: kept."""
    found = soup([scalar(1.0), scalar(2.0), scalar(-3.0)], "greedy", evaluate=near(0.0))
    assert found.members == (0, 2)


def test_greedy_refreshes_every_candidate():
    models = [normed("a"), normed("bb")]
    seen = []

    def evaluate(model: nn.Module) -> dict[str, float]:
        hidden = model[0](ROWS)
        seen.append(torch.allclose(model[1].running_mean, hidden.mean(0), rtol=1e-12, atol=1e-13))
        return {"loss": 1.0}

    found = soup(models, "greedy", evaluate=evaluate, calibrate=[ROWS])
    assert all(seen)
    hidden = nn.functional.linear(ROWS, found.state["0.weight"], found.state["0.bias"])
    torch.testing.assert_close(found.state["1.running_var"], hidden.var(0), rtol=1e-12, atol=1e-13)


def test_a_member_that_diverged_sorts_last():
    def evaluate(model: nn.Module) -> dict[str, float]:
        value = model.weight.item()
        return {"error": float("nan") if value == 5.0 else value}

    assert soup([scalar(1.0), scalar(5.0), scalar(2.0)], "greedy", evaluate=evaluate).members == (0,)


def test_the_deciding_metric_can_be_named():
    def evaluate(model: nn.Module) -> dict[str, float]:
        return {"loss": model.weight.item(), "error": -model.weight.item()}

    models = [scalar(1.0), scalar(2.0)]
    assert soup(models, "greedy", evaluate=evaluate).members == (1,)
    assert soup(models, "greedy", evaluate=evaluate, metric="loss").members == (0,)
    refused("measured were loss, error", soup, models, "greedy", evaluate=evaluate, metric="accuracy")


def test_uniform_reports_what_was_evaluated():
    found = soup([scalar(1.0), scalar(3.0)], evaluate=near(0.0))
    assert [(row["members"], row["error"]) for row in found.record] == [("0", 1.0), ("1", 3.0), ("0 + 1", 2.0)]


def test_refusals():
    models = [scalar(1.0), scalar(2.0)]
    refused("models: got none", soup, [])
    with pytest.raises(UserError, match="there are two soups"):
        soup(models, "best")  # type: ignore[arg-type]
    refused("greedy soup keeps what helps", soup, models, "greedy")
    refused("equal weights", soup, models, "greedy", evaluate=near(0.0), weights=[1, 1])
    refused("states only", soup, [model.state_dict() for model in models], evaluate=near(0.0))
    refused("states only", soup, [model.state_dict() for model in models], calibrate=[ROWS])
    refused("statistics must follow", soup, [normed("a"), normed("b")], "greedy", evaluate=near(0.0))
    with pytest.raises(UserError, match="in the live model and shape"):
        soup([model.state_dict() for model in models], evaluate=near(0.0), model=nn.Linear(2, 1, bias=False))


def test_running_average_is_the_mean_and_keeps_dtypes():
    model, average, seen = nn.Linear(3, 2).bfloat16(), WeightAverage(), []
    for step in range(7):
        with torch.no_grad():
            model.weight.copy_(torch.randn(2, 3, generator=stream(step, "test-soup")))
        seen.append(copy.deepcopy(model.state_dict()))
        average.add_(model)
    mean = torch.stack([state["weight"].double() for state in seen]).mean(0)
    assert average.state["weight"].dtype == torch.bfloat16
    torch.testing.assert_close(average.state["weight"].double(), mean, rtol=2**-8, atol=1e-6)  # bfloat16 once
    assert average.count == 7


def test_running_average_weighs_and_copies():
    model, average = scalar(1.0), WeightAverage()
    average.add_(model, 1.0)
    model.weight.data.fill_(5.0)
    assert average.state["weight"].item() == 1.0
    average.add_(model, 3.0)
    assert average.state["weight"].item() == 4.0
    refused("finite weights", average.add_, model, 0.0)
    refused("'weight'", average.add_, nn.Linear(2, 1, bias=False))


@pytest.mark.parametrize("how", ["uniform", "greedy"])
def test_a_soup_is_compared_with_its_best_member_on_the_same_rows(how):
    """Against the two models evaluated apart, row by row."""
    models = [nn.Linear(4, 2).double() for _ in range(3)]
    for seed, model in enumerate(models):
        for parameter in model.parameters():
            parameter.data.copy_(torch.randn(parameter.shape, generator=stream(seed, "paired")).double())
    targets = torch.randint(2, (32,), generator=stream(0, "targets"))
    evaluate = Classification(ROWS, targets, batch_size=7)
    found = soup(models, how, evaluate=evaluate)
    best = min(models, key=lambda model: evaluate(model)["error"])
    merged = copy.deepcopy(best)
    merged.load_state_dict(dict(found.state))
    rows = [
        nn.functional.cross_entropy(model(ROWS), targets, reduction="none").detach().double()
        for model in (merged, best)
    ]
    right = [model(ROWS).argmax(1) == targets for model in (merged, best)]
    assert found.beside_best["loss"].mean == pytest.approx(float((rows[0] - rows[1]).mean()), rel=1e-12, abs=1e-15)
    assert found.mcnemar == mcnemar(*right)
    assert found.beside_best["error"].mean == pytest.approx(-found.mcnemar.difference)
    assert soup(models, how, evaluate=lambda model: evaluate(model)).beside_best == {}


class Told:
    """A measure whose rows come as users write them; it counts how often it was asked."""

    def __init__(self, rows):
        self.rows, self.asked = rows, 0

    def __call__(self, model):
        self.asked += 1
        return {"error": float((model(ROWS)[:, 0] > 0).double().mean())}

    def each(self, *given):
        return self.rows(*given)


@pytest.mark.parametrize("rows", [
    lambda wrong: wrong, lambda wrong: wrong.tolist(), lambda wrong: wrong.numpy(), lambda wrong: wrong.int(),
    lambda wrong: wrong.float().requires_grad_(),
])  # fmt: skip
def test_rows_come_as_truth_values_lists_and_arrays(rows):
    models = [nn.Linear(4, 2).double() for _ in range(2)]
    for seed, model in enumerate(models):
        for parameter in model.parameters():
            parameter.data.copy_(torch.randn(parameter.shape, generator=stream(seed, "told")).double())
    found = soup(models, evaluate=Told(lambda model: {"error": rows(model(ROWS)[:, 0] > 0)}))
    best = min(models, key=lambda model: float((model(ROWS)[:, 0] > 0).double().mean()))
    merged = copy.deepcopy(best)
    merged.load_state_dict(dict(found.state))
    assert found.mcnemar == mcnemar(*((model(ROWS)[:, 0] <= 0) for model in (merged, best)))


@pytest.mark.parametrize(("rows", "said"), [
    (lambda: None, "evaluate.each: got TypeError: .*; a soup and its best member .*; return .* another name"),
    (lambda model: [0.0] * 32, "evaluate.each: got AttributeError"),
    (lambda model: {"error": ["wrong"] * 32}, "evaluate.each: got "),
    (lambda model: {"error": torch.zeros(32, 1)}, r"evaluate.each: got numbers of another shape; .* \(rows,\)"),
])  # fmt: skip
def test_what_is_no_rows_is_refused_before_the_rest_is_evaluated(rows, said):
    evaluate = Told(rows)
    refused(said, soup, [nn.Linear(4, 2).double() for _ in range(3)], evaluate=evaluate)
    assert evaluate.asked == 2  # the first member, twice: whether a measure can be trusted


def test_other_rows_of_another_model_are_refused():
    lengths = iter((32, 32, 31))
    evaluate = Told(lambda model: {"error": torch.zeros(next(lengths))})
    with pytest.raises(UserError, match=r"evaluate.each: got other rows of 'error' for another model"):
        soup([nn.Linear(4, 2).double() for _ in range(2)], evaluate=evaluate)


def test_sequences_are_compared_as_wholes():
    import zoo

    model = zoo.gpt2(layers=1, vocab=20, dtype=torch.float32).eval()
    tokens = torch.randint(20, (12, 7), generator=stream(0, "tokens"))
    measure = NextToken(tokens, batch_size=5)
    each = measure.each(model)
    assert each["loss"].shape == (12,)
    assert {name: float(values.mean()) for name, values in each.items()} == pytest.approx(measure(model), rel=1e-12)
    assert soup([model, model], evaluate=measure).mcnemar is None


def test_weights():
    assert soup([scalar(0.0), scalar(4.0)], weights=[3, 1]).state["weight"].item() == 1.0
