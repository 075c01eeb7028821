"""Closed forms where there are some, and elsewhere the laws that every trace must obey."""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from sparing.sharding.levels import Plan, effective
from sparing.sharding.planner.config import BucketSpec, Link, Topology, Workload
from sparing.sharding.planner.prediction import predict
from sparing.sharding.planner.simulation import Event, Timeline, least_seconds, simulate

RATE = 1000.0
ONE_BLOCK = Workload(
    params=4000, accumulate=3, blocks=1, seconds_forward=2.0, seconds_backward=5.0, param_bytes=1, wire_bytes=1
)
COLUMN = Topology(groups=1, per_group=4, intra=RATE)
"""One axis of four ranks: a ring over V bytes takes 3/4 · V / 1000 seconds, 3 for a whole block."""

RING = 3.0


def seconds(workload: Workload, plan: str, topology: Topology = COLUMN) -> float:
    return simulate(workload, topology, plan).seconds


def test_one_block_whole_parameters():
    """NII on one axis: the new parameters, then each reduction hides behind the next forward pass, the last nowhere."""
    refresh, reduce, f, b, s = RING, RING, 2.0, 5.0, 3
    assert seconds(ONE_BLOCK, "NII") == refresh + f + b + (s - 1) * (max(f, reduce) + b) + reduce
    slow = Topology(groups=1, per_group=4, intra=RATE / 10)
    expected = 10 * RING + f + b + 2 * (10 * RING + b) + 10 * RING
    assert seconds(ONE_BLOCK, "NII", slow) == pytest.approx(expected, rel=1e-12)


def test_one_block_cut_parameters():
    """III with one block has nothing to hide behind: gather, forward, backward, reduce, in turn."""
    assert seconds(ONE_BLOCK, "III") == 3 * (RING + 2.0 + 5.0 + RING)


def test_one_block_ddp():
    """NNN: reduce-scatter and all-gather once, after everything."""
    assert seconds(ONE_BLOCK, "NNN") == 3 * 7.0 + 2 * RING


def test_one_block_two_axes():
    """IIG: inter gather of new parameters, then s times intra gather and reduction, then the inter reduction."""
    machine = Topology(groups=2, per_group=4, intra=RATE, inter=100.0)
    inter = 4000 / 4 / 2 / 100
    assert seconds(ONE_BLOCK, "IIG", machine) == inter + 3 * (RING + 7.0 + RING) + inter


def test_two_level_parts_follow_each_other():
    """GGG with one block: inter then intra out, intra then inter back."""
    machine = Topology(groups=2, per_group=4, intra=RATE, inter=100.0)
    inter = 4000 / 4 / 2 / 100
    assert seconds(replace(ONE_BLOCK, accumulate=1), "GGG", machine) == 2 * (inter + RING) + 7.0


def test_gathers_hide_behind_blocks():
    """INI with blocks slower than their gathers: the first gather and the last reduction are seen, nothing else."""
    work = Workload(
        params=40_000, accumulate=1, blocks=10, seconds_forward=40.0, seconds_backward=80.0, param_bytes=1, wire_bytes=1
    )
    assert seconds(work, "INI") == pytest.approx(RING + 40.0 + 80.0 + RING, rel=1e-12)


def test_without_prefetch_nothing_hides():
    work = Workload(
        params=40_000, blocks=10, seconds_forward=40.0, seconds_backward=80.0, param_bytes=1, wire_bytes=1, prefetch=0
    )
    found = simulate(work, COLUMN, "INI")
    assert found.busy == pytest.approx((10 * RING + 9 * RING + 10 * RING, 0), rel=1e-12)
    assert found.seconds == pytest.approx(120.0 + found.busy[0], rel=1e-12)


def test_new_parameters_hide_behind_the_forward_pass():
    """NNI, ten blocks: block k waits for its own parameters alone."""
    work = Workload(params=40_000, blocks=10, seconds_forward=40.0, seconds_backward=800.0, param_bytes=1, wire_bytes=1)
    assert seconds(work, "NNI") == pytest.approx(RING + 40.0 + 800.0 + RING, rel=1e-12)


def test_the_optimizer_is_shared_out():
    """Its time falls with the slices: 8 s on one rank, 2 s on four."""
    work = replace(ONE_BLOCK, seconds_update=8.0)
    assert seconds(work, "NNN") - seconds(ONE_BLOCK, "NNN") == pytest.approx(8.0, rel=1e-12)
    assert seconds(work, "NNI") - seconds(ONE_BLOCK, "NNI") == pytest.approx(2.0, rel=1e-12)


def test_checkpointing_computes_again():
    work = replace(ONE_BLOCK, checkpointing=True)
    assert seconds(work, "NNN") == seconds(ONE_BLOCK, "NNN") + 3 * 2.0


