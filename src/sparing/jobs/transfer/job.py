"""The whole job: claim runs until none is left, analyse, write the page."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from typing import Any

from sparing.jobs import folder
from sparing.jobs.folder import Folder, tell_page
from sparing.jobs.interrupts import StoppedError, patient
from sparing.jobs.transfer.analysis import analyse
from sparing.jobs.transfer.coordinates import add_coordinates
from sparing.jobs.transfer.grid import Cell, cells
from sparing.jobs.transfer.inputs import Inputs, gather
from sparing.jobs.transfer.page import write_page
from sparing.jobs.transfer.settings import Transfer
from sparing.jobs.transfer.study import DATABASE, LOCKS, Study, needed, study_name
from sparing.jobs.transfer.train import train
from sparing.report import Progress, Record, print_table

GROWS = {
    "rates", "stds", "widths", "densities", "pairs", "rules", "seeds", "least_live", "coordinates", "storage",
    "requeue",
}  # fmt: skip
"""Settings that may change when a study is resumed: they say which runs are wanted, not what a run is."""

UNITS = {
    "loss": "nat", "held_out_loss": "nat", "start": "nat", "seconds": "s", "best": "log2", "best_tried": "log2",
    "drift": "log2", "x": "log2", "loss_transferred": "nat", "loss_retuned": "nat",
}  # fmt: skip


NAMES = {"lr": "learning rate", "std": "initial scale"}


def folder_of(settings: Transfer) -> Folder:
    """The directory of a study."""
    names = (DATABASE, f"{DATABASE}-wal", f"{DATABASE}-shm", LOCKS)
    return Folder(settings.out, resume=settings.resume, overwrite=settings.overwrite, names=names, shared=True)


def identity(settings: Transfer) -> dict[str, Any]:
    """What makes two runs of a study the same, whichever of its cells are wanted."""
    mark = folder.identity(settings, harmless=GROWS)
    return mark | ({"rates": list(settings.rates[:1])} if settings.axis == "std" else {})


def work_(settings: Transfer, study: Study, inputs: Inputs, wanted: Sequence[Cell]) -> None:
    """Claim and do runs until none is left; at a signal, stop once the run under way is finished."""
    done = len(study.results(wanted))
    with patient() as signals, Progress("transfer", total=len(wanted), unit="run", resume_at=done) as bar:
        while (claimed := study.claim(wanted) or _second_look(study, wanted)) is not None:
            cell, trial = claimed
            try:
                result = train(settings, inputs, cell)
            except BaseException:
                study.release_(trial)
                raise
            study.finish(trial, result)
            loss = result["loss"]
            bar.advance(rule=cell.rule, loss="diverged" if result["diverged"] else loss)
            if signals:
                done, do = len(study.results(wanted)), "run the same command with --resume to go on"
                raise StoppedError(f"interrupted; {done} of {len(wanted)} runs are done; {do}")


def _second_look(study: Study, wanted: Sequence[Cell]) -> tuple[Cell, Any] | None:
    """When none is left: take over from processes that have died since."""
    return study.claim(wanted) if study.free_dead_() else None


def run(settings: Transfer) -> Record:
    """Do a transfer study, or a share of it, as the command line does; the record is also in OUT/record.jsonl."""
    needed()
    place, mark = folder_of(settings), identity(settings)
    place.check()
    place.latest(mark)
    inputs = gather(settings)
    place.claim_(mark)
    wanted = cells(settings)
    digest = hashlib.sha256(json.dumps(mark, sort_keys=True).encode()).hexdigest()
    fresh = settings.storage is not None and not settings.resume
    with Study(settings.out, study_name(digest), storage=settings.storage, fresh=fresh) as study:
        study.free_dead_(all_of_them=settings.requeue)
        work_(settings, study, inputs, wanted)
        with study.exclusive_record():
            record = _record(settings, inputs, study.results(wanted))
            place.finish_(record, lambda full, path: write_page(full, path, settings))
    return record


def _record(settings: Transfer, inputs: Inputs, results: Mapping[Cell, dict[str, Any]]) -> Record:
    """What the finished runs say."""
    question = (
        f"Does the best {NAMES[settings.axis]} of the dense model serve sparse and wide ones, and under which rule?"
    )
    record = Record(question=question, settings=settings, seed=list(settings.seeds), units=dict(UNITS))
    analyse(record, settings, results)
    add_coordinates(record, settings, inputs)
    return record


def show(record: Record) -> None:
    """Print the tables of a study on standard output; the last line says where the page is."""
    for name, title in (("optima", "Best rates"), ("transfer", "Drift and regret"), ("summary", "By rule")):
        print_table(record.table(name), title=title, units=record.units)
    tell_page(record)
