"""Ctrl-C: a signal is noted, the step is finished and saved, then the run stops and says how to go on.

with defer_signals() as signals:
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
def defer_signals(*, always: bool = False) -> Iterator[list[int]]:
    """Note SIGINT and SIGTERM in a list instead of dying of them; a second one of a kind acts as usual.

    ``always`` notes every one: under ``torchrun``, which sends on what the terminal has sent already, and which kills
    after half a minute whoever is still there. Outside the main thread signals stay as they are.
    """
    noted: list[int] = []
    before: dict[int, Any] = {}

    def note(number: int, frame: FrameType | None) -> None:
        noted.append(number)
        if not always:
            signal.signal(number, before[number])

    # ``signal.signal`` is refused in any other thread
    if threading.current_thread() is threading.main_thread():
        before = {number: signal.signal(number, note) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield noted
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def save_when_due(save: Callable[[], Path], signals: Sequence[int], *, step: int, every: int, done: str) -> None:
    """Between two steps: save if it is time to (``every`` so many; 0: never) or a signal came in, and then stop.

    ``save`` returns the checkpoint's place; ``done`` says what is finished, such as "step 5 of 7".
    """
    if not (signals or (every and step % every == 0)):
        return
    path = save()
    if signals:
        raise StoppedError(f"interrupted; {done} is saved in {path}; run the same command with --resume to go on")


AGAIN = 0.01  # until an interrupt that could not be raised, or was lost, is tried again (s)


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
            # a mode traces what is never trained, so that nothing is lost
            if self.for_good:
                os.write(2, b"sparing: interrupted\n")
                os._exit(130)
            _thread.start_new_thread(_press_again, ())

    def lost(self, found: sys.UnraisableHookArgs) -> None:
        """Take an error that nothing can catch, from a finaliser say: an interrupt is raised again elsewhere."""
        if issubclass(found.exc_type, KeyboardInterrupt):
            _thread.start_new_thread(_press_again, ())
        else:
            sys.__unraisablehook__(found)


_LISTENING: list[CtrlC] = []  # that of the command that runs, if one does


def stop_if_pressed(error: Exception) -> None:
    """Stop where a run would go on after an error, if Ctrl-C was pressed: the error may be what became of it."""
    if any(keys.pressed for keys in _LISTENING):
        raise KeyboardInterrupt from error


def _below_torch(frame: FrameType | None) -> bool:
    """Whether a dispatch mode is on: torch's C++ then asks Python for what may not fail, or the process is aborted."""
    # ``int`` in place of torch's count is 0: without torch no mode is on, and a signal must not import it
    modes = getattr(getattr(sys.modules.get("torch"), "_C", None), "_len_torch_dispatch_stack", int)
    # the handler of a mode runs with its mode taken off, so it is looked for by name
    while frame is not None and frame.f_code.co_name != "__torch_dispatch__":
        frame = frame.f_back
    return frame is not None or modes() > 0


def _press_again() -> None:
    time.sleep(AGAIN)
    # a signal, because unlike ``_thread.interrupt_main`` it also wakes a main thread that sleeps
    os.kill(os.getpid(), signal.SIGINT)


@contextlib.contextmanager
def catch_interrupts(*, for_good: bool = False) -> Iterator[CtrlC]:
    """Note Ctrl-C before it is raised; where somebody else handles the signal, and in other threads, change nothing.

    ``for_good``: the process ends with the block, so that Ctrl-C during its end makes no traceback either.
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
