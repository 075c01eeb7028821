"""Who is lost when the network breaks: the ranks that are left ask all, and end with a line that names the others."""

from __future__ import annotations

import contextlib
import threading
import time
from typing import Any

from torch import distributed as dist
from torch.distributed import PrefixStore  # type: ignore[attr-defined]  # not in its list of names

from sparing.errors import RunError
from sparing.sharding.mesh import Mesh
from sparing.sharding.rendezvous import name_ranks

POLL, ROLL = 0.2, 3.0
"""How often a rank looks whether the roll is called, and how long the caller waits for answers (s)."""


class Roll:
    """Who is still there, asked after the network broke.

    A thread answers for its process, because the main one may hang in a message to somebody who is asking himself. So
    a rank that does not answer is dead, whichever neighbour noticed it first.
    """

    def __init__(self, mesh: Mesh) -> None:
        """Begin to listen; alone there is nothing to hear.

        Args:
            mesh: All ranks.
        """
        self.rank, self.world, self._over = mesh.rank, mesh.world, threading.Event()
        self._store: Any = None
        if self.world > 1:
            self._store = PrefixStore("sparing/roll", dist.distributed_c10d._get_default_store())
            threading.Thread(target=self._listen, name="roll", daemon=True).start()

    def end(self) -> None:
        """Stop listening."""
        self._over.set()

    def _listen(self) -> None:
        with contextlib.suppress(RuntimeError):  # the store went with its process
            while not self._over.wait(POLL):
                if self._store.check(["alarm"]):
                    self._store.set(f"here/{self.rank}", "yes")
                    return

    def tell(self, error: BaseException) -> None:
        """Leave a word for those who will wait for me in vain.

        Args:
            error: Why I end; of the network's failures others are told by whom they miss.
        """
        if self._store is not None and not of_network(error):
            with contextlib.suppress(RuntimeError):
                self._store.set(f"failed/{self.rank}", first_line(error))

    def lost(self, error: BaseException) -> str:
        """Call the roll, if an error is of the network.

        Args:
            error: Why I end.

        Returns:
            A line that names who is lost; empty for other errors.
        """
        if self._store is None or not of_network(error):
            return ""
        do = "run the same command with --resume to go on from the last checkpoint"
        try:
            silent, words = self._call(), self._words()
        except RuntimeError:
            return f"rank 0 is gone, its store does not answer; {do}"
        if words:
            return "; ".join(words)
        if silent:
            return f"{name_ranks(silent)} {'is' if len(silent) == 1 else 'are'} gone; {do}"
        return f"the network broke ({first_line(error)}); {do}"

    def _call(self) -> list[int]:
        """Ranks that do not answer."""
        keys = [f"here/{rank}" for rank in range(self.world)]
        self._store.set(keys[self.rank], "yes")
        self._store.set("alarm", "yes")
        until = time.monotonic() + ROLL
        while time.monotonic() < until and not self._store.check(keys):
            time.sleep(POLL)
        return [rank for rank, key in enumerate(keys) if not self._store.check([key])]

    def _words(self) -> list[str]:
        """What ranks that failed by themselves have left."""
        failed = [rank for rank in range(self.world) if self._store.check([f"failed/{rank}"])]
        return [f"rank {rank} failed: {self._store.get(f'failed/{rank}').decode()}" for rank in failed]


def of_network(error: BaseException) -> bool:
    """Whether an error says that a message did not get through.

    Args:
        error: Any.

    Returns:
        True for errors of collectives.
    """
    if isinstance(error, RunError):
        return type(error) is RunError  # divergence and the like are kinds of their own
    words = ("gloo", "NCCL", "TCPStore", "Connection", "onnection reset", "imed out")
    return isinstance(error, RuntimeError) and any(word in str(error) for word in words)


def first_line(error: BaseException) -> str:
    """The first line of what an error says.

    Args:
        error: Any.

    Returns:
        Its words, or the name of its kind.
    """
    return (str(error).strip() or type(error).__name__).splitlines()[0][:300]
