"""Shapes that fit the world, ranks that meet or are named, and who holds which slice."""

from __future__ import annotations

import os
import threading
import time
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed import HashStore  # type: ignore[attr-defined]  # a builtin, not in its list of names

from oracles import wire_threads as wt
from oracles.processes import answers
from patience import PATIENCE
from sparing.errors import RunError, UserError
from sparing.sharding.layout import Layout
from sparing.sharding.network import rendezvous as meeting
from sparing.sharding.network.mesh import make_mesh, mesh_sizes
from sparing.sharding.network.rendezvous import join, rendezvous


@pytest.mark.parametrize(
    ("world", "given", "expected"),
    [
        (8, {"groups": 2, "per_group": 4}, (4, 2)),
        (8, {"groups": 2}, (4, 2)),
        (8, {"per_group": 2}, (2, 4)),
        (8, {}, (8, 1)),
        (1, {}, (1, 1)),
        (12, {"sizes": [2, 3, 2]}, (2, 3, 2)),
        (4, {"sizes": (4,)}, (4,)),
    ],
)
def test_sizes(
    world: int, given: dict[str, object], expected: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("LOCAL_WORLD_SIZE", raising=False)
    assert mesh_sizes(world, **given) == expected  # type: ignore[arg-type]


def test_a_group_is_a_machine_unless_said_otherwise(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    assert mesh_sizes(6) == (2, 3)


@pytest.mark.parametrize(
    ("world", "given", "told"),
    [
        (
            8,
            {"groups": 3, "per_group": 2},
            "3 groups of 2 ranks; that is not the world size 8; pass groups . per_group = 8",
        ),
        (8, {"groups": 3}, "that is not the world size 8"),
        (4, {"per_group": 8}, "0 groups of 8 ranks"),
        (4, {"groups": 0}, "world size 4"),
        (4, {"groups": -2, "per_group": -2}, "world size 4"),
        (8, {"sizes": [3, 2]}, r"\[3, 2\]; there are 8 ranks"),
        (16, {"sizes": [2, 2, 2, 2]}, "one to three axes"),
        (4, {"sizes": [4, 1], "groups": 1}, "one or the other"),
        (4, {"sizes": []}, "one to three axes"),
    ],
)
def test_shapes_that_do_not_fit_are_refused(world: int, given: dict[str, object], told: str) -> None:
    with pytest.raises(UserError, match=told):
        mesh_sizes(world, **given)  # type: ignore[arg-type]


def test_one_process_is_a_mesh_without_a_process_group() -> None:
    with make_mesh() as mesh:
        assert (mesh.sizes, mesh.coords, mesh.rank, mesh.world, mesh.tiers) == ((1, 1), (0, 0), 0, 1, 2)
        assert [axis.name for axis in mesh.axes] == ["intra", "inter"]
        assert mesh.control is None
        assert mesh.device_mesh is None
        assert mesh.backend == "none"
        assert mesh.gather_scalars(torch.tensor([1.0, 2.0])).tolist() == [[1.0, 2.0]]
        assert mesh.broadcast_(torch.ones(2)).tolist() == [1.0, 1.0]
        mesh.drain()
    with make_mesh(sizes=(1, 1, 1)) as mesh:
        assert [axis.name for axis in mesh.axes] == ["intra", "middle", "inter"]
    with pytest.raises(UserError, match="world size 1"):
        make_mesh(groups=2, per_group=2)


@pytest.mark.parametrize("sizes", [(2, 3), (3, 2), (2, 2, 2)], ids=str)
def test_holders_make_one_tensor_and_replicas_hold_the_same_slice(sizes: tuple[int, ...]) -> None:
    meshes = wt.meshes(sizes)
    layout = Layout(sizes=sizes, length=24)
    slices = {
        (level, mesh.rank): layout.slice(level, mesh.coords) for mesh in meshes for level in range(len(sizes) + 1)
    }
    for mesh in meshes:
        for level in range(len(sizes) + 1):
            same = tuple(q for q in range(mesh.world) if slices[level, q] == slices[level, mesh.rank])
            assert mesh.replicas(level) == same
            held = sorted(slices[level, q] for q in mesh.holders(level))
            assert mesh.rank in mesh.holders(level)
            assert [start for start, _ in held] == list(range(0, 24, 24 // mesh.inside(level)))


def shaped(machines: list[int], given: list[dict[str, int]]) -> list[Any]:
    """The sizes of a mesh of ranks whose machines have so many, and what ranks that ask for others are told."""
    rank = dist.get_rank()
    os.environ["LOCAL_WORLD_SIZE"] = str(machines[rank])
    with make_mesh() as mesh:
        found = [mesh.sizes, mesh.gather_scalars(torch.tensor([rank])).flatten().tolist()]
    try:
        make_mesh(**given[rank])
    except UserError as error:
        found.append(str(error))
    return found


@pytest.mark.processes
@pytest.mark.slow
def test_unequal_machines_are_one_group_and_other_sizes_on_other_ranks_are_refused() -> None:
    """A machine of two ranks and one of one."""
    told = answers(3, shaped, [2, 2, 1], [{"groups": 3}, {"groups": 3}, {"groups": 1}])
    line = "mesh: got sizes [1, 3] on ranks 0, 1, [3, 1] on rank 2; all ranks make one mesh together; pass the same"
    assert [(sizes, ranks) for sizes, ranks, _ in told] == [((3, 1), [0, 1, 2])] * 3
    assert all(words.startswith(line) for *_, words in told)


def gather_at(store: HashStore, present: list[int], world: int, timeout: float) -> dict[int, str]:
    """What each rank that comes hears."""
    heard: dict[int, str] = {}

    def run(rank: int) -> None:
        try:
            rendezvous(store, rank, world, timeout)
            heard[rank] = "all"
        except RunError as error:
            heard[rank] = str(error)

    threads = [threading.Thread(target=run, args=(rank,)) for rank in present]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(PATIENCE)
    return heard


def store() -> HashStore:
    made = HashStore()
    made.set_timeout(timedelta(seconds=PATIENCE))
    return made


def test_all_ranks_meet() -> None:
    assert gather_at(store(), [0, 1, 2], 3, PATIENCE) == dict.fromkeys(range(3), "all")


@pytest.mark.parametrize(
    ("present", "missing"), [([0, 1, 3], "rank 2"), ([0, 2], "ranks 1, 3"), ([0], "ranks 1, 2, 3")]
)
def test_whoever_does_not_come_is_named_to_all(present: list[int], missing: str) -> None:
    start = time.monotonic()
    heard = gather_at(store(), present, 4, 2.0)
    assert sorted(heard) == present
    for told in heard.values():
        assert f"{missing} did not come within 2 s" in told
    assert time.monotonic() - start < 60  # the store itself would wait for twenty minutes


def test_without_rank_0_there_is_no_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(meeting, "GRACE", 0.2)
    for told in gather_at(store(), [1, 2], 3, 0.3).values():
        assert "rank 0 gave no answer within 0.5 s" in told


def test_an_environment_that_says_half_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RANK", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(UserError, match="no RANK, MASTER_ADDR, MASTER_PORT"):
        make_mesh()
    monkeypatch.setenv("RANK", "first")
    monkeypatch.setenv("MASTER_ADDR", "localhost")
    monkeypatch.setenv("MASTER_PORT", "1")
    with pytest.raises(UserError, match="integers"):
        join(1)
