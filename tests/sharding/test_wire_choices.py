"""Flat rings against hops played one by one, and ways to use the wires against plans priced on their own."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from sparing import sharding as sh
from sparing.errors import UserError
from sparing.sharding.planner.config import BucketSpec, Link
from sparing.sharding.planner.flat import flat_passes, flat_seconds
from sparing.sharding.planner.local_choices import local_price
from sparing.sharding.planner.wire_choices import leaving_bytes, wire_choices

SQUARE = sh.Topology(groups=2, per_group=4, inter=100.0, intra=1000.0, latency_inter=0.5)
ONE_BLOCK = sh.Workload(
    params=4000, accumulate=3, blocks=1, seconds_forward=2.0, seconds_backward=5.0, param_bytes=1, wire_bytes=1
)
RING = 7 * (0.5 + 500 / 100)
"""Seven hops of an eighth of the block, each waiting for the wire between groups."""


def seconds(plan: str, work: sh.Workload = ONE_BLOCK, machine: sh.Topology = SQUARE) -> float:
    return sh.simulate(work, machine, plan, flat=True).seconds


def test_flat_steps_of_one_block_by_hand():
    """DDP goes round twice after everything; ZeRO-3 three times a micro-step, less the gather that the last keeps."""
    assert seconds("NNN") == pytest.approx(21.0 + 2 * RING, rel=1e-12)
    assert seconds("NNG") == pytest.approx(21.0 + 2 * RING, rel=1e-12)
    assert seconds("GGG") == pytest.approx(3 * (RING + 7.0 + RING), rel=1e-12)


@pytest.mark.parametrize("plan", ["III", "NII", "INI", "IIG", "NNI"])
def test_plans_that_never_span_all_axes_are_the_same_on_both(plan: str):
    """INI completes what it reduces inside, and so do all others here, but for parts of one axis."""
    assert seconds(plan) == sh.simulate(ONE_BLOCK, SQUARE, plan).seconds


@pytest.mark.parametrize(
    ("plan", "passes"),
    [("NNN", (0, 0, 2, 0)), ("NNG", (0, 0, 1, 1)), ("NGG", (0, 1, 0, 1)), ("GGG", (1, 1, 0, 0)), ("IGG", (0, 1, 0, 0)),
     ("ING", (0, 0, 1, 0)), ("NIG", (0, 0, 0, 1)), ("GIG", (1, 0, 0, 0)), ("III", (0, 0, 0, 0))],
)  # fmt: skip
def test_which_moves_go_round(plan: str, passes: tuple[int, ...]):
    spec = BucketSpec(elements=10)
    assert flat_passes(spec, sh.Plan(plan), (4, 2)) == passes
    assert flat_passes(replace(spec, trainable=False), sh.Plan(plan), (4, 2)) == (passes[0], 0, 0, 0)
    assert flat_passes(spec, sh.Plan(plan), (1, 2)) == flat_passes(spec, sh.Plan(plan), (4, 1)) == (0, 0, 0, 0)


def test_a_flat_ring_hop_by_hop_over_three_kinds_of_links():
    """Twelve ranks: some hop crosses every kind of link, and every other waits for the slowest."""
    words = {"sharing": 2.0, "overhead": 1e-3}
    links = [
        Link(name="intra", size=2, rate=1e3, latency=0.1, **words),
        Link(name="middle", size=2, rate=1e2, latency=0.2, **words),
        Link(name="inter", size=3, rate=50, latency=0.3, **words),
    ]
    hops = []
    for rank in range(12):
        there = (rank + 1) % 12
        if rank // 2 == there // 2:
            hops.append(0.1 + 1e-3 + 10 / 1e3)  # one of two sends inside
        elif rank // 4 == there // 4:
            hops.append(0.2 + 1e-3 + 10 / 1e2)
        else:
            hops.append(0.3 + 1e-3 + 10 / 50)
    assert flat_seconds(120.0, sh.Topology(axes=links)) == pytest.approx(11 * max(hops), rel=1e-12)


def crossing(work: sh.Workload, machine: sh.Topology, plan: str, group: int) -> int:
    """Bytes of flat rings that leave one group, rank by rank and hop by hop, for one trained bucket of full steps."""
    world, inside = machine.world, math.prod(machine.sizes[:-1])
    block = sum(-(-spec.elements // world) for spec in work.buckets())
    leaving = [rank for rank in range(group * inside, (group + 1) * inside) if (rank + 1) % world // inside != group]
    rounds = {"NNN": 2, "NNG": 2, "GGG": 3 * work.accumulate - work.accumulate}[plan]
    return sum(rounds * block * work.param_bytes for _ in leaving for _ in range(world - 1))


@pytest.mark.parametrize("plan", ["NNN", "NNG", "GGG"])
@pytest.mark.parametrize("group", [0, 1])
def test_bytes_that_leave_a_group_on_a_flat_ring(plan: str, group: int):
    """The last block's parameters stay from its forward pass on, so ZeRO-3 goes round twice a micro-step here."""
    assert leaving_bytes(ONE_BLOCK, SQUARE, sh.Plan(plan), flat=True) == crossing(ONE_BLOCK, SQUARE, plan, group)


