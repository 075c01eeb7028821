"""Loops around a sharded model end where DistributedDataParallel does, or are refused in a line, under every plan."""

from __future__ import annotations

from collections import ChainMap
from typing import Any

import pytest

from idioms.sharding.cells import EVERY, IDIOMS, SUBJECTS, THEIRS, TRAINING, idioms
from idioms.table import Cell
from oracles import idiom_ranks
from oracles.processes import answers

# slow: four processes train a small net some eight hundred times
pytestmark = [pytest.mark.processes, pytest.mark.slow, pytest.mark.timeout(3600 if EVERY else 600)]


@pytest.fixture(scope="module")
def found() -> list[dict[tuple[str, str], Any]]:
    size = 4 if EVERY else len(SUBJECTS)  # so that no launch outlasts the patience of its processes
    parts = [SUBJECTS[at : at + size] for at in range(0, len(SUBJECTS), size)]
    told = [answers(4, idiom_ranks.asked, idioms, part) for part in parts]
    return [dict(ChainMap(*rank)) for rank in zip(*told, strict=True)]


@pytest.mark.parametrize("cell", TRAINING, ids=lambda cell: cell.name)
def test_a_loop_ends_as_under_ddp_or_is_refused(found: list[dict[tuple[str, str], Any]], cell: Cell) -> None:
    """Sums of four ranks in another order: rounding of 1e-16, which AdamW's division by √v grows a thousandfold."""
    told = [rank[cell.idiom, cell.subject] for rank in found]
    words = IDIOMS[cell.idiom].words(cell.subject)
    if words is None:
        assert [far for far in told if not (isinstance(far, float) and far <= 1e-12)] == []
        return
    for line in told:
        assert words in str(line)
        assert str(line).startswith("UserError: ")
        assert line.count("; ") >= 2  # what and got, why, do
        assert "\n" not in line


@pytest.mark.parametrize(("idiom", "subject"), THEIRS)
def test_what_torch_itself_refuses_on_its_engine(
    found: list[dict[tuple[str, str], Any]], idiom: str, subject: str
) -> None:
    words = IDIOMS[idiom].torch_says(subject)
    assert words is not None
    assert all(words in str(rank[idiom, subject]) for rank in found)
