"""One first-in-first-out thread per axis of the network: its collectives run in the order they were submitted."""

from __future__ import annotations

import contextlib
import os
import queue
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import torch

from sparing.errors import RunError

T = TypeVar("T")


class Handle(Generic[T]):
    """A result that a lane will deliver; ``wait`` may be called often and from any thread."""

    __slots__ = ("_arrived", "_error", "_value")

    def __init__(self) -> None:
        # Held until the result is there: what a threading.Event does, without its condition variable.
        self._arrived = threading.Lock()
        self._arrived.acquire()
        self._error: BaseException | None = None
        self._value: T

    @classmethod
    def of(cls, value: T) -> Handle[T]:
        """One that is already done."""
        handle = cls()
        handle.deliver(value)
        return handle

    def deliver(self, value: T) -> None:
        """Hand over the result; once."""
        self._value = value
        self._arrived.release()

    def fail(self, error: BaseException) -> None:
        """Hand over an error, which every ``wait`` raises."""
        self._error = error
        self._arrived.release()

    def done(self) -> bool:
        """Whether ``wait`` would return (or raise) at once."""
        return not self._arrived.locked()

    def wait(self) -> T:
        """Block until done; return the value, or raise the error (``RunError`` if the lane had failed before)."""
        with self._arrived:
            pass
        if self._error is not None:
            raise self._error
        return self._value


@dataclass(frozen=True, slots=True)
class _Work:
    """What a lane is to do."""

    function: list[Callable[[], Any]]  # one, taken out when it is called
    handle: Handle[Any]


class Lane:
    """A thread that runs what it is given in order, for tensors on CPU; those on CUDA have ``streams``.

    Deadlock rule: a collective of two axes enqueues both parts at submit time, the second blocking on the handle of the
    first at the head of its lane; and every rank submits in the same order. Then each part waits only for parts that
    were submitted earlier, on all ranks. After an error everything submitted later fails at once with that cause:
    this rank is out of order, and a collective that its peers do not match would hang or mix data.
    """

    def __init__(self, name: str) -> None:
        self.name = name
        self._work: queue.SimpleQueue[_Work | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._failure: BaseException | None = None
        self._closed = False

    def submit(self, function: Callable[[], T]) -> Handle[T]:
        """Queue a function to run in the lane's thread, without autograd."""
        if self._closed:
            raise RunError(f"lane {self.name} is closed; make a new mesh")
        handle: Handle[T] = Handle()
        self._work.put(_Work([function], handle))
        if self._thread is None:
            self._thread = threading.Thread(target=self._loop, name=f"lane {self.name}", daemon=True)
            with yielding():
                self._thread.start()
        return handle

    def drain(self) -> None:
        """Wait until all that was submitted is done, and raise the first error there was."""
        if self._thread is not None and not self._closed:
            self.submit(lambda: None).wait()

    def close(self, timeout: float = 5.0) -> None:
        """Finish what is queued and end the thread; after ``timeout`` seconds give up on one in a dead network."""
        self._closed = True
        if self._thread is not None:
            self._work.put(None)
            self._thread.join(timeout)
            self._thread = None

    def _loop(self) -> None:
        # grad mode is per thread
        torch.set_grad_enabled(False)
        while (work := self._work.get()) is not None:
            self._run(work)
            # or tensors of the last collective would live until the next one
            del work

    def _run(self, work: _Work) -> None:
        handle = work.handle
        if self._failure is not None:
            first_line = (str(self._failure) or type(self._failure).__name__).splitlines()[0]
            handle.fail(RunError(f"lane {self.name} had stopped: {first_line}"))
            return
        try:
            # popped, so that what it holds is freed before any waiter sees that it is done
            value = work.function.pop()()
        except BaseException as error:  # noqa: BLE001  # every waiter must get it, whatever it is
            self._failure = error
            handle.fail(error)
            return
        handle.deliver(value)


@contextlib.contextmanager
def yielding() -> Iterator[None]:
    """Let threads that begin within not push a running thread off its core when they wake: Linux's ``SCHED_BATCH``.

    While a thread of ours sends, it holds the lock of the connection, and gloo's thread, woken by what arrives on the
    same connection, asks for that lock again and again without rest (``Pair::handleEvents``). Where threads crowd on
    few cores, it preempts the sender and spins until its time slice is over. Threads of this policy preempt nobody.
    """
    changed = False
    # suppressed: not Linux, or a sandbox that forbids it
    with contextlib.suppress(AttributeError, OSError):
        # any other policy is a choice of the user
        if os.sched_getscheduler(0) == os.SCHED_OTHER:
            os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))
            changed = True
    try:
        yield
    finally:
        if changed:
            os.sched_setscheduler(0, os.SCHED_OTHER, os.sched_param(0))
