"""Three kinds of links and groups of unequal size: where they are two kinds, or equal, the same numbers to the bit."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from sparing import sharding as sh
from sparing.errors import UserError
from sparing.sharding.levels import effective, letters
from sparing.sharding.planner.choose import crossover
from sparing.sharding.planner.config import Link
from sparing.sharding.planner.cost import paper_seconds
from sparing.sharding.planner.unequal import arrangements

WORK = sh.Workload(
    params=1e6, trainable=1 / 4, accumulate=3, blocks=3, root_share=0.1, seconds_forward=1e-3, seconds_update=1e-3
)
INTRA = Link(name="intra", size=4, rate=1e9, latency=1e-5, sharing=2.0, work=1e-5, overhead=1e-6)
INTER = Link(name="inter", size=3, rate=1e7, latency=1e-4, sharing=4.0, work=2e-5, overhead=2e-6)
TWO = sh.Topology(axes=(INTRA, INTER), crowding=2.0, per_pass=1e-5, per_step=1e-4)
NONE = Link(name="middle", size=1, rate=math.inf)


@pytest.mark.parametrize("plan", [plan.name for plan in effective(3)])
@pytest.mark.parametrize("at", [0, 1, 2])
def test_an_axis_of_one_rank_changes_no_bit(plan: str, at: int):
    """Of three axes one has one rank: every plan of three tiers is one of two, in bytes, traffic and seconds."""
    axes = [INTRA, INTER]
    axes.insert(at, NONE)
    three = replace(TWO, axes=tuple(axes))
    # the letter of three tiers -> that of two which cuts over the same ranks
    same = {letter: "NIG"[level - (level > at)] for level, letter in enumerate(letters(3))}
    twin = "".join(same[letter] for letter in plan)
    one, other = sh.predict(WORK, three, plan), sh.predict(WORK, TWO, twin)
    kept = [k for k in range(3) if k != at]
    assert [one.traffic.total[k] for k in kept] == list(other.traffic.total)
    assert (one.params, one.grads, one.optimizer, one.transient, one.memory) == (
        other.params, other.grads, other.optimizer, other.transient, other.memory,
    )  # fmt: skip
    assert [one.seconds[k] for k in kept] == list(other.seconds)
    for flat in (False, True):
        first, second = (sh.simulate(WORK, place, name, flat=flat) for place, name in ((three, plan), (TWO, twin)))
        assert (first.seconds, first.compute, first.cores) == (second.seconds, second.compute, second.cores)
    assert paper_seconds(WORK, three, plan).total == paper_seconds(WORK, TWO, twin).total


def test_three_tiers_by_hand():
    """III of one block of 24 elements on 2×3×2 ranks, a byte each: rings inside hide nothing, MMM goes two axes out."""
    speeds = {"intra": (2, 8.0), "middle": (3, 4.0), "inter": (2, 1.0)}
    links = [Link(name=name, size=size, rate=rate) for name, (size, rate) in speeds.items()]
    machine, work = sh.Topology(axes=links), sh.Workload(params=24, blocks=1, param_bytes=1, wire_bytes=1)
    intra, middle, inter = 12 / 8, 8 / 4, 2 / 1  # 1/2 of 24, 2/3 of its half, 1/2 of its sixth
    assert sh.simulate(work, machine, "IIG").seconds == pytest.approx(2 * (middle + inter) + 2 * intra)
    assert sh.simulate(work, machine, "MMM").seconds == pytest.approx(2 * (intra + middle) + 2 * inter)
    assert sh.predict(work, machine, "IMG").traffic.total == (24, 8 + 8, 2 + 2)


def test_a_map_of_three_tiers_is_each_machine_on_its_own():
    axes = (INTRA, replace(INTER, name="middle", size=2), replace(INTER, size=2))
    machine = sh.Topology(axes=axes)
    cells = crossover(WORK, machine, ratios=(1, 25), accumulates=(1,), trainables=(1,), middles=(1, 10), memory="30MB")
    assert [(cell.middle, cell.ratio) for cell in cells] == [(1, 1), (1, 25), (10, 1), (10, 25)]
    for cell in cells:
        middle = replace(axes[1], rate=1e9 / cell.middle)
        here = sh.Topology(axes=(axes[0], middle, replace(axes[2], rate=1e9 / cell.middle / cell.ratio)))
        best = sh.choose(replace(WORK, trainable=1.0, accumulate=1), here, "30MB").best
        assert (cell.plan, cell.seconds) == (best.plan, best.seconds)
    with pytest.raises(UserError, match="middles: got \\[1\\]; only a machine of three axes has a middle one"):
        crossover(WORK, TWO, middles=(1,))


def brute(sizes: list[int]) -> list[tuple[int, int]]:
    """Group size and ranks used, of all sizes; of equal use the largest; none that both another exceeds."""
    ways = [(d, d * sum(size // d for size in sizes)) for d in range(1, max(sizes) + 1)]
    best = [w for w in ways if not any(o != w and o[0] >= w[0] and o[1] >= w[1] for o in ways)]
    return sorted(best, key=lambda way: -way[1])


@pytest.mark.parametrize("sizes", [[8, 8, 4], [8, 7], [5], [1, 1, 1], [6, 4, 4, 2], [3, 8, 13]])
def test_arrangements_are_those_that_no_other_beats(sizes: list[int]):
    found = arrangements(sizes, TWO)
    assert [(one.topology.sizes[0], one.ranks) for one in found] == brute(sizes)
    assert all(one.ranks + one.left_out == sum(sizes) for one in found)
    assert all(axis.sharing <= one.topology.sizes[0] for one in found for axis in one.topology.axes)


@pytest.mark.parametrize(("groups", "per_group"), [(2, 8), (3, 4), (1, 5), (4, 1)])
def test_equal_groups_are_a_special_case_to_the_bit(groups: int, per_group: int):
    words = {"inter": "80Gbps", "intra": "2000Gbps", "latency_inter": 1e-5, "sharing": per_group}
    machine = sh.Topology(groups=groups, per_group=per_group, **words)
    (found,) = arrangements([per_group] * groups, sh.Topology(**words))
    assert (found.topology, found.left_out) == (machine, 0)
    assert sh.choose(WORK, found.topology).ranking == sh.choose(WORK, machine).ranking


def test_what_no_mesh_has_is_refused():
    with pytest.raises(UserError, match="domains inside groups of unequal size have no common mesh"):
        arrangements([4, 2], sh.Topology(axes=(INTRA, NONE, INTER)))
    with pytest.raises(UserError, match="a group has a rank"):
        arrangements([4, 0], TWO)
