"""A chapter of the demo: its page as declarations over the record, and what the work of several chapters needs."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar, TypeVar

from sparing.errors import UserError, require
from sparing.jobs.demo.settings import Name, Scale
from sparing.jobs.run import Run
from sparing.report import Figure, Record, Sample, Section, Table
from sparing.report.page import Number

Loaded = TypeVar("Loaded")
Row = dict[str, Any]


class OmittedError(Exception):
    """What a chapter works on is not available here: the chapter is omitted."""


def load_or_omit(load: Callable[[], Loaded]) -> Loaded:
    """What a chapter works on; where it cannot be had the chapter is omitted."""
    try:
        return load()
    except UserError as missing:
        raise OmittedError(str(missing)) from missing


def begin_on(run: Run, table: str, name: str, **more: Any) -> None:
    """Note the data of a chapter, and refuse to go on with others, as where a download fails now that worked then."""

    def note() -> str:
        run.record.add(table, name=name, **more)
        return name

    began = run.once(f"{table} is known", note)
    why = f"the chapter began on {began}, which is not available now"
    do = "make it available again, or pass --overwrite in place of --resume to start over"
    require(began == name, "resume", name, why, do)


def copy_tables(record: Record, found: Record, names: Mapping[str, str], **columns: Any) -> None:
    """Copy rows of a run's own record to the demo's, by table -> table there, with more columns in front."""
    for name, theirs in names.items():
        for row in found.table(name):
            record.add(theirs, **columns, **row)


def keyed(rows: Iterable[Row], column: str) -> dict[str, Row]:
    """Rows by what stands in a column."""
    return {str(row[column]): row for row in rows}


class Chapter(ABC):
    """One question of the demo, and the page that answers it from the record."""

    name: ClassVar[Name]  # as on the command line
    saves: ClassVar[str]  # what it is about in a few words, for a list
    topic: ClassVar[str]  # the same with the method: a line above the question
    question: ClassVar[str]
    paper: ClassVar[str]  # authors, title or place, and number
    deeper: ClassVar[tuple[str, ...]]  # commands to go on with
    more: ClassVar[str]  # title of what is folded away
    complete: ClassVar[tuple[str, int]]  # the table that the chapter fills last, and its rows when it is done (count)

    def __init__(self, record: Record, folder: Path) -> None:
        """Of a record that holds the chapter, and the folder beside it."""
        self.record, self.folder = record, folder
        self.scale: Scale = record.settings["scale"]

    @abstractmethod
    def answer(self) -> str:
        """One sentence with its numbers."""

    @abstractmethod
    def story(self) -> str:
        """What was done, in words that need no paper."""

    @abstractmethod
    def numbers(self) -> Sequence[tuple[str, str, str]]:
        """Three of value, what it is, and the runs behind it; the first is in the strip at the top of the page."""

    @abstractmethod
    def claims(self) -> Sequence[tuple[str, str, str]]:
        """What is compared, the paper's figure and where it stands (a dash where it has none), and ours."""

    @property
    @abstractmethod
    def limits(self) -> str:
        """What a run of this size cannot match, and why."""

    @property
    @abstractmethod
    def details(self) -> str:
        """Words above the pictures that are folded away."""

    @abstractmethod
    def figures(self) -> Sequence[Figure]:
        """Pictures: the one to look at, then those that are folded away."""

    @abstractmethod
    def tables(self) -> Sequence[Table]:
        """Tables, folded away; the first one is also the terminal's."""

    def samples(self) -> Sequence[Sample]:
        """Texts, folded away."""
        return ()

    def runs(self, what: str = "n = 1") -> str:
        """The note under a number: how many runs, and the seed."""
        return f"{what}, seed {self.record.seed}"

    @property
    def section(self) -> Section:
        """As the page shows it."""
        columns = ("what", "paper", "here")
        rows = [dict(zip(columns, claim, strict=True)) for claim in self.claims()]
        note = f"Paper: {self.paper}. {self.limits}"
        beside = Table(rows, "The paper's figures beside ours", columns=columns, note=note)
        numbers = [Number(value=value, label=label, note=note) for value, label, note in self.numbers()]
        top, *rest = self.figures()
        return Section(
            self.question, self.story(), [top], [beside], answer=self.answer(), topic=self.topic, anchor=self.name,
            numbers=numbers, commands=self.deeper,
            details=Section(self.more, self.details, rest, self.tables(), self.samples()),
        )  # fmt: skip
