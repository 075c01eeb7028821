"""Merging whole states: every kind of tensor by its rule, and the same tensor by tensor."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from refusals import refused
from sparing.seeds import stream
from sparing.valley.merging import method as slices
from sparing.valley.merging.dare import Dare
from sparing.valley.merging.linear import Linear, TaskArithmetic
from sparing.valley.merging.merge import merge, merged_tensor
from sparing.valley.merging.method import Method
from sparing.valley.merging.sign_aware import SignAware
from sparing.valley.merging.ties import Ties

METHODS: list[Method] = [
    Linear(),
    Linear((1.0, 2.0, 3.0)),
    TaskArithmetic(0.3),
    Ties(keep=0.3),
    Dare(0.5),
    Dare(0.5, then=Ties(keep=0.5)),
    SignAware(keep=0.5),
]


def state(label: str, dtype: torch.dtype = torch.float32) -> dict[str, torch.Tensor]:
    generator = stream(0, "test-merge", label)
    return {
        "w": torch.randn(5, 7, generator=generator).to(dtype),
        "b": torch.randn(7, generator=generator).to(dtype),
        "bn.running_mean": torch.randn(7, generator=generator).to(dtype),
        "bn.num_batches_tracked": torch.tensor(len(label)),
    }


MODELS, BASE = [state("a"), state("bb"), state("ccc")], state("base")


@pytest.mark.parametrize("method", METHODS, ids=repr)
def test_tensor_by_tensor_is_the_merge(method: Method):
    whole = merge(MODELS, base=BASE, method=method)
    for name in BASE:
        alone = merged_tensor(method, name, [model[name] for model in MODELS], BASE[name])
        assert torch.equal(whole[name], alone)
    for name in ("w", "b"):
        assert torch.equal(whole[name], method.tensor(name, [model[name] for model in MODELS], BASE[name]))


@pytest.mark.parametrize("method", [*METHODS, Ties(keep=0.3, across="model")], ids=repr)
def test_how_tensors_are_cut_does_not_matter(method: Method, monkeypatch: pytest.MonkeyPatch):
    """Thresholds, votes and draws of 35 numbers in slices of 5 are those of all at once."""
    whole = merge(MODELS, base=BASE, method=method)
    monkeypatch.setattr(slices, "SLICE", 5)
    sliced = merge(MODELS, base=BASE, method=method)
    for name, value in whole.items():
        # float32: vector units may fuse a product and a sum where the end of an array does not
        torch.testing.assert_close(sliced[name], value, rtol=1e-6, atol=1e-7)
        assert (sliced[name].shape, sliced[name].dtype) == (value.shape, value.dtype)


@pytest.mark.parametrize("method", METHODS, ids=repr)
def test_nothing_learned_is_nothing_changed(method: Method):
    """Models equal to their base come back bit by bit, in any dtype."""
    for dtype in (torch.bfloat16, torch.float32, torch.float64):
        base = state("base", dtype)
        found = merge([base, copy.deepcopy(base), copy.deepcopy(base)], base=base, method=method)
        assert all(torch.equal(found[name], base[name]) and found[name].dtype == base[name].dtype for name in base)


@pytest.mark.parametrize("method", METHODS, ids=repr)
def test_arguments_keep_their_values(method: Method):
    models, base = copy.deepcopy(MODELS), copy.deepcopy(BASE)
    merge(models, base=base, method=method)
    assert all(torch.equal(models[at][name], MODELS[at][name]) for at in range(3) for name in BASE)
    assert all(torch.equal(base[name], BASE[name]) for name in BASE)


def test_mean_is_the_mean():
    models = [{"w": model["w"].double()} for model in MODELS]
    stacked = torch.stack([model["w"] for model in models])
    # float64: three additions and a division against as many interpolations
    torch.testing.assert_close(merge(models)["w"], stacked.mean(0), rtol=1e-14, atol=1e-15)
    weighed = merge(models, method=Linear((1.0, 0.0, 3.0)))["w"]
    torch.testing.assert_close(weighed, (stacked[0] + 3 * stacked[2]) / 4, rtol=1e-14, atol=1e-15)


@pytest.mark.parametrize("first", [torch.bfloat16, torch.float32, torch.float64])
def test_mean_of_several_dtypes_is_that_of_the_widest_in_the_dtype_of_the_first(first: torch.dtype):
    """One rounding to the first's dtype, of float64 interpolations."""
    models = [MODELS[0]["w"].to(first), MODELS[1]["w"].to(torch.bfloat16), MODELS[2]["w"].double()]
    found = merge([{"w": one} for one in models])["w"]
    wanted = torch.stack([one.double() for one in models]).mean(0)
    assert found.dtype == first
    torch.testing.assert_close(found, wanted.to(first), rtol=torch.finfo(first).eps, atol=1e-15)


