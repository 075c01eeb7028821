"""Moves between levels, against dense sums: every pair of levels, up to three tiers, every route; bytes by formula."""

from __future__ import annotations

import math
import threading

import pytest
import torch

from oracles import wire_threads as wt
from sparing.errors import RunError, UserError
from sparing.sharding.network.lanes import Handle
from sparing.sharding.network.mesh import Mesh, make_mesh
from sparing.sharding.network.wires import Wires

SHAPES = [(2, 2), (2, 3), (3, 2), (4, 2), (1, 3), (3, 1), (1, 1), (2, 2, 2), (2, 1, 3), (3, 2, 2), (4,)]
ROUTES = ["two-level", "overlapped", "flat"]


@pytest.mark.parametrize("gather", ROUTES)
@pytest.mark.parametrize("sizes", SHAPES, ids=str)
def test_every_move_equals_dense_sums(sizes: tuple[int, ...], gather: str) -> None:
    moves, length = wt.every(len(sizes)), 3 * math.prod(sizes)
    meshes = wt.meshes(sizes, Wires(gather=gather))  # type: ignore[arg-type]
    found = wt.together(lambda mesh: [wt.do(mesh, length, move) for move in moves], meshes)
    for rank, results in enumerate(found):
        for move, result in zip(moves, results, strict=True):
            assert torch.equal(result, wt.truth(rank, sizes, length, move)), (rank, move)


@pytest.mark.parametrize("gather", ["two-level", "overlapped"])
@pytest.mark.parametrize("sizes", SHAPES, ids=str)
def test_bytes_by_axis_are_the_formulas(sizes: tuple[int, ...], gather: str) -> None:
    moves, length = wt.every(len(sizes)), 3 * math.prod(sizes)

    def counted(mesh: Mesh) -> list[list[int]]:
        told = []
        for move in moves:
            mesh.counter.reset()
            wt.do(mesh, length, move)
            told.append([mesh.counter.sent[axis.name] for axis in mesh.axes])
        return told

    for rows in wt.together(counted, wt.meshes(sizes, Wires(gather=gather))):  # type: ignore[arg-type]
        assert rows == [[8 * count for count in wt.elements(sizes, length, move)] for move in moves]


def test_messages_are_the_hops_of_the_rings() -> None:
    """Three ranks in each of two groups: w - 1 messages for a reduction, twice as many for an all-reduce."""

    def counted(mesh: Mesh) -> dict[str, int]:
        wt.do_sync(mesh, 12, 0, 1)
        return mesh.counter.messages

    assert wt.together(counted, wt.meshes((3, 2))) == [{"intra": 2, "inter": 2}] * 6


def test_flat_ring_sends_over_the_world_only() -> None:
    def counted(mesh: Mesh) -> dict[str, int]:
        wt.do_gather(mesh, 24, 2, 0)
        return mesh.counter.sent

    assert wt.together(counted, wt.meshes((2, 3), Wires(gather="flat"))) == [{"intra": 0, "inter": 0, "world": 160}] * 6


@pytest.mark.parametrize("gather", ROUTES)
def test_many_submissions_from_both_lanes_at_once(gather: str) -> None:
    """All is queued before anything is waited for; each rank waits in another order."""
    sizes, length = (2, 3), 24
    moves = [move for move in wt.every(2) if move[0] != "gather"] * 4

    def work(mesh: Mesh) -> list[torch.Tensor]:
        handles = []
        for move in moves:
            x = wt.part_of(wt.value(mesh.rank, length), move[1], mesh.coords, sizes).clone()
            run = (
                mesh.transitions.reduce_step(x, move[2]) if move[0] == "reduce" else mesh.transitions.sync(x, *move[1:])
            )
            handles.append(run)
        order = torch.randperm(len(moves), generator=torch.Generator().manual_seed(mesh.rank)).tolist()
        done = {place: handles[place].wait() for place in order}
        return [done[place] for place in range(len(moves))]

    for rank, results in enumerate(wt.together(work, wt.meshes(sizes, Wires(gather=gather)))):  # type: ignore[arg-type]
        for move, result in zip(moves, results, strict=True):
            assert torch.equal(result, wt.truth(rank, sizes, length, move)), (rank, move)


@pytest.mark.parametrize("gather", ROUTES)
def test_overlapped_and_two_level_sums_have_the_same_bits(gather: str) -> None:
    """Real numbers: the overlapped route adds in the same order; a flat ring adds in another."""

    def work(mesh: Mesh) -> torch.Tensor:
        x = torch.randn(30, generator=torch.Generator().manual_seed(mesh.rank))
        return mesh.transitions.sync(x, 0, 2).wait().clone()

    first = wt.together(work, wt.meshes((3, 2)))
    other = wt.together(work, wt.meshes((3, 2), Wires(gather=gather)))  # type: ignore[arg-type]
    for a, b in zip(first, other, strict=True):
        torch.testing.assert_close(a, b, **({} if gather == "flat" else {"rtol": 0, "atol": 0}))


