"""Groups from rates and lines from times, on made-up numbers; real measuring is in ``test_wire_ranks.py``."""

from __future__ import annotations

import math
import random
from contextlib import nullcontext

import pytest

from oracles import wire_threads as wt
from sparing.errors import UserError
from sparing.sharding.network import engine_timing, probe
from sparing.sharding.network.mesh import Mesh
from sparing.sharding.network.probe import beyond, cluster, fit, measure, per_group_of, rounds, tiers_of
from sparing.sharding.planner.config import BucketSpec, Link, Topology, Workload
from sparing.sharding.planner.simulation import simulate


def matrix(groups: list[list[int]], inside: float, across: float, noise: float = 0.0) -> list[list[float]]:
    draw, home = random.Random(0), {rank: at for at, group in enumerate(groups) for rank in group}
    rows = [[math.inf] * len(home) for _ in home]
    for a in home:
        for b in range(a):
            rate = (inside if home[a] == home[b] else across) * math.exp(draw.uniform(-noise, noise))
            rows[a][b] = rows[b][a] = rate
    return rows


@pytest.mark.parametrize("world", [2, 3, 4, 5, 6, 9])
def test_every_pair_meets_once_and_nobody_twice_in_a_round(world: int) -> None:
    found = rounds(world)
    assert sorted(pair for pairs in found for pair in pairs) == [
        (a, b) for a in range(world) for b in range(a + 1, world)
    ]
    for pairs in found:
        ranks = [rank for pair in pairs for rank in pair]
        assert len(ranks) == len(set(ranks))
    assert len(found) == world - 1 + world % 2


@pytest.mark.parametrize("noise", [0.0, 0.3])
@pytest.mark.parametrize(
    "groups", [[[0, 1], [2, 3]], [[0, 1, 2], [3, 4, 5]], [[0, 1], [2, 3], [4, 5]], [[0, 3, 1], [2, 4, 5]]]
)
def test_groups_are_found(groups: list[list[int]], noise: float) -> None:
    expected = sorted(tuple(sorted(group)) for group in groups)
    assert sorted(cluster(matrix(groups, 1e9, 1e8, noise))) == expected


def test_a_slow_pair_inside_a_group_does_not_split_it() -> None:
    rows = matrix([[0, 1, 2], [3, 4, 5]], 1e9, 5e7)
    rows[0][1] = rows[1][0] = 6e7
    assert cluster(rows) == ((0, 1, 2), (3, 4, 5))


@pytest.mark.parametrize("world", [1, 2, 3, 6])
def test_an_even_network_is_one_group(world: int) -> None:
    rows = matrix([list(range(world))], 1e9, 1e9, 0.2)
    assert cluster(rows) == (tuple(range(world)),)
    assert per_group_of(cluster(rows), rows) == world


def test_groups_that_no_mesh_has_are_refused() -> None:
    rows = matrix([[0, 1, 2], [3]], 1e9, 1e8)
    assert cluster(rows) == ((0, 1, 2), (3,))
    with pytest.raises(UserError, match=r"\[\[0, 1, 2\], \[3\]\]; groups that a mesh has are equal"):
        per_group_of(cluster(rows), rows)
    rows = matrix([[0, 2], [1, 3]], 1e9, 1e8)
    with pytest.raises(UserError, match="must be adjacent"):
        per_group_of(cluster(rows), rows)
    # what might be noise is no ground to refuse
    rows = matrix([[0, 2], [1, 3]], 3e8, 1e8)
    assert per_group_of(cluster(rows), rows) == 4


def test_unequal_groups_are_measured_by_their_common_divisor(caplog: pytest.LogCaptureFixture) -> None:
    rows = matrix([[0, 1, 2, 3], [4, 5], [6, 7]], 1e9, 1e8)
    assert cluster(rows) == ((0, 1, 2, 3), (4, 5), (6, 7))
    assert per_group_of(cluster(rows), rows) == 2
    assert caplog.messages == ["groups of 4, 2, 2 ranks are measured as groups of 2; plan with --group-sizes 4 2 2"]


