"""One run of a job: its folder, lock, identity, signals, checkpoints and record; what every verb does, written once.

    with Run(settings, writes=("model",), reads=paths, ignore={"device"}) as run:  # refuses another run's folder
        inputs = gather(settings)                     # until everything is known to work, nothing is written
        run.resume(record, hashes={"data": digest(path)})
        forecast = run.once("forecast", compute)      # a result that a resumed run does not compute again
        run.claim()                                   # from here on the folder is this run's
        run.steps(take_step, state, total=100)        # bar, checkpoints, a clean stop at a signal
        run.finish(write_page)

A checkpoint holds the rows of the record, the results of ``once`` and the state of the loop that was under way.
"""

from __future__ import annotations

import contextlib
import io
import math
import time
from collections.abc import Callable, Collection, Iterable, Mapping
from functools import partial
from pathlib import Path
from typing import Any, Protocol, Self

from sparing.jobs.disk import refusing_to_write
from sparing.jobs.folder import RECORD, Folder, identity
from sparing.jobs.interrupts import patient, save_when_due
from sparing.report import Progress, Record

LEAST_INTERVAL = 10.0
"""Between two checkpoints that nobody asked for, so that quick results are not slowed down by the disk (seconds)."""


class State(Protocol):
    """What the steps of a loop change."""

    @property
    def step(self) -> int:
        """Steps finished."""
        ...

    def tree(self) -> Mapping[str, Any]:
        """Everything that is needed to go on to the same bits: tensors and plain values."""
        ...


class Between(Protocol):
    """What happens between two steps."""

    def __call__(self, done: str, every: int, *, more: bool) -> None:
        """Act on what is done, in words, where every so many steps are saved and more may follow."""


class Ranks(Protocol):
    """The processes of a run; the first one writes."""

    @property
    def first(self) -> bool:
        """Whether this process is it."""
        ...

    @property
    def several(self) -> bool:
        """Whether there are others."""
        ...

    def on_first_rank(self, work: Callable[[], object]) -> None:
        """Let the first work, and the others wait for it and share its failure."""
        ...

    def heard(self, signals: list[int]) -> list[int]:
        """Signals on account of which all stop, from those of this process."""
        ...


class Alone:
    """One process."""

    first, several = True, False

    def on_first_rank(self, work: Callable[[], object]) -> None:
        """Do the work."""
        work()

    def heard(self, signals: list[int]) -> list[int]:
        """Its own."""
        return signals


