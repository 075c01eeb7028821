"""Measure the network: groups from pairwise rates, then latency, rate and contention of each axis.

topology = measure()              # under torchrun, on all ranks
topology = measure(make_mesh(groups=4, per_group=8))
"""

from __future__ import annotations

import hashlib
import logging
import math
import os
import platform
import statistics
import time
from collections import Counter as Tally
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace

import torch
import torch.distributed as dist

from sparing.errors import UserError, require
from sparing.sharding.network.engine_timing import engine_costs
from sparing.sharding.network.mesh import Mesh, make_mesh
from sparing.sharding.network.on_ranks import progress_on_first_rank
from sparing.sharding.network.rings import Axis, Counter, Ring, Throttle
from sparing.sharding.network.wires import collectives_of
from sparing.sharding.planner.config import Link, Topology

# Ranks form groups if the mean rate inside them is at least this many times that between them.
APART = 2.0

# From this ratio on, groups that no mesh can have (unequal, or ranks not adjacent) are believed and refused.
UNEQUAL = 4.0

# Up to this many ranks, pairs are measured one at a time; beyond, all pairs of a round at once.
ONE_AT_A_TIME = 16

LOG = logging.getLogger(__name__)

PAIR = 1 << 18  # message between two ranks when groups are sought (bytes)


def measure(
    mesh: Mesh | None = None,
    *,
    sizes: Sequence[int] = (1 << 12, 1 << 16, 1 << 19, 1 << 22),
    seconds: float = 20.0,
    label: str = "probe",
) -> Topology:
    """Measure the network between all ranks; every rank calls it, and all get the same.

    A hop is measured as rings use it, in the lane of its axis and sending and receiving at once: first on the line of
    rank 0 alone, then on all lines of the axis together, whose ratio of rates is the contention. The latency is that of
    all lines, since in a step of training no rank sends alone: where ranks share cores, it is their cores' as well.
    Collectives show how much longer a message takes in them than alone; on CPUs, all-reduces show what it costs a
    processor, and names of machines how many ranks share a core. Nets of tiny blocks show what the engine adds to a
    pass of a block and to a step.

    Args:
        mesh: Groups to measure; none to find them, in two tiers or three.
        sizes: Messages (B), at least two.
        seconds: Time to spend on the axes, about (s).
        label: Words before the progress bar of rank 0; empty for none.

    Returns:
        Axes with their rates, latencies and contention; an axis of one rank has an infinite rate.

    Raises:
        UserError: If there is one process only, or the groups found have no common divisor or no adjacent ranks.
    """
    require(len(set(sizes)) >= 2, "sizes", list(sizes), "latency and rate are two unknowns", "pass two sizes or more")
    if mesh is None:
        with make_mesh(sizes=_world()) as flat:
            rows = rates(flat, label=label)
        with make_mesh(sizes=tiers_of(rows)) as found:
            return measure(found, sizes=sizes, seconds=seconds, label=label)
    require(mesh.world > 1, "probe", "one process", "there is no network in it", "start several with torchrun")
    busy = [axis for axis in range(mesh.tiers) if mesh.sizes[axis] > 1]
    with progress_on_first_rank(mesh, label, 4 * len(busy) * len(sizes), "message") as advance:
        share = seconds / (4 * len(busy) * len(sizes))
        links = [_link(mesh, axis, sorted(sizes), share, advance) for axis in range(mesh.tiers)]
    bare = Topology(axes=links, crowding=_crowding(mesh) if mesh.device.type == "cpu" else 0.0)
    per_pass, per_step = engine_costs(mesh, bare)
    return replace(bare, per_pass=per_pass, per_step=per_step)


def rates(mesh: Mesh, *, label: str = "") -> list[list[float]]:
    """Rates of a message between each two ranks, of a mesh with one axis: a symmetric matrix (B/s), the same on all."""
    mine = torch.zeros(mesh.world, dtype=torch.float64)
    steps = (
        rounds(mesh.world) if mesh.world > ONE_AT_A_TIME else [[pair] for many in rounds(mesh.world) for pair in many]
    )
    with progress_on_first_rank(mesh, label and f"{label} pairs", len(steps), "round") as advance:
        for pairs in steps:
            mesh.gather_scalars(torch.zeros(1))  # a barrier
            for low, high in pairs:
                if mesh.rank in {low, high}:
                    mine[low + high - mesh.rank] = _pair(mesh, low, high)
            advance()
    rows = mesh.gather_scalars(mine)
    both = torch.maximum(rows, rows.T).fill_diagonal_(math.inf)
    return [[float(rate) for rate in row] for row in both.tolist()]


