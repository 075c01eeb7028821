"""A signal is noted, the step finished and saved; then the run stops."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from sparing.jobs.interrupts import StoppedError, catch_interrupts, defer_signals, save_when_due, stop_if_pressed

PLACE = Path("out/checkpoints/step-00000005")


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_is_noted_and_handlers_come_back(number: int) -> None:
    before = signal.getsignal(number)
    with defer_signals() as signals:
        assert signals == []
        signal.raise_signal(number)
        assert signals == [number]
    assert signal.getsignal(number) is before


@pytest.fixture
def usual() -> Iterator[None]:
    """Python's own handler of SIGINT, which a shell that starts jobs in the background takes away."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("usual")
def test_the_second_of_a_kind_acts_as_usual() -> None:
    with defer_signals() as signals:
        signal.raise_signal(signal.SIGINT)
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)
    assert signals == [signal.SIGINT]
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_handlers_come_back_after_an_error() -> None:
    before = signal.getsignal(signal.SIGTERM)
    with pytest.raises(ZeroDivisionError), defer_signals():
        raise ZeroDivisionError
    assert signal.getsignal(signal.SIGTERM) is before


def test_other_threads_leave_signals_as_they_are() -> None:
    seen = []

    def work() -> None:
        before = signal.getsignal(signal.SIGINT)
        with defer_signals() as signals:
            seen.append((signals, signal.getsignal(signal.SIGINT) is before))

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert seen == [([], True)]


@pytest.mark.parametrize(("every", "expected"), [(0, []), (1, [1, 2, 3, 4, 5, 6]), (3, [3, 6])])
def test_it_saves_when_it_is_time_to(every: int, expected: list[int]) -> None:
    saved: list[int] = []
    for step in range(1, 7):

        def save(step: int = step) -> Path:
            saved.append(step)
            return PLACE

        save_when_due(save, [], step=step, every=every, done="")
    assert saved == expected


@pytest.mark.parametrize("every", [0, 3, 5])
def test_a_signal_saves_once_and_stops(every: int) -> None:
    saved: list[Path] = []

    def save() -> Path:
        saved.append(PLACE)
        return PLACE

    with pytest.raises(StoppedError, match=rf"step 5 of 7 is saved in {PLACE}; .*--resume"):
        save_when_due(save, [signal.SIGINT], step=5, every=every, done="step 5 of 7")
    assert saved == [PLACE]


def test_a_stop_is_a_keyboard_interrupt() -> None:
    """So that nothing which catches errors takes it for one."""
    assert issubclass(StoppedError, KeyboardInterrupt)
    assert not issubclass(StoppedError, Exception)


@pytest.mark.usefixtures("usual")
def test_an_error_that_ctrl_c_became_stops_what_would_go_on() -> None:
    """A library in C makes a RuntimeError of it; elsewhere an error is an error."""
    error = RuntimeError("error return without exception set")
    stop_if_pressed(error)
    with catch_interrupts() as keys:
        stop_if_pressed(error)
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)
        assert keys.pressed
        with pytest.raises(KeyboardInterrupt):
            stop_if_pressed(error)
    stop_if_pressed(error)
