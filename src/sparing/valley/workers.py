"""Points of a walk, visited one after the other or shared out to processes, with the same numbers to the bit.

A point is visited from θ alone, never from the point before, and every process uses the same number of threads; so it
does not matter who visits it, or when.
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
from sparing.valley.apply import walking
from sparing.valley.config import Direction
from sparing.valley.directions import Resolved, direction_of
from sparing.valley.evaluators import Evaluate, numbers
from sparing.valley.statistics import Batch, Refresher, Statistics

Point = tuple[tuple[int, int, float], ...]
"""Where to go from θ: which direction (index), which draw of it (index), how far (λ · width); one entry or more."""

Facts = dict[tuple[int, int], Resolved]
"""(direction, draw) -> what is known of it, without its vector."""

Told = Callable[[], object]
CHUNKS: int = 6
"""Chunks a worker gets (count): enough that none waits long for the last, few enough that draws are made seldom."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Work:
    """All that a visit needs."""

    model: nn.Module
    """The model at θ."""
    evaluate: Evaluate
    """What is measured."""
    directions: tuple[Direction, ...]
    """Where one can go."""
    calibrate: Iterable[Batch] | None = None
    """Batches that batch-norm statistics are estimated from."""
    statistics: Statistics = "exact"
    """How they are."""
    seed: int = 0
    """Of the draws."""
    threads: int = field(default_factory=torch.get_num_threads)
    """Threads a process computes with (count)."""


class Resolver:
    """Draws directions when they are first needed, keeps the last two, and notes what is known of each."""

    def __init__(self, work: Work) -> None:
        """Take the settings.

        Args:
            work: Model and directions; the model must be at θ whenever a direction is drawn.
        """
        self._work = work
        self._kept: dict[tuple[int, int], Resolved] = {}
        self.facts: Facts = {}
        """Of every direction drawn so far."""

    def __contains__(self, key: tuple[int, int]) -> bool:
        return key in self._kept

    def __call__(self, which: int, draw: int) -> Resolved:
        """Return a direction.

        Args:
            which: Index into the directions of the work.
            draw: Which of its draws (index).

        Returns:
            The direction with its vector.
        """
        key = (which, draw)
        if key not in self._kept:
            while len(self._kept) > 1:
                self._kept.pop(next(iter(self._kept)))
            found = direction_of(self._work.directions[which], self._work.model, seed=self._work.seed, draw=draw)
            self._kept[key] = found
            values = {name: getattr(found, name) for name in Resolved.__dataclass_fields__}
            self.facts[key] = Resolved(**{**values, "vector": {}})
        return self._kept[key]


@contextlib.contextmanager
def threads(count: int) -> Iterator[None]:
    """Compute with so many threads within a block.

    Args:
        count: Threads of this process.

    Yields:
        Nothing.
    """
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def visit(
    work: Work, points: Sequence[Point], *, resolver: Resolver | None = None, tell: Told = lambda: None
) -> tuple[list[dict[str, float]], Facts]:
    """Visit points one after the other; the model is as before afterwards, also after an exception.

    Args:
        work: What is measured, and how.
        points: Where.
        resolver: With directions that are drawn already.
        tell: Called after each point.

    Returns:
        Numbers at each point, and what is known of the directions.
    """
    resolve = Resolver(work) if resolver is None else resolver
    found: list[dict[str, float]] = []
    with threads(work.threads), walking(work.model) as walker:
        work.model.eval()
        refresher = Refresher(work.model, work.calibrate, work.statistics)
        for point in points:
            if any((which, draw) not in resolve for which, draw, _ in point):
                walker.to({}, 0.0)  # directions are made of θ, not of where the last visit ended
            first, *rest = [(resolve(which, draw).vector, step) for which, draw, step in point]
            walker.to(*first, *rest)
            with refresher.at_point():
                found.append(numbers(work.evaluate, work.model))
            tell()
    return found, resolve.facts


