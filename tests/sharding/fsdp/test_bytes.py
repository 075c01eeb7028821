"""What plans on ``fully_shard`` send and hold is what the formulas say, to the byte."""

from __future__ import annotations

from typing import Any

import pytest

from oracles import fsdp_ranks
from oracles.processes import answers
from sparing.sharding import effective
from sparing.sharding.planner.config import Topology, Workload
from sparing.sharding.planner.fsdp import UnitSpec, fsdp_live_bytes, fsdp_traffic
from sparing.sharding.planner.prediction import predict

PLANS = [plan.name for plan in effective()]


@pytest.fixture(scope="module")
def found() -> list[dict[str, Any]]:
    return answers(4, fsdp_ranks.bytes_of, PLANS)


def wrong(rank: dict[str, Any], of: str) -> dict[str, Any]:
    asked = {name: told for name, told in rank.items() if of in name}
    assert len(asked) > len(PLANS)
    return {
        name: (told["found"], told["expected"]) for name, told in asked.items() if told["found"] != told["expected"]
    }


# slow: four processes that train a small net briefly some seventy times
@pytest.mark.processes
@pytest.mark.slow
@pytest.mark.timeout(600)
def test_rings_count_what_the_formulas_say(found: list[dict[str, Any]]) -> None:
    """Bytes and messages by axis: all trains, some frozen, one layer trains under checkpointing."""
    assert [wrong(rank, " sends") for rank in found] == [{}] * 4


@pytest.mark.processes
@pytest.mark.slow
@pytest.mark.timeout(600)
def test_live_tensors_are_the_formula(found: list[dict[str, Any]]) -> None:
    """Every floating tensor that Python knows, between micro-steps; later ranks have no more rows than the first."""
    assert wrong(found[0], " holds") == {}
    over = [
        name for rank in found for name, told in rank.items() if "holds" in name and told["found"] > told["expected"]
    ]
    assert over == []


@pytest.mark.processes
@pytest.mark.slow
@pytest.mark.timeout(600)
def test_what_comes_and_goes_in_a_backward_pass_is_the_formula(found: list[dict[str, Any]]) -> None:
    """Every floating tensor that Python knows, when the gradient of each block's input is there; no activations."""
    assert wrong(found[0], " passes") == {}


EVEN = [UnitSpec(shapes=((8, 6), (16,)), trains=(True, True), block=at) for at in range(3)]
"""Rows that four ranks share evenly."""


@pytest.mark.parametrize("plan", PLANS)
def test_even_rows_cost_what_flat_slices_do(plan: str) -> None:
    """But for the shard beside whole parameters, for rows of the optimizer's own, and for messages."""
    work = Workload(params=3 * 64, blocks=3, accumulate=2, param_bytes=4, grad_bytes=4, wire_bytes=4, state_bytes=8)
    price = predict(work, Topology(groups=2, per_group=2, inter=1e9, intra=1e10), plan)
    live = fsdp_live_bytes(EVEN, (2, 2), plan, param_bytes=4)
    assert (live.params, live.grads, live.moments) == (price.params, price.grads, price.optimizer)
    sent = fsdp_traffic(EVEN, (2, 2), plan, accumulate=2, gather_bytes=4, reduce_bytes=4)
    assert sent.total == price.traffic.total


@pytest.mark.parametrize(("plan", "kept"), [("NNN", 1), ("NNI", 2), ("NIG", 4), ("IIG", None), ("GGG", None)])
def test_a_shard_stays_beside_whole_parameters(plan: str, kept: int | None) -> None:
    whole = 4 * 3 * 64
    live = fsdp_live_bytes(EVEN, (2, 2), plan, param_bytes=4)
    assert live.kept == (whole // kept if kept else 0)
    assert live.master == (whole // 4 if plan == "IIG" else 0)
    assert live.total == live.params + live.kept + live.grads + live.master + live.moments
