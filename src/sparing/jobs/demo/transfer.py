"""Third chapter: one learning rate for dense and sparse nets, or a new search for each density."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Final

from sparing.errors import UserError
from sparing.jobs.demo.settings import Scale
from sparing.jobs.transfer.coordinates import add_coordinates
from sparing.jobs.transfer.grid import Cell, cells
from sparing.jobs.transfer.inputs import digits
from sparing.jobs.transfer.settings import Transfer
from sparing.jobs.transfer.train import train
from sparing.report import Progress, Record

LOG = logging.getLogger("sparing.demo")

WORK: Final = Transfer(
    model="mlp", widths=(256,), base_width=128, layers=3, densities=(1.0, 0.25, 0.0625), rules=("sp", "mup", "supar"),
    rates=(-11, -10, -9, -8, -7, -6, -5), seeds=(0,), steps=120,
)  # fmt: skip
"""The paper's Figure 6 at the size of a minute on two cores."""

WORKS: Final[Mapping[Scale, Transfer]] = {
    "small": WORK,
    "tiny": replace(WORK, widths=(128,), base_width=64, densities=(1.0, 0.125), rates=(-10, -8, -6, -4), steps=40),
}

SAVED_EVERY: Final = 10  # runs between two writes of the record (count)


def run_chapter(record: Record, *, seed: int, path: Path, work: Transfer = WORK) -> None:
    """Do the runs that the record does not hold yet; without scikit-learn the chapter is omitted."""
    have = {tuple(row[name] for name in Cell.__dataclass_fields__) for row in record.table("transfer_runs")}
    left = [cell for cell in cells(work) if (*cell.params.values(),) not in have]
    if not left and record.table("coordinates"):
        return
    try:
        inputs = digits()
    except UserError as missing:
        LOG.warning("demo: the chapter on scaling is left out (%s)", missing)
        return
    total = len(cells(work))
    with Progress("transfer", total=total, unit="run", resume_at=total - len(left)) as bar:
        for at, cell in enumerate(left, start=1):
            # run with the demo's seed, recorded under the grid's, by which a resumed demo finds it
            result = train(work, inputs, Cell(**cell.params | {"seed": seed}))
            record.add("transfer_runs", **cell.params, **result)
            bar.advance(rule=cell.rule, loss="diverged" if result["diverged"] else result["loss"])
            if at % SAVED_EVERY == 0:
                record.write(path)
    if not record.table("coordinates"):
        add_coordinates(record, work, inputs)
    record.write(path)
