"""Models that cannot be averaged are refused at the first difference, by name."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from refusals import refused
from sparing.errors import UserError
from sparing.valley.merging.compatible import (
    is_statistic,
    lora_pairs,
    require_compatible,
    state_of,
    surely_finite,
    vectors_of,
)


def net() -> nn.Sequential:
    return nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 2))


def test_parameters_of_a_live_model_are_its_own_and_of_a_state_all_that_is_no_statistic():
    model = net()
    live, bare = vectors_of(model, model.state_dict())
    assert list(live) == list(bare) == [name for name, _ in model.named_parameters()]
    assert list(vectors_of(model.state_dict())[0]) == list(live)


def test_tied_weights_are_compared_once():
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    model[1].weight = model[0].weight
    assert list(vectors_of(model.state_dict())[0]) == ["0.weight", "0.bias", "1.bias"]
    assert list(vectors_of(model.state_dict(), model)[0]) == ["0.weight", "0.bias", "1.bias"]


def test_wrappers_leave_no_trace():
    model = net()
    assert list(state_of(nn.DataParallel(model))) == list(model.state_dict())


def test_first_differing_key_is_named_with_both_shapes():
    a = {"stem": torch.zeros(2), "body": torch.zeros(3, 4), "head": torch.zeros(1)}
    b = {"stem": torch.zeros(2), "body": torch.zeros(5, 4), "head": torch.zeros(9)}
    with pytest.raises(UserError, match=r"'body': got shape \(3, 4\) in left and shape \(5, 4\) in right"):
        require_compatible([a, b], ["left", "right"])


def test_missing_and_new_keys_are_named():
    a, b = {"x": torch.zeros(2), "y": torch.zeros(1)}, {"x": torch.zeros(2)}
    refused(r"'y': got shape \(1,\) in model 1 and nothing in model 2", require_compatible, [a, b])
    refused(r"'y': got nothing in model 1 and shape \(1,\) in model 2", require_compatible, [b, a])


def test_the_third_model_is_looked_at_too():
    a = {"x": torch.zeros(2)}
    refused("in model 3", require_compatible, [a, a, {"x": torch.zeros(3)}])


def test_nothing_to_merge():
    refused("models: got none", require_compatible, [])


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_what_is_not_finite_is_counted_and_named(value: float):
    bad = {"w": torch.tensor([1.0, value, value])}
    refused("model 2 at 'w': got 2 values that are NaN or infinite", require_compatible, [{"w": torch.zeros(3)}, bad])


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_large_numbers_whose_sum_is_not_finite_are_taken(dtype: torch.dtype):
    large = {"w": torch.full((5,), torch.finfo(dtype).max, dtype=dtype)}
    assert not surely_finite(large["w"])
    require_compatible([large, large])


@pytest.mark.parametrize("dtype", [torch.complex64, torch.float8_e4m3fn])
def test_numbers_without_an_average_are_refused(dtype: torch.dtype):
    state = {"w": torch.ones(3).to(dtype)}
    refused("convert it to a floating dtype", require_compatible, [state, state])


def test_quantised_weights_are_refused_and_equal_masks_are_not():
    a, b = {"w": torch.tensor([1, 2], dtype=torch.int8)}, {"w": torch.tensor([1, 3], dtype=torch.int8)}
    refused(r"torch\.int8 tensors that differ", require_compatible, [a, b])
    require_compatible([a, dict(a)])
    with pytest.raises(UserError, match=r"torch\.bool tensors that differ"):
        require_compatible([{"m": torch.tensor([True, False])}, {"m": torch.tensor([True, True])}])


def test_counters_may_differ():
    model, other = net(), copy.deepcopy(net())
    other[1].num_batches_tracked += 7
    require_compatible([model.state_dict(), other.state_dict()])


def test_quantised_beside_floating_is_refused():
    with pytest.raises(UserError, match=r"torch.float32 in model 1 and torch.int8 in model 2"):
        require_compatible([{"w": torch.zeros(2)}, {"w": torch.zeros(2, dtype=torch.int8)}])


def test_what_is_no_tensor_is_named():
    with pytest.raises(UserError, match="state at 'note': got str"):
        state_of({"note": "hello"})  # type: ignore[dict-item]


def test_statistics_are_told_by_the_last_part_of_a_name():
    assert is_statistic("layer1.0.bn1.running_var")
    assert not is_statistic("running_var.weight")


def test_lora_pairs_need_both_factors():
    names = ["a.lora_A.weight", "b.lora_A.default.weight", "b.lora_B.default.weight", "c.lora_up.weight"]
    assert lora_pairs(names) == ["b"]
    assert lora_pairs(["c.lora_up.weight", "c.lora_down.weight"]) == ["c"]
    assert lora_pairs(["e.lora_embedding_A.default", "e.lora_embedding_B.default"]) == ["e"]
    assert lora_pairs(["lora_Alpha.weight", "lora_Beta.weight"]) == []
