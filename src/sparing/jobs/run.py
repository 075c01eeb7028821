"""One run of a job: its folder, lock, identity, signals, checkpoints and record; what every verb does, written once.

    with Run(settings, writes=("model",), reads=paths, ignore={"device"}) as run:  # refuses another run's folder
        settings = run.settings                       # names on the hub have their commits now
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
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any, Protocol, Self

from sparing.errors import UserError
from sparing.jobs import checkpoint, hub, run_file
from sparing.jobs.disk import refusing_to_write
from sparing.jobs.folder import CHECKPOINTS, RECORD, Folder, identity
from sparing.jobs.interrupts import defer_signals, save_when_due
from sparing.jobs.ranks import Ranks
from sparing.jobs.step import DivergedError, SpoiltError
from sparing.report import Progress, Record
from sparing.report.atomic import write_whole

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


class Processes(Protocol):
    """The processes of a run, of which the first writes: ``Ranks``, or a job's own."""

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

    def agree_to_stop(self, signals: list[int]) -> list[int]:
        """Signals on account of which all stop, from those of this process."""
        ...


class Slices(Protocol):
    """State that is sharded over the processes, which save and read it together."""

    def save(self, folder: Path) -> None:
        """Write a folder."""

    def load_(self, folder: Path) -> None:
        """Go on from one."""


