"""The table behind the idiom suites: what users do with a part of the library, and what they get."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Literal

ROOMS = tuple(sorted(path.parent.name for path in Path(__file__).parent.glob("*/cells.py")))
"""Suites: folders of ``tests/idioms``, each with a ``cells.py`` that holds ``CELLS``."""


@dataclass(frozen=True)
class Cell:
    """One idiom on one subject. A test of the suite holds the outcome."""

    idiom: str
    """What the user does, in words."""

    subject: str
    """What it is done to: a plan, a family of models, a method, a metric."""

    outcome: Literal["equal", "refused"] = "equal"
    """Equal to an independent answer, or refused in a line that says what, got, why, do this."""

    @property
    def name(self) -> str:
        """How a test and a failure name it."""
        return f"{self.idiom} - {self.subject}"


def cells(room: str) -> tuple[Cell, ...]:
    """What a suite promises, each cell once."""
    found: tuple[Cell, ...] = tuple(import_module(f"idioms.{room}.cells").CELLS)
    assert len(set(found)) == len(found), [cell.name for cell, count in Counter(found).items() if count > 1]
    return found


def counted(of: Iterable[Cell]) -> dict[str, int]:
    """Cells, idioms, and how many end in which outcome."""
    every = list(of)
    outcomes = Counter(cell.outcome for cell in every)
    return {
        "idioms": len({cell.idiom for cell in every}),
        "cells": len(every),
        "equal": outcomes["equal"],
        "refused": outcomes["refused"],
    }
