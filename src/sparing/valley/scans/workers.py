"""Measure points one after the other or in several processes, with the same numbers to the bit.

Every point starts from θ, never from the point before, and every process uses the same number of threads; so it does
not matter which process measures it, or when.
"""

from __future__ import annotations

import contextlib
import math
import multiprocessing
import multiprocessing.context
import pickle
import signal
import traceback
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from sparing.errors import RunError, UserError, require
from sparing.valley.apply import perturbing
from sparing.valley.directions.config import Direction
from sparing.valley.directions.resolve import Resolved, direction_of
from sparing.valley.scans.batch_norm import Batch, Refresher, Statistics
from sparing.valley.scans.evaluators import Evaluate, run_evaluate
from sparing.valley.scans.memory_format import channels_last

# Steps from θ, one or more: which direction (index), which draw of it (index), how far (λ · width)
Point = tuple[tuple[int, int, float], ...]

DirectionFacts = dict[tuple[int, int], Resolved]  # (direction, draw) -> its facts, without the vector

OnPoint = Callable[[], object]
# Enough that no worker waits long for the last one, few enough that directions are seldom drawn again
CHUNKS_PER_WORKER: int = 6


@dataclass(frozen=True, kw_only=True, slots=True)
class ScanTask:
    """What to measure, and how; sent to every worker."""

    model: nn.Module  # the model at θ
    evaluate: Evaluate  # what is measured
    directions: tuple[Direction, ...]  # where one can go
    calibrate: Iterable[Batch] | None = None  # batches that batch-norm statistics are estimated from
    statistics: Statistics = "exact"  # how they are
    seed: int = 0  # of the draws
    channels_last: bool = False  # whether convolutions run in that layout
    threads: int = field(default_factory=torch.get_num_threads)  # threads a process computes with (count)

    def numbers(self, point: Point) -> dict[str, Any]:
        """What is measured once the model is at a point."""
        return run_evaluate(self.evaluate, self.model)


class DirectionCache:
    """Draws directions when they are first needed (the model must then be at θ), keeps the last two and all facts."""

    def __init__(self, task: ScanTask) -> None:
        self._task = task
        self._kept: dict[tuple[int, int], Resolved] = {}
        self.facts: DirectionFacts = {}  # of every direction drawn so far

    def __contains__(self, key: tuple[int, int]) -> bool:
        return key in self._kept

    def __call__(self, which: int, draw: int) -> Resolved:
        """Return a draw of a direction, by their indices."""
        key = (which, draw)
        if key not in self._kept:
            # A vector is as large as the model; a plane needs two of them
            while len(self._kept) > 1:
                self._kept.pop(next(iter(self._kept)))
            found = direction_of(self._task.directions[which], self._task.model, seed=self._task.seed, draw=draw)
            self._kept[key] = found
            values = {name: getattr(found, name) for name in Resolved.__dataclass_fields__}
            self.facts[key] = Resolved(**{**values, "vector": {}})
        return self._kept[key]


@contextlib.contextmanager
def num_threads(count: int) -> Iterator[None]:
    """Set torch's number of threads within a block."""
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def measure(
    task: ScanTask,
    points: Sequence[Point],
    *,
    directions: DirectionCache | None = None,
    on_point: OnPoint = lambda: None,
) -> tuple[list[dict[str, float]], DirectionFacts]:
    """Measure points one after the other; the model is restored, also after an exception."""
    directions = DirectionCache(task) if directions is None else directions
    found: list[dict[str, float]] = []
    with (
        num_threads(task.threads),
        channels_last(task.model, wanted=task.channels_last),
        perturbing(task.model) as perturber,
    ):
        task.model.eval()
        refresher = Refresher(task.model, task.calibrate, task.statistics)
        for point in points:
            if any((which, draw) not in directions for which, draw, _ in point):
                perturber.to({}, 0.0)  # directions are computed from θ, not from the last point
            first, *rest = [(directions(which, draw).vector, step) for which, draw, step in point]
            perturber.to(*first, *rest)
            with refresher.at_point():
                found.append(task.numbers(point))
            on_point()
    return found, directions.facts


