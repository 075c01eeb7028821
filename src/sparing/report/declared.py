"""A page declared once, as a list of tables and figures over a record; the terminal prints the same tables.

A part is a table (``Rows``), texts (``Samples``) or any function from the record to figures. A part whose rows are
missing, or whose function returns None, is not on the page.

Example:
    >>> chapter = Chapter("By method", "At the peak.", Rows("methods", "Peak"), Rows("layers", "By layer"))
    >>> page = RunPage("Memory", lambda record: "**A half**.", chapter)
    >>> record = Record(question="Which holds less?", settings={}, seed=0, units={"peak": "B"}, environment={})
    >>> record.add("methods", method="lisa", peak=2.4e9)
    >>> [table.title for section in page.of(record).sections for table in section.tables]
    ['Peak']
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from sparing.report.figure import Figure
from sparing.report.page import Page, Sample, Section, Table
from sparing.report.palette import Role
from sparing.report.record import Record
from sparing.report.series import rename
from sparing.report.terminal import print_table

Words = str | Callable[[Record], str]  # fixed, or made of the record

Source = str | Callable[[Record], Iterable[Mapping[str, Any]]]  # a table of the record by name, or rows made of it

Part = Callable[[Record], Figure | Table | Sequence[Figure | Table | Sample] | None]

Roles = Mapping[str, Role]


def _of(record: Record, given: Any) -> Any:
    """What was given, or what the function that was given makes of the record."""
    return given(record) if callable(given) else given


def _rows(source: Source, record: Record, by: str, names: Mapping[str, str]) -> list[dict[str, Any]]:
    return rename(source(record) if callable(source) else record.table(source), names, by)


@dataclass(frozen=True, slots=True)
class Rows:
    """A table of the page, and of the terminal unless it is folded there."""

    source: Source
    title: Words
    columns: Sequence[str] | Callable[[Record], Sequence[str]] | None = None  # to show, in order; all by default
    note: Words = ""
    folded: bool | int = False  # whether it opens on a click; a number: where it has more rows than that
    terminal: bool | None = None  # whether the terminal prints it; by default if it is not folded
    by: str = "method"  # column that says whose row it is
    names: Mapping[str, str] = field(default_factory=dict)  # written in place of what stands in that column
    roles: Roles | Callable[[Record], Roles] | None = None

    def __call__(self, record: Record) -> Table | None:
        """The table, if it has rows."""
        rows = _rows(self.source, record, self.by, self.names)
        if not rows:
            return None
        title, columns, note = (_of(record, one) for one in (self.title, self.columns, self.note))
        folded = self.folded if isinstance(self.folded, bool) else len(rows) > self.folded
        roles = {self.names.get(name, name): role for name, role in (_of(record, self.roles) or {}).items()}
        return Table(rows, title, record.units, columns, note, roles or None, folded)


@dataclass(frozen=True, slots=True)
class Samples:
    """Texts side by side, a group for each row."""

    source: Source
    texts: Mapping[str, str]  # column -> who wrote it; columns that a row lacks are left out
    title: str  # of a group, before its number
    lead: str = ""  # before each prompt

    def __call__(self, record: Record) -> list[Sample]:
        """The texts."""
        return [
            Sample(
                f"{self.lead}{row['prompt']}",
                {name: str(row[column]) for column, name in self.texts.items() if column in row},
                f"{self.title} {number}",
            )
            for number, row in enumerate(_rows(self.source, record, "", {}), start=1)
        ]


class Chapter:
    """A heading, words, and what is shown below; not on the page where nothing is, unless words alone are enough."""

    def __init__(self, title: Words, text: Words, *parts: Part, words_alone: bool = False) -> None:
        """Declare it."""
        self.title, self.text, self.parts, self.words_alone = title, text, parts, words_alone

    def of(self, record: Record) -> Section | None:
        """The chapter, if it has something to show."""
        shown: list[Any] = []
        for part in self.parts:
            found = part(record)
            shown += found if isinstance(found, Sequence) else [] if found is None else [found]
        text = _of(record, self.text) if shown or self.words_alone else ""
        if not shown and not text:
            return None
        kinds: Any = ([one for one in shown if isinstance(one, kind)] for kind in (Figure, Table, Sample))
        return Section(_of(record, self.title), text, *kinds)


class RunPage:
    """The page of a run, made of its record alone."""

    def __init__(
        self,
        title: Words,
        answer: Callable[[Record], str],
        *chapters: Chapter,
        caveats: Sequence[str] | Callable[[Record], Sequence[str]] = (),
        facts: Callable[[Record], Mapping[str, Any]] = lambda record: {},
    ) -> None:
        """Declare it: its answer in a sentence with its number, and facts for those who reproduce the run."""
        self.title, self.answer, self.chapters = title, answer, chapters
        self.caveats, self.facts = caveats, facts

    def of(self, record: Record, caveats: Sequence[str] = ()) -> Page:
        """The page; ``caveats`` are those that the record does not hold."""
        return Page(
            title=_of(record, self.title),
            question=record.question,
            answer=self.answer(record),
            sections=[section for chapter in self.chapters if (section := chapter.of(record))],
            record=record,
            reproduce=self.facts(record),
            caveats=[*_of(record, self.caveats), *caveats],
        )

    def write(self, record: Record, path: Path, caveats: Sequence[str] = ()) -> Path:
        """Write the page, whole or not at all."""
        return self.of(record, caveats).write(path)

    def print_tables(self, record: Record) -> None:
        """Print the tables on the terminal, in the order of the page."""
        print_tables(record, *(part for chapter in self.chapters for part in chapter.parts if isinstance(part, Rows)))


def print_tables(record: Record, *tables: Rows) -> None:
    """Print those tables that have rows and are not folded away."""
    for one in tables:
        table = one(record)
        if table and (one.terminal or (one.terminal is None and not table.folded)):
            print_table(table.rows, title=table.title, units=table.units, columns=table.columns, roles=table.roles)


def applicable(*notes: tuple[object, str]) -> list[str]:
    """The notes whose condition holds.

    Example:
        >>> applicable((True, "One seed."), (0, "Nothing was held out."))
        ['One seed.']
    """
    return [note for applies, note in notes if applies]
