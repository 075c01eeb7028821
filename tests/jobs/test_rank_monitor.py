"""The monitor over a store of threads: who is silent is lost, and who has said why it ended is quoted."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from torch.distributed import HashStore

from sparing.errors import RunError, UserError
from sparing.jobs import rank_monitor
from sparing.jobs.rank_monitor import RankMonitor, of_network
from sparing.jobs.step import DivergedError


@pytest.fixture
def monitors(monkeypatch: pytest.MonkeyPatch) -> list[RankMonitor]:
    """Those of three ranks in one process."""
    store = HashStore()
    monkeypatch.setattr(rank_monitor.dist.distributed_c10d, "_get_default_store", lambda: store)
    monkeypatch.setattr(rank_monitor, "WAIT", 1.0)
    monkeypatch.setattr(rank_monitor, "POLL", 0.02)
    meshes: list[Any] = [SimpleNamespace(rank=rank, world=3) for rank in range(3)]
    return [RankMonitor(mesh) for mesh in meshes]


BROKEN = RunError("all-gather over axis 'inter': rank 0 waited for rank 1: Connection closed")


def test_a_rank_that_does_not_answer_is_named_by_all_others(monitors: list[RankMonitor]):
    monitors[1].end()  # killed
    lines = [monitors[rank].lost(BROKEN) for rank in (0, 2)]
    assert lines == [lines[0]] * 2
    assert lines[0].startswith("rank 1 is gone; run the same command with --resume")


def test_a_rank_that_failed_by_itself_is_quoted(monitors: list[RankMonitor]):
    monitors[2].report_failure(UserError("disk", got="full", why="it is", do="free it"))
    assert monitors[0].lost(BROKEN) == "rank 2 failed: disk: got full; it is; free it"


def test_a_network_that_broke_with_everybody_there(monitors: list[RankMonitor]):
    assert "Connection closed" in monitors[0].lost(BROKEN)
    assert "is gone" not in monitors[0].lost(BROKEN)


def test_of_other_errors_nobody_is_asked(monitors: list[RankMonitor]):
    mistake = UserError("a", got=1, why="b", do="c")
    for error in (mistake, DivergedError("step 2"), RuntimeError("shape"), KeyboardInterrupt()):
        assert monitors[0].lost(error) == ""
        assert not of_network(error)
    assert of_network(RuntimeError("[..gloo/transport/tcp/pair.cc:1] Connection closed by peer"))


def test_alone_nobody_is_lost():
    mesh: Any = SimpleNamespace(rank=0, world=1)
    alone = RankMonitor(mesh)
    alone.report_failure(BROKEN)
    assert alone.lost(BROKEN) == ""
