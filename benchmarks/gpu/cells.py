"""What every part does with its cells: each in processes of its own, as many as the minutes hold, a row after each.

A process of a cell is forked from a server that has imported the part but not touched the device: what a cell holds and
takes is its own, and imports, seconds of every interpreter, are paid once.
"""

from __future__ import annotations

import contextlib
import faulthandler
import fcntl
import importlib
import json
import multiprocessing
import os
import re
import signal
import socket
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from multiprocessing.context import ForkServerContext, ForkServerProcess
from pathlib import Path
from typing import Any

import torch

from sparing.report import Record

# what torch and transformers would otherwise import in every cell
MODULE = "benchmarks.gpu.{}"  # of a part
FATAL = "Fatal Python error"
ERROR = re.compile(
    r"(\[rank\d+\]: )?(Fatal Python error|[\w.]*(Error|Exception|Interrupt))\b"
)  # of a traceback's last line
IMPORTED = ("torch._dynamo", "torch.distributed.fsdp", "transformers.models.llama.modeling_llama", "peft")


@dataclass(frozen=True, slots=True)
class Done:
    """How the processes of a cell ended."""

    code: int
    out: str  # of the first rank
    err: str


def launched(part: str, words: Sequence[str], *, seconds: float, ranks: int = 0) -> Done | None:
    """Run ``main`` of a part with some words, as one process or as so many ranks; None if it took longer."""
    context = _server(part)
    with tempfile.TemporaryDirectory() as name, socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        folder, port = Path(name), free.getsockname()[1]
        free.close()
        world = {"WORLD_SIZE": str(ranks), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
        running = []
        for rank in range(max(1, ranks)):
            given = {**world, "RANK": str(rank), "LOCAL_RANK": str(rank)} if ranks else {}
            told = (MODULE.format(part), list(words), folder / str(rank), given)
            # by name, as the child finds it: this module may have been imported anew
            running.append(context.Process(target=importlib.import_module(__name__)._program, args=told))
            running[-1].start()
        late = not _ended(running, seconds)
        texts = {at.name: at.read_text(errors="replace") for at in sorted(folder.iterdir())}
    if late:
        return None
    err = "".join(text for name, text in texts.items() if name.endswith(".err"))
    return Done(max(abs(process.exitcode or 0) for process in running), texts.get("0.out", ""), err)


def _server(part: str) -> ForkServerContext:
    # or a look for a device would begin with it, and a fork could not go on
    os.environ.setdefault("PYTORCH_NVML_BASED_CUDA_CHECK", "1")
    context = multiprocessing.get_context("forkserver")
    # counts for the server, which the first cell starts
    context.set_forkserver_preload([*IMPORTED, MODULE.format(part)])
    return context


def _program(module: str, words: list[str], stem: Path, given: dict[str, str]) -> None:
    """Inside a process: be the program of a part."""
    os.setsid()  # what it starts in turn ends with it
    os.environ.update(given)
    for number, kind in ((1, "out"), (2, "err")):
        target = os.open(stem.with_suffix(f".{kind}"), os.O_WRONLY | os.O_CREAT)
        os.dup2(target, number)
    faulthandler.enable()
    if torch.cuda._is_in_bad_fork():  # a version of some package looked at the device all the same
        os.execv(sys.executable, [sys.executable, "-m", module, *words])
    sys.argv = [module, *words]
    importlib.import_module(module).main()


def _ended(running: Sequence[ForkServerProcess], seconds: float) -> bool:
    """Wait until all have ended, or one has failed; end what is left. False if time was up."""
    end = time.monotonic() + seconds
    late = False
    while any(process.is_alive() for process in running) and not any(process.exitcode for process in running):
        if late := time.monotonic() > end:
            break
        time.sleep(0.02)
    for process in running:
        # ranks of one that failed would wait for it
        process.join(0 if late else 5)
        with contextlib.suppress(ProcessLookupError):
            if process.is_alive() and process.pid:
                os.killpg(process.pid, signal.SIGKILL)
        process.join()
    return not late


_held: list[int] = []


def take_device() -> None:
    """Wait for the device, among cells that run side by side, and keep it: they import while another one works."""
    # until the process ends, and not before: so long it holds memory of the device
    _held.append(os.open(Path(tempfile.gettempdir(), f"sparing-gpu-{os.getuid()}.lock"), os.O_RDWR | os.O_CREAT))
    fcntl.flock(_held[-1], fcntl.LOCK_EX)


def child(part: str, cell: Any, *, seconds: float, options: Sequence[str] = (), ranks: int = 0) -> dict[str, Any]:
    """Run a cell of a part, of some ranks or of none; one that fails, or takes longer, says ``why``."""
    done = launched(part, ["--cell", json.dumps(asdict(cell)), *options], seconds=seconds, ranks=ranks)
    if done is None:
        return {"why": f"ran past {seconds / 60:g} minutes"}
    found = [line for line in done.out.splitlines() if line.startswith("{")]
    if done.code == 0 and found:
        return dict(json.loads(found[-1]))
    lines = done.err.strip().splitlines()
    # after the error of a rank, or in it, may stand what libraries say besides
    said = [line for line in lines if ERROR.match(line)] or lines or [f"ended with {done.code}"]
    if FATAL in done.err:  # where it was, as `faulthandler` tells
        frames = re.findall(r'File ".*?([^/"]+)", line (\d+) in (\S+)', done.err.partition("Current thread")[2])
        said = [f"{said[-1].strip()} in {', '.join(':'.join(frame) for frame in frames[:6])}"]
    return {"why": "out of memory" if "out of memory" in done.err else said[-1].strip()[:300]}


def fill(
    record: Record, out: Path, table: str, cells: Sequence[Any], measure: Callable[[Any, float], dict[str, Any]], *,
    minutes: float, limit: Callable[[Any], float], after: Callable[[], None] = lambda: None,
    beside: Callable[[Any], int] = lambda _: 1, sort: Callable[[Any], object] = lambda cell: cell.kind,
) -> int:  # fmt: skip
    """Measure what is left, as far as the minutes go, and write after every cell.

    Args:
        record: Rows of the part.
        out: Where it goes.
        table: Of the record: a row for each cell.
        cells: All of the part, in order; dataclasses.
        measure: Row of a cell within so many seconds.
        minutes: For all; at least one cell, whatever the minutes. 0: the first cell of each sort, whatever they take.
        limit: Seconds that a cell may take; none begins that might outlast the minutes.
        after: What to make of the rows after each cell.
        beside: How many cells of this kind, next to each other in order, may run at the same time: more than one where
            nothing is timed, or where each calls ``take_device``.
        sort: Of a cell, where the minutes are 0.

    Returns:
        How many cells are left.
    """
    done = record.table(table)
    left = [cell for cell in cells if not any(asdict(cell).items() <= row.items() for row in done)]
    begin, later = time.monotonic(), 0
    if not minutes:
        firsts = list({sort(cell): cell for cell in reversed(left)}.values())[::-1]
        left, later = firsts, len(left) - len(firsts)
    first = True
    while left:
        if minutes and not first and time.monotonic() - begin > 60 * minutes - limit(left[0]):
            return len(left)
        together = [left[0]]
        # of a try on the CPU no more than it has cores for
        most = min(len(left), beside(left[0]), beside(left[0]) if minutes else os.cpu_count() or 1)
        while len(together) < most and beside(left[len(together)]) > 1:
            together.append(left[len(together)])
        with ThreadPoolExecutor(len(together)) as pool:
            rows = list(pool.map(lambda cell: measure(cell, limit(cell)), together))
        for cell, row in zip(together, rows, strict=True):
            record.add(table, **asdict(cell), **row)
        after()
        record.write(out)
        left, first = left[len(together) :], False
    return later


def resumed(record: Record, out: Path) -> Record:
    """The record with the rows that an earlier call left."""
    if out.exists():
        record.rows = Record.read(out).rows
    return record


def say(left: int) -> None:
    """Tell whether to run the part again, as ``benchmarks.gpu`` reads it."""
    sys.stdout.write(f"{left} cells are left: run it again\n" if left else "nothing is left\n")