COSTLY = Topology(
    axes=[Link(name="intra", size=4, rate=RATE, latency=0.25, overhead=0.5), Link(name="inter", size=1, rate=math.inf)],
    per_pass=0.125,
    per_step=0.0625,
)
"""A ring of three messages takes 3 · 0.75 s more than its bytes; a pass and a step take what the engine adds."""


def test_probed_costs_of_a_block_that_hides_nothing():
    """NNN and III in turn: messages of every ring, two passes a micro-step, one step; powers of two are exact."""
    ring, passes = RING + 3 * 0.75, 3 * (2.0 + 5.0 + 2 * 0.125)
    assert seconds(ONE_BLOCK, "NNN", COSTLY) == passes + 2 * ring + 0.0625
    assert seconds(ONE_BLOCK, "III", COSTLY) == passes + 6 * ring + 0.0625


def test_probed_costs_of_a_chain_without_prefetch():
    """INI, ten blocks in turn: gathers for ten forward passes and nine backward ones, and ten reductions at the end."""
    work = Workload(
        params=40_000, blocks=10, seconds_forward=40.0, seconds_backward=80.0, param_bytes=1, wire_bytes=1, prefetch=0
    )
    found = simulate(work, COSTLY, "INI")
    ring, passes = RING + 3 * 0.75, 2 * 10 * 0.125
    assert found.compute == 120.0 + passes + 0.0625
    assert found.seconds == pytest.approx(120.0 + passes + 0.0625 + 29 * ring, rel=1e-12)


def test_what_the_engine_adds_hides_messages():
    """INI with prefetch: passes that the engine makes longer hide gathers that arithmetic alone would not."""
    work = Workload(params=40_000, blocks=10, param_bytes=1, wire_bytes=1)
    slow = replace(COSTLY, per_pass=100.0, per_step=0.0)
    ring = RING + 3 * 0.75
    assert seconds(work, "INI", slow) == pytest.approx(ring + 20 * 100.0 + ring, rel=1e-12)


def test_blocks_below_all_that_trains_have_no_backward_pass():
    """Of four blocks the last two train: six passes a micro-step."""
    specs = [BucketSpec(elements=100, block=at, trainable=at >= 2) for at in range(4)]
    work = Workload.of(specs, accumulate=2, seconds_forward=1.0)
    machine = Topology(per_pass=0.5, per_step=0.25)
    found = simulate(work, machine, "NNN", trace=True)
    passes = [event for event in found.events if event.name.startswith(("forward", "backward"))]
    assert len(passes) == 2 * (4 + 2)
    assert found.seconds == pytest.approx(2 * 3.0 + 12 * 0.5 + 0.25, rel=1e-12)
    assert found.compute == pytest.approx(found.seconds, rel=1e-12)


def test_cores_do_what_the_engine_adds():
    machine = replace(COSTLY, crowding=2.0, axes=(replace(COSTLY.axes[0], work=3.0), COSTLY.axes[1]))
    assert simulate(ONE_BLOCK, machine, "NNN").cores == 3 * 7.25 + 0.0625 + 2.0 * (6 * 3.0)


WORKS = st.builds(
    Workload,
    params=st.integers(200, 2000),
    trainable=st.sampled_from([1.0, 0.5, 1 / 16]),
    accumulate=st.integers(1, 6),
    blocks=st.integers(1, 6),
    root_share=st.sampled_from([0.0, 0.2]),
    seconds_forward=st.sampled_from([0.0, 0.5, 3.0]),
    seconds_backward=st.sampled_from([None, 1.0]),
    seconds_update=st.sampled_from([0.0, 1.0]),
    prefetch=st.integers(0, 3),
    grad_buffers=st.integers(1, 3),
)
MACHINES = st.builds(
    Topology,
    groups=st.integers(1, 3),
    per_group=st.integers(1, 4),
    inter=st.sampled_from([100.0, 1000.0, math.inf]),
    intra=st.sampled_from([300.0, 5000.0]),
    latency_inter=st.sampled_from([0.0, 0.01]),
    sharing=st.sampled_from([1.0, 4.0]),
    per_pass=st.sampled_from([0.0, 0.05]),
    per_step=st.sampled_from([0.0, 0.3]),
)
PLANS = st.sampled_from(effective())


@settings(max_examples=60)
@given(WORKS, MACHINES, PLANS)
def test_time_is_work_and_waiting(work: Workload, machine: Topology, plan: Plan):
    found = simulate(work, machine, plan)
    assert found.seconds == pytest.approx(found.compute + sum(found.exposed), rel=1e-9)
    assert found.seconds >= max(found.compute, *found.busy) * (1 - 1e-9)
    assert found.seconds <= (found.compute + sum(found.busy)) * (1 + 1e-9)
    assert all(wait <= busy * (1 + 1e-9) + 1e-12 for wait, busy in zip(found.exposed, found.busy, strict=True))