def measure_all(
    task: ScanTask, points: Sequence[Point], *, workers: int = 1, directions: DirectionCache | None = None,
    on_point: OnPoint = lambda: None,
) -> tuple[list[dict[str, float]], DirectionFacts]:  # fmt: skip
    """Measure points in this process or in ``workers`` others, each with its own copy of the model."""
    require(workers >= 1, "workers", workers, "someone must do the work", "pass workers >= 1")
    if workers == 1 or len(points) < 2:
        return measure(task, points, directions=directions, on_point=on_point)
    # Chunks are taken as workers become free, and read in order: the result does not depend on who was faster
    size = math.ceil(len(points) / (CHUNKS_PER_WORKER * workers))
    chunks = [points[start : start + size] for start in range(0, len(points), size)]
    precision, deterministic = torch.get_float32_matmul_precision(), torch.are_deterministic_algorithms_enabled()
    state = (torch.get_default_dtype(), precision, deterministic)
    # Settings that change bits are process-wide, and a fresh process starts from torch's defaults
    pool = ProcessPoolExecutor(workers, _context(), initializer=_init_worker, initargs=(_pickle_task(task), state))
    found: list[dict[str, float]] = []
    facts: DirectionFacts = {}
    try:
        for chunk, future in [(chunk, pool.submit(_run_chunk, chunk)) for chunk in chunks]:
            values, known = _unwrap_result(future.result())
            found += values
            facts |= known
            for _ in chunk:
                on_point()
    except BrokenProcessPool as error:
        raise RunError(
            "a worker of the scan died: out of memory, or the script starts the scan when it is imported; put it under "
            'if __name__ == "__main__": or pass workers=1'
        ) from error
    finally:
        pool.shutdown(wait=True, cancel_futures=True)
    return found, facts


def _context() -> multiprocessing.context.BaseContext:
    """Start processes from a server that has imported torch already, or afresh where there is none (Windows)."""
    if "forkserver" not in multiprocessing.get_all_start_methods():
        return multiprocessing.get_context("spawn")
    # Not "fork": a child of a process whose thread pools have run can hang
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([__name__])
    return context


def _pickle_task(task: ScanTask) -> bytes:
    try:
        # Plain pickle: torch's own multiprocessing would move the caller's parameters to shared memory
        return pickle.dumps(task)
    except (pickle.PicklingError, AttributeError, TypeError, RuntimeError) as error:
        why = f"model, evaluate and calibrate are sent to other processes by pickle ({error})"
        do = "define evaluate at the top of a module, or use Classification or NextToken, or pass workers=1"
        raise UserError("workers", got="something that cannot be sent", why=why, do=do) from error


@dataclass(frozen=True, slots=True)
class _RemoteError:
    """An exception on its way to the parent, and its text: not every class survives pickling."""

    error: Exception | None
    text: str


_TASK: list[ScanTask] = []  # one entry in a worker: what it was started with


def _init_worker(packed: bytes, state: tuple[torch.dtype, str, bool]) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the parent too, which ends the pool
    torch.set_default_dtype(state[0])
    torch.set_float32_matmul_precision(state[1])
    torch.use_deterministic_algorithms(state[2])
    _TASK[:] = [pickle.loads(packed)]  # noqa: S301  # what the parent packed, never a file


def _run_chunk(points: Sequence[Point]) -> tuple[list[dict[str, float]], DirectionFacts] | _RemoteError:
    try:
        return measure(_TASK[0], points)
    except Exception as error:  # noqa: BLE001  # whatever evaluate raises is passed on to the caller
        text = traceback.format_exc()
        # Pickled here, where failure can be caught: in the pool it would look as if the worker had died
        try:
            return _RemoteError(pickle.loads(pickle.dumps(error)), text)  # noqa: S301  # our own
        except Exception:  # noqa: BLE001  # an exception that cannot be sent goes as text
            return _RemoteError(None, text)


def _unwrap_result(result: Any) -> tuple[list[dict[str, float]], DirectionFacts]:
    """Return what a chunk measured, or raise the exception it ended with."""
    if not isinstance(result, _RemoteError):
        found: tuple[list[dict[str, float]], DirectionFacts] = result
        return found
    if isinstance(result.error, UserError):
        raise result.error
    if result.error is not None:
        result.error.add_note(f"In a worker of the scan:\n{result.text}")
        raise result.error
    raise RunError(f"a worker of the scan failed: {result.text}")
