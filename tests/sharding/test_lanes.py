"""Lanes run work in order, tell every error to every waiter, and never hang what comes after one."""

from __future__ import annotations

import os
import threading
import time

import pytest
import torch

from sparing.errors import RunError
from sparing.sharding.network.lanes import Lane, yielding


def test_work_runs_in_the_order_it_was_submitted() -> None:
    lane, seen = Lane("a"), list[int]()
    handles = [lane.submit(lambda k=k: seen.append(k)) for k in range(500)]  # type: ignore[misc]
    for handle in handles:
        handle.wait()
    assert seen == list(range(500))
    lane.close()


def test_a_handle_gives_its_value_to_every_thread_that_waits() -> None:
    lane, found = Lane("a"), list[int]()
    handle = lane.submit(lambda: (time.sleep(0.05), 7)[1])
    assert not handle.done()
    threads = [threading.Thread(target=lambda: found.append(handle.wait())) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(5)
    assert found == [7] * 4
    assert handle.done()
    assert handle.wait() == 7
    lane.close()


def test_parts_on_two_lanes_follow_each_other() -> None:
    """Hundreds of pairs, half from the first lane to the second and half back, all queued before any has run."""
    lanes, seen, start = (Lane("a"), Lane("b")), list[tuple[int, str]](), threading.Event()
    lanes[0].submit(start.wait)
    handles = []
    for k in range(300):
        first, second = lanes if k % 2 else lanes[::-1]
        before = first.submit(lambda k=k: seen.append((k, "first")))  # type: ignore[misc]
        handles.append(second.submit(lambda k=k, before=before: (before.wait(), seen.append((k, "second")))))  # type: ignore[misc]
    start.set()
    for handle in handles:
        handle.wait()
    assert all(seen.index((k, "first")) < seen.index((k, "second")) for k in range(300))
    for lane in lanes:
        lane.close()


def test_an_error_reaches_every_wait_and_stops_what_comes_later() -> None:
    lane = Lane("inter")

    def broken() -> None:
        raise ValueError("cable cut\nsecond line")

    first, ran = lane.submit(broken), list[int]()
    later = [lane.submit(lambda: ran.append(1)) for _ in range(3)]
    for _ in range(2):
        with pytest.raises(ValueError, match="cable cut"):
            first.wait()
    for handle in later:
        with pytest.raises(RunError, match=r"lane inter had stopped: cable cut$"):
            handle.wait()
    with pytest.raises(RunError, match="cable cut"):
        lane.drain()
    assert not ran
    lane.close()


def test_an_error_crosses_to_the_lane_that_waits_for_it() -> None:
    first, second = Lane("a"), Lane("b")
    broken = first.submit(lambda: 1 / 0)
    behind = second.submit(broken.wait)
    for handle in (behind, second.submit(lambda: 0)):
        with pytest.raises((ZeroDivisionError, RunError), match="division"):
            handle.wait()
    first.close()
    second.close()


def test_a_closed_lane_finishes_its_queue_and_takes_no_more() -> None:
    lane, seen = Lane("a"), list[int]()
    for k in range(20):
        lane.submit(lambda k=k: seen.append(k))  # type: ignore[misc]
    lane.close()
    assert seen == list(range(20))
    with pytest.raises(RunError, match="closed"):
        lane.submit(lambda: None)
    lane.close()


def test_a_lane_without_work_has_no_thread() -> None:
    before, lane = threading.active_count(), Lane("a")
    lane.drain()
    assert threading.active_count() == before
    lane.submit(lambda: None).wait()
    assert threading.active_count() == before + 1
    lane.close()
    assert threading.active_count() == before


def test_work_runs_without_autograd() -> None:
    lane = Lane("a")
    weight = torch.ones(2, requires_grad=True)
    assert not lane.submit(lambda: weight * 2).wait().requires_grad
    assert (weight * 2).requires_grad
    lane.close()


needs_batch = pytest.mark.skipif(not hasattr(os, "SCHED_BATCH"), reason="Linux only")


def policy_within() -> list[int]:
    """Of a thread that begins in this one."""
    found: list[int] = []
    thread = threading.Thread(target=lambda: found.append(os.sched_getscheduler(0)))
    thread.start()
    thread.join()
    return found


@needs_batch
def test_threads_that_begin_within_yield_and_those_after_do_not() -> None:
    assert policy_within() == [os.SCHED_OTHER]
    with yielding():
        assert policy_within() == [os.SCHED_BATCH]
    assert policy_within() == [os.SCHED_OTHER]
    with pytest.raises(ZeroDivisionError), yielding():
        raise ZeroDivisionError
    assert os.sched_getscheduler(0) == os.SCHED_OTHER


@needs_batch
def test_the_thread_of_a_lane_yields() -> None:
    lane = Lane("a")
    assert lane.submit(lambda: os.sched_getscheduler(0)).wait() == os.SCHED_BATCH
    lane.close()


@needs_batch
def test_a_policy_of_the_users_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getscheduler", lambda _: os.SCHED_FIFO)
    monkeypatch.setattr(os, "sched_setscheduler", lambda *_: pytest.fail("it was changed"))
    with yielding():
        pass


@needs_batch
def test_a_sandbox_that_forbids_it_is_no_error(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise PermissionError

    monkeypatch.setattr(os, "sched_setscheduler", refuse)
    with yielding():
        assert policy_within() == [os.SCHED_OTHER]


def test_a_system_without_such_policies_is_no_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(os, "sched_getscheduler", raising=False)
    with yielding():
        pass
