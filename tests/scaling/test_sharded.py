"""FSDP2 and tensor parallelism: two processes over gloo, whose masks are DTensors, equal one process."""

from __future__ import annotations

from functools import cache

import pytest
import torch

from oracles.processes import answers
from scaling import sharded_ranks as ranks
from sparing.scaling.apply import restore_
from sparing.scaling.plans.planning import plan

# slow: two processes, once for all tests
pytestmark = [pytest.mark.processes, pytest.mark.slow]


@pytest.fixture(scope="module")
def both() -> list[dict]:
    return answers(ranks.WORLD, ranks.work)


one = cache(ranks.train)


@pytest.mark.parametrize("case", ranks.CASES)
def test_two_processes_equal_one(both, case):
    """Weights, masks and factors of the gathered state dict; nine clipped steps on rounding of 1e-16."""
    alone = one(case)
    for answer in both:
        got = answer[case]
        assert got["digest"] == alone["digest"]
        assert got["off"] == 0
        assert got["updates"] == alone["updates"]
        assert got["state"].keys() == alone["state"].keys()
        for name, value in alone["state"].items():
            torch.testing.assert_close(got["state"][name], value, rtol=0, atol=1e-10, msg=lambda m, n=name: f"{n}: {m}")
    assert (one(case)["updates"] > 0) == (case in {"rigl", "gmp"})


def test_in_single_precision_they_agree_to_a_millionth(both):
    alone = ranks.train("static", None, torch.float32)
    for name, value in alone["state"].items():
        torch.testing.assert_close(both[0]["float32"]["state"][name], value, rtol=0, atol=1e-6)


def test_the_gathered_state_loads_into_a_whole_model(both):
    model = ranks.net_of(ranks.WIDTH)
    restore_(model, plan(model, base=ranks.net_of(8), density=0.3, init={"*": "constant"}))
    model.load_state_dict(both[0]["static"]["state"])
    twin = ranks.net_of(ranks.WIDTH)
    restore_(twin, plan(twin, base=ranks.net_of(8), density=0.3, init={"*": "constant"}))
    twin.load_state_dict(one("static")["state"])
    x = torch.randn(5, 6, generator=torch.Generator().manual_seed(9), dtype=torch.float64)
    torch.testing.assert_close(model(x), twin(x), rtol=0, atol=1e-10)  # as above


def test_what_is_omitted_is_said(both):
    whole, unsharded, folded = both[0]["refusals"]
    assert "call it after fully_shard" in whole
    assert "masks.shard_() after fully_shard" in unsharded
    assert "full_state_dict" in folded
    assert both[0]["static"]["repr"] == "Masks(2 weights, sharded)"