class Run:
    """A run under way; a context that takes the signals from ``claim`` to its end."""

    def __init__(
        self, settings: Any, *, writes: Iterable[str] = (), reads: Iterable[Path | None] = (),
        ignore: Collection[str] = (), resumes: bool = True, shared: bool = False, watched: bool = False,
        ranks: Processes | None = None,
    ) -> None:  # fmt: skip
        """Describe the run; nothing is touched.

        ``settings`` has ``out`` and ``overwrite``, and where the job ``resumes``, ``resume``. ``writes`` are names in
        the folder beside those of every run; ``reads`` is never deleted; settings in ``ignore`` may differ when the
        run is resumed. A ``shared`` folder takes several runs at once; of a ``watched`` run the record is written
        beside every checkpoint.
        """
        self.settings, self._ignore, self.ranks = settings, ignore, ranks or Ranks()
        self._watched = watched
        self._slices: Slices | None = None
        self._resumed_from: Path | None = None  # the checkpoint
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
        """Refuse a folder that holds another run; then give every name on the hub its commit."""
        self.ranks.on_first_rank(self.folder.check)
        if any(hub.names(self.settings)):
            before = self.folder.hub_commits()
            pin = partial(hub.pinned, self.settings, before)
            # one downloads, and the others find it in the cache
            self.ranks.on_first_rank(pin)
            self.settings = pin()
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
        self, record: Record, *, hashes: Mapping[str, Any] | None = None, also: Mapping[str, Any] | None = None,
        files: Collection[str] = (),
    ) -> bool:  # fmt: skip
        """Take up what an interrupted run of the same identity left, if there is any; refuse that of another.

        The record receives the rows. ``hashes`` of files that are read stand for the settings of their names; ``also``
        is what else makes two runs the same, or stands for a setting, and ``files`` names those of it that are hashes.
        """
        self._record = record
        self.mark = {**identity(self.settings, harmless=self._ignore), **(hashes or {}), **(also or {})}
        if commits := hub.commits(self.settings):
            self.mark["hub"] = commits
        self._resumed_from = self.folder.newest(self.mark, files={*(hashes or ()), *files})
        if self._resumed_from is None:
            return False
        tree = checkpoint.load(self._resumed_from, run=self.folder.whose())
        record.rows[:] = tree["rows"]
        self._done, self._left, self._number = dict(tree["done"]), dict(tree["left"]), tree["number"]
        return True

    @property
    def sharded(self) -> bool:
        """Whether the checkpoint that the run goes on from has slices."""
        return self._resumed_from is not None and (self._resumed_from / checkpoint.SLICES).is_dir()

    def attach(self, slices: Slices) -> None:
        """Save these beside every checkpoint from now on; a resumed run goes on from those it has."""
        self._slices = slices
        if self._resumed_from is None:
            return
        if not self.sharded:
            why, do = f"{self._resumed_from.name} was written without", "omit --plan, or start anew with --overwrite"
            raise UserError("plan", got="one", why=why, do=do)
        slices.load_(self._resumed_from / checkpoint.SLICES)

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
        self.ranks.on_first_rank(self._claim)
        self._claimed = True
        if defer_signals:
            self.defer_signals()

    def _claim(self) -> None:
        self.folder.claim_(self.mark)
        with refusing_to_write("out", self.folder.path):
            write_whole(self.folder.at(run_file.FILE), run_file.text_of(self.settings))

    def defer_signals(self) -> None:
        """Note SIGINT and SIGTERM from here on, up to ``finish``; what cannot be saved half-way should come before."""
        self.signals = self._exit.enter_context(defer_signals(always=self.ranks.several))

    def once(self, name: str, compute: Callable[[], Any], **shown: Any) -> Any:
        """A result of numbers, texts, lists, mappings or tensors, or rows; computed once however often a run stops.

        ``compute`` may add rows to the record; the bar shows what is ``shown``. At a signal, ``StoppedError`` is raised
        once the result is saved.
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
                # every 1 or 0: the clock decides, not the number of results
                save_when_due(self.save, self.signals, step=self.finished, every=int(due), done=name)
        return self._done[name]

    def results(self, prefix: str) -> dict[str, Any]:
        """Results so far whose names begin so, by the rest of the name."""
        return {name.removeprefix(prefix): value for name, value in self._done.items() if name.startswith(prefix)}

    def forget(self, name: str) -> None:
        """Have a result computed again."""
        self._done.pop(name, None)

    def steps(self, state: State, take_step: Callable[[], Mapping[str, Any]], **how: Any) -> None:
        """Take steps to the end as ``take_steps`` does; at a signal, save and raise ``StoppedError``."""

        def between(done: str, every: int, *, more: bool) -> None:
            stop = self.ranks.agree_to_stop(self.signals)
            done = f"{self._under_way}, {done}" if self._under_way else done
            # the end is saved by whoever asked for the steps
            if more and (self.ranks.first or self._slices is not None):
                save_when_due(partial(self.save, state), stop, step=state.step, every=every, done=done)

        take_steps(state, take_step, between=between, quiet=not self.ranks.first, **how)

    def save(self, state: State | None = None) -> Path:
        """Write a checkpoint, named by its step where the loop is the whole run, else by one more than the last."""
        self._number, left = self._number + 1, self._left
        if state is not None:
            # what was loaded goes now, and what is written is not kept: both may be as large as the model
            left.pop(self._under_way, None)
            left = {**left, self._under_way: {"step": state.step, "tree": state.tree()}}
            if not self._under_way:
                self._number = state.step
        tree = {"rows": self.record.rows, "done": self._done, "left": left, "number": self._number}
        place, slices, number = self.folder.at(CHECKPOINTS), self._slices, self._number

        def write() -> None:
            checkpoint.save(place, number, tree, run=self.folder.whose(), slices=slices is not None)
            if self._watched:
                self._write_record()

        # which only the first has come to do
        if slices is None:
            write()
        else:
            # every rank, before the first one seals the checkpoint: its manifest has the hash of theirs
            slices.save(place / checkpoint.DRAFT)
            self.ranks.on_first_rank(write)
        # after the writing, so that on a slow disk the interval is one of work
        self._saved = time.monotonic()
        return place / checkpoint.name_of(number)

    def _write_record(self) -> None:
        with refusing_to_write("saving", self.folder.path):
            self.record.write(self.folder.at(RECORD))

    def write_record(self) -> None:
        """Write the record as it is, for a run that ends early; every process calls it."""
        self.ranks.on_first_rank(self._write_record)

    @contextlib.contextmanager
    def explain_divergence(self, state: State, *, anew: str, leave: Callable[[], str]) -> Iterator[None]:
        """Have a loss that is not finite end the run with its last good state saved, and say how to go on.

        ``anew`` is advice on how to start over, ``leave`` writes what else can be left and says how to go on from it.
        """
        try:
            yield
        except SpoiltError as error:
            self.write_record()
            raise SpoiltError(f"{error}; no model is saved; {anew}") from None
        except DivergedError as error:
            path = self.save(state)
            self.write_record()
            why = f"the step was not applied and the state before it is in {path}"
            raise DivergedError(f"{error}; {why}{leave()}") from None

    def finish(self, write_page: Callable[[Record, Path], object]) -> Record:
        """Write record and page, and give the folder back; returns the record."""
        # nothing more is saved: a signal stops at once, and a resumed run draws the page again
        self._exit.close()
        self.folder.finish_(self.record, write_page)
        return self.record


def take_steps(
    state: State, take_step: Callable[[], Mapping[str, Any]], *, total: int, label: str, unit: str = "step",
    every: int = 0, bar: Progress | None = None, progress: Callable[[], int] | None = None,
    until: Callable[[], bool] = lambda: False, between: Callable[..., None] | None = None, quiet: bool = False,
) -> None:  # fmt: skip
    """Take steps to the end and show how far they are: units of ``label`` in all, ``every`` so many of them saved.

    ``take_step`` returns what the bar shows. A ``bar`` that is there already counts ``progress``, or steps; ``until``
    ends the steps early; ``between(done, every, more=…)`` is called after each, and may save, or raise to stop.
    """
    new = Progress(label, total=total, unit=unit, resume_at=state.step, file=io.StringIO() if quiet else None)
    with contextlib.nullcontext(bar) if bar else new as shown:
        while state.step < total and not until():
            row = take_step()
            shown.advance(1 if progress is None else progress() - shown.done, **row)
            if between is not None:
                between(f"{unit} {state.step} of {total}", every, more=state.step < total and not until())
        if state.step < total and progress is None:
            shown.advance(total - state.step)  # what ending early saved
