"""Tables on a terminal, and as plain text in a pipe."""

from __future__ import annotations

import io
import os
import sys
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, TextIO

from sparing.report.cells import Cell, Column, tidy
from sparing.report.cells import columns as to_columns
from sparing.report.palette import Role, style

if TYPE_CHECKING:
    from rich.table import Table as RichTable

_NARROW_TEXT = 28  # letters: shorter names are never wrapped
_ASCII = str.maketrans(
    {"–": "-", "−": "-", "×": "x", "µ": "u", "∞": "inf", "─": "-", "…": "."}
    | dict(zip("⁻⁰¹²³⁴⁵⁶⁷⁸⁹", "-0123456789", strict=True))
    | dict.fromkeys("●◆■▲▼✕✚★", "*")
)


def print_table(
    rows: Sequence[Mapping[str, Cell]],
    *,
    title: str = "",
    units: Mapping[str, str] | None = None,
    columns: Sequence[str] | None = None,
    roles: Mapping[str, Role] | None = None,
    file: TextIO | None = None,
) -> None:
    """Print rows as a table, with the column names and numbers that the page shows.

    On a terminal the title is bold and known methods carry the marker and colour of their role; in a pipe, a file or
    under ``NO_COLOR`` the text is plain. Numbers are never cut: a table wider than the terminal is printed at its full
    width.

    Args:
        rows: Rows of one table.
        title: Above the table.
        units: Unit by column name.
        columns: Columns to show, in order; all by default.
        roles: Role by name in the first text column.
        file: Where to print; standard output by default.
    """
    stream = sys.stdout if file is None else file
    shown = to_columns(rows, units=units, names=columns)
    colour = stream.isatty() and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"
    text = _rendered(_table(shown, roles or {}), tidy(title), colour=colour)
    encoding = getattr(stream, "encoding", None) or "utf-8"
    try:
        text.encode(encoding)
    except UnicodeEncodeError:
        # an ASCII locale must not fail on a dash
        text = text.replace(" × 10", "e").translate(_ASCII).encode(encoding, "replace").decode(encoding)
    stream.write(text)
    stream.flush()


def _table(shown: Sequence[Column], roles: Mapping[str, Role]) -> RichTable:
    from rich import box
    from rich.table import Table
    from rich.text import Text

    table = Table(box=box.SIMPLE_HEAD, header_style="bold", pad_edge=False, show_edge=False, padding=(0, 1))
    has_units = any(column.unit for column in shown)
    named = next((at for at, column in enumerate(shown) if not column.numeric), None)
    for at, column in enumerate(shown):
        head = Text(tidy(column.label))
        if has_units:
            head.append(f"\n{column.unit}", style="not bold dim")
        width = max(map(len, column.cells), default=0) + (2 if at == named and roles else 0)
        least = width if column.numeric else min(width, _NARROW_TEXT)
        least = max(least, len(column.label), len(column.unit))
        table.add_column(head, justify="right" if column.numeric else "left", overflow="fold", min_width=least)
    for cells in zip(*(column.cells for column in shown), strict=True):
        texts = [Text(cell) for cell in cells]
        if roles and named is not None:
            role = roles.get(cells[named])
            sign = " " if role is None else style(role).sign
            colour = "" if role in {None, "reference"} else style(roles[cells[named]]).colour
            texts[named] = Text.assemble((sign, colour), f" {cells[named]}")
        table.add_row(*texts)
    return table


def _rendered(table: RichTable, title: str, *, colour: bool) -> str:
    from rich.console import Console
    from rich.text import Text

    out = io.StringIO()
    console = Console(file=out, force_terminal=colour, no_color=not colour, legacy_windows=False, highlight=False)
    needed = console.measure(table, options=console.options.update(max_width=100_000))
    # in a pipe as wide as the table, whatever COLUMNS says; on a terminal names may wrap but numbers may not
    console.width = max(needed.minimum, console.width) if colour else max(needed.maximum, len(title))
    if title:
        console.print(Text(title, style="bold"))
    console.print(table)
    return "\n".join(line.rstrip() for line in out.getvalue().splitlines()) + "\n"
