"""Who is lost when the network breaks: the ranks that are left ask all, and end with a line that names the others."""

from __future__ import annotations

import contextlib
import threading
import time
from typing import Any

from torch import distributed as dist
from torch.distributed import PrefixStore  # type: ignore[attr-defined]  # not in its list of names

from sparing.errors import RunError
from sparing.sharding.network.mesh import Mesh
from sparing.sharding.network.rendezvous import name_ranks

POLL, WAIT = 0.2, 3.0  # how often a rank looks whether it is asked, and how long who asks waits for answers (s)


class RankMonitor:
    """Which ranks are still there, asked after the network broke: one that does not answer is dead."""

    def __init__(self, mesh: Mesh) -> None:
        """Begin to listen; one process alone has nobody to listen to."""
        self.rank, self.world, self._over = mesh.rank, mesh.world, threading.Event()
        self._store: Any = None
        if self.world > 1:
            self._store = PrefixStore("sparing/monitor", dist.distributed_c10d._get_default_store())
            # a thread answers, because the main one may hang in a message to a rank that is itself asking
            threading.Thread(target=self._listen, name="rank monitor", daemon=True).start()

    def end(self) -> None:
        """Stop listening."""
        self._over.set()

    def _listen(self) -> None:
        with contextlib.suppress(RuntimeError):  # the store went with its process
            while not self._over.wait(POLL):
                # asked again and again: a blocking ``get`` would hold the store's one connection, which the main thread
                # needs too
                if self._store.check(["alarm"]):
                    self._store.set(f"here/{self.rank}", "yes")
                    return

    def report_failure(self, error: BaseException) -> None:
        """Say why this rank ends to those who wait for it; of failures of the network they learn by themselves."""
        if self._store is not None and not of_network(error):
            with contextlib.suppress(RuntimeError):
                self._store.set(f"failed/{self.rank}", first_line(error))

    def lost(self, error: BaseException) -> str:
        """Ask all ranks, if an error is of the network; a line that names who is lost, empty for other errors."""
        if self._store is None or not of_network(error):
            return ""
        do = "run the same command with --resume to go on from the last checkpoint"
        try:
            silent = self._silent()
            failed = {rank: f"failed/{rank}" for rank in range(self.world) if self._store.check([f"failed/{rank}"])}
            said = [f"rank {rank} failed: {self._store.get(key).decode()}" for rank, key in failed.items()]
        except RuntimeError:
            return f"rank 0 is gone, its store does not answer; {do}"
        if said:
            return "; ".join(said)
        if silent:
            return f"{name_ranks(silent)} {'is' if len(silent) == 1 else 'are'} gone; {do}"
        return f"the network broke ({first_line(error)}); {do}"

    def _silent(self) -> list[int]:
        """Ranks that do not answer."""
        keys = [f"here/{rank}" for rank in range(self.world)]
        self._store.set(keys[self.rank], "yes")
        self._store.set("alarm", "yes")
        until = time.monotonic() + WAIT
        while time.monotonic() < until and not self._store.check(keys):
            time.sleep(POLL)
        return [rank for rank, key in enumerate(keys) if not self._store.check([key])]


def of_network(error: BaseException) -> bool:
    """Whether an error says that a message did not get through."""
    if isinstance(error, RunError):
        # divergence and the like are kinds of their own
        return type(error) is RunError
    words = ("gloo", "NCCL", "TCPStore", "Connection", "onnection reset", "imed out")
    return isinstance(error, RuntimeError) and any(word in str(error) for word in words)


def first_line(error: BaseException) -> str:
    """The first line of what an error says, or the name of its kind."""
    return (str(error).strip() or type(error).__name__).splitlines()[0][:300]