def visit_all(
    work: Work, points: Sequence[Point], *, workers: int = 1, resolver: Resolver | None = None,
    tell: Told = lambda: None,
) -> tuple[list[dict[str, float]], Facts]:  # fmt: skip
    """Visit points in this process or in several others; the numbers are the same to the bit.

    Args:
        work: What is measured, and how. For several processes model, ``evaluate`` and ``calibrate`` must be picklable;
            each process has copies of its own, so they need memory for so many models.
        points: Where.
        workers: Processes; 1 is this one.
        resolver: With directions that are drawn already, for this process.
        tell: Called after each point.

    Returns:
        As ``visit``, in the order of the points.

    Raises:
        UserError: If ``workers`` < 1 or something cannot be pickled.
        RunError: If a process died.
    """
    require(workers >= 1, "workers", workers, "someone must do the work", "pass workers >= 1")
    if workers == 1 or len(points) < 2:
        return visit(work, points, resolver=resolver, tell=tell)
    size = math.ceil(len(points) / (CHUNKS * workers))
    chunks = [points[start : start + size] for start in range(0, len(points), size)]
    # By plain pickle: torch's own way to other processes would move the caller's parameters to shared memory.
    state = (
        torch.get_default_dtype(),
        torch.get_float32_matmul_precision(),
        torch.are_deterministic_algorithms_enabled(),
    )
    pool = ProcessPoolExecutor(workers, _context(), initializer=_begin, initargs=(_packed(work), state))
    found: list[dict[str, float]] = []
    facts: Facts = {}
    try:
        for chunk, future in [(chunk, pool.submit(_chunk, chunk)) for chunk in chunks]:
            values, known = _opened(future.result())
            found += values
            facts |= known
            for _ in chunk:
                tell()
    except BrokenProcessPool as error:
        raise RunError(
            "a worker of the scan died: out of memory, or the script starts the scan when it is imported; put it under "
            'if __name__ == "__main__": or pass workers=1'
        ) from error
    finally:
        pool.shutdown(wait=True, cancel_futures=True)
    return found, facts


def _context() -> multiprocessing.context.BaseContext:
    """How processes start: from a server that has torch imported already, or anew where there is none (Windows)."""
    if "forkserver" not in multiprocessing.get_all_start_methods():
        return multiprocessing.get_context("spawn")
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([__name__])
    return context


def _packed(work: Work) -> bytes:
    try:
        return pickle.dumps(work)
    except (pickle.PicklingError, AttributeError, TypeError, RuntimeError) as error:
        why = f"model, evaluate and calibrate are sent to other processes by pickle ({error})"
        do = "define evaluate at the top of a module, or use Classification or NextToken, or pass workers=1"
        raise UserError("workers", got="something that cannot be sent", why=why, do=do) from error


@dataclass(frozen=True, slots=True)
class _Failure:
    """An exception on its way back: not every class survives pickling, ours included."""

    error: Exception | None
    parts: tuple[str, str, str, str] | None
    text: str


_WORK: list[Work] = []  # one entry: what this process, a worker, was started with


def _begin(packed: bytes, state: tuple[torch.dtype, str, bool]) -> None:
    """Set a worker up."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent is told too, and ends the pool
    torch.set_default_dtype(state[0])
    torch.set_float32_matmul_precision(state[1])
    torch.use_deterministic_algorithms(state[2])
    _WORK[:] = [pickle.loads(packed)]  # noqa: S301  # what the parent packed, never a file


def _chunk(points: Sequence[Point]) -> tuple[list[dict[str, float]], Facts] | _Failure:
    try:
        return visit(_WORK[0], points)
    except UserError as error:
        return _Failure(None, (error.what, str(error.got), error.why, error.do), str(error))
    except Exception as error:  # noqa: BLE001  # anything evaluate raises belongs to the caller
        text = traceback.format_exc()
        try:
            same = pickle.loads(pickle.dumps(error))  # noqa: S301  # our own
        except Exception:  # noqa: BLE001  # an exception that cannot be sent is told as text
            same = None
        return _Failure(same, None, text)


def _opened(result: Any) -> tuple[list[dict[str, float]], Facts]:
    """What a chunk found, or the exception it ended with."""
    if not isinstance(result, _Failure):
        found: tuple[list[dict[str, float]], Facts] = result
        return found
    if result.parts is not None:
        what, got, why, do = result.parts
        raise UserError(what, got=got, why=why, do=do)
    if result.error is not None:
        result.error.add_note(f"In a worker of the scan:\n{result.text}")
        raise result.error
    raise RunError(f"a worker of the scan failed: {result.text}")
