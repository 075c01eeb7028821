"""What a claim is, and where its numbers come from: cells of the pages' tables, which the committed JSON makes."""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, get_args

from sparing.report import Record

RESULTS = Path(__file__).parents[1] / "results"
MINUS = "\N{MINUS SIGN}"
Verdict = Literal["holds", "holds in part", "does not hold here", "not settled", "not measured"]
VERDICTS: tuple[Verdict, ...] = get_args(Verdict)
Row = dict[str, Any]
_NUMBER = re.compile(r"-?\d+(?:\.\d+)?(?:e[+-]?\d+)?")


@dataclass(frozen=True, slots=True)
class Pages:
    """The texts of the pages of results, by name."""

    texts: Mapping[str, str]
    """Name without suffix -> Markdown."""

    def table(self, page: str, mark: str) -> dict[str, dict[str, str]]:
        """Cells of a table by its first column and its head; of columns with equal heads the first counts."""
        text = self.texts[page].split(f"<!-- {mark} -->\n", 1)[1].split(f"<!-- /{mark} -->", 1)[0]
        rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in text.splitlines() if line[:1] == "|"]
        head, _, *body = rows
        at = {name: head.index(name) for name in head[1:]}
        return {row[0]: {name: row[place] for name, place in at.items()} for row in body}

    def cell(self, page: str, mark: str, row: str, column: str) -> str:
        """One cell."""
        return self.table(page, mark)[row][column]


@dataclass(frozen=True, slots=True)
class Found:
    """What was measured of a claim."""

    text: str
    """In a sentence or two, with numbers and intervals."""
    n: str
    """Over what: seeds, rounds, pairs."""
    stands: bool
    """Whether the numbers are such that the verdict is right; a test holds it."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Claim:
    """A claim, and the verdict on it."""

    says: str
    """The claim, in our words."""
    place: str
    """Where the paper makes it."""
    found: Callable[[Pages], Found]
    """What was measured."""
    verdict: Verdict
    """What we make of it."""
    steps: tuple[str, ...]
    """Steps of ``benchmarks.steps`` that measure it; empty where nothing was measured."""
    page: str
    """Page that says more; empty where none does."""


def number(cell: str) -> float:
    """The first number of a cell.

    Example:
        >>> number("−0.4 [−0.6, +0.1]"), number("≥ +5.0")
        (-0.4, 5.0)
    """
    found = _NUMBER.search(cell.replace(MINUS, "-"))
    assert found, f"no number in {cell!r}"
    return float(found.group())


def ends(cell: str) -> tuple[float, float]:
    """The ends of a cell's interval.

    Example:
        >>> ends("−0.4 [−0.6, +0.1]")
        (-0.6, 0.1)
    """
    low, high = _NUMBER.findall(cell.replace(MINUS, "-").split("[", 1)[1])[:2]
    return float(low), float(high)


@functools.cache
def rows_of(name: str) -> dict[str, Row]:
    """Rows of a JSON document by key; empty where it does not exist."""
    path = RESULTS / f"{name}.json"
    return dict(json.loads(path.read_text())["rows"]) if path.exists() else {}


@functools.cache
def record(name: str) -> Record:
    """A record in JSON lines."""
    return Record.read(RESULTS / f"{name}.jsonl")


def nothing(text: str) -> Callable[[Pages], Found]:
    """A claim of which nothing was measured, and why."""
    return lambda _: Found(text, "–", stands=True)
