"""Processes that share an inner loss end with the hypergradient of one process that holds all rows."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from oracles import shared_loss
from oracles.processes import answers
from oracles.shared_loss import METHODS, PHI, RUNS, problem, told, uneven
from refusals import refused
from sparing import hypergrad as hg

pytestmark = [pytest.mark.processes, pytest.mark.slow]  # two processes, once for all tests


@pytest.fixture(scope="module")
def ranks() -> list[dict[str, Any]]:
    return answers(shared_loss.WORLD, shared_loss.work)


def close(found: Any, expected: Any) -> None:
    """Sums of eight rows in two parts: rounding, which five steps at most amplify a thousandfold."""
    torch.testing.assert_close(found, expected, rtol=1e-11, atol=1e-12)


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("run", RUNS)
def test_two_ranks_equal_one_process(ranks: list[dict[str, Any]], run: str, method: str) -> None:
    expected = told(problem(**RUNS[run]), METHODS[method])
    for rank in ranks:
        close(rank[f"{run}, {method}"], expected)


def test_all_ranks_end_with_the_same_bits(ranks: list[dict[str, Any]]) -> None:
    for name in (f"{run}, {method}" for run in RUNS for method in METHODS):
        first, second = (rank[name] for rank in ranks)
        torch.testing.assert_close(first, second, rtol=0, atol=0)


@pytest.mark.parametrize("method", shared_loss.LONG)
def test_a_phi_of_16_bits_gets_the_sum_over_all_steps(ranks: list[dict[str, Any]], method: str) -> None:
    """900/1024; a sum in bfloat16 would stop at 256/1024."""
    for rank in ranks:
        found = rank["16 bits"][method]
        assert found.dtype == torch.bfloat16
        assert found.tolist() == pytest.approx([900 / 1024] * 3, rel=1e-2)  # bfloat16 has three digits


def test_the_run_alone_is_shared_too(ranks: list[dict[str, Any]]) -> None:
    for rank in ranks:
        close(rank["solved"], hg.solve(problem(), PHI))


def test_parts_of_unequal_size_weigh_alike(ranks: list[dict[str, Any]]) -> None:
    """The loss is the mean over ranks of their losses, whatever the number of their rows."""
    parts = [problem(*uneven(rank)) for rank in range(2)]
    whole = replace(
        problem(),
        inner=lambda theta, phi, batch: sum(part.inner(theta, phi, batch[at]) for at, part in enumerate(parts)) / 2,
        outer=lambda theta, phi: sum(part.outer(theta, phi) for part in parts) / 2,
        batches=lambda step: [part.batch(step, 0) for part in parts],
    )
    for rank in ranks:
        close(rank["uneven"], told(whole, hg.Reverse()))


@pytest.mark.parametrize("name", shared_loss.APART)
def test_a_rank_whose_loss_ignores_something_keeps_step(ranks: list[dict[str, Any]], name: str) -> None:
    """Autograd would not visit a mean that leads to nothing, on that rank alone."""
    for rank in ranks:
        close(rank["apart"][name], told(shared_loss.apart(name, [0, 1]), hg.Reverse()))


def test_ranks_with_unequal_parts_replay_together_in_a_budget(ranks: list[dict[str, Any]]) -> None:
    for rank in ranks:
        close(rank["in a budget"], rank["uneven"])


@pytest.mark.parametrize(
    ("what", "words"),
    [
        ("another phi", "phi: got another value on rank 1"),
        ("another seed", "seed: got another value on rank 1"),
        ("other weights", "init: got another value on rank 1"),
        ("one number of many", "phi: got another value on rank 1"),
        ("another method", "method: got another value on rank 1"),
        ("a part that is refused", "a loss is one number"),
        ("a part that fails", "no rows"),
        ("a bottleneck of its own", "phi: got another value on rank 1"),
        ("other steps", "steps: got another value on rank 1"),
        ("a rate of its own", "the last weights: got another value on rank 1"),
        ("sampled", "use Reverse, Truncated or Checkpointed"),
        ("implicit", "use Reverse, Truncated or Checkpointed"),
        ("differences", "use Reverse, Truncated or Checkpointed"),
        ("a stream", "use Reverse, Truncated or Checkpointed"),
        ("a plan", "use Reverse, Truncated or Checkpointed"),
    ],
)
def test_on_all_ranks_it_is_refused(ranks: list[dict[str, Any]], what: str, words: str) -> None:
    for rank in ranks:
        assert words in rank["refused"][what]


def test_a_plan_prices_one_process() -> None:
    price = hg.predict(replace(problem(), group=dist.ProcessGroup(0, 2)), PHI, hg.Reverse())
    assert price == hg.predict(problem(), PHI, hg.Reverse())


def test_a_process_outside_of_the_group_is_told() -> None:
    """Collectives over what `new_group` gives it would return at once, and the mean would be of another sign."""
    refused("group: got -100", problem, group=dist.GroupMember.NON_GROUP_MEMBER)
