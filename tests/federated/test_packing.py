"""Trees of tensors come back with the same bits, names, order and empty places."""

from __future__ import annotations

import math

import pytest
import torch

from sparing.federated.packing import detached_copy, pack, unpack


def test_there_and_back():
    shared = torch.arange(6.0)
    tree = {
        "b": {"x.y/z": shared, "half": shared[3:], "turned": shared.view(2, 3).T},
        "a": {"empty": {}, "deep": {"k": {"bool": torch.tensor([True, False]), "none": torch.zeros(0, 3)}}},
        "n": torch.tensor(3),
        "low": torch.tensor([1.5], dtype=torch.bfloat16),
    }
    found, facts = unpack(pack(tree, {"rows": [{"a": float("nan")}], "n": 3}))
    assert list(found["b"]) == ["x.y/z", "half", "turned"]
    assert found["a"]["empty"] == {}
    for mine, theirs in (
        *((found["b"][name], tree["b"][name]) for name in tree["b"]),
        *((found["a"]["deep"]["k"][name], value) for name, value in tree["a"]["deep"]["k"].items()),
        (found["n"], tree["n"]),
        (found["low"], tree["low"]),
    ):
        assert mine.dtype == theirs.dtype
        assert torch.equal(mine, theirs)
    assert math.isnan(facts["rows"][0]["a"])


@pytest.mark.parametrize("damage", [lambda d: d[:-1], lambda d: b"", lambda d: b"x" * 40, lambda d: d[:20] + d[30:]])
def test_damaged(damage):
    with pytest.raises(ValueError, match="not a whole safetensors file"):
        unpack(damage(pack({"a": torch.ones(3)})))


def test_detached_shares_nothing():
    value = torch.ones(2, requires_grad=True)
    copy = detached_copy({"a": {"b": value}})["a"]["b"]
    with torch.no_grad():
        value.zero_()
    assert copy.tolist() == [1.0, 1.0]
    assert not copy.requires_grad
