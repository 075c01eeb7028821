"""How a value reads: numbers, units, intervals and gaps as text, alike for terminal, page and plots.

Column names are words; ``units`` gives a column its unit. ``x_low`` and ``x_high`` beside ``x`` are its interval and
are folded into it. Bytes ("B") and seconds ("s") are shown in one prefix per column, chosen by the largest value.
"""

from __future__ import annotations

import math
import textwrap
import unicodedata
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeGuard

Cell = int | float | str | bool | None  # what a row may hold

MISSING = "–"  # shown for what was not measured; never a zero

_LADDERS: dict[str, tuple[tuple[float, float, str], ...]] = {  # unit -> (used from, one of it, its name)
    "B": ((0, 1, "B"), (2**10, 2**10, "KiB"), (2**20, 2**20, "MiB"), (2**30, 2**30, "GiB"), (2**40, 2**40, "TiB")),
    "s": ((0, 1e-6, "µs"), (1e-3, 1e-3, "ms"), (1, 1, "s"), (600, 60, "min"), (7200, 3600, "h")),
}
_LARGE = ((1e12, "tn"), (1e9, "bn"), (1e6, "M"))
_SUPERSCRIPT = str.maketrans("-0123456789", "⁻⁰¹²³⁴⁵⁶⁷⁸⁹")


@dataclass(frozen=True, slots=True)
class Scale:
    """A unit to show values in: ``shown = value / one``."""

    one: float  # one shown unit, in the unit of the data
    unit: str  # name of the shown unit ("" for a plain number)


@dataclass(frozen=True, slots=True)
class Column:
    """A column of a table, ready to be printed."""

    name: str  # key of the column in the rows
    unit: str  # unit for the head row; "" where there is none or each cell carries its own
    cells: tuple[str, ...]  # one text per row
    numeric: bool  # whether the cells are numbers, to be aligned right

    @property
    def label(self) -> str:
        """The name in words."""
        return words(self.name)


def words(name: str) -> str:
    """Turn a key into words: ``held_out_loss`` reads "held out loss"."""
    return name.replace("_", " ")


def fold(text: str, width: int) -> str:
    """Break a text into at most three lines of so many letters."""
    return "\n".join(textwrap.wrap(text, width, max_lines=3, placeholder="…"))


def superscript(power: int) -> str:
    """Write an exponent."""
    return str(power).translate(_SUPERSCRIPT)


def tidy(text: str) -> str:
    r"""Make a text safe for one line of a terminal: no control characters, no line breaks.

    Example:
        >>> tidy("two\nlines\x1b[31m")
        'two lines�[31m'
    """
    flat = " ".join(text.split())
    return "".join("�" if unicodedata.category(letter) in {"Cc", "Cf", "Cs"} else letter for letter in flat)


def scale_of(values: Iterable[object], unit: str) -> Scale:
    """Choose the prefix that the largest finite value asks for."""
    ladder = _LADDERS.get(unit)
    if ladder is None:
        return Scale(1, unit)
    sizes = [abs(value) for value in values if is_number(value) and math.isfinite(value)]
    largest = max(sizes, default=0.0)
    # nothing but zeros says nothing of a prefix: they are shown in the unit itself
    rungs = [rung for rung in ladder if largest >= rung[0]] if largest else [rung for rung in ladder if rung[1] == 1]
    return Scale(*rungs[-1][1:])


def is_number(value: object) -> TypeGuard[int | float]:
    """Whether a cell is a number (a truth value is not)."""
    return isinstance(value, int | float) and not isinstance(value, bool)


def is_finite(value: object) -> TypeGuard[int | float]:
    """Whether a cell is a finite number."""
    return is_number(value) and math.isfinite(value)


def digits(value: float) -> str:
    """Write a number with three significant digits; an integer below a million is written exactly.

    Example:
        >>> [digits(x) for x in (3.2149, 12345.6, 1200, 24_407_040, 3e-4, 1.5e-7, float("nan"))]
        ['3.21', '12,300', '1200', '24.4 M', '0.0003', '1.5 × 10⁻⁷', 'NaN']
    """
    if not math.isfinite(value):
        return "NaN" if math.isnan(value) else _minus("∞", value)
    size = abs(value)
    if isinstance(value, int) and size < 1_000_000:
        return _minus(grouped(size, 0), value)
    # of the rounded number: a logarithm would give 9.996 two decimals, 10.00
    exponent = int(f"{size:.2e}".split("e")[1]) if size else 0
    if size and (exponent < -4 or exponent >= 15):
        return _minus(f"{_trimmed(f'{size:.2e}'.split('e')[0])} × 10{superscript(exponent)}", value)
    for one, name in _LARGE:
        # what three digits round up to 1,000,000 is written "1 M"
        if size >= one * 0.9995:
            return _minus(f"{digits(size / one)} {name}", value)
    text = grouped(round(size, 2 - exponent), max(0, 2 - exponent))
    return _minus(_trimmed(text) if size < 0.01 else text, value)


