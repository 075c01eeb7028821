"""Settings under which a sharded model would not train as a whole one are refused before anything is changed."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from idioms.sharding.cells import CELLS, SETTINGS
from idioms.table import Cell, counted
from sparing import sharding as sh
from sparing.errors import UserError
from sparing.sharding.network.mesh import Mesh


@pytest.fixture
def mesh() -> Iterator[Mesh]:
    with sh.make_mesh(groups=1) as made:
        yield made


@pytest.mark.parametrize("cell", SETTINGS, ids=lambda cell: cell.name)
def test_a_setting_is_refused_in_a_line(mesh: Mesh, cell: Cell) -> None:
    model = nn.Sequential(*(nn.Linear(3, 3) for _ in range(4)))
    before = {name: value.clone() for name, value in model.state_dict().items()}
    settings: dict[str, Any] = {"optimizer": torch.optim.AdamW} | SETTINGS[cell]
    with pytest.raises(UserError) as caught:
        sh.shard_(model, "IIG", mesh, **settings)
    assert caught.value.what in settings
    assert all(str(caught.value).count(part) for part in (caught.value.why, caught.value.do))
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())


def test_the_page_counts_these_cells() -> None:
    counts = counted(CELLS)
    page = (Path(__file__).parents[3] / "docs/results/sharding.md").read_text(encoding="utf-8")
    assert f"{counts['cells']} cells, {counts['equal']} equal and {counts['refused']} refused" in page
