"""Ctrl-C with patience: a signal is noted, the step is finished and saved, then the run stops and says how to go on.

with patient() as signals:
while step < steps:
step += 1  # one step of the work
save_when_due(save, signals, step=step, every=100, done=f"step {step} of {steps}")
"""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import FrameType
from typing import Any


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
