"""Progress bars on standard error: rate, time left and the quantities that matter."""

from __future__ import annotations

import contextlib
import os
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from types import TracebackType
from typing import TYPE_CHECKING, Self, TextIO

from sparing.report.cells import digits, format_number, grouped, tidy, words

if TYPE_CHECKING:
    from rich.progress import Progress as RichProgress
    from rich.progress import ProgressColumn, TaskID

_REDRAW = 0.1  # s: a bar is not redrawn more often, so that fast loops stay fast
_WINDOW = 60  # points of (time, done), half a second apart or more: the rate is that of the last half minute


class Progress:
    """A bar with rate, time left and quantities; in a pipe a line at the start, at the end and every half minute.

    Bars may be nested and advanced from several threads.

    Example:
        >>> with Progress("fine-tune", total=2, file=sys.stdout, clock=iter(range(9)).__next__) as bar:
        ...     for _ in range(2):
        ...         bar.advance(loss=3.2149)
        fine-tune: 2 steps to do
        fine-tune: 2 steps in 3 s, 0.667 steps/s, loss 3.21
    """

    def __init__(
        self,
        label: str,
        *,
        total: int,
        unit: str = "step",
        resume_at: int = 0,
        units: Mapping[str, str] | None = None,
        file: TextIO | None = None,
        every: float = 30.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Describe the work; nothing is shown before the ``with`` block.

        Args:
            label: What is being done, in a word or two.
            total: Units of work in all, those before ``resume_at`` included.
            unit: One unit of work, singular ("step"); "B" for bytes.
            resume_at: Units done in an earlier run; they do not count for the rate.
            units: Unit by name of a quantity, as in tables.
            file: Where to show it; standard error by default.
            every: Seconds between lines where there is no terminal.
            clock: Seconds, rising.
        """
        self.label, self.total, self.unit, self.done = tidy(label), total, unit, resume_at
        self._resumed, self._units, self._every, self._clock = resume_at, units or {}, every, clock
        self._stream = sys.stderr if file is None else file
        self._quantities: dict[str, float | str] = {}
        self._points: deque[tuple[float, int]] = deque(maxlen=_WINDOW)
        self._lock = threading.RLock()
        self._task: TaskID | None = None
        self._started = self._shown = 0.0

    def __enter__(self) -> Self:
        """Show the bar, or its first line."""
        self._started = self._shown = self._clock()
        self._points.append((self._started, self.done))
        if self._stream.isatty() and os.environ.get("TERM") != "dumb":
            self._task = _TERMINAL.join(self)
        elif self._resumed:
            self._say(f"resumes at {self.counter}")
        else:
            self._say(f"{self._amount(self.total)} to do")
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Take the bar away and leave one line: what was done, how fast, and the last quantities."""
        with self._lock:
            seconds = self._clock() - self._started
            done = self._amount(self.done) if self.done == self.total else self.counter
            rate = (self.done - self._resumed) / seconds if seconds > 0 else 0.0
            start = f"stopped at {done} after" if kind else f"{done} in"
            line = ", ".join([f"{start} {duration(seconds)}", *self._rate(rate), *self._values()])
            if self._task is None:
                self._say(line)
            else:
                _TERMINAL.leave(self._task, f"{self.label}: {line}")

    def advance(self, n: int = 1, **quantities: float | str) -> None:
        """Count work as done.

        Args:
            n: Units done since the last call.
            **quantities: What to show beside the bar, by name; a name stays until its next value.
        """
        with self._lock:
            self.done += n
            self._quantities |= quantities
            now = self._clock()
            if now - self._points[-1][0] >= 0.5:
                self._points.append((now, self.done))
            if self._task is None:
                if now - self._shown >= self._every and self.done < self.total:
                    self._shown = now
                    self._say(", ".join([self.counter, *self._state(now)]))
            elif now - self._shown >= _REDRAW or self.done >= self.total:
                self._shown = now
                _TERMINAL.show(self._task, self, ", ".join(self._state(now)))

    def _say(self, line: str) -> None:
        # a log that is full, or whose reader is gone, is no reason to stop
        with contextlib.suppress(OSError):
            self._stream.write(f"{self.label}: {line}\n")
            self._stream.flush()

    def _state(self, now: float) -> list[str]:
        since, before = self._points[0]
        rate = (self.done - before) / (now - since) if now > since else 0.0
        busy = rate > 0 and self.done < self.total
        left = [f"{duration(max(1, round((self.total - self.done) / rate)))} left"] if busy else []
        return [*self._rate(rate), *left, *self._values()]

    def _rate(self, rate: float) -> list[str]:
        if rate <= 0:
            return []
        return [f"{format_number(rate, 'B')}/s" if self.unit == "B" else f"{digits(rate)} {_plural(self.unit)}/s"]

    def _values(self) -> list[str]:
        shown = ((name, format_number(value, self._units.get(name, ""))) for name, value in self._quantities.items())
        return [f"{words(name)} {text}" for name, text in shown]

    @property
    def counter(self) -> str:
        """How much is done, to show beside the bar."""
        return f"{self._amount(self.done, bare=self.unit != 'B')} of {self._amount(self.total)}"

    def _amount(self, count: int, *, bare: bool = False) -> str:
        if self.unit == "B":
            return format_number(count, "B")
        return grouped(count) if bare else f"{grouped(count)} {self.unit if count == 1 else _plural(self.unit)}"


def _plural(unit: str) -> str:
    return f"{unit}es" if unit.endswith(("s", "x", "ch", "sh")) else f"{unit}s"


def duration(seconds: float) -> str:
    """Write a time span (seconds) in at most two units.

    Example:
        >>> [duration(seconds) for seconds in (0.25, 74.2, 750, 7500)]
        ['250 ms', '74 s', '12 min 30 s', '2 h 05 min']
    """
    if seconds < 10:
        return f"{seconds:.0f} s" if seconds == int(seconds) else format_number(float(seconds), "s")
    if seconds < 100:
        return f"{seconds:.0f} s"
    minutes, rest = divmod(round(seconds), 60)
    if minutes < 100:
        return f"{minutes} min {rest:02d} s"
    return f"{minutes // 60} h {minutes % 60:02d} min"


class _Terminal:
    """All bars of this process: a terminal has room for one live display, and bars come and go from many threads."""

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._display: RichProgress | None = None
        self._bars = 0

    def join(self, bar: Progress) -> TaskID:
        """Show one more bar."""
        with self._lock:
            if self._display is None:
                self._display = _display(bar._stream)
                self._display.start()
            self._bars += 1
            return self._display.add_task(bar.label, total=bar.total, completed=bar.done, counter=bar.counter, state="")

    def show(self, task: TaskID, bar: Progress, state: str) -> None:
        """Move a bar."""
        with self._lock:
            if self._display is not None:
                self._display.update(task, completed=bar.done, counter=bar.counter, state=state)

    def leave(self, task: TaskID, line: str) -> None:
        """Take a bar away and leave its last line above those that remain."""
        with self._lock:
            display = self._display
            if display is None:
                return
            display.remove_task(task)
            self._bars -= 1
            if not self._bars:
                display.stop()
                self._display = None
            display.console.print(line, markup=False, highlight=False, soft_wrap=True)


# a terminal is one thing per process, so this is too
_TERMINAL = _Terminal()


def _display(stream: TextIO) -> RichProgress:
    from rich.console import Console
    from rich.progress import BarColumn, TextColumn
    from rich.progress import Progress as RichProgress
    from rich.table import Column

    whole = Column(no_wrap=True)
    return RichProgress(
        TextColumn("{task.description}", markup=False, table_column=whole),
        BarColumn(20, complete_style="#0072B2", finished_style="#009E73", table_column=whole),
        TextColumn("{task.fields[counter]}", markup=False, table_column=whole),
        _line_column(),
        console=Console(file=stream, force_terminal=True, legacy_windows=False),
        transient=True,
        # a pipe keeps its standard output; a terminal prints above the bars
        redirect_stdout=sys.stdout.isatty(),
    )


def _line_column() -> ProgressColumn:
    """The one column that a narrow terminal may cut: rate, time left, quantities, on one line."""
    from rich.progress import ProgressColumn, Task
    from rich.text import Text

    class Line(ProgressColumn):
        def render(self, task: Task) -> Text:
            return Text(str(task.fields["state"]), no_wrap=True, overflow="ellipsis")

    return Line()
