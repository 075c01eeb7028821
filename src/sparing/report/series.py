"""What a plot shows, as plain data: axes, and series of points taken from the rows of a record."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from sparing.report.cells import Cell, Scale, is_number, scale_of, words
from sparing.report.palette import Role


@dataclass(frozen=True, slots=True)
class Axis:
    """A quantity along an edge of a plot."""

    label: str
    """The quantity, in words."""

    unit: str = ""
    """Its unit; "B" and "s" are shown with a prefix chosen from the data."""

    log: bool | int = False
    """Logarithmic: True for powers of ten, 2 for powers of two."""

    low: float | None = None
    """First value shown, in ``unit``; by default chosen from the data."""

    high: float | None = None
    """Last value shown, in ``unit``."""

    def scaled(self, values: Iterable[object]) -> Scale:
        """The unit to show these values in."""
        return scale_of(values, self.unit)

    def text(self, scale: Scale) -> str:
        """Label with its unit."""
        return f"{words(self.label)} ({scale.unit})" if scale.unit else words(self.label)


def as_axis(axis: Axis | str) -> Axis:
    """Accept a plain text for an axis without unit."""
    return Axis(axis) if isinstance(axis, str) else axis


@dataclass(frozen=True, slots=True)
class Series:
    """Points that belong together."""

    label: str
    """Name, written at the end of the line."""

    x: Sequence[float]
    """Positions, in the unit of the axis."""

    y: Sequence[float]
    """Values; a gap is NaN."""

    role: Role = "ours"
    """Role of the method: its colour, marker and dash."""

    low: Sequence[float] | None = None
    """Lower edge of the spread, one per point."""

    high: Sequence[float] | None = None
    """Upper edge of the spread, one per point."""

    n: int | None = None
    """Runs behind each point (count); None or 1 draws a thin line."""

    source: str = ""
    """Where published points come from: they are drawn as open markers."""

    @property
    def name(self) -> str:
        """Label with its source."""
        return f"{self.label} ({self.source})" if self.source else self.label


def series(
    rows: Sequence[Mapping[str, Cell]], *, x: str, y: str, by: str = "method", roles: Mapping[str, Role] | None = None,
    names: Mapping[str, str] | None = None,
) -> list[Series]:  # fmt: skip
    """Group the rows of a table into one series per name.

    Rows with the same name and x are repetitions (seeds): their mean is the point, their lowest and highest the spread,
    their number n. A row with ``{y}_low`` and ``{y}_high`` brings its own spread (and ``n``). Rows without a value at x
    or y are left out.

    Args:
        rows: Rows of a table.
        x: Column of positions.
        y: Column of values.
        by: Column that names the series.
        roles: Role by name; "baseline" where a name is missing.
        names: What is written for a name; the name itself by default.

    Returns:
        Series in order of first use, points by rising x.
    """
    groups: dict[str, dict[float, list[Mapping[str, Cell]]]] = {}
    for row in rows:
        if is_number(row.get(x)) and is_number(row.get(y)):
            groups.setdefault(str(row.get(by, "")), {}).setdefault(float(row[x] or 0), []).append(row)
    return [
        _grouped((names or {}).get(name, name), points, y, (roles or {}).get(name, "baseline"))
        for name, points in groups.items()
    ]


def _grouped(name: str, points: Mapping[float, Sequence[Mapping[str, Cell]]], y: str, role: Role) -> Series:
    xs = sorted(points)
    runs = [[float(row[y] or 0) for row in points[at]] for at in xs]
    means = [math.fsum(values) / len(values) if all(map(math.isfinite, values)) else math.nan for values in runs]
    count = max(map(len, runs))
    if count > 1:
        return Series(name, xs, means, role, [min(v) for v in runs], [max(v) for v in runs], count)
    only = [points[at][0] for at in xs]
    ends = [[row.get(f"{y}_{end}") for row in only] for end in ("low", "high")]
    n = next((int(row["n"] or 0) for row in only if is_number(row.get("n"))), None)
    if not all(is_number(end) for side in ends for end in side):
        return Series(name, xs, means, role, n=n)
    low, high = ([float(end or 0) for end in side] for side in ends)
    return Series(name, xs, means, role, low, high, n)


def columns(rows: Sequence[Mapping[str, Any]], x: str, roles: Mapping[str, Role], **names: str) -> list[Series]:
    """One series per column over another, by the name that is given for the column or its own.

    Example:
        >>> [(one.label, one.y) for one in columns([{"x": 0.0, "u": 1.0}], "x", {"u": "ours"}, u="found")]
        [('found', [1.0])]
    """
    across = [row[x] for row in rows]
    return [Series(names.get(name, name), across, [row[name] for row in rows], role) for name, role in roles.items()]


def rename(rows: Iterable[Mapping[str, Any]], names: Mapping[str, str], by: str = "method") -> list[dict[str, Any]]:
    """Rows with the names of their methods as they are written.

    Example:
        >>> rename([{"method": "full", "loss": 2.0}], {"full": "full fine-tuning"})
        [{'method': 'full fine-tuning', 'loss': 2.0}]
    """
    return [{**row, by: names.get(row[by], row[by])} if by in row else {**row} for row in rows]


def bin_means(rows: Sequence[Mapping[str, Any]], column: str, points: int = 200) -> tuple[list[float], list[float]]:
    """A long column as means of neighbouring rows.

    Example:
        >>> bin_means([{"step": s, "loss": float(s)} for s in (1, 2, 3, 4)], "loss", points=2)
        ([2, 4], [1.5, 3.5])
    """
    size = -(-len(rows) // points) or 1
    bins = [rows[start : start + size] for start in range(0, len(rows), size)]
    return [part[-1]["step"] for part in bins], [sum(row[column] for row in part) / len(part) for part in bins]