def test_task_arithmetic_by_hand():
    """θ₀ = 1, τ = 2 and −6: 1 + ½ (2 − 6) = −1; with weights 2 and ½: 1 + ½ (4 − 3) = 1.5; ½ of two is their mean."""
    models, base = [torch.tensor([3.0]), torch.tensor([-5.0])], torch.tensor([1.0])
    assert TaskArithmetic(0.5).tensor("w", models, base).item() == -1.0
    assert TaskArithmetic(0.5, weights=(2.0, 0.5)).tensor("w", models, base).item() == 1.5
    assert Linear().tensor("w", models).item() == -1.0


@pytest.mark.parametrize("method", METHODS, ids=repr)
def test_counters_keep_their_dtype_and_take_the_largest(method: Method):
    found = merge(MODELS, base=BASE, method=method)["bn.num_batches_tracked"]
    assert (found.dtype, found.item()) == (torch.int64, 3)


@pytest.mark.parametrize("method", METHODS[2:], ids=repr)
def test_statistics_are_averaged_whatever_the_method(method: Method):
    found = merge(MODELS, base=BASE, method=method)["bn.running_mean"]
    expected = torch.stack([model["bn.running_mean"] for model in MODELS]).mean(0)
    torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-7)  # float32


def test_half_precision_is_merged_in_single():
    """256 and 257 ones' worth: the mean of 1 and 1 + 2⁻⁷ rounds once, not in every step."""
    models = [{"w": torch.tensor([1.0, 256.0]).bfloat16()} for _ in range(300)]
    found = merge(models)["w"]
    assert (found.dtype, found.tolist()) == (torch.bfloat16, [1.0, 256.0])


def test_tied_weights_stay_tied():
    def tied() -> nn.Module:
        model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
        model[1].weight = model[0].weight
        return model

    found = merge([tied(), tied()], base=tied(), method=Dare(0.5))
    assert found["0.weight"].data_ptr() == found["1.weight"].data_ptr()
    loose = merge([tied(), nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))])
    assert not torch.equal(loose["0.weight"], loose["1.weight"])


def test_lora_factors_are_warned_of():
    pair = {"q.lora_A.weight": torch.ones(2, 4), "q.lora_B.weight": torch.ones(4, 2)}
    with pytest.warns(RuntimeWarning, match="1 LoRA pairs, such as 'q'"):
        merge([pair, {name: -value for name, value in pair.items()}])


def test_refusals():
    refused("models: got none", merge, [])
    refused("Ties merges what was learned since", merge, MODELS, method=Ties())
    refused("in model 1 and nothing in the base", merge, MODELS, base={"w": BASE["w"]}, method=Ties())
    refused("weights: got 2 of them; 3 models", merge, MODELS, method=Linear((1.0, 1.0)))
    for weights in ((0.0, 0.0), (-1.0, 2.0), (float("nan"), 1.0)):
        refused("finite weights", Linear, weights)
    refused("scale: got nan", TaskArithmetic, float("nan"))
