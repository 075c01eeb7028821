"""A chapter of the demo: its page as declarations over the record, and what the work of several chapters needs."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar, Final, TypeVar

from sparing.data import asset
from sparing.errors import UserError, require
from sparing.jobs.demo.settings import Name, Scale, Settings
from sparing.jobs.run import Run
from sparing.report import Figure, Record, Sample, Section, Table
from sparing.report.page import Number

Loaded = TypeVar("Loaded")
Row = dict[str, Any]

REPEATS: Final[dict[Scale, int]] = {"small": 3, "tiny": 1}
"""Seeds of what is repeated (count), from the demo's own on; methods that are close need several."""

MADE: Final = {
    "alice": ("Alice in Wonderland", "public domain"),
    "digits": ("digits of scikit-learn", "CC BY 4.0 (package: BSD-3-Clause)"),
    "mnist-1d": ("MNIST-1D, generated here by its recipe", "our code, Apache-2.0"),
    "typeset digits": ("digits typeset here in DejaVu", "Bitstream Vera licence"),
}
"""Data that are not fetched: by name, what they are and under which licence."""


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


def licence_of(name: str) -> tuple[str, str]:
    """A data set or model by name: what to call it, and its licence."""
    return MADE[name] if name in MADE else (name, asset(name).licence)


def seeds_of(settings: Settings) -> list[int]:
    """The seeds of what is repeated, the demo's own first."""
    return [settings.seed + at for at in range(REPEATS[settings.scale])]


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
    def pays(self) -> str:
        """Where the method earns its place, with the numbers of this run that show it."""

    @abstractmethod
    def fails(self) -> str:
        """Where it does not."""

    @abstractmethod
    def card(self) -> Number:
        """The finding with its interval and its control, also in the strip at the top of the page."""

    @abstractmethod
    def brief(self) -> str:
        """The finding in a line, for the picture of all chapters."""

    @abstractmethod
    def numbers(self) -> Sequence[Number]:
        """Two more."""

    @abstractmethod
    def licences(self) -> Sequence[tuple[str, str]]:
        """What it works on, and the licence of each."""

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

    @property
    def seeds(self) -> int:
        """Seeds of what is repeated (count)."""
        return REPEATS[self.scale]

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
        story = f"{self.story()}\n\n**Where it pays.** {self.pays()}\n\n**Where it does not.** {self.fails()}"
        top, *rest = self.figures()
        return Section(
            self.question, story, [top], [beside], answer=self.answer(), topic=self.topic, anchor=self.name,
            numbers=[self.card(), *self.numbers()], commands=self.deeper,
            details=Section(self.more, self.details, rest, self.tables(), self.samples()),
        )  # fmt: skip