def rounds(world: int) -> list[list[tuple[int, int]]]:
    """All pairs (lower, higher) as rounds in which no rank occurs twice (the circle method)."""
    # With an odd world, the partner of a rank that does not exist has a free round.
    places: list[int] = list(range(world + world % 2))
    found = []
    for _ in range(len(places) - 1):
        half = len(places) // 2
        pairs = zip(places[:half], reversed(places[half:]), strict=True)
        found.append([(min(pair), max(pair)) for pair in pairs if max(pair) < world])
        places = [places[0], places[-1], *places[1:-1]]
    return found


def cluster(rows: Sequence[Sequence[float]]) -> tuple[tuple[int, ...], ...]:
    """Groups of ranks between which messages are slow, by single linkage over rates (B/s).

    Pairs are joined from the fastest on; of the partitions that arise on the way, the one is taken whose mean rate
    inside is furthest above that across, equal groups before others; one group if nothing separates them.
    """
    world = len(rows)
    whole = (tuple(range(world)),)
    # without all apart, and without all together
    partitions = list(_merges(rows))[1:-1]
    equal = [groups for groups in partitions if len({len(group) for group in groups}) == 1]
    for candidates, ratio in ((equal, APART), (partitions, UNEQUAL)):
        best = max(candidates, key=lambda groups: _separation(groups, rows), default=whole)
        if best != whole and _separation(best, rows) >= ratio:
            return best
    return whole