def nested(sizes: tuple[int, ...], rates: tuple[float, ...], noise: float = 0.0) -> list[list[float]]:
    """Rates of pairs by the outermost axis along which they differ."""
    draw, world = random.Random(0), math.prod(sizes)
    rows = [[math.inf] * world for _ in range(world)]
    for a in range(world):
        for b in range(a):
            places = zip(wt.coordinates(a, sizes), wt.coordinates(b, sizes), strict=True)
            axis = max(k for k, (one, other) in enumerate(places) if one != other)
            rows[a][b] = rows[b][a] = rates[axis] * math.exp(draw.uniform(-noise, noise))
    return rows


@pytest.mark.parametrize("noise", [0.0, 0.2])
@pytest.mark.parametrize("rates", [(1e11, 1e10, 1e9), (1e11, 1e10, 5e9), (3e10, 1e10, 1e8), (4e10, 1e10, 2e9)])
@pytest.mark.parametrize("sizes", [(2, 2, 2), (4, 2, 2), (2, 3, 2), (2, 2, 3)])
def test_three_kinds_of_links_are_found(sizes: tuple[int, ...], rates: tuple[float, ...], noise: float) -> None:
    if rates[1] / rates[2] <= 2:
        assert tiers_of(nested(sizes, rates)) in {sizes, (sizes[0], sizes[1] * sizes[2])}
    else:
        assert tiers_of(nested(sizes, rates, noise)) == sizes


@pytest.mark.parametrize("sizes", [(2, 2), (4, 2), (3, 4), (8, 1), (4, 4)])
@pytest.mark.parametrize("noise", [0.0, 0.3])
def test_two_kinds_of_links_stay_two(sizes: tuple[int, ...], noise: float) -> None:
    assert tiers_of(nested(sizes, (1e10, 1e9), noise)) == sizes


def test_a_line_is_fitted() -> None:
    latency, rate = fit([(size, 2e-4 + size / 5e8) for size in (1e3, 1e5, 1e6, 4e6)])
    assert latency == pytest.approx(2e-4)
    assert rate == pytest.approx(5e8)


def test_a_fit_weighs_errors_by_their_share() -> None:
    """Ten per cent more at every size is ten per cent in both, whatever the spread of sizes."""
    latency, rate = fit([(size, 1.1 * (1e-4 + size / 1e8)) for size in (1e2, 1e4, 1e7)])
    assert latency == pytest.approx(1.1e-4)
    assert rate == pytest.approx(1e8 / 1.1)


def test_errors_of_long_messages_do_not_drown_the_latency() -> None:
    """Ten per cent more or less at the two longest is hundreds of latencies."""
    truth = {size: 1e-4 + size / 1e8 for size in (1e2, 1e3, 5e6, 1e7)}
    latency, rate = fit([(s, t * {5e6: 0.9, 1e7: 1.1}.get(s, 1.0)) for s, t in truth.items()])
    assert latency == pytest.approx(1e-4, rel=0.01)
    assert rate == pytest.approx(1e8, rel=0.1)


def test_times_that_fit_no_line_still_give_a_link() -> None:
    assert fit([(1e3, 1e-6), (1e6, 2e-3)]) == (0.0, pytest.approx(6.7e8, rel=0.5))
    assert fit([(1e3, 2e-3), (1e6, 1e-3)]) == (0.0, 1e9)