def test_replicas_of_an_all_reduce_have_the_same_bits() -> None:
    def work(mesh: Mesh) -> torch.Tensor:
        x = torch.randn(48, generator=torch.Generator().manual_seed(mesh.rank))
        return mesh.transitions.sync(x, 0, 0).wait().clone()

    for gather in ROUTES:
        first, *others = wt.together(work, wt.meshes((2, 3), Wires(gather=gather)))  # type: ignore[arg-type]
        assert all(torch.equal(first, other) for other in others)


def test_a_part_can_wait_for_another_and_be_followed() -> None:
    """A reduction, an addition in the lane, and the completion of the sum, all queued at once."""
    sizes, length = (2, 2), 16

    def work(mesh: Mesh) -> torch.Tensor:
        acc = torch.ones(length // 2, dtype=torch.float64)
        folded = mesh.transitions.reduce_step(wt.value(mesh.rank, length), 1, then=acc.add_)
        return mesh.transitions.sync(acc, 1, 2, after=folded).wait()

    for rank, result in enumerate(wt.together(work, wt.meshes(sizes))):
        # each of the two groups added its own one
        assert torch.equal(result, wt.synced(rank, sizes, length, 0, 2) + 2)


def test_one_process_moves_nothing_and_starts_no_thread() -> None:
    before = threading.active_count()
    with make_mesh() as mesh:
        x = torch.arange(6.0)
        moved = [mesh.transitions.gather_(x, 2, 0), mesh.transitions.reduce_step(x, 2), mesh.transitions.sync(x, 0, 1)]
        assert all(handle.done() for handle in moved)
        assert all(torch.equal(handle.wait(), x) for handle in moved)
        assert moved[0].wait() is x
        assert mesh.transitions.reduce_step(x, 1, then=lambda part: part + 1).wait().tolist() == [1, 2, 3, 4, 5, 6]
        assert mesh.counter.sent == {"intra": 0, "inter": 0}
        assert threading.active_count() == before


def test_nothing_to_move_still_comes_after_what_it_must_follow() -> None:
    with make_mesh() as mesh:
        first: Handle[None] = Handle()
        x = torch.zeros(2)
        second = mesh.transitions.sync(x, 2, 2, after=first, then=lambda part: part.add_(1))
        assert not second.done()
        assert x.sum() == 0
        first.deliver(None)
        assert second.wait().tolist() == [1, 1]


def test_an_error_before_a_part_is_the_error_of_the_whole() -> None:
    with make_mesh() as mesh:
        first: Handle[None] = Handle()
        second = mesh.transitions.gather_(torch.zeros(2), 2, 0, after=first)
        first.fail(RunError("the network fell down"))
        with pytest.raises(RunError, match="fell down"):
            second.wait()


def test_slices_are_views() -> None:
    meshes = wt.meshes((2, 3))
    x = torch.arange(12.0)
    for mesh in meshes:
        for to in range(3):
            cut = mesh.transitions.slice(x, 0, to)
            assert cut.untyped_storage().data_ptr() == x.untyped_storage().data_ptr()
            assert torch.equal(cut, wt.part_of(x, to, mesh.coords, mesh.sizes))


@pytest.mark.parametrize(("frm", "to"), [(1, 2), (3, 0), (0, -1)])
def test_levels_out_of_order_are_refused(frm: int, to: int) -> None:
    with pytest.raises(UserError, match="levels"):
        wt.meshes((2, 2))[0].transitions.gather_(torch.zeros(8), frm, to)


def test_a_length_that_ranks_cannot_share_is_refused() -> None:
    with pytest.raises(UserError, match="10 elements; 4 ranks cut it; pad it as Layout says"):
        wt.meshes((2, 2))[0].transitions.reduce_step(torch.zeros(10), 2)


@pytest.mark.parametrize("gather", ROUTES)
def test_syncs_that_come_back_later_are_whole(gather: str) -> None:
    """All reductions are queued before any gather, and the gathers in the other order."""
    sizes, length = (2, 3), 24

    def work(mesh: Mesh) -> list[torch.Tensor]:
        rests = [mesh.transitions.sync_out(wt.value(mesh.rank + k, length).clone(), 0, 0) for k in range(4)]
        handles = [rest() for rest in reversed(rests)]
        return [handle.wait() for handle in reversed(handles)]

    for results in wt.together(work, wt.meshes(sizes, Wires(gather=gather))):  # type: ignore[arg-type]
        for k, result in enumerate(results):
            assert torch.equal(result, torch.stack([wt.value(rank + k, length) for rank in range(6)]).sum(0))


def test_a_sync_that_goes_on_later_queues_its_reductions_only() -> None:
    def work(mesh: Mesh) -> list[dict[str, int]]:
        seen = []
        rest = mesh.transitions.sync_out(torch.ones(24), 0, 0)
        mesh.drain()
        seen.append(dict(mesh.counter.sent))
        rest().wait()
        return [*seen, dict(mesh.counter.sent)]

    # 24 floats on 2 × 2: halves inside, quarters out and back between; then halves inside again
    assert wt.together(work, wt.meshes((2, 2))) == [[{"intra": 48, "inter": 48}, {"intra": 96, "inter": 48}]] * 4
