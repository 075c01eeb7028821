"""What a cell of the command line must have said and left; tests of some verbs share one run of all their cells."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from idioms.cli.cells import LINES, STANDING
from idioms.table import Cell
from oracles.scripts import forked
from sparing.cli import UNEXPECTED
from sparing.report.environment import commit

ROOT = Path(__file__).parents[3]


def told(verbs: Sequence[str], folder: Path) -> dict[str, Any]:
    """What every cell of some verbs said and left, by name."""
    file = folder / "found.json"
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(ROOT))  # for benchmarks, whose fuzzer runs the cells
        done = forked(Path(__file__).with_name("runner.py"), str(file), *verbs, folder=folder)
    assert done.code == 0, done.err
    return dict(json.loads(file.read_text()))


def judge(cell: Cell, row: dict[str, Any]) -> None:
    """Nothing else is changed, nothing runs that the folder names, and no line is one that nobody has foreseen."""
    assert row["wrong"] == "", row["said"]
    assert UNEXPECTED not in row["said"]
    if cell.outcome == "refused":
        refused(cell, row)
    else:
        assert row["status"] == 0, row["said"]
        CHECKS[cell.idiom](row)


def refused(cell: Cell, row: dict[str, Any]) -> None:
    """One line: what, got, why, do."""
    lines = [line for line in row["said"].splitlines() if line.startswith("sparing: ")]
    assert row["status"] == 2, row["said"]
    assert len(lines) == 1, row["said"]
    assert any(words in lines[0] for words in str(LINES[cell.idiom]).split("|")), lines[0]
    assert lines[0].count("; ") >= 2 or lines[0].endswith(f"see `sparing {cell.subject} --help`"), lines[0]


def is_document(row: dict[str, Any]) -> None:
    """Standard output is one strict JSON document and nothing else; its rows are those of the run's file."""
    document = json.loads(row["document"], parse_constant=lambda name: pytest.fail(name))
    assert {"question", "settings", "seed", "environment", "units", "tables"} <= set(document)
    if row["record"]:
        head, *rows = map(json.loads, row["record"].splitlines())
        assert {name: head[name] for name in ("question", "seed", "units")} == {
            name: document[name] for name in ("question", "seed", "units")
        }
        tables: dict[str, list[Any]] = {}
        for line in rows:
            tables.setdefault(line.pop("table"), []).append(line)
        assert document["tables"] == tables


def is_unbitten(row: dict[str, Any]) -> None:
    """The commit is that of the sources, or none; the repository one stands in is not asked."""
    if row["record"]:
        assert json.loads(row["record"].splitlines()[0])["environment"]["commit"] == commit()


CHECKS = {"--json": is_document, STANDING: is_unbitten}
