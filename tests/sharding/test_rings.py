"""Ring collectives over threads, against dense sums: exact indices, uneven and empty chunks, every type; every byte."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from oracles import wire_threads as wt
from sparing.errors import RunError
from sparing.sharding.network.mesh import Mesh
from sparing.sharding.network.rings import PART_BYTES, Counter, Ring

DTYPES = [torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.int64, torch.uint8]
LENGTHS = [
    [3],
    [2, 2],
    [5, 0],
    [0, 0, 0],
    [1, 4, 2],
    [3, 0, 5, 1],
    [PART_BYTES // 4 + 3, PART_BYTES // 2, 1],
    [PART_BYTES // 2 + 3, PART_BYTES],
]


def chunks(rank: int, lengths: list[int], dtype: torch.dtype) -> list[torch.Tensor]:
    return [wt.value(rank + 2 * c, length, dtype) for c, length in enumerate(lengths)]


def on_a_ring(width: int, work: Callable[[Ring, Counter], Any]) -> list[Any]:
    def run(mesh: Mesh) -> Any:
        return work(Ring(mesh.axes[0], mesh.counter), mesh.counter)

    return wt.together(run, wt.meshes((width, 1)))


def dense(width: int, lengths: list[int], dtype: torch.dtype) -> list[torch.Tensor]:
    return [
        torch.stack([wt.value(rank + 2 * c, length, dtype) for rank in range(width)]).sum(0).to(dtype)
        for c, length in enumerate(lengths)
    ]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("lengths", LENGTHS, ids=str)
def test_collectives_are_dense_sums_and_send_what_they_must(lengths: list[int], dtype: torch.dtype) -> None:
    def work(ring: Ring, counter: Counter) -> list[list[torch.Tensor]]:
        gathered, scattered, reduced = (chunks(ring.me, lengths, dtype) for _ in range(3))
        whole = sum(lengths) * dtype.itemsize
        ring.all_gather_(gathered)
        assert counter.sent["intra"] == whole - gathered[(ring.me + 1) % ring.width].nbytes
        counter.reset()
        assert ring.reduce_scatter_(scattered) is scattered[ring.me]
        assert counter.sent["intra"] == whole - scattered[ring.me].nbytes
        ring.all_reduce_(reduced)
        return [gathered, [scattered[ring.me]], reduced]

    owned = [wt.value(3 * c, length, dtype) for c, length in enumerate(lengths)]
    sums = dense(len(lengths), lengths, dtype)
    for rank, found in enumerate(on_a_ring(len(lengths), work)):
        for got, expected in zip(found, (owned, [sums[rank]], sums), strict=True):
            assert all(torch.equal(a, b) for a, b in zip(got, expected, strict=True))


def test_messages_are_counted_once_a_step_however_long() -> None:
    def work(ring: Ring, counter: Counter) -> tuple[int, int]:
        ring.reduce_scatter_([torch.zeros(PART_BYTES), torch.zeros(PART_BYTES), torch.zeros(0)])
        return counter.messages["intra"], counter.sent["intra"]

    # chunk 2 is empty: ranks 1 and 0 send it in steps 0 and 1, and send nothing
    assert on_a_ring(3, work) == [(1, 4 * PART_BYTES), (1, 4 * PART_BYTES), (2, 8 * PART_BYTES)]


@pytest.mark.parametrize(
    "lengths", [[PART_BYTES // 2, PART_BYTES // 2], [PART_BYTES // 2 + 3, PART_BYTES], [PART_BYTES // 2] * 3], ids=str
)
def test_a_receipt_is_posted_before_the_neighbours_can_miss_it(lengths: list[int]) -> None:
    """All ranks walk in step: where mine sends part k of a step before its receipt is posted, so does its neighbour,
    whose message has then to be asked for, a round trip on a link that is full."""

    def work(ring: Ring, counter: Counter) -> list[tuple[str, int]]:
        events: list[tuple[str, int]] = []
        receive, send = ring.receive, ring.send
        ring.receive = lambda into, tag: events.append(("receipt", tag)) or receive(into, tag)  # type: ignore[method-assign]
        ring.send = lambda part, tag: events.append(("message", tag)) or send(part, tag)  # type: ignore[method-assign]
        ring.all_reduce_(chunks(ring.me, lengths, torch.float32))
        return events

    for events in on_a_ring(len(lengths), work):
        for at, (kind, tag) in enumerate(events):
            if kind == "message":
                before = events[:at]
                posted, all_of_them = before.count(("receipt", tag)), events.count(("receipt", tag))
                assert posted > before.count(("message", tag)) or posted == all_of_them


def test_a_counter_starts_at_zero_for_every_axis_and_returns_there() -> None:
    counter = Counter(["intra", "inter"])
    counter.add("inter", 12)
    counter.add("inter", 3)
    assert counter.sent == {"intra": 0, "inter": 15}
    assert counter.messages == {"intra": 0, "inter": 2}
    counter.reset()
    assert counter.sent == counter.messages == {"intra": 0, "inter": 0}


def test_an_error_of_the_network_names_axis_and_neighbours() -> None:
    mesh = wt.meshes((3, 1))[1]

    def broken(*_: object) -> None:
        raise RuntimeError("[/src/gloo/pair.cc:1] Connection closed by peer [1.2.3.4]. This is typically bad\nmore")

    mesh.axes[0].group.recv = broken  # type: ignore[union-attr, method-assign, assignment]
    message = r"all-gather over axis 'intra': rank 1 waited for ranks 0, 2: Connection closed by peer \[1.2.3.4\]$"
    with pytest.raises(RunError, match=message):
        Ring(mesh.axes[0], mesh.counter).all_gather_([torch.zeros(1)] * 3)
