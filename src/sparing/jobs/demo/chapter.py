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
    """The quantity."""

    paper: str
    """The paper's figure and where it stands; a dash where it has none."""

    here: str
    """Ours."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Chapter:
    """One question of the demo."""

    name: Name
    """As on the command line."""

    topic: str
    """What it saves, and by which method: a line above the question."""

    question: str
    """In one sentence."""

    answer: str
    """In one sentence with its numbers."""

    story: str
    """What was done, in words that need no paper."""

    numbers: tuple[Number, Number, Number]
    """The first also stands in the strip of answers at the top."""

    picture: Figure
    """The one to look at."""

    claims: Sequence[Claim]
    """The paper beside us."""

    paper: str
    """Authors, title or place, and number of the paper."""

    limits: str
    """What a run of this size cannot match, and why."""

    deeper: Sequence[str]
    """Commands to go on with."""

    details: Section
    """All else, folded away."""

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


def once(seed: int | list[int], what: str = "n = 1") -> str:
    """The note under a number: how many runs, and the seed.

    Args:
        seed: Of the demo.
        what: How many of what.

    Returns:
        Such as "n = 1, seed 0".
    """
    return f"{what}, seed {seed}"
