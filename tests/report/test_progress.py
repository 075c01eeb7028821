"""Bars: few lines in a pipe, one display on a terminal, right rates, safe from threads."""

from __future__ import annotations

import io
import re
import threading

import pytest

from sparing.report.progress import Progress, duration


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def plain_text(written: str) -> str:
    return re.sub(r"\x1b\[[?0-9;]*[a-zA-Z]", "", written)


def run(total: int, seconds: float, *, start: int = 0, unit: str = "step", **quantities) -> list[str]:
    clock, out = Clock(), io.StringIO()
    with Progress("train", total=total, unit=unit, resume_at=start, file=out, clock=clock) as bar:
        for _ in range(total - start):
            clock.now += seconds
            bar.advance(**quantities)
    return out.getvalue().splitlines()


def test_a_short_run_is_two_lines() -> None:
    assert run(10, 0.5, loss=3.2149) == ["train: 10 steps to do", "train: 10 steps in 5 s, 2.00 steps/s, loss 3.21"]


@pytest.mark.parametrize("error", [BrokenPipeError(), OSError(28, "No space left on device")], ids=["reader", "disk"])
def test_a_log_that_is_gone_or_full_ends_no_run(error: OSError) -> None:
    class Gone(io.StringIO):
        def write(self, text: str) -> int:
            raise error

    clock = Clock()
    with Progress("train", total=100, file=Gone(), clock=clock) as bar:
        for _ in range(100):
            clock.now += 10.0
            bar.advance()
    assert bar.done == 100


def test_a_long_run_speaks_at_most_every_thirty_seconds() -> None:
    lines = run(200, 1.0, loss=1.0)
    assert len(lines) == 2 + 6  # at 30, 60, … 180 s
    assert lines[1] == "train: 30 of 200 steps, 1.00 steps/s, 2 min 50 s left, loss 1.00"


def test_units_before_the_resumption_do_not_count_for_the_rate() -> None:
    lines = run(110, 1.0, start=100)
    assert lines == ["train: resumes at 100 of 110 steps", "train: 110 steps in 10 s, 1.00 steps/s"]


def test_the_rate_is_a_recent_one() -> None:
    """Slow at first, then four a second: the time left follows the last half minute, not the mean."""
    clock, out = Clock(), io.StringIO()
    with Progress("t", total=1000, file=out, clock=clock) as bar:
        for at in range(300):
            clock.now += 2.0 if at < 10 else 0.5
            bar.advance()
    assert "2.00 steps/s, 6 min" in out.getvalue().splitlines()[-2]


def test_bytes_are_written_as_bytes() -> None:
    out, clock = io.StringIO(), Clock()
    with Progress("fetch", total=3 * 2**20, unit="B", file=out, clock=clock) as bar:
        clock.now = 31.0
        bar.advance(2**20)
        clock.now = 40.0
        bar.advance(2**21)
    assert out.getvalue().splitlines() == [
        "fetch: 3.00 MiB to do",
        "fetch: 1.00 MiB of 3.00 MiB, 33.0 KiB/s, 62 s left",
        "fetch: 3.00 MiB in 40 s, 76.8 KiB/s",
    ]


def test_an_interruption_is_named_and_goes_on() -> None:
    out, clock = io.StringIO(), Clock()

    def interrupted() -> None:
        with Progress("t", total=4, file=out, clock=clock) as bar:
            clock.now = 2.0
            bar.advance(loss=2.0)
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert out.getvalue().splitlines()[-1] == "t: stopped at 1 of 4 steps after 2 s, 0.500 steps/s, loss 2.00"


def test_quantities_have_units_and_stay() -> None:
    out, clock = io.StringIO(), Clock()
    with Progress("t", total=2, unit="batch", units={"memory": "B"}, file=out, clock=clock) as bar:
        clock.now = 1.0
        bar.advance(memory=2**31, state="warm\nup")
        bar.advance()
    assert out.getvalue().splitlines()[-1] == "t: 2 batches in 1 s, 2.00 batches/s, memory 2.00 GiB, state warm up"


def test_nothing_to_do() -> None:
    assert run(5, 1.0, start=5) == ["train: resumes at 5 of 5 steps", "train: 5 steps in 0 s"]


def test_standard_error_is_the_default(capsys) -> None:
    with Progress("t", total=1) as bar:
        bar.advance()
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("t: 1 step to do\nt: 1 step in ")


def test_a_terminal_shows_a_bar_and_leaves_one_line(terminal) -> None:
    clock = Clock()
    with Progress("fine-tune", total=4, file=terminal, clock=clock) as bar:
        for _ in range(3):
            clock.now += 1.0
            bar.advance(loss=3.0)
    written = terminal.getvalue()
    assert "━" in written
    assert "\x1b[?25l" in written  # the cursor is hidden while the bar moves
    assert "\x1b[?25h" in written  # and shown again
    assert plain_text(written).splitlines()[-1].strip() == "fine-tune: 3 of 4 steps in 3 s, 1.00 steps/s, loss 3.00"


def test_a_bar_that_ended_is_gone_while_the_outer_one_goes_on(terminal) -> None:
    with Progress("outer", total=2, file=terminal) as outer:
        with Progress("inner", total=1, file=terminal) as inner:
            inner.advance()
        seen = len(terminal.getvalue())
        outer.advance()
    assert "outer" in plain_text(terminal.getvalue()[seen:])
    assert "inner" not in plain_text(terminal.getvalue()[seen:])


def test_a_dumb_terminal_is_a_pipe(terminal, monkeypatch) -> None:
    monkeypatch.setenv("TERM", "dumb")
    with Progress("t", total=1, file=terminal) as bar:
        bar.advance()
    assert "\x1b" not in terminal.getvalue()


def test_bars_nest_and_run_in_threads(terminal) -> None:
    def work(name: int) -> None:
        with Progress(f"worker {name}", total=50, file=terminal) as bar:
            for _ in range(50):
                bar.advance(loss=1.0)

    with Progress("outer [bold]", total=3, file=terminal) as outer:
        threads = [threading.Thread(target=work, args=(at,)) for at in range(3)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
            outer.advance()
    text = plain_text(terminal.getvalue())
    for name in ("worker 0", "worker 1", "worker 2"):
        assert text.count(f"{name}: 50 steps in") == 1
    assert text.count("outer [bold]: 3 steps in") == 1
    with Progress("again", total=1, file=terminal) as bar:  # the terminal is free for the next
        bar.advance()
    assert "again: 1 step in" in plain_text(terminal.getvalue())


def test_no_count_is_lost_between_threads() -> None:
    with Progress("t", total=8000, file=io.StringIO()) as bar:

        def count() -> None:
            for _ in range(1000):
                bar.advance()

        threads = [threading.Thread(target=count) for _ in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert bar.done == 8000


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0, "0 s"),
        (0.0123, "12.3 ms"),
        (9.5, "9.50 s"),
        (99.4, "99 s"),
        (99.6, "100 s"),
        (3661, "61 min 01 s"),
        (86400, "24 h 00 min"),
    ],
)
def test_spans_of_time(seconds: float, text: str) -> None:
    assert duration(seconds) == text
