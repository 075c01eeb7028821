"""The record of a run: one JSON-lines file that the terminal table, the page and a benchmark read alike.

The first line is the header (question, settings, seed, environment, units and how many rows follow); each further line
is a row with the name of its table. Numbers that JSON lacks are the strings "NaN", "Infinity" and "-Infinity".
"""

from __future__ import annotations

import enum
import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields, is_dataclass
from os import PathLike
from pathlib import Path, PurePath
from typing import Any

from sparing.errors import UserError, without_password
from sparing.report.atomic import write_whole
from sparing.report.cells import Cell
from sparing.report.environment import environment, without_folders

_FORMAT, _VERSION = "sparing.record", 1
_SPECIAL = {"NaN": math.nan, "Infinity": math.inf, "-Infinity": -math.inf}
_HEADER: dict[str, type | tuple[type, ...]] = {
    "question": str, "settings": dict, "seed": (int, list), "environment": dict, "units": dict, "rows": int,
}  # fmt: skip


@dataclass(kw_only=True)
class Record:
    """What was asked, with which settings, seed and machine, and the rows that were measured.

    Example:
        >>> record = Record(question="Which method holds less memory?", settings={}, seed=0, units={"peak": "B"})
        >>> record.add("methods", method="lisa", peak=2_400_000_000)
        >>> record.table("methods")
        [{'method': 'lisa', 'peak': 2400000000}]
    """

    question: str
    """The question that the run answers, in one sentence."""

    settings: Any
    """Settings of the run: a dataclass or a mapping; kept as plain JSON (see ``plain``)."""

    seed: int | list[int]
    """Seed or seeds of the run."""

    environment: Mapping[str, Any] = field(default_factory=environment)
    """Machine, versions, commit and command; filled in when not given."""

    units: dict[str, str] = field(default_factory=dict)
    """Unit by column name ("B" bytes, "s" seconds, "×" ratios, or any other in words)."""

    rows: list[dict[str, Cell]] = field(default_factory=list)
    """Rows of all tables, in order; ``row["table"]`` names the table."""

    def __post_init__(self) -> None:
        """Turn settings, seeds and environment into plain JSON, so that what is written is what is read."""
        self.settings = plain(self.settings, top=True)
        self.environment = plain(self.environment, top=True)
        self.seed = self.seed if isinstance(self.seed, int) else [int(seed) for seed in self.seed]

    def add(self, table: str, **cells: Any) -> None:
        """Append a row.

        Args:
            table: Table that the row belongs to.
            **cells: Values by column: numbers (also numpy's and one-element tensors), strings, booleans, None.

        Raises:
            UserError: If a value is none of these.
        """
        row: dict[str, Cell] = {"table": table}
        self.rows.append(row | {name: _cell(name, value) for name, value in cells.items()})

    def table(self, name: str, **cells: Cell) -> list[dict[str, Any]]:
        """Rows of one table, without its name, those that have these cells; empty where there are none."""
        return [
            {key: cell for key, cell in row.items() if key != "table"}
            for row in self.rows
            if row["table"] == name and all(row.get(key) == cell for key, cell in cells.items())
        ]

    @property
    def tables(self) -> list[str]:
        """Names of the tables, in order of first use."""
        return list(dict.fromkeys(str(row["table"]) for row in self.rows))

    def document(self) -> dict[str, Any]:
        """The whole record as one strict JSON document: the header, and the rows by table."""
        head = {name: getattr(self, name) for name in _HEADER if name != "rows"}
        return head | {"tables": {name: [_strict(row) for row in self.table(name)] for name in self.tables}}

    def write(self, path: str | PathLike[str]) -> Path:
        """Write the record whole or not at all.

        Args:
            path: Target, usually ``OUT/record.jsonl``.

        Returns:
            The target.
        """
        header = {"format": _FORMAT, "version": _VERSION, **{name: getattr(self, name) for name in _HEADER}}
        lines = [header | {"rows": len(self.rows)}, *map(_strict, self.rows)]
        written = [json.dumps(line, ensure_ascii=False, allow_nan=False) + "\n" for line in lines]
        return write_whole(path, "".join(written))

    @classmethod
    def read(cls, path: str | PathLike[str]) -> Record:
        """Read a record that ``write`` wrote.

        Args:
            path: The file.

        Returns:
            A record equal to the one written.

        Raises:
            UserError: If the file is missing, torn, damaged or not a record.
        """
        try:
            header, rows = _parsed(Path(path))
        except _NoRecordError as why:
            do = "give a record.jsonl that a finished job wrote"
            raise UserError("record", got=str(path), why=str(why), do=do) from None
        return cls(**{name: header[name] for name in _HEADER} | {"rows": rows})


class _NoRecordError(ValueError):
    """A file is not the record of a run; says why."""