def _minus(text: str, value: float) -> str:
    return f"−{text}" if value < 0 else text


def _trimmed(text: str) -> str:
    return text.rstrip("0").rstrip(".") if "." in text else text


def grouped(size: float, decimals: int = 0) -> str:
    """Write with thousands parted by commas from ten thousand on."""
    return f"{size:,.{decimals}f}" if size >= 10_000 else f"{size:.{decimals}f}"


def _interval(value: float, low: float, high: float) -> str:
    """Write value and interval with the decimals that half the width of the interval supports."""
    half = (high - low) / 2
    if not all(map(math.isfinite, (value, half))) or half <= 0 or max(map(abs, (low, high))) >= 1e6 or half < 1e-4:
        return f"{digits(value)} [{digits(low)}, {digits(high)}]"
    exponent = math.floor(math.log10(half))
    # one digit of half the width, two where it begins with 1: the second is then worth more than 5 %
    decimals = -exponent + (half / 10.0**exponent < 2)
    centre, lower, upper = (_minus(grouped(abs(round(x, decimals)), max(0, decimals)), x) for x in (value, low, high))
    return f"{centre} [{lower}, {upper}]"


def format_number(value: Cell, unit: str = "", *, low: float | None = None, high: float | None = None) -> str:
    """Write one value with its unit, as our tables, pages and plots do.

    Args:
        value: The value, in ``unit``; None is a dash.
        unit: "B" and "s" are given a prefix; "×" makes a ratio; others follow the number.
        low: Lower end of an interval, in ``unit``.
        high: Upper end of an interval, in ``unit``.

    Returns:
        Three significant digits and the unit.

    Example:
        >>> format_number(24.1e9, "B"), format_number(0.0123, "s"), format_number(2.7, "×"), format_number(None)
        ('22.4 GiB', '12.3 ms', '2.7×', '–')
        >>> format_number(0.83, low=0.80, high=0.86)
        '0.83 [0.80, 0.86]'
    """
    scale = scale_of([value, low, high], unit)
    text = _shown(value, scale, low, high)
    return text if not is_number(value) or scale.unit in {"", "×"} else f"{text} {scale.unit}"


def _shown(value: Cell, scale: Scale, low: Cell = None, high: Cell = None) -> str:
    if value is None:
        return MISSING
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, str):
        return tidy(value)
    shown = value if scale.one == 1 else value / scale.one
    if isinstance(low, int | float) and isinstance(high, int | float):
        text = _interval(shown, low / scale.one, high / scale.one)
        return text.replace(" [", "× [") if scale.unit == "×" else text
    text = digits(shown)
    if scale.unit != "×" or not math.isfinite(shown):
        return text
    if "." in text and text[-1].isdigit():  # 2.70 is written 2.7, and 2.00 2.0
        text = text.rstrip("0")
        text += "0" if text.endswith(".") else ""
    return f"{text}×"


def _cell(row: Mapping[str, Cell], name: str, scale: Scale, unit: str) -> str:
    value, low, high = row.get(name), row.get(f"{name}_low"), row.get(f"{name}_high")
    if is_number(value) and unit in _LADDERS and 0 < abs(float(value or 0)) < 0.01 * scale.one and low is None:
        return format_number(value, unit)  # too small for the unit of its column: it carries its own
    return _shown(value, scale, low, high)


def columns(
    rows: Sequence[Mapping[str, Cell]], *, units: Mapping[str, str] | None = None, names: Sequence[str] | None = None
) -> list[Column]:
    """Turn rows into columns of text."""
    if names is None:
        seen = dict.fromkeys(name for row in rows for name in row if name != "table")
        folded = {f"{name}_{end}" for name in seen for end in ("low", "high")}
        names = [name for name in seen if name not in folded]
    shown = []
    for name in names:
        values = [row.get(name) for row in rows]
        ends = [row.get(f"{name}_{end}") for row in rows for end in ("low", "high")]
        unit = (units or {}).get(name, "")
        scale = scale_of([*values, *ends], unit)
        cells = tuple(_cell(row, name, scale, unit) for row in rows)
        numeric = any(map(is_number, values))
        shown.append(Column(name, "" if scale.unit == "×" or not numeric else scale.unit, cells, numeric))
    return shown
