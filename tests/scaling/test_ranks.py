"""Two processes over gloo, each given another seed and half of the batch, equal one process with the first seed."""

from __future__ import annotations

from functools import cache

import pytest
import torch

from oracles.processes import answers
from scaling import ranks

# slow: two processes, once for all tests
pytestmark = [pytest.mark.processes, pytest.mark.slow]


@pytest.fixture(scope="module")
def both() -> list[dict]:
    return answers(ranks.WORLD, ranks.work)


one = cache(ranks.train)


@pytest.mark.parametrize("name", ranks.METHODS)
def test_masks_are_those_of_process_0_before_and_after(both, name):
    """Defect 1 of the public code: under data parallelism every process trained another mask."""
    alone = one(name) if "set" not in name else None  # its growth is drawn from each process's own seed
    for answer in both:
        assert answer[name]["first"] == both[0][name]["first"]
        assert answer[name]["last"] == both[0][name]["last"]
        assert answer[name]["off"] == 0
        if alone:
            assert (answer[name]["first"], answer[name]["last"]) == (alone["first"], alone["last"])
    assert both[0][name]["weights"] == both[1][name]["weights"]  # to the bit
    assert both[0][name]["updates"] == (0 if name == "static" else 2)
    assert (both[0][name]["first"] != both[0][name]["last"]) == (name != "static")


@pytest.mark.parametrize("name", ["static", "rigl", "sparse rigl"])
def test_two_processes_equal_one(both, name):
    """Up to the order in which eight rows are summed: 1e-16 per gradient, under nine AdamW steps of 1e-2."""
    for answer in both:
        for key, values in one(name)["weights"].items():
            torch.testing.assert_close(
                torch.tensor(answer[name]["weights"][key]), torch.tensor(values), rtol=0, atol=1e-9
            )