@settings(max_examples=60)
@given(WORKS, MACHINES, PLANS)
def test_lanes_send_what_the_formulas_say(work: Workload, machine: Topology, plan: Plan):
    assert simulate(work, machine, plan).busy == pytest.approx(predict(work, machine, plan).seconds, rel=1e-9)


@settings(deadline=None, max_examples=60)
@given(WORKS, MACHINES, PLANS, st.sampled_from([0.0, 0.4, 1.0]), st.sampled_from([0.0, 3.0]))
def test_the_bound_is_one(work: Workload, machine: Topology, plan: Plan, overlap: float, crowding: float):
    """And where nothing overlaps, and no optimizer computes, it is the time."""
    machine = Topology(axes=machine.axes, overlap=overlap, crowding=crowding)
    least, found = least_seconds(work, machine, predict(work, machine, plan)), simulate(work, machine, plan).seconds
    assert least <= found
    if not overlap and not crowding and not work.seconds_update:
        assert least == pytest.approx(found, rel=1e-8)


TIED = Workload(params=200, blocks=2, root_share=0.0, seconds_forward=3.0, prefetch=0, grad_buffers=1)
"""On the machine below a ring and the lane of the next end at the same moment, but for rounding."""


@settings(max_examples=60)
@example(TIED, 4, Topology(groups=2, per_group=4, inter=100.0, intra=300.0, sharing=1.0), Plan("NNN"))
@given(WORKS, st.integers(1, 40), MACHINES, PLANS)
def test_repeated_micro_steps_are_skipped_rightly(work: Workload, accumulate: int, machine: Topology, plan: Plan):
    """Tracing walks through every micro-step; without it a steady stretch is jumped over."""
    work = replace(work, accumulate=accumulate)
    short, whole = simulate(work, machine, plan), simulate(work, machine, plan, trace=True)
    assert short.seconds == pytest.approx(whole.seconds, rel=1e-7)
    assert short.busy == pytest.approx(whole.busy, rel=1e-7)
    assert short.exposed == pytest.approx(whole.exposed, rel=1e-6, abs=1e-6 * whole.seconds)


@settings(max_examples=60)
@given(WORKS, st.integers(1, 5), PLANS)
def test_infinite_compute_leaves_one_full_lane(work: Workload, ranks: int, plan: Plan):
    """On one axis the worker always waits for the lane, which therefore never rests."""
    idle = replace(work, seconds_forward=None, seconds_backward=None, seconds_update=0.0)
    found = simulate(idle, Topology(groups=1, per_group=ranks, intra=100.0), plan)
    assert found.seconds == pytest.approx(found.busy[0], rel=1e-9)


@settings(max_examples=60)
@given(WORKS, MACHINES, PLANS)
def test_slower_wires_never_help(work: Workload, machine: Topology, plan: Plan):
    intra, inter = machine.axes
    slower = replace(machine, axes=(replace(intra, rate=intra.rate / 2), replace(inter, latency=inter.latency + 0.1)))
    assert simulate(work, slower, plan).seconds >= simulate(work, machine, plan).seconds * (1 - 1e-9)


def named(timeline: Timeline) -> dict[str, list[Event]]:
    found = defaultdict(list)
    for event in timeline.events:
        found[event.name].append(event)
    return found


@settings(max_examples=60)
@given(WORKS, MACHINES, PLANS)
def test_laws_of_a_trace(work: Workload, machine: Topology, plan: Plan):
    """One thing at a time on every lane, in order; no block runs before its parameters, no gradient leaves early."""
    found = simulate(work, machine, plan, trace=True)
    lanes = defaultdict(list)
    for event in found.events:
        lanes[event.lane].append(event)
    for lane in lanes.values():
        assert all(a.end <= b.start + 1e-9 for a, b in pairwise(lane))
    names = named(found)
    blocks = sorted({spec.block for spec in work.buckets() if not spec.root})
    for block in blocks:
        passes = names.get(f"forward {block}", [])
        for refreshed in names.get(f"refresh {block}", []):
            assert all(refreshed.end <= run.start + 1e-9 for run in passes)
        backward = names.get(f"backward {block}", [])
        for reduced in names.get(f"reduce {block}", []):
            assert sum(run.end <= reduced.start + 1e-9 for run in backward) >= bool(backward)
        for synced in names.get(f"sync {block}", []):
            ends = [event.end for event in [*backward, *names.get(f"reduce {block}", [])]]
            assert all(end <= synced.start + 1e-9 for end in ends)
    assert max((event.end for event in found.events), default=0) <= found.seconds + 1e-9