class Run:
    """A run under way; a context that takes the signals from ``claim`` to its end."""

    def __init__(
        self,
        settings: Any,
        *,
        writes: Iterable[str] = (),
        reads: Iterable[Path | None] = (),
        ignore: Collection[str] = (),
        resumes: bool = True,
        shared: bool = False,
        ranks: Ranks | None = None,
    ) -> None:
        """Describe the run; nothing is touched.

        Args:
            settings: With ``out`` and ``overwrite``, and where the job resumes, ``resume``.
            writes: Names in the folder beside those of every run.
            reads: What the run reads: never deleted.
            ignore: Settings that may differ when the run is resumed.
            resumes: Whether a run of this job can go on where another stopped.
            shared: Whether several runs may work in the folder at once, once it is claimed.
            ranks: The processes that work on this run together.
        """
        self.settings, self._ignore, self.ranks = settings, ignore, ranks or Alone()
        self.folder = Folder(
            settings.out, resume=resumes and settings.resume, overwrite=settings.overwrite, names=tuple(writes),
            reads=tuple(path for path in reads if path is not None), resumes=resumes, shared=shared,
        )  # fmt: skip
        self.bar: Progress | None = None  # advanced by every result of ``once``
        self.signals: list[int] = []
        self._record: Record | None = None
        self.mark: dict[str, Any] = {}  # what makes two runs the same
        self._done: dict[str, Any] = {}
        self._left: dict[str, Any] = {}  # by loops that were interrupted, by the result they are of
        self._under_way = ""  # the result that is being computed
        self._number, self._saved = 0, -math.inf  # of the last checkpoint, and when it was written
        self._claimed, self._exit = False, contextlib.ExitStack()

    def __enter__(self) -> Self:
        """Refuse a folder that holds another run.

        Returns:
            The run.
        """
        self.ranks.on_first_rank(self.folder.check)
        return self

    def __exit__(self, *error: object) -> None:
        """Give the signals back."""
        self._exit.close()

    @property
    def record(self) -> Record:
        """Of the run; rows of an interrupted one are in it."""
        assert self._record is not None
        return self._record

    @property
    def finished(self) -> int:
        """Results of ``once`` so far (count)."""
        return len(self._done)

    def resume(
        self,
        record: Record,
        *,
        hashes: Mapping[str, Any] | None = None,
        also: Mapping[str, Any] | None = None,
        files: Collection[str] = (),
    ) -> bool:
        """Take up what an interrupted run of the same identity left; refuse that of another.

        Args:
            record: Of the run; receives the rows.
            hashes: Of the files that are read, by setting; they count by their content.
            also: What else makes two runs the same, or in place of a setting.
            files: Names in ``also`` under which hashes stand.

        Returns:
            Whether there was anything.
        """
        self._record = record
        self.mark = {**identity(self.settings, harmless=self._ignore), **(hashes or {}), **(also or {})}
        tree = self.folder.latest(self.mark, files={*(hashes or ()), *files})
        if tree is None:
            return False
        record.rows[:] = tree["rows"]
        self._done, self._left, self._number = dict(tree["done"]), dict(tree["left"]), tree["number"]
        return True

    @property
    def interrupted_at(self) -> int:
        """Steps that interrupted loops had finished; 0 where there was none."""
        return sum(left["step"] for left in self._left.values())

    @property
    def interrupted(self) -> Any:
        """What ``State.tree`` gave when the loop that is about to begin was interrupted; None if it was not."""
        return self._left[self._under_way]["tree"] if self._under_way in self._left else None

    def claim(self, *, defer_signals: bool = True) -> None:
        """Make the folder this run's; from here on SIGINT and SIGTERM wait for the next checkpoint."""
        self.ranks.on_first_rank(lambda: self.folder.claim_(self.mark))
        self._claimed = True
        if defer_signals:
            self.defer_signals()

    def defer_signals(self) -> None:
        """Note SIGINT and SIGTERM from here on, up to ``finish``; what cannot be saved half-way should come before."""
        self.signals = self._exit.enter_context(patient(always=self.ranks.several))

    def once(self, name: str, compute: Callable[[], Any], **shown: Any) -> Any:
        """A result of numbers, texts, lists, mappings or tensors, or rows; computed once however often a run stops.

        Args:
            name: Of the result, unlike all others.
            compute: Computes it, and may add rows to the record.
            shown: Quantities for the bar.

        Raises:
            StoppedError: At a signal; the result is saved by then.
        """
        if name not in self._done:
            self._under_way = name
            self._done[name] = compute()
            self._under_way = ""
            self._left.pop(name, None)
            if self.bar is not None:
                self.bar.advance(**shown)
            if self._claimed:
                due = time.monotonic() - self._saved >= LEAST_INTERVAL
                save_when_due(self.save, self.signals, step=self.finished, every=int(due), done=name)
        return self._done[name]

    def results(self, prefix: str) -> dict[str, Any]:
        """Results so far whose names begin so, by the rest of the name."""
        return {name.removeprefix(prefix): value for name, value in self._done.items() if name.startswith(prefix)}

    def forget(self, name: str) -> None:
        """Have a result computed again."""
        self._done.pop(name, None)

    def steps(self, state: State, take_step: Callable[[], Mapping[str, Any]], **how: Any) -> None:
        """Take steps to the end as ``take_steps`` does, with checkpoints and a clean stop at a signal.

        Raises:
            StoppedError: At a signal; everything is saved by then.
        """

        def between(done: str, every: int, *, more: bool) -> None:
            stop = self.ranks.heard(self.signals)
            done = f"{self._under_way}, {done}" if self._under_way else done
            if more and self.ranks.first:  # the end is saved by whoever asked for the steps
                save_when_due(partial(self.save, state), stop, step=state.step, every=every, done=done)

        take_steps(state, take_step, between=between, quiet=not self.ranks.first, **how)

    def save(self, state: State | None = None) -> Path:
        """Write a checkpoint, named by its step where the loop is the whole run, else by one more than the last."""
        self._number += 1
        if state is not None:
            self._left[self._under_way] = {"step": state.step, "tree": state.tree()}
            if not self._under_way:
                self._number = state.step
        tree = {"rows": self.record.rows, "done": self._done, "left": self._left, "number": self._number}
        path = self.folder.save(self._number, tree)
        self._saved = time.monotonic()
        return path

    def write_record(self) -> None:
        """Write the record as it is, for whoever watches, or for a run that ends early."""
        with refusing_to_write("saving", self.folder.path):
            self.record.write(self.folder.at(RECORD))

    def finish(self, write_page: Callable[[Record, Path], object]) -> Record:
        """Write record and page, and give the folder back.

        Returns:
            The record.
        """
        self._exit.close()  # nothing more is saved: a signal stops at once, and a resumed run draws the page again
        self.folder.finish_(self.record, write_page)
        return self.record


def take_steps(
    state: State,
    take_step: Callable[[], Mapping[str, Any]],
    *,
    total: int,
    label: str,
    unit: str = "step",
    every: int = 0,
    bar: Progress | None = None,
    progress: Callable[[], int] | None = None,
    until: Callable[[], bool] = lambda: False,
    between: Between | None = None,
    quiet: bool = False,
) -> None:
    """Take steps to the end and show how far they are.

    Args:
        state: What the steps change; at its first step or a restored one.
        take_step: Takes one, and returns what the bar shows.
        total: Steps in all.
        label: Words before the bar.
        unit: A step, in a word or two.
        every: Steps between checkpoints; 0: only at a signal.
        bar: One that is there already, over more than these steps.
        progress: What that bar has done; without it a step is one unit of it.
        until: Whether the steps end early.
        between: Called after each step; may save, or raise to stop.
        quiet: Whether nothing is shown.
    """
    new = Progress(label, total=total, unit=unit, resume_at=state.step, file=io.StringIO() if quiet else None)
    with contextlib.nullcontext(bar) if bar else new as shown:
        while state.step < total and not until():
            told = take_step()
            shown.advance(1 if progress is None else progress() - shown.done, **told)
            if between is not None:
                between(f"{unit} {state.step} of {total}", every, more=state.step < total and not until())
        if state.step < total and progress is None:
            shown.advance(total - state.step)  # what ending early saved
