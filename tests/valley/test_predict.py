"""Forecasts rank pairs, name their reasons, and know what they cannot say."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from refusals import refused
from sparing.errors import UserError
from sparing.seeds import stream
from sparing.valley.forecast.calibration import METRICS, Pair, fit, spearman
from sparing.valley.forecast.predict import features_of, predict_merge


def net(label: str = "base") -> nn.Sequential:
    model = nn.Sequential(nn.Linear(20, 30), nn.BatchNorm1d(30), nn.ReLU(), nn.Linear(30, 10))
    with torch.no_grad():
        for at, parameter in enumerate(model.parameters()):
            if parameter.ndim > 1:
                parameter.copy_(torch.randn(parameter.shape, generator=stream(at, "test-predict", label)))
    return model


def moved(model: nn.Module, size: float, label: str) -> nn.Module:
    model = copy.deepcopy(model)
    with torch.no_grad():
        for at, parameter in enumerate(model.parameters()):
            parameter += size * torch.randn(parameter.shape, generator=stream(at, "test-predict", label))
    return model


def known(gap, names: tuple[str, ...] = ("disagreement", "distance")):
    """A calibration on pairs of this net, whose gap is made from how far they were moved."""
    base, sizes = net(), [0.02 * at for at in range(1, 41)]
    made = []
    for at, size in enumerate(sizes):
        a, b = (moved(base, size, f"calibration {half} {at}") for half in "ab")
        made.append(Pair(name=str(at), features=features_of(a, b, base), gap=dict.fromkeys(METRICS, gap(size))))
    return fit(made, names)


def test_farther_pairs_are_predicted_worse():
    """New pairs, ranked against the gap they were given: the goal of 0.9 for measured ones is met where it can be."""
    found, base = known(lambda size: size**2), net()
    sizes = [0.05, 0.6, 0.3, 0.15, 0.45, 0.75, 0.1, 0.5]
    predicted = []
    for size in sizes:
        a, b = moved(base, size, "a"), moved(base, size, "b")
        predicted.append(predict_merge(a, b, fit=found).gap["error"])
    assert spearman(predicted, sizes) >= 0.95
    for size, gap in zip(sizes, predicted, strict=True):
        assert gap == pytest.approx(size**2, abs=0.05)  # 3 % of a layer's signs are luck


def test_verdicts_follow_the_interval_and_the_tolerance():
    found, base = known(lambda size: size), net()
    near = predict_merge(moved(base, 0.1, "a"), moved(base, 0.1, "b"), fit=found, tolerance=0.3)
    middle = predict_merge(moved(base, 0.4, "a"), moved(base, 0.4, "b"), fit=found, tolerance=0.4)
    far = predict_merge(moved(base, 0.7, "a"), moved(base, 0.7, "b"), fit=found, tolerance=0.3)
    assert [one.verdict for one in (near, middle, far)] == ["will merge", "uncertain", "will not"]
    assert "is tolerated" in near.reasons[0]
    for one in (near, middle, far):
        low, high = one.interval["error"]
        assert low <= one.gap["error"] <= high
        assert one.pairs == 40


def test_strangers_will_not_merge_whatever_the_numbers():
    found = predict_merge(net("one"), net("another"), fit=known(lambda size: 0.0))
    assert found.verdict == "will not"
    assert "strangers" in found.reasons[0]
    assert abs(found.agreement.corrected) < 0.1


def test_permuted_neurons_read_as_strangers():
    """The same function, its hidden neurons in another order: an average of the two is no such function."""
    model, other = net(), net()
    order = torch.randperm(30, generator=stream(0, "test-predict", "order"))
    with torch.no_grad():
        other[0].weight.copy_(model[0].weight[order])
        other[3].weight.copy_(model[3].weight[:, order])
    assert predict_merge(model, other).verdict == "will not"


def test_lora_pairs_are_uncertain_and_said_so():
    pair = {"q.lora_A.weight": torch.randn(4, 30), "q.lora_B.weight": torch.randn(30, 4)}
    found = predict_merge(pair, {name: -value for name, value in pair.items()})
    assert found.verdict == "uncertain"
    assert "LoRA" in found.reasons[0]


def test_the_base_counts_where_it_is_given():
    base = net()
    a, b = moved(base, 0.2, "a"), moved(base, 0.2, "b")
    plain, based = predict_merge(a, b), predict_merge(a, b, base=base)
    assert "task_disagreement" in based.features
    assert "task_disagreement" not in plain.features
    with pytest.raises(UserError, match="features that only a base gives"):
        predict_merge(a, b, fit=known(lambda size: size, ("distance", "update")))


def test_what_lies_beyond_the_calibration_is_said():
    found, base = known(lambda size: size), net()
    far = predict_merge(moved(base, 1.2, "a"), moved(base, 1.2, "b"), fit=found)
    assert any("farther apart than any" in reason for reason in far.reasons)
    near = predict_merge(moved(base, 0.001, "a"), moved(base, 0.001, "b"), fit=found)
    assert any("closer than any" in reason for reason in near.reasons)


def test_states_are_as_good_as_models_and_the_order_does_not_matter():
    base = net()
    a, b = moved(base, 0.3, "a"), moved(base, 0.2, "b")
    found = predict_merge(a, b)
    assert predict_merge(a.state_dict(), b.state_dict()).gap == pytest.approx(found.gap, rel=1e-9)
    assert predict_merge(b, a).gap == pytest.approx(found.gap, rel=1e-9)


def test_refusals():
    refused(r"'0\.weight': got shape", predict_merge, nn.Sequential(nn.Linear(2, 3)), nn.Sequential(nn.Linear(3, 3)))
    refused("tolerance: got -1", predict_merge, net(), net(), tolerance=-1)
    broken = net()
    broken[0].weight.data[0, 0] = float("nan")
    refused(r"'0\.weight': got 1 values", predict_merge, net(), broken)


def test_the_most_different_block_is_named():
    base = net()
    other = copy.deepcopy(base)
    with torch.no_grad():
        other[3].weight.copy_(-other[3].weight)
    found = predict_merge(base, other, fit=known(lambda size: size))
    assert any("most in '3'" in reason for reason in found.reasons)
