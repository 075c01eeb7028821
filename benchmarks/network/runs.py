"""Ranks started where a network puts them, kept alive for many jobs, and ended whatever happens."""

from __future__ import annotations

import itertools
import json
import os
import queue
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any

from benchmarks.network.namespaces import DEVICE, Network

ROOT = Path(__file__).parents[2]
_PORTS = itertools.count(29500 + os.getpid() % 1000)


class RankError(RuntimeError):
    """A rank failed or fell silent; the ranks are no longer usable."""

    def __init__(self, text: str, arm: str | None, doing: str) -> None:
        """Say what happened, and to which arm.

        Args:
            text: What was seen.
            arm: The arm that the ranks were at.
            doing: What they did with it.
        """
        super().__init__(f"{arm or 'start'}, {doing}: {text}")
        self.arm = arm


@dataclass(kw_only=True)
class Ranks:
    """The ranks of one shape, for as long as the ``with`` block lasts.

    Without a network they run side by side on loopback, where only our own arms can be throttled.
    """

    groups: int
    per_group: int
    network: Network | None
    python: str = sys.executable
    """Interpreter of the ranks; one with DeepSpeed has those arms too."""

    patience: float = 300.0
    """Seconds of silence after which the ranks are given up."""

    log: Path | None = None
    """Where what the ranks write to standard error goes; None: nowhere."""

    processes: list[subprocess.Popen[str]] = field(default_factory=list, init=False)
    answers: queue.SimpleQueue[dict[str, Any] | None] = field(default_factory=queue.SimpleQueue, init=False)
    versions: str = field(default="", init=False)
    """What the ranks run on."""

    at: tuple[str | None, str] = field(default=(None, "joining"), init=False)
    """The arm that the ranks said they are at, and what they do with it."""

    def __enter__(self) -> Ranks:
        """Start them and wait until all have joined."""
        port = next(_PORTS)
        try:
            for rank in range(self.groups * self.per_group):
                self._start(rank, port)
            list(self._collect("ready"))
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        """End them."""
        self.close()

    def _start(self, rank: int, port: int) -> None:
        """One rank, and the thread that reads it."""
        group, local = divmod(rank, self.per_group)
        words = [self.python, "-W", "ignore", "-m", "benchmarks.network.workers"]
        words = self.network.command(group, words) if self.network else words
        places = {
            "RANK": rank, "WORLD_SIZE": self.groups * self.per_group, "LOCAL_RANK": local, "MASTER_PORT": port,
            "MASTER_ADDR": self.network.address(0) if self.network else "127.0.0.1",
            "GLOO_SOCKET_IFNAME": DEVICE if self.network else "lo",
            "OMP_NUM_THREADS": 1, "PYTHONPATH": f"{ROOT}{os.pathsep}{ROOT / 'src'}", "DS_ACCELERATOR": "cpu",
        }  # fmt: skip
        errors = self.log.open("a") if self.log else subprocess.DEVNULL
        process = subprocess.Popen(
            words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=errors, text=True, cwd=ROOT,
            env=os.environ | {name: str(value) for name, value in places.items()},
        )  # fmt: skip
        if self.log:
            errors.close()  # the rank has its own
        self.processes.append(process)
        threading.Thread(target=self._read, args=(process,), daemon=True).start()

    def _read(self, process: subprocess.Popen[str]) -> None:
        """Pass on the answers of one rank; other lines, which libraries print, are dropped."""
        assert process.stdout is not None
        for line in process.stdout:
            if line.startswith('{"kind"'):
                self.answers.put(json.loads(line))
        self.answers.put(None)

    def _next(self) -> dict[str, Any]:
        """The next answer of any rank."""
        try:
            found = self.answers.get(timeout=self.patience)
        except queue.Empty:
            raise RankError(f"nothing was heard for {self.patience:.0f} s", *self.at) from None
        if found is None:
            raise RankError("a rank ended", *self.at)
        if found["kind"] == "failed":
            raise RankError(f"rank {found['rank']}: {found['error']}", *self.at)
        if found["kind"] == "ready":
            self.versions = found["versions"]
        if found["kind"] == "at":
            self.at = found["arm"], found["doing"]
        return found

    def _collect(self, last: str) -> Iterator[dict[str, Any]]:
        """Answers until every rank has sent ``last``."""
        waiting = set(range(len(self.processes)))
        while waiting:
            found = self._next()
            if found["kind"] == last:
                waiting.discard(found["rank"])
            else:
                yield found

    def do(self, **job: Any) -> Iterator[dict[str, Any]]:
        """Give one job to all ranks.

        Args:
            **job: ``kind`` and what that kind of job reads.

        Yields:
            Answers of the ranks as they come.

        Raises:
            RankError: If a rank fails or falls silent.
        """
        for process in self.processes:
            assert process.stdin is not None
            process.stdin.write(json.dumps(job) + "\n")
            process.stdin.flush()
        yield from self._collect("done")

    def close(self) -> None:
        """End them: a rank ends with its input, and is killed when it has not after two seconds."""
        for process in self.processes:
            if process.stdin is not None:
                process.stdin.close()
        until = time.monotonic() + 2
        for process in self.processes:
            try:
                process.wait(timeout=max(0.0, until - time.monotonic()))
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        self.processes = []
