"""Settings of the wires, and a throttle that takes the time the cost model says."""

from __future__ import annotations

import math
import time

import pytest
import torch

from oracles import wire_threads as wt
from sparing.errors import UserError
from sparing.sharding.network.mesh import Mesh
from sparing.sharding.network.rings import RateLimit, Throttle
from sparing.sharding.network.wires import Wires, collectives_of


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"kind": "rings"}, "kind: got rings"),
        ({"gather": "two"}, "gather: got two"),
        ({"kind": "builtin", "gather": "overlapped"}, 'pass kind="ring"'),
        ({"kind": "builtin", "rate": {"inter": 1e6}}, 'pass kind="ring"'),
    ],
)
def test_what_there_is_not_is_refused(settings: dict[str, object], message: str) -> None:
    with pytest.raises(UserError, match=message):
        Wires(**settings)  # type: ignore[arg-type]


@pytest.mark.parametrize("settings", [{"rate": 0}, {"rate": 1, "latency": -1}, {"rate": 1, "sharing": 0}])
def test_a_link_that_never_delivers_is_refused(settings: dict[str, float]) -> None:
    with pytest.raises(UserError):
        RateLimit(**settings)  # type: ignore[arg-type]


def test_rings_on_cuda_are_refused_before_anything_is_sent() -> None:
    mesh = wt.meshes((2, 1))[0]
    with pytest.raises(UserError, match=r"rings on cuda; .*; leave them out, or run over gloo"):
        collectives_of(mesh.axes[0], Wires(kind="ring"), mesh.counter, torch.device("cuda"))


def test_rates_are_bytes_per_second_or_a_pace() -> None:
    wires = Wires(rate={"intra": 5, "inter": RateLimit(rate=3, sharing=2), "middle": "80 kbit/s"})
    assert wires.pace("intra") == RateLimit(rate=5)
    assert wires.pace("middle") == RateLimit(rate=10_000)
    assert wires.pace("inter") == RateLimit(rate=3, sharing=2)
    assert wires.pace("world") is None


def test_messages_queue_for_the_link() -> None:
    throttle, start = Throttle(RateLimit(rate=1e6, latency=0.01, sharing=2)), time.perf_counter()
    for _ in range(3):
        throttle.hold(10_000)
    assert 3 * (0.01 + 0.02) <= time.perf_counter() - start < 30  # what it slept, not what it took, is the claim


def seconds(gather: str, sizes: tuple[int, int], wires: dict[str, RateLimit], *, below: float) -> float:
    """Least time of a gather of 1.6 MB from G to N; a busy machine only adds to it, so it may try again and again."""

    def work(mesh: Mesh) -> list[float]:
        out, found = torch.zeros(200_000, dtype=torch.float64), []
        for _ in range(3):
            start = time.perf_counter()
            mesh.transitions.gather_(out, 2, 0).wait()
            found.append(time.perf_counter() - start)
        return found

    best = math.inf
    for _ in range(30):
        rows = wt.together(work, wt.meshes(sizes, Wires(gather=gather, rate=wires)))  # type: ignore[arg-type]
        best = min(best, *(max(column) for column in zip(*rows, strict=True)))
        if best < below:
            break
    return best


def test_the_throttle_takes_as_long_as_the_formula_says_and_overlap_hides_what_it_can() -> None:
    """2 × 2 ranks, V = 1.6 MB: a block takes 0.1 s on either axis."""
    rate = {"intra": RateLimit(rate=4e6), "inter": RateLimit(rate=4e6)}
    # one block between groups, then two inside: never less, however busy or idle the machine
    assert 0.29 < seconds("two-level", (2, 2), rate, below=0.6) < 0.6
    # the first inside while the second comes: less than the sequential way can take
    assert 0.19 < seconds("overlapped", (2, 2), rate, below=0.25) < 0.29


def test_a_flat_ring_runs_at_the_pace_of_the_links_it_crosses() -> None:
    """One of two ranks of a group sends to the next group: it has the shared link for itself, and all wait for it."""
    rate = {"intra": RateLimit(rate=4e8), "inter": RateLimit(rate=8e6, sharing=2)}
    # three steps; the slow links carry a block of 0.4 MB in 0.05 s in each
    assert 0.14 < seconds("flat", (2, 2), rate, below=0.5) < 0.5
    # both ranks of a group share it: 0.1 s for the one step there is
    assert 0.09 < seconds("two-level", (2, 2), rate, below=0.4) < 0.4
