"""Terminal tables: the page's words and numbers, plain in a pipe, whole on a narrow screen."""

from __future__ import annotations

import io
import re

import pytest

from sparing.report.cells import columns
from sparing.report.terminal import print_table

ROWS = [
    {"method": "full", "peak": 5_100_000_000, "loss": 3.214, "loss_low": 3.19, "loss_high": 3.24, "n": 3, "speed": 1.0},
    {"method": "lisa, embedding frozen", "peak": 2_400_000_000, "loss": 3.3, "n": 1, "speed": None},
]
UNITS = {"peak": "B", "loss": "nat/token", "speed": "×"}
ESCAPE = re.compile(r"\x1b\[[0-9;]*m")


def printed(rows, stream=None, **options) -> str:
    stream = io.StringIO() if stream is None else stream
    print_table(rows, file=stream, **options)
    return stream.getvalue()


def test_a_pipe_gets_aligned_plain_text() -> None:
    text = printed(ROWS, title="Memory and loss", units=UNITS)
    assert text == (
        "Memory and loss\n"
        "method                   peak                loss   n   speed\n"
        "                          GiB           nat/token\n"
        "─────────────────────────────────────────────────────────────\n"
        "full                     4.75   3.21 [3.19, 3.24]   3    1.0×\n"
        "lisa, embedding frozen   2.24                3.30   1       –\n"
    )


def test_every_cell_is_that_of_the_page() -> None:
    text = printed(ROWS, units=UNITS)
    assert all(cell in text for column in columns(ROWS, units=UNITS) for cell in column.cells)


def test_a_terminal_gets_colour_and_the_same_words(terminal) -> None:
    roles = {"full": "reference", "lisa, embedding frozen": "extension"}
    text = printed(ROWS, terminal, title="T", units=UNITS, roles=roles)
    assert ESCAPE.search(text)
    bare = [line.rstrip() for line in ESCAPE.sub("", text).splitlines()]
    assert bare == printed(ROWS, title="T", units=UNITS, roles=roles).splitlines()
    assert "◆ lisa, embedding frozen" in ESCAPE.sub("", text)


@pytest.mark.parametrize(("name", "value"), [("NO_COLOR", "1"), ("TERM", "dumb")])
def test_no_colour_when_asked(terminal, monkeypatch, name, value) -> None:
    monkeypatch.setenv(name, value)
    assert "\x1b" not in printed(ROWS, terminal, units=UNITS)


@pytest.mark.parametrize("width", [20, 60])
def test_a_narrow_terminal_cuts_no_number(terminal, monkeypatch, width) -> None:
    monkeypatch.setenv("COLUMNS", str(width))
    text = ESCAPE.sub("", printed(ROWS, terminal, units=UNITS))
    assert "3.21 [3.19, 3.24]" in text
    assert "…" not in text


def test_long_words_are_folded_on_a_terminal_and_whole_in_a_pipe(terminal, monkeypatch) -> None:
    monkeypatch.setenv("COLUMNS", "60")
    rows = [{"note": "word " * 40, "n": 1}]
    assert max(map(len, ESCAPE.sub("", printed(rows, terminal)).splitlines())) <= 60
    assert printed(rows).splitlines()[-1][:199] + " " == "word " * 40


def test_hostile_text_is_shown_not_obeyed(terminal) -> None:
    text = printed([{"name": "[red]x[/red] \x1b[2J\x07\nnext", "a": 1}], terminal, title="[bold]\x1b]0;t\x07")
    assert "[red]x[/red]" in text
    assert "\x1b[2J" not in text
    assert "\x1b]0" not in text
    assert "\x07" not in text


def test_an_ascii_stream_does_not_fail() -> None:
    raw = io.BytesIO()
    stream = io.TextIOWrapper(raw, encoding="ascii")
    print_table([{"name": "γ ●", "lr": 1e-5, "speed": 2.7, "t": None}], units={"speed": "×"}, file=stream)
    last = raw.getvalue().decode("ascii").splitlines()[-1]
    assert last.split() == ["?", "*", "1e-5", "2.7x", "-"]


def test_standard_output_is_the_default(capsys) -> None:
    print_table([{"a": 1}])
    out, err = capsys.readouterr()
    assert (out.split(), err) == (["a", "─", "1"], "")


def test_no_rows_print_the_title() -> None:
    assert printed([], title="Nothing yet").startswith("Nothing yet\n")