@pytest.mark.parametrize("plan", [plan.name for plan in sh.effective()])
def test_bytes_that_leave_a_group_in_two_levels_are_those_of_its_ranks(plan: str):
    work = replace(ONE_BLOCK, blocks=3, root_share=0.25, trainable=1 / 2, param_bytes=2, wire_bytes=4)
    assert leaving_bytes(work, SQUARE, sh.Plan(plan)) == 4 * sh.predict(work, SQUARE, plan).traffic.total[1]


def test_every_way_has_the_best_plan_on_it():
    """Against all plans simulated on their own, gradients of low-bit wires in 32 bits."""
    work = sh.Workload(params=7e9, accumulate=10)
    machine = sh.Topology(groups=4, per_group=8, inter="80Gbps", intra="2000Gbps")
    *ways, rare, rarest = wire_choices(work, machine, "40GB")
    assert [way.name for way in ways] == ["two-level", "flat ring", "int8", "int4"]
    assert [rare.name, rarest.name] == ["local steps, 8", "local steps, 32, int8"]
    for way, local in ((rare, sh.LocalSteps(every=8)), (rarest, sh.LocalSteps(every=32, wire=sh.LowBit(bits=8)))):
        prices = [local_price(work, machine, plan, local) for plan in ("NNN", "NNI", "NII", "INI", "III")]
        seconds, memory = min((price.seconds, price.memory) for price in prices if price.memory <= 40e9)
        assert (way.seconds, way.memory) == (seconds, memory)
        assert way.why.endswith(f"groups meet once in {local.every} steps: another algorithm")
    for way in ways:
        same = work if way.slow is None else replace(work, grad_bytes=4, wire_bytes=4, slow=way.slow)
        fit = [plan for plan in sh.effective() if sh.predict(same, machine, plan).memory <= 40e9]
        fit = [plan for plan in fit if way.slow is None or plan.params != "G"]
        times = [sh.simulate(same, machine, plan, flat=way.name == "flat ring").seconds for plan in fit]
        assert way.seconds == pytest.approx(min(times), rel=2e-3)
        assert way.plan in fit
    two, flat, eight, four = ways
    assert flat.leaving
    assert two.leaving
    assert eight.leaving
    assert four.leaving
    assert four.leaving < eight.leaving < two.leaving
    assert flat.why.endswith("sums in another order")
    assert eight.why.endswith("rounds gradients and changes of parameters")


def test_a_flat_ring_wins_where_links_are_equal_and_shared():
    """Four ranks on wires of one rate, DDP: 2 · 3/4 of 2 MB go round, 2 · (1/2 + 1/2) over both axes in turn."""
    even = sh.Topology(groups=2, per_group=2, inter=1e6, intra=1e6, sharing=2, sharing_intra=2)
    two, flat, *_ = wire_choices(sh.Workload(params=1e6), even)
    assert flat.seconds == pytest.approx(3.0, rel=1e-3)
    assert two.seconds == pytest.approx(4.0, rel=1e-3)
    uneven = replace(even, axes=(replace(even.axes[0], rate=25e6), even.axes[1]))
    two, flat, *_ = wire_choices(sh.Workload(params=1e6), uneven)
    assert flat.seconds > two.seconds


def test_ways_that_cannot_run_say_so():
    one = sh.Topology(groups=1, per_group=4, intra=1e9)
    two, flat, eight, _, local, _ = wire_choices(sh.Workload(params=1e6), one)
    assert two.plan is not None
    assert (flat.plan, flat.why) == (None, "there is one kind of link, whose rings are flat")
    assert (eight.plan, eight.why) == (None, "there is one group, so nothing crosses the outermost axis")
    assert (local.plan, local.why) == (None, eight.why)
    assert {way.plan for way in wire_choices(sh.Workload(params=1e9), SQUARE, 1e6)} == {None}
    with pytest.raises(UserError, match="flat"):
        sh.simulate(replace(ONE_BLOCK, slow=sh.LowBit()), SQUARE, "NNG", flat=True)