def test_contention_is_how_much_slower_all_lines_are_together(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each of three ranks of a group has its own wire inside, and all share one between groups."""

    def hop(mesh: Mesh, axis: int, size: int, seconds: float, *, only_first: bool) -> float:
        latency, rate = ((1e-5, 1e9), (1e-3, 1e7))[axis]
        return latency + size * (3 if axis == 1 and not only_first else 1) / rate

    monkeypatch.setattr(probe, "_hop", hop)
    monkeypatch.setattr(probe, "_work", lambda mesh, axis, size, seconds: (axis + 1) * (2e-4 + 1e-9 * size))
    monkeypatch.setattr(probe, "_crowding", lambda mesh: 3.0)
    slower = ((3e-5, 1e9), (4e-3, 1e7 / 3))  # in collectives, all lines together
    monkeypatch.setattr(probe, "_in_collectives", lambda mesh, axis, size, _: slower[axis][0] + size / slower[axis][1])
    monkeypatch.setattr(probe, "engine_costs", lambda mesh, found: (1e-4, found.axes[1].rate * 1e-10))
    found = measure(wt.meshes((3, 2))[0], label="")
    assert found.sizes == (3, 2)
    inner, outer = found.axes
    assert (inner.rate, inner.latency, inner.sharing) == pytest.approx((1e9, 1e-5, 1.0))
    assert (outer.rate, outer.latency, outer.sharing) == pytest.approx((1e7, 1e-3, 3.0))
    assert (inner.work, inner.work_per_byte) == pytest.approx((2e-4, 1e-9))
    assert (outer.work, outer.work_per_byte) == pytest.approx((4e-4, 2e-9))
    assert (inner.overhead, outer.overhead) == pytest.approx((2e-5, 3e-3))
    assert (found.crowding, found.per_pass, found.per_step) == pytest.approx((3.0, 1e-4, 1e-3))
    alone = measure(wt.meshes((1, 2))[0], label="")
    assert alone.axes[0].rate == math.inf
    assert alone.axes[1].sharing == 1.0  # one line has nobody to share with


def test_overheads_are_what_messages_take_beyond_a_link() -> None:
    link = Link(name="inter", size=4, rate=1e8, latency=1e-4, sharing=2.0)
    sizes = (1e3, 1e5, 1e7)
    exact = [(size, 7e-5 + 1e-4 + 2 * size / 1e8) for size in sizes]
    assert beyond(link, exact) == pytest.approx(7e-5)
    # ten per cent more or less at the longest is thousands of overheads, and says nothing about them
    assert beyond(link, [*exact[:2], (1e7, 1.1 * exact[2][1])]) == pytest.approx(7e-5, rel=0.01)
    assert beyond(link, [(size, link.seconds(size, 1) / 2) for size in sizes]) == 0.0


def test_what_the_engine_takes_comes_back(monkeypatch: pytest.MonkeyPatch) -> None:
    """Times made by a simulated engine of known costs, beside plain arithmetic."""
    mesh = wt.meshes((3, 2))[0]
    monkeypatch.setattr(mesh, "gather_scalars", lambda values: values[None])
    links = [Link(name=name, size=size, rate=1e8, latency=1e-4) for name, size in (("intra", 3), ("inter", 2))]
    truth = Topology(axes=links, per_pass=2e-4, per_step=5e-3)
    specs = [BucketSpec(elements=144, block=at) for at in range(engine_timing.DEEP)]
    words = {"param_bytes": 4, "grad_bytes": 4, "wire_bytes": 4, "state_bytes": 8}
    work = Workload.of(specs, seconds_forward=1e-3, seconds_backward=2e-3, seconds_update=6e-4, **words)
    asked = []

    def typical(given: Mesh, step: str, rounds: int) -> tuple[float, float, float]:
        asked.append(step)
        kind, depth = step.split()
        if kind == "network":
            return 0.0, 0.0, simulate(work, truth, "NNG").seconds
        more = (2e-4 * int(depth) + 3e-4) * (kind == "alone")  # a pass of the model costs something once, too
        return 1e-3 + more, 2e-3 + more, 6e-4

    monkeypatch.setattr(engine_timing, "_typical", typical)
    monkeypatch.setattr(engine_timing, "_net", lambda mesh, depth: depth)
    monkeypatch.setattr(engine_timing, "_plain", lambda depth: f"plain {depth}")
    monkeypatch.setattr(
        engine_timing, "_engine", lambda depth, on: nullcontext(f"{'network' if on is mesh else 'alone'} {depth}")
    )
    assert engine_timing.engine_costs(mesh, Topology(axes=links)) == pytest.approx((2e-4, 5e-3))
    assert asked == ["plain 2", "plain 10", "alone 2", "alone 10", "network 10"]


def test_one_process_has_no_network() -> None:
    with pytest.raises(UserError, match="one process; there is no network in it; start several with torchrun"):
        measure()
    with pytest.raises(UserError, match="two sizes or more"):
        measure(sizes=[5])
