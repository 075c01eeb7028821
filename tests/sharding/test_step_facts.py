"""Before a step every rank knows whether all of them divide by the same number and hold buffers of the same shape."""

from __future__ import annotations

import math
import re
from pathlib import Path

import pytest

from oracles import facts_ranks
from oracles.processes import answers

pytestmark = [pytest.mark.processes, pytest.mark.slow]

ENGINES = ["sparing", "fsdp2"]


@pytest.mark.parametrize("engine", ENGINES)
def test_divisors_that_differ_or_divide_nothing_are_refused_on_every_rank(engine: str) -> None:
    for told in answers(2, facts_ranks.asked, facts_ranks.dividing, engine):
        assert "UserError: step: got divisor 4.0 on rank 0, 5.0 on rank 1; replicas would go apart;" in told["apart"]
        assert "UserError: divisor: got 0.0; it divides the sum" in told["zero"]
        assert "got divisor 4.0 on rank 0, 0.0 on rank 1" in told["zero on one"]
        assert "UserError: divisor: got -1.0" in told["negative"]
        assert told["alike"] == told["same as none"] == told["no number on one"] == ""
        assert (told["skipped"], told["unchanged"]) == (1, True)
        assert told["loss scale"].startswith("UserError: step: got backward passes, collectives and their order")
        words = "UserError: divisor: got nan; only loss_scale skips such a step; pass loss_scale=1.0, or a number"
        assert told["nothing skips on one"] == told["nothing skips"] == words
        assert told["after it"] == ""


@pytest.mark.parametrize("engine", ENGINES)
def test_a_rate_that_one_rank_has_changed_is_refused_on_every_rank_before_the_step(engine: str) -> None:
    for told in answers(2, facts_ranks.asked, facts_ranks.rated, engine):
        for name in ("number", "tensor"):
            assert told[f"{name}, as made"] == told[f"{name}, on all"] == told[f"{name}, weights"] == ""
            words = r"UserError: step: got lr of group 0 \[0\.05\d*\] on rank 0, \[0\.0\] on rank 1; replicas would go"
            assert re.match(words, told[name])
            assert "betas of group 0 [0.9, 0.999] on rank 0, [0.5, 0.999] on rank 1" in told[f"{name}, betas"]


def test_parts_of_a_model_that_divide_by_other_numbers_are_refused_and_one_without_a_number_is_not() -> None:
    numbers = [(4.0, 4.0), (4.0, 5.0), (math.nan, 4.0), (math.nan, math.nan)]
    for rank, told in enumerate(answers(2, facts_ranks.of_parts, numbers, 1.0)):
        assert told[0] == "4.0"
        assert told[1].startswith("step of the whole model: got divisor 4.0 on rank 0, 5.0 on rank 1;")
        assert told[2:] == [["nan", "4.0"][rank], "nan"]
    for told in answers(2, facts_ranks.of_parts, numbers[2:], None):
        assert all("divisor: got nan; only loss_scale skips such a step" in text for text in told)


@pytest.mark.parametrize("engine", ENGINES)
def test_buffers_made_later_are_in_no_checkpoint_and_others_of_several_shapes_are_refused_on_every_rank(
    engine: str, tmp_path: Path
) -> None:
    for told in answers(2, facts_ranks.asked, facts_ranks.restored, engine, tmp_path):
        assert told["trained"] == told["new"] == told["old"] == ""
        assert told["mask"]
        assert "mask" not in told["names"]
        assert "another model: mask of shape (2, 2); here its shape is (3, 3)" in told["apart"]


@pytest.mark.parametrize("engine", ENGINES)
def test_a_buffer_of_several_shapes_is_named_and_one_made_later_is_each_ranks_own(engine: str) -> None:
    for told in answers(2, facts_ranks.asked, facts_ranks.growing, engine):
        assert told["alike"] == told["late"] == ""
        words = "UserError: step: got buffer mask '(5, 5) torch.float32' on rank 0, '(4, 4) torch.float32' on rank 1;"
        assert told["apart"].startswith(words)
        assert told["kept"]


@pytest.mark.parametrize("engine", ENGINES)
def test_buffers_of_a_block_that_is_wrapped_later_are_rank_zeros_after_a_step(engine: str) -> None:
    first, second = answers(2, facts_ranks.asked, facts_ranks.wrapped_later, engine)
    assert first == second


def test_groups_that_meet_with_buffers_of_several_shapes_are_refused() -> None:
    for told in answers(2, facts_ranks.asked, facts_ranks.growing_apart, "sparing"):
        assert told["inside"] == ""
        assert "buffer mask '(3, 3) torch.float32' on rank 0, '(2, 2) torch.float32' on rank 1" in told["meeting"]