def _parsed(path: Path) -> tuple[dict[str, Any], list[dict[str, Cell]]]:
    """Header and rows of a file that is whole."""
    try:
        text = path.read_bytes().decode()
    except OSError as error:
        raise _NoRecordError(f"it cannot be read ({error.strerror})") from None
    except UnicodeDecodeError:
        raise _NoRecordError("it is not UTF-8 text") from None
    # not ``splitlines``, which also breaks at U+2028; JSON leaves that one inside a text as it is
    first, *rest = text.split("\n")
    header = _json(first, 1)
    if not isinstance(header, dict) or header.get("format") != _FORMAT:
        raise _NoRecordError("its first line is not the header of a record")
    if header.get("version") != _VERSION:
        raise _NoRecordError(f"its version is {header.get('version')}, this program reads version {_VERSION}")
    for name, kind in _HEADER.items():
        if not isinstance(header.get(name), kind):
            raise _NoRecordError(f"its header lacks {name!r}")
    if len(rest) != header["rows"] + 1 or rest[-1]:
        found = max(0, len(rest) - 1)
        raise _NoRecordError(f"it is torn: {header['rows']} whole rows are announced and {found} found")
    rows = [_json(line, number) for number, line in enumerate(rest[:-1], start=2)]
    if not all(isinstance(unit, str) for unit in header["units"].values()):
        raise _NoRecordError("a unit is not a text")
    if isinstance(header["seed"], list) and not all(isinstance(one, int) for one in header["seed"]):
        raise _NoRecordError("a seed is not a whole number")
    return header, [_row(number, row) for number, row in enumerate(rows, start=2)]


def _json(line: str, number: int) -> Any:
    # Python's reader takes NaN and Infinity, which are not JSON
    def refuse_constant(name: str) -> None:
        raise ValueError(name)

    try:
        return json.loads(line, parse_constant=refuse_constant)
    except (ValueError, RecursionError):
        raise _NoRecordError(f"line {number} is not strict JSON") from None


def _row(number: int, row: Any) -> dict[str, Cell]:
    if not isinstance(row, dict) or not isinstance(row.get("table"), str):
        raise _NoRecordError(f"line {number} is not a row with the name of its table")
    if not all(cell is None or isinstance(cell, str | int | float) for cell in row.values()):
        raise _NoRecordError(f"line {number} holds a value that is not a number, text or truth value")
    return {
        key: _SPECIAL.get(cell, cell) if isinstance(cell, str) and key != "table" else cell for key, cell in row.items()
    }


def _strict(row: Mapping[str, Cell]) -> dict[str, Cell]:
    """A row in which numbers that JSON lacks are texts."""
    return {
        key: _name_of(cell) if isinstance(cell, float) and not math.isfinite(cell) else cell
        for key, cell in row.items()
    }


def _name_of(value: float) -> str:
    return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"


def _cell(name: str, value: Any) -> Cell:
    """Turn a value into a cell: numpy's and torch's scalars become Python's."""
    if isinstance(value, enum.Enum):
        value = value.value
    if isinstance(value, PurePath):
        value = without_folders(str(value))
    if hasattr(value, "item") and getattr(value, "size", None) is not None:
        # a tensor's size is a method, an array's a number
        count = value.numel() if hasattr(value, "numel") else value.size
        value = value.item() if int(count) == 1 else value
    if name == "table" or (isinstance(value, str) and value in _SPECIAL):
        raise UserError(f"cell {name!r}", got=value, why="the record uses this word itself", do="choose another")
    if isinstance(value, str):
        return _utf8(value)
    if value is None or isinstance(value, bool | int | float):
        return float(value) if isinstance(value, float) else value
    why = "a row holds numbers, texts and truth values"
    raise UserError(f"cell {name!r}", got=type(value).__name__, why=why, do="convert it first")


def _utf8(text: str) -> str:
    # lone surrogates, as in odd file names, cannot be written
    return text.encode("utf-8", "replace").decode()


def plain(value: Any, *, top: bool = False) -> Any:
    """Turn settings into plain JSON.

    Dataclasses become mappings (inside another they carry their class name as ``kind``; one without fields becomes its
    class name), enumerations their values, absolute paths their last name, functions their qualified name; passwords of
    URLs are left out.

    Example:
        >>> plain({"data": Path("/some/where/texts.jsonl"), "clip": float("inf"), "betas": (0.9, 0.999)})
        {'data': 'texts.jsonl', 'clip': 'Infinity', 'betas': [0.9, 0.999]}
    """
    # the type itself: an ``IntEnum`` is an int too, and goes by its rule below
    if value is None or isinstance(value, bool) or type(value) is int:
        return value
    for kinds, rule in _RULES:
        if isinstance(value, kinds):
            return rule(value)
    kind: Any = type(value)
    name = kind.__name__
    if is_dataclass(value) and not isinstance(value, type):
        cells = {entry.name: plain(getattr(value, entry.name)) for entry in fields(value)}
        return cells if top else {"kind": name, **cells} if cells else name
    if hasattr(value, "tolist"):
        return plain(value.tolist())
    # an object by its text where its class wrote one, which is without an address
    if kind.__str__ is not object.__str__ or " at 0x" not in repr(value):
        name = str(value)
    return _utf8(getattr(value, "__qualname__", None) or name)


# first match wins, so subclasses stand before their bases: str enumerations before str, str before Sequence
_RULES: tuple[tuple[Any, Callable[[Any], Any]], ...] = (
    (enum.Enum, lambda value: plain(value.value)),
    (int, int),
    (float, lambda value: float(value) if math.isfinite(value) else _name_of(value)),
    (str, lambda value: _utf8(without_password(without_folders(value)))),
    (PurePath, lambda value: _utf8(without_folders(str(value)))),
    (Mapping, lambda value: {str(key): plain(entry) for key, entry in value.items()}),
    # sorted: in a set of texts the order is another in every process
    ((set, frozenset), lambda value: sorted((plain(entry) for entry in value), key=str)),
    (Sequence, lambda value: [plain(entry) for entry in value]),
)
