"""Ctrl-C. With patience: a signal is noted, the step is finished and saved, then the run stops and says how to go on.

with patient() as signals:
while step < steps:
step += 1  # one step of the work
save_when_due(save, signals, step=step, every=100, done=f"step {step} of {steps}")
"""

from __future__ import annotations

import _thread
import contextlib
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any, Literal


class StoppedError(KeyboardInterrupt):
    """The run was interrupted by a signal, after its step was finished and saved; says how to go on."""


@contextlib.contextmanager
def patient(*, always: bool = False) -> Iterator[list[int]]:
    """Note SIGINT and SIGTERM instead of dying of them; a second one of a kind acts as usual.

    Args:
        always: Note every one: under ``torchrun``, which sends on what the terminal has sent already, and which kills
            after half a minute whoever is still there.

    Yields:
        A list that receives the signals' numbers. Outside the main thread signals stay as they are.
    """
    noted: list[int] = []
    before: dict[int, Any] = {}

    def note(number: int, frame: FrameType | None) -> None:
        noted.append(number)
        if not always:
            signal.signal(number, before[number])

    if threading.current_thread() is threading.main_thread():
        before = {number: signal.signal(number, note) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield noted
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def save_when_due(save: Callable[[], Path], signals: Sequence[int], *, step: int, every: int, done: str) -> None:
    """Between two steps: save if it is time to or a signal came in, and stop in the latter case.

    Args:
        save: Writes a checkpoint and returns its place.
        signals: Those noted so far.
        step: Steps finished (count).
        every: Steps between checkpoints (count); 0: only at a signal.
        done: What is finished, such as "step 5 of 7".

    Raises:
        StoppedError: If there was a signal; everything is saved by then.
    """
    if not (signals or (every and step % every == 0)):
        return
    path = save()
    if signals:
        raise StoppedError(f"interrupted; {done} is saved in {path}; run the same command with --resume to go on")


AGAIN = 0.01
"""Seconds until an interrupt that could not be raised, or was lost, is tried again."""


@dataclass(slots=True)
class CtrlC:
    """What Ctrl-C does to a command line: it is raised where Python can pass it on, and no traceback is shown."""

    for_good: bool = False
    """Whether the process ends with the command."""

    pressed: bool = False
    """Whether it was: libraries in C make other errors of it than Python's."""

    during: Literal["the run", "the line", "nothing"] = "the run"
    """What it stops: the run; nothing while the line is written that says why the run ended; then the process."""

    def note(self, number: int, frame: FrameType | None) -> None:
        """Handle the signal."""
        self.pressed = True
        if self.during == "nothing":
            os._exit(130)
        if self.during == "the run":
            if not _below_torch(frame):
                signal.default_int_handler(number, frame)
            if self.for_good:  # a mode traces what is never trained, so that nothing is lost
                os.write(2, b"sparing: interrupted\n")
                os._exit(130)
            _thread.start_new_thread(_press_again, ())

    def lost(self, found: sys.UnraisableHookArgs) -> None:
        """Take an error that nothing can catch, from a finaliser say: an interrupt is raised again elsewhere."""
        if issubclass(found.exc_type, KeyboardInterrupt):
            _thread.start_new_thread(_press_again, ())
        else:
            sys.__unraisablehook__(found)


_LISTENING: list[CtrlC] = []
"""That of the command that runs, if one does."""


def stop_if_pressed(error: Exception) -> None:
    """Stop where a run would go on after an error, if Ctrl-C was pressed: the error may be what became of it.

    Args:
        error: What was caught.

    Raises:
        KeyboardInterrupt: If it was.
    """
    if any(keys.pressed for keys in _LISTENING):
        raise KeyboardInterrupt from error


def _below_torch(frame: FrameType | None) -> bool:
    """Whether a dispatch mode is on: torch's C++ then asks Python for what may not fail, or the process is aborted."""
    modes = getattr(getattr(sys.modules.get("torch"), "_C", None), "_len_torch_dispatch_stack", int)
    while frame is not None and frame.f_code.co_name != "__torch_dispatch__":  # which runs with its mode taken off
        frame = frame.f_back
    return frame is not None or modes() > 0


def _press_again() -> None:
    time.sleep(AGAIN)
    os.kill(os.getpid(), signal.SIGINT)  # it also wakes a sleeping main thread


@contextlib.contextmanager
def heard(*, for_good: bool = False) -> Iterator[CtrlC]:
    """Note Ctrl-C before it is raised.

    Args:
        for_good: Whether the process ends with the block: Ctrl-C during its end then makes no traceback either.

    Yields:
        What is known of it. Outside the main thread, and where somebody handles the signal, nothing changes.
    """
    keys = CtrlC(for_good)
    main = threading.current_thread() is threading.main_thread()
    usual = main and signal.getsignal(signal.SIGINT) is signal.default_int_handler
    hook = sys.unraisablehook
    if usual:
        _LISTENING.append(keys)
        signal.signal(signal.SIGINT, keys.note)
        sys.unraisablehook = keys.lost
    try:
        yield keys
    finally:
        keys.during = "nothing"
        if usual and not for_good:
            _LISTENING.remove(keys)
            sys.unraisablehook = hook
            signal.signal(signal.SIGINT, signal.default_int_handler)