@settings(max_examples=60)
@given(WORKS, MACHINES, st.sampled_from(["INI", "III", "IIG", "GGG", "GIG"]))
def test_a_pass_needs_its_gather(work: Workload, machine: Topology, plan: str):
    """Between two uses of a block that is freed lies a gather of it; roots and the last block have one a micro-step."""
    found = named(simulate(work, machine, plan, trace=True))
    blocks = sorted({spec.block for spec in work.buckets() if not spec.root})
    each = Counter(spec.block for spec in work.buckets() if not spec.root)
    rings = sum(size > 1 for size in machine.sizes[: Plan(plan).levels()[0]])
    for block in blocks:
        times = 1 if block == blocks[-1] else 2
        assert len(found[f"gather {block}"]) == work.accumulate * times * rings * each[block]
        forward = [event.start for event in found[f"forward {block}"]]
        ends = sorted(event.end for event in found[f"gather {block}"])
        per_pass = rings * each[block] * times
        for micro, start in enumerate(forward):
            needed = ends[micro * per_pass : micro * per_pass + rings * each[block]]
            assert all(end <= start + 1e-9 for end in needed)


def test_one_reduction_at_a_time():
    """With two gradient buffers, one is being filled while the other is on the wire."""
    work = Workload(params=40_000, blocks=10, accumulate=2, seconds_forward=1.0, param_bytes=1, wire_bytes=1)
    machine = Topology(groups=2, per_group=4, inter=100.0, intra=RATE)
    two = simulate(work, machine, "NGG", trace=True)
    last = {name: max(e.end for e in events) for name, events in named(two).items() if name.startswith("reduce")}
    reductions = [event for event in two.events if event.name.startswith("reduce") and event.lane == "intra"]
    assert len(last) == 10
    second = [e for e in two.events if e.name.startswith("reduce") and e.lane == "inter"]
    assert all(before.end <= after.start + 1e-9 for before, after in zip(second, reductions[1:], strict=False))
    more = replace(work, grad_buffers=3)
    assert simulate(more, machine, "NGG").seconds < two.seconds


def test_frozen_blocks_below_have_no_backward():
    """Ten blocks, the upper half trainable: five backward passes, gathers of the lower half once a micro-step."""
    specs = [BucketSpec(elements=400, block=at, trainable=at >= 5) for at in range(10)]
    work = Workload.of(specs, accumulate=2, seconds_forward=1.0)
    found = named(simulate(work, COLUMN, "III", trace=True))
    assert [at for at in range(10) if f"backward {at}" in found] == [5, 6, 7, 8, 9]
    assert [len(found[f"gather {at}"]) for at in range(10)] == [2] * 5 + [4] * 4 + [2]
    assert sum(event.end - event.start for at in range(5, 10) for event in found[f"backward {at}"]) == pytest.approx(
        4.0
    )


def test_no_overlap_is_one_after_the_other():
    work = Workload(params=40_000, blocks=10, seconds_forward=40.0, param_bytes=1, wire_bytes=1)
    hidden, shown = (simulate(work, Topology(axes=COLUMN.axes, overlap=share), "INI") for share in (1.0, 0.0))
    assert shown.seconds == pytest.approx(hidden.compute + sum(hidden.busy), rel=1e-12)
    half = simulate(work, Topology(axes=COLUMN.axes, overlap=0.5), "INI")
    assert half.seconds == pytest.approx((hidden.seconds + shown.seconds) / 2, rel=1e-12)


def test_crowded_cores_need_their_time():
    """III with one block: 3 micro-steps, each one gather and one reduction of 3 messages and 3/4 of 4000 bytes."""
    link, none = Link(name="intra", size=4, rate=1e9, work=0.5, work_per_byte=1e-3), Link(name="inter", size=1, rate=1)
    labour = 3 * 2 * (3 * 0.5 + 3000 * 1e-3)
    crowded = simulate(ONE_BLOCK, Topology(axes=[link, none], crowding=2.0), "III")
    assert crowded.cores == crowded.seconds == pytest.approx(3 * 7.0 + 2.0 * labour, rel=1e-12)
    free = simulate(ONE_BLOCK, Topology(axes=[link, none]), "III")
    assert (free.cores, free.seconds) == (0.0, pytest.approx(3 * 7.0, rel=1e-4))
    slow = replace(link, rate=1.0)  # the wire is what takes long
    assert simulate(ONE_BLOCK, Topology(axes=[slow, none], crowding=2.0), "III").seconds > 3 * 2 * 3000


def test_whole_sums_come_back_when_all_have_gone_out():
    """Equal links: the inner lane reduces all, then gathers all, and the outer one hides behind it."""
    specs = [BucketSpec(elements=8, block=block) for block in range(5)]
    work = Workload.of(specs, param_bytes=1, wire_bytes=1)
    links = Topology(groups=2, per_group=2, inter=4.0, intra=4.0)
    # 8 bytes: 4 out and 4 back inside, 4 between, each 1 s; one after the other they would take 15 s
    assert simulate(work, links, "NNN").seconds == pytest.approx(10.0)
