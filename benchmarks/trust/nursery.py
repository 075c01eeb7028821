"""Runs of the command line as forks of one interpreter that has imported everything: a start costs no import.

    with Nursery(["sparing.jobs.federate"]) as nursery:
        child = nursery.start(["federate", "--out", "runs/x"], Path("said.txt"))
        child.kill()

A fork dies of SIGKILL as any process does. It may have a disk of its own, in namespaces that end with it.
"""

from __future__ import annotations

import contextlib
import ctypes
import importlib
import json
import os
import shutil
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

ALL = (
    "sparing.jobs.finetune.job", "sparing.jobs.pretrain.job", "sparing.jobs.condense.job", "sparing.jobs.federate.job",
    "sparing.jobs.scan.job", "sparing.jobs.merge.job", "sparing.jobs.invert.job", "sparing.jobs.adapt.job",
    "sparing.jobs.transfer.job", "sparing.jobs.demo", "optuna", "scipy.integrate",
    "tyro", "peft", "matplotlib.pyplot", "jinja2", "transformers.models.gpt2.modeling_gpt2",
    "transformers.models.llama.modeling_llama", "transformers.pytorch_utils", "tokenizers",
)  # fmt: skip
"""What the jobs import."""

QUIET = {
    "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false", "MPLBACKEND": "Agg",
    "NO_COLOR": "1", "COLUMNS": "200",
}  # fmt: skip

_NEWNS, _NEWUSER = 0x00020000, 0x10000000
_RDONLY, _REMOUNT, _BIND, _REC, _PRIVATE = 1, 32, 4096, 16384, 1 << 18


@dataclass(frozen=True)
class Child:
    """A run under way."""

    nursery: Nursery
    pid: int

    def poll(self) -> int | None:
        """Its exit status, negative for a signal; None while it runs."""
        found: int | None = self.nursery.ask(poll=self.pid)
        return found

    def wait(self, patience: float = 600.0) -> int:
        """Wait for its exit status; after ``patience`` seconds it is killed."""
        until = time.monotonic() + patience
        while (status := self.poll()) is None:
            if time.monotonic() > until:
                self.kill()
            time.sleep(0.005)
        return status

    def kill(self) -> None:
        """SIGKILL, unless it has ended."""
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.pid, signal.SIGKILL)


class Nursery:
    """The interpreter that forks; one of another hash seed orders sets in another way."""

    def __init__(self, modules: Sequence[str] = ALL, *, hash_seed: int = 0) -> None:
        """Start it; ``ask`` waits until it has imported ``modules``."""
        env = os.environ | QUIET | {"PYTHONHASHSEED": str(hash_seed)}
        command = [sys.executable, "-m", "benchmarks.trust.nursery", *modules]
        pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
        self._process = subprocess.Popen(command, env=env, **pipes)
        self._known: dict[int, int] = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self._process.communicate()

    def ask(self, **what: Any) -> Any:
        """Send a question, return the answer."""
        if what.get("poll") in self._known:
            return self._known[what["poll"]]
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps(what) + "\n")
        self._process.stdin.flush()
        answer = json.loads(self._process.stdout.readline())
        if "poll" in what and answer is not None:
            self._known[what["poll"]] = answer
        return answer

    def start(self, words: Sequence[str], said: Path, **disk: Any) -> Child:
        """Begin ``sparing WORDS``, both streams into ``said``.

        Keywords for a disk of its own: ``out``, the folder it is mounted over, and either ``size`` in bytes and
        ``keep``, where its content goes afterwards, or nothing: it cannot be written.
        """
        return Child(self, self.ask(words=list(words), said=str(said), disk={k: str(v) for k, v in disk.items()}))

    def prepare(self, folder: Path) -> None:
        """``cases.prepare`` in a fork, where what it imports is there already."""
        if Child(self, self.ask(prepare=str(folder))).wait():
            raise RuntimeError("nothing is prepared")

    def refusal(self) -> str:
        """Why this system lets nobody have a disk of his own; nothing where it does."""
        child = Child(self, self.ask(probe=True))
        return "" if child.wait() == 0 else "user and mount namespaces are refused here"


def serve() -> None:
    """Answer questions until there are no more; runs write no page, whose pictures take longer than all else."""
    for name in sys.argv[1:]:
        module: Any = importlib.import_module(name)
        if hasattr(module, "write_page"):
            module.write_page = lambda *_, **__: None
    # a result is saved at once, so that a kill a moment later goes on behind it
    importlib.import_module("sparing.jobs.run").LEAST_INTERVAL = 0.0  # type: ignore[attr-defined]
    for line in sys.stdin:
        asked = json.loads(line)
        if "poll" in asked:
            pid, status = os.waitpid(asked["poll"], os.WNOHANG)
            answer = os.waitstatus_to_exitcode(status) if pid else None
        else:
            answer = os.fork()
            if not answer:
                _live(asked)
        sys.stdout.write(json.dumps(answer) + "\n")
        sys.stdout.flush()


def _live(asked: dict[str, Any]) -> None:
    """What a fork does; it does not return."""
    status = 70
    try:
        disk = asked.get("disk", {})
        file = os.open(asked.get("said", os.devnull), os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        for stream in (1, 2):
            os.dup2(file, stream)
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        if "probe" in asked:
            _apart()
            status = 0
        elif "prepare" in asked:
            importlib.import_module("benchmarks.trust.cases").prepare(asked["prepare"])
            status = 0
        else:
            status = _run(asked["words"], **disk)
    except BaseException:  # noqa: BLE001  # it is seen as a traceback in what was said
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)


def _run(words: list[str], out: str = "", size: str = "", keep: str = "") -> int:
    from sparing.cli import main

    sys.argv = ["sparing", *words]
    if out:
        _apart()
        if size:
            _mount("none", out, "tmpfs", 0, f"size={size}")
        else:
            _mount(out, out, "", _BIND, "")
            _mount(out, out, "", _BIND | _REMOUNT | _RDONLY, "")
    status = main(words)
    if keep:
        shutil.copytree(out, keep, dirs_exist_ok=True)
    return status


def _apart() -> None:
    """Enter namespaces in which one may mount."""
    uid, gid = os.getuid(), os.getgid()
    _checked(ctypes.CDLL(None, use_errno=True).unshare(_NEWNS | _NEWUSER))
    Path("/proc/self/setgroups").write_text("deny")
    Path("/proc/self/uid_map").write_text(f"0 {uid} 1")
    Path("/proc/self/gid_map").write_text(f"0 {gid} 1")
    _mount("none", "/", "", _REC | _PRIVATE, "")


def _mount(source: str, target: str, kind: str, flags: int, options: str) -> None:
    words = [word.encode() or None for word in (source, target, kind, options)]
    libc = ctypes.CDLL(None, use_errno=True)
    _checked(libc.mount(words[0], words[1], words[2], ctypes.c_ulong(flags), words[3]))


def _checked(result: int) -> None:
    if result:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))


if __name__ == "__main__":
    serve()
