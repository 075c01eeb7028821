"""What plans on ``fully_shard`` send and hold is what the formulas say, to the byte."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from oracles import fsdp_ranks
from oracles.processes import answers
from sparing.errors import UserError
from sparing.sharding import effective
from sparing.sharding.lowbit.config import LowBit
from sparing.sharding.planner.choose import choose
from sparing.sharding.planner.config import BucketSpec, Topology, Workload
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


# ---- the same bytes in a plan's price

CLUSTER = Topology(groups=4, per_group=8, inter="80Gbps", intra="2000Gbps")
SEVEN = Workload(params=32 * 32 * 6_835_938, engine="fsdp2")
"""7B whose 32 blocks are cut evenly."""


@pytest.mark.parametrize("plan", PLANS)
@pytest.mark.parametrize("width", [2, 4])
def test_a_price_is_that_of_our_engine_and_what_is_kept(plan: str, width: int) -> None:
    """7B on 4 × 8 cards: beside whole parameters their shard, and with 32-bit ones the optimizer's own rows."""
    work = replace(SEVEN, param_bytes=width, state_bytes=8 + (4 if width == 2 else 0))
    ours, theirs = (predict(replace(work, engine=engine), CLUSTER, plan) for engine in ("sparing", "fsdp2"))
    cut = {"N": 1, "I": 8, "G": 32}[plan[2]]
    kept = SEVEN.params * width / cut if plan[0] == "N" else 0
    own = SEVEN.params * 4 / 32 if width == 4 and plan in {"IIG", "IGG", "ING"} else 0
    assert (ours.kept, theirs.kept) == (0, kept)
    assert theirs.memory == ours.memory + kept + own
    assert (theirs.params, theirs.grads, theirs.transient) == (ours.params, ours.grads, ours.transient)
    assert (theirs.traffic, theirs.seconds, theirs.slices) == (ours.traffic, ours.seconds, ours.slices)


def test_what_stays_live_of_7b() -> None:
    held = {plan: round(predict(SEVEN, CLUSTER, plan).static / 1e9, 1) for plan in ("NNN", "NNI", "NNG", "IIG")}
    assert held == {"NNN": 126.0, "NNI": 40.3, "NNG": 31.1, "IIG": 6.1}


UNEVEN = [
    BucketSpec(elements=7 * 5 + 3, root=True, block=-1, shapes=((7, 5), (3,))),
    *(BucketSpec(elements=9 * 6 + 5, block=at, shapes=((9, 6), (5,))) for at in range(2)),
    BucketSpec(elements=33, trainable=False, block=1, shapes=((11, 3),)),
    BucketSpec(elements=13, root=True, block=2, shapes=((13,),)),
]
UNITS = [
    UnitSpec(shapes=((7, 5), (3,), (13,)), trains=(True,) * 3, root=True, block=-1),
    UnitSpec(shapes=((9, 6), (5,)), trains=(True, True)),
    UnitSpec(shapes=((9, 6), (5,), (11, 3)), trains=(True, True, False), block=1),
]
"""Rows that four ranks do not share evenly, as buckets and as units."""


@pytest.mark.parametrize("plan", PLANS)
@pytest.mark.parametrize("width", [2, 4])
def test_a_price_of_known_shapes_has_the_padding_of_their_rows(plan: str, width: int) -> None:
    state = 8 + (4 if width == 2 else 0)
    work = Workload.of(UNEVEN, param_bytes=width, grad_bytes=4, wire_bytes=4, state_bytes=state, engine="fsdp2")
    live = fsdp_live_bytes(UNITS, (2, 2), plan, param_bytes=width)
    price = predict(work, Topology(groups=2, per_group=2, inter=1e9, intra=1e10), plan)
    assert (price.params, price.kept, price.grads) == (live.params, live.kept, live.grads)
    assert price.static == live.total


def test_a_plan_that_fits_only_without_what_is_kept_is_not_chosen() -> None:
    ours = choose(replace(SEVEN, engine="sparing"), CLUSTER, memory="39GB")
    theirs = choose(SEVEN, CLUSTER, memory="39GB")
    assert {"NNI"} == {v.plan.name for v in ours.ranking if v.fits} - {v.plan.name for v in theirs.ranking if v.fits}
    (lost,) = (verdict for verdict in theirs.ranking if verdict.plan.name == "NNI")
    assert lost.why == "1.25 GB too much"


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"slow": LowBit(bits=8)}, "low-bit wires"),
        ({"engine": "ours"}, "pass sparing or fsdp2"),
        ({"specs": (BucketSpec(elements=SEVEN.params, plan=effective()[0]),)}, "one plan"),
    ],
)
def test_work_that_the_engine_does_not_take_is_refused(changes: dict[str, Any], said: str) -> None:
    with pytest.raises(UserError, match=said):
        replace(SEVEN, **changes)


def test_shapes_of_another_size_are_refused() -> None:
    with pytest.raises(UserError, match=r"6 elements.*has 7 elements"):
        BucketSpec(elements=7, shapes=((2, 3),))
