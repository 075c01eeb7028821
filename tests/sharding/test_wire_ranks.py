"""Six real gloo processes, started once: rings, every move on every wire, agreement, a probe, and a rank that dies."""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch

from oracles import wire_ranks as wr
from oracles import wire_threads as wt

# slow: six processes on few cores, about ten seconds of processor time, once for all tests
pytestmark = [pytest.mark.processes, pytest.mark.slow]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return tmp_path_factory.mktemp("ranks")


@pytest.fixture(scope="module")
def ranks(folder: Any) -> list[dict[str, Any]]:
    return wr.answers(folder)


@pytest.mark.parametrize("name", wr.LENGTHS)
@pytest.mark.parametrize("dtype", wr.DTYPES, ids=str)
def test_rings_over_gloo(ranks: list[dict[str, Any]], dtype: torch.dtype, name: str) -> None:
    if name == "long" and dtype is not torch.float64:
        return
    lengths, key = wr.LENGTHS[name], f"{str(dtype).removeprefix('torch.')} {name}"
    total = [
        torch.stack([wr.chunks(q, lengths, dtype)[c] for q in range(wr.WORLD)]).sum(0).to(dtype)
        for c in range(wr.WORLD)
    ]
    for rank, answer in enumerate(ranks):
        gathered, sent = answer["rings"][f"all_gather_ {key}"]
        assert all(torch.equal(chunk, wr.chunks(c, lengths, dtype)[c]) for c, chunk in enumerate(gathered))
        assert sent[0] == dtype.itemsize * (sum(lengths) - lengths[(rank + 1) % wr.WORLD])
        mine, sent = answer["rings"][f"reduce_scatter_ {key}"]
        assert torch.equal(mine, total[rank])
        assert sent[0] == dtype.itemsize * (sum(lengths) - lengths[rank])
        both, _ = answer["rings"][f"all_reduce_ {key}"]
        assert all(torch.equal(chunk, expected) for chunk, expected in zip(both, total, strict=True))


@pytest.mark.parametrize("wires", wr.WIRES)
@pytest.mark.parametrize("sizes", wr.SHAPES, ids=str)
def test_every_move_over_gloo_equals_dense_sums(
    ranks: list[dict[str, Any]], sizes: tuple[int, ...], wires: str
) -> None:
    """So two-level = overlapped = flat = built-in; bytes of the two that go by axis are the closed forms."""
    length = 2 * wr.WORLD
    for move in wt.every(len(sizes)):
        for rank, answer in enumerate(ranks):
            result, sent = answer["moves"][f"{sizes} {wires} {move}"]
            assert torch.equal(result, wt.truth(rank, sizes, length, move)), (rank, move)
            if wires in {"ring", "overlapped"}:
                assert sent == [8 * count for count in wt.elements(sizes, length, move)]


def test_many_submissions_waited_for_in_another_order(ranks: list[dict[str, Any]]) -> None:
    sizes = (2, 3)
    for rank, answer in enumerate(ranks):
        me = wt.coordinates(rank, sizes)
        for k, (reduced, whole) in enumerate(
            zip(answer["queued"]["reduced"], answer["queued"]["gathered"], strict=True)
        ):
            level = 1 + k % 2
            peers = [q for q in range(wr.WORLD) if wt.coordinates(q, sizes)[level:] == me[level:]]
            total = torch.stack([wt.value(q + k, 60) for q in peers]).sum(0)
            assert torch.equal(reduced, wt.part_of(total, level, me, sizes))
            assert torch.equal(whole, wt.value(k, 60))


def test_equal_facts_agree_and_unequal_ones_name_their_ranks(ranks: list[dict[str, Any]]) -> None:
    for answer in ranks:
        facts = answer["facts"]
        assert facts["equal"] == facts["after"] == "nothing"
        assert facts["plan"].startswith("UserError: start: got plan 'IIG' on ranks 0, 1, 2, 3, 5, 'NNG' on rank 4; ")
        assert "0 on ranks 0, 2, 4, 1 on ranks 1, 3, 5" in facts["one value"]
        assert "b 2 on ranks 1, 2, 3, 4, 5, nothing on rank 0" in facts["missing"]


def test_replicas_that_differ_are_named(ranks: list[dict[str, Any]]) -> None:
    for answer in ranks:
        assert answer["facts"]["replicas"] == "nothing"
        assert "replicas differ: v on rank 5:" in answer["facts"]["odd"]


def test_what_a_mesh_tells_of_its_ranks(ranks: list[dict[str, Any]]) -> None:
    for rank, answer in enumerate(ranks):
        facts, (j, i) = answer["facts"], (rank % 2, rank // 2)
        assert facts["rows"].tolist() == [[q, 10.0 * q] for q in range(wr.WORLD)]
        assert facts["broadcast"].tolist() == [2.0] * 3
        line, column = (2 * i, 2 * i + 1), (j, 2 + j, 4 + j)
        assert facts["place"] == ((j, i), line, column, [line, column])
        assert facts["device mesh"] == [j, i]
        assert "4 groups of 2 ranks; that is not the world size 6" in facts["refused"]


def test_a_throttled_network_is_measured_as_it_was_set(ranks: list[dict[str, Any]]) -> None:
    """The throttle only ever adds time, so a loaded machine can make a link look slower, but not faster."""
    told = {answer["measured"]["paced"] for answer in ranks}
    assert len(told) == 1
    machine = told.pop()
    intra, inter = machine.axes
    assert machine.crowding == wr.WORLD / len(os.sched_getaffinity(0))
    assert all(axis.work > 1e-6 and axis.work_per_byte >= 0 for axis in (intra, inter))
    assert 0 < machine.per_pass < 0.1
    assert machine.per_step >= 0
    assert intra.overhead >= 0
    assert (intra.name, intra.size, inter.name, inter.size) == ("intra", 2, "inter", 3)
    for axis, latency, rate in ((intra, 4e-3, 4e7), (inter, 8e-3, 1e7)):
        for size in (1 << 12, 1 << 20):  # what was measured
            assert axis.latency + size / axis.rate > 0.8 * (latency + size / rate)


def test_all_ranks_get_the_same_matrix_of_rates(ranks: list[dict[str, Any]]) -> None:
    first = torch.tensor(ranks[0]["measured"]["rates"])
    assert torch.equal(first, first.T)
    assert (first > 0).all()
    assert all(torch.equal(torch.tensor(answer["measured"]["rates"]), first) for answer in ranks)


def test_a_rank_that_dies_ends_all_others_soon(ranks: list[dict[str, Any]]) -> None:
    for answer in ranks:
        assert all(told.startswith("RunError: ") for told in answer["lost"]["errors"])
        assert answer["lost"]["seconds"] < 300  # the group itself would wait for twenty minutes
    # rank 4 shares the group with it
    assert "over axis 'intra': rank 4 waited for rank 5: " in ranks[4]["lost"]["errors"][0]


def test_a_rank_that_never_starts_is_named(ranks: list[dict[str, Any]], folder: Any) -> None:
    del ranks
    for rank in range(2):
        told = torch.load(folder / f"absent-{rank}.pt")
        assert "rank 2 did not come within 3 s" in told["error"]
        assert told["seconds"] < 300  # torch itself would wait for thirty minutes