def tiers_of(rows: Sequence[Sequence[float]]) -> tuple[int, ...]:
    """Ranks along two axes or three, innermost first: groups, and groups of them or groups in them, where rates tell.

    A further tier is believed only where it is even: the same domains in every group, or as many groups in each other.
    """
    world, m = len(rows), per_group_of(cluster(rows), rows)
    g = world // m
    if 1 < g < world:
        # rates between whole groups, as one rank each
        homes = [range(at * m, (at + 1) * m) for at in range(g)]
        means = [
            [math.inf if a is b else statistics.geometric_mean(rows[i][j] for i in a for j in b) for b in homes]
            for a in homes
        ]
        if (middle := _even(cluster(means))) < g:
            return (m, middle, g // middle)
        inside = {_even(cluster([[rows[i][j] for j in home] for i in home])) for home in homes}
        if len(inside) == 1 and (domain := inside.pop()) < m:
            return (domain, m // domain, g)
    return (m, g)


def _even(groups: Sequence[Sequence[int]]) -> int:
    """Ranks of each group where all are adjacent and of one size above 1; else all ranks."""
    sizes, world = {len(group) for group in groups}, sum(map(len, groups))
    even = len(sizes) == 1 and all(group[-1] - group[0] == len(group) - 1 for group in groups)
    return len(groups[0]) if even and len(groups[0]) > 1 else world


def per_group_of(groups: Sequence[Sequence[int]], rows: Sequence[Sequence[float]]) -> int:
    """Ranks per group, where a mesh can have these groups; of unequal ones their largest common divisor."""
    shown, size = [list(group) for group in groups], math.gcd(*map(len, groups))
    if size == 1 and any(len(group) != 1 for group in groups):
        why, do = "groups that a mesh has are equal, and no equal ones use all ranks", "leave ranks out, or pass a mesh"
        raise UserError("groups", got=shown, why=why, do=do)
    if all(group[-1] - group[0] == len(group) - 1 for group in groups):
        if size < max(map(len, groups)):
            said, words = ", ".join(map(str, map(len, groups))), " ".join(map(str, map(len, groups)))
            LOG.warning(
                "groups of %s ranks are measured as groups of %d; plan with --group-sizes %s", said, size, words
            )
        return size
    if _separation(groups, rows) < UNEQUAL:
        return len(rows)
    why, do = "ranks of a group must be adjacent", "start all ranks of a machine one after the other"
    raise UserError("groups", got=shown, why=why, do=do)


def fit(samples: Iterable[tuple[float, float]]) -> tuple[float, float]:
    """Latency α ≥ 0 (s) and rate 1/β (B/s) of (bytes, seconds) samples, by least squares of relative errors."""
    points = [(1 / seconds**2, size, seconds) for size, seconds in samples]
    one, x, y, xx, xy = (
        sum(w * value(s, t) for w, s, t in points)
        for value in (lambda s, t: 1.0, lambda s, t: s, lambda s, t: t, lambda s, t: s * s, lambda s, t: s * t)
    )
    determinant = one * xx - x * x
    beta = (one * xy - x * y) / determinant if determinant > 0 else 0.0
    alpha = (y - beta * x) / one
    if beta <= 0:
        return 0.0, max(size / seconds for _, size, seconds in points)
    return (alpha, 1 / beta) if alpha >= 0 else (0.0, xx / xy)


def _world() -> tuple[int, ...]:
    with make_mesh() as mesh:
        require(mesh.world > 1, "probe", "one process", "there is no network in it", "start several with torchrun")
        return (mesh.world,)


def _link(mesh: Mesh, axis: int, sizes: Sequence[int], seconds: float, advance: Callable[[], object]) -> Link:
    """One axis, measured at its line of rank 0 and at all lines together."""
    found = mesh.axes[axis]
    if found.size == 1:
        return Link(name=found.name, size=1, rate=math.inf)
    alone, all_lines, works, together = [], [], [], []
    for size in sizes:
        alone.append((size, _hop(mesh, axis, size, seconds, only_first=True)))
        advance()
        all_lines.append((size, _hop(mesh, axis, size, seconds, only_first=False)))
        advance()
        works.append((size, _work(mesh, axis, size, seconds)))
        advance()
        together.append((size, _in_collectives(mesh, axis, size, seconds)))
        advance()
    _, rate = fit(alone)
    latency, slowed = fit(all_lines)
    sharing = max(rate / slowed, 1.0) if mesh.world > found.size else 1.0
    work, speed = fit(works) if works[0][1] else (0.0, math.inf)
    known = {"rate": rate, "latency": latency, "sharing": sharing, "work": work, "work_per_byte": 1 / speed}
    link = Link(name=found.name, size=found.size, **known)
    return replace(link, overhead=beyond(link, together))


def beyond(link: Link, samples: Iterable[tuple[float, float]]) -> float:
    """What a message takes longer than a link says (s), by least squares of relative errors; not below 0."""
    more = [(1 / seconds**2, seconds - link.seconds(size, 1)) for size, seconds in samples]
    return max(0.0, sum(weight * rest for weight, rest in more) / sum(weight for weight, _ in more))


def _hop(mesh: Mesh, axis: int, size: int, seconds: float, *, only_first: bool) -> float:
    """Time of one ring step with messages of ``size`` bytes (s): of the slowest rank, in the best of three runs."""
    takes_part = not only_first or all(place == 0 for k, place in enumerate(mesh.coords) if k != axis)
    lane, step = mesh.lanes[axis], _step(mesh, mesh.axes[axis], size)

    def run(count: int) -> float:
        mesh.gather_scalars(torch.zeros(1))  # a barrier
        start = time.perf_counter()
        for _ in range(count if takes_part else 0):
            lane.submit(step).wait()
        _idle(mesh)
        spent = (time.perf_counter() - start) / count if takes_part else 0.0
        return float(mesh.gather_scalars(torch.tensor([spent], dtype=torch.float64)).max())

    run(1)
    count = max(1, min(50, int(seconds / 3 / run(1))))
    return min(run(count) for _ in range(3))


def _work(mesh: Mesh, axis: int, size: int, seconds: float) -> float:
    """Processor time of a message in an all-reduce, adding included (s), mean over ranks; 0 where GPUs may spin."""
    if mesh.device.type != "cpu":
        return 0.0
    found, lane = mesh.axes[axis], mesh.lanes[axis]
    ring, whole = collectives_of(found, mesh.wires, Counter(), mesh.device), torch.zeros(found.size * max(1, size // 4))

    def run(count: int) -> tuple[float, float]:
        mesh.gather_scalars(torch.zeros(1))  # a barrier
        start, worked = time.perf_counter(), time.process_time()
        for _ in range(count):
            lane.submit(lambda: ring.all_reduce_(whole)).wait()
        spent = (time.perf_counter() - start, time.process_time() - worked)
        rows = mesh.gather_scalars(torch.tensor(spent, dtype=torch.float64)) / count
        return float(rows[:, 0].max()), float(rows[:, 1].mean())

    run(1)
    slow, _ = run(1)
    return run(max(1, min(50, int(seconds / slow))))[1] / (2 * (found.size - 1))


def _in_collectives(mesh: Mesh, axis: int, size: int, seconds: float) -> float:
    """Time of a message in a reduce-scatter and an all-gather, each a job of the lane; of the slowest rank (s)."""
    found, lane = mesh.axes[axis], mesh.lanes[axis]
    ring = collectives_of(found, mesh.wires, Counter(), mesh.device)
    whole = torch.zeros(found.size * max(1, size // 4), device=mesh.device)

    def run(count: int) -> float:
        mesh.gather_scalars(torch.zeros(1))  # a barrier
        start = time.perf_counter()
        for _ in range(count):
            lane.submit(lambda: ring.reduce_scatter_(whole)).wait()
            lane.submit(lambda: ring.all_gather_(whole)).wait()
        _idle(mesh)
        spent = (time.perf_counter() - start) / count
        return float(mesh.gather_scalars(torch.tensor([spent], dtype=torch.float64)).max())

    run(1)
    count = max(1, min(50, int(seconds / run(1))))
    return run(count) / (2 * (found.size - 1))


def _crowding(mesh: Mesh) -> float:
    """Ranks of a machine over its cores, where most are; of the cores, those that this process may use."""
    name = int.from_bytes(hashlib.sha256(platform.node().encode()).digest()[:6])
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    rows = mesh.gather_scalars(torch.tensor([name, cores], dtype=torch.float64)).tolist()
    ranks = Tally(machine for machine, _ in rows)
    return float(max(ranks[machine] / cores for machine, cores in rows))


def _step(mesh: Mesh, axis: Axis, size: int) -> Callable[[], object]:
    """One ring step: sends right and receives from the left, through the throttle of the mesh if it has one."""
    out, into = (torch.zeros(size, dtype=torch.uint8, device=mesh.device) for _ in range(2))
    if mesh.device.type == "cpu":
        pace = mesh.wires.pace(axis.name)
        ring = Ring(axis, Counter(), None if pace is None else Throttle(pace))
        chunks = [into] * axis.size
        chunks[axis.index] = out
        return lambda: ring.gather_step(chunks, 0)
    right, left = axis.neighbour(1), axis.neighbour(-1)
    ops = [
        dist.P2POp(dist.isend, out, group=axis.group, group_peer=right),
        dist.P2POp(dist.irecv, into, group=axis.group, group_peer=left),
    ]
    return lambda: [work.wait() for work in dist.batch_isend_irecv(ops)]


def _pair(mesh: Mesh, low: int, high: int) -> float:
    """Rate of a message there and back (B/s), the best of three."""
    group, there, best = mesh.axes[0].group, low + high - mesh.rank, math.inf
    assert group is not None
    x = torch.zeros(PAIR, dtype=torch.uint8, device=mesh.device)
    # the first of four makes the connection
    for _ in range(4):
        start = time.perf_counter()
        for sender in (low, high):
            (group.send([x], there, 0) if mesh.rank == sender else group.recv([x], there, 0)).wait()
        _idle(mesh)
        best = min(best, time.perf_counter() - start)
    return 2 * PAIR / best


def _idle(mesh: Mesh) -> None:
    """Wait until the GPU is idle."""
    if mesh.device.type == "cuda":
        torch.cuda.synchronize(mesh.device)


def _merges(rows: Sequence[Sequence[float]]) -> Iterator[tuple[tuple[int, ...], ...]]:
    """Partitions from all apart to all together, joining the fastest pair each time."""
    world = len(rows)
    groups: dict[int, tuple[int, ...]] = {rank: (rank,) for rank in range(world)}
    yield tuple(groups.values())
    pairs = sorted(((rows[a][b], a, b) for a in range(world) for b in range(a)), key=lambda pair: -pair[0])
    for _, a, b in pairs:
        one, other = next(k for k, g in groups.items() if a in g), next(k for k, g in groups.items() if b in g)
        if one != other:
            groups[min(one, other)] = tuple(sorted(groups.pop(one) + groups.pop(other)))
            yield tuple(groups[key] for key in sorted(groups))


def _separation(groups: Sequence[Sequence[int]], rows: Sequence[Sequence[float]]) -> float:
    """Geometric mean of the rates inside the groups over that across them."""
    home = {rank: at for at, group in enumerate(groups) for rank in group}
    inside: list[float] = []
    across: list[float] = []
    for a in home:
        for b in range(a):
            (inside if home[a] == home[b] else across).append(math.log(rows[a][b]))
    return math.exp(statistics.fmean(inside) - statistics.fmean(across)) if inside and across else 1.0
