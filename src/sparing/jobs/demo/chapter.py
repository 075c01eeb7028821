"""A chapter as its page shows it: question, answer, three numbers, picture, the paper beside us, and where to go on."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from sparing.jobs.demo.settings import Name
from sparing.report import Figure, Section, Table
from sparing.report.page import Number


@dataclass(frozen=True, kw_only=True, slots=True)
class Claim:
    """What a paper states, and what this run found."""

    what: str
    paper: str  # its figure and where it stands; a dash where it has none
    here: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Chapter:
    """One question of the demo."""

    name: Name  # as on the command line
    topic: str  # what it saves, and by which method: a line above the question
    question: str
    answer: str  # one sentence with its numbers
    story: str  # what was done, in words that need no paper
    numbers: tuple[Number, Number, Number]  # the first also stands in the strip of answers at the top
    picture: Figure  # the one to look at
    claims: Sequence[Claim]  # the paper beside us
    paper: str  # authors, title or place, and number
    limits: str  # what a run of this size cannot match, and why
    deeper: Sequence[str]  # commands to go on with
    details: Section  # all else, folded away

    @property
    def section(self) -> Section:
        """As the page shows it."""
        rows = [{"what": claim.what, "paper": claim.paper, "here": claim.here} for claim in self.claims]
        note = f"Paper: {self.paper}. {self.limits}"
        beside = Table(rows, "The paper's figures beside ours", columns=("what", "paper", "here"), note=note)
        return Section(
            self.question, self.story, [self.picture], [beside], answer=self.answer, topic=self.topic,
            anchor=self.name, numbers=self.numbers, commands=self.deeper, details=self.details,
        )  # fmt: skip


def run_note(seed: int | list[int], what: str = "n = 1") -> str:
    """The note under a number: how many runs, and the seed."""
    return f"{what}, seed {seed}"
