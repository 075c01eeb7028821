"""The whole job: claim runs until none is left, analyse, write the page."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from sparing.jobs.folder import print_page_path
from sparing.jobs.interrupts import StoppedError, defer_signals
from sparing.jobs.run import Run
from sparing.jobs.transfer.analysis import add_coordinates, analyse
from sparing.jobs.transfer.inputs import Inputs, gather
from sparing.jobs.transfer.page import MOVED, OPTIMA, SUMMARY, write_page
from sparing.jobs.transfer.settings import Cell, Transfer, cells
from sparing.jobs.transfer.study import DATABASE, LOCKS, Study, needed, study_name
from sparing.jobs.transfer.train import train
from sparing.report import Progress, Record
from sparing.report.declared import print_tables

GROWS = {
    "log2_rates", "log2_stds", "widths", "densities", "pairs", "rules", "seeds", "least_live", "coordinates", "storage",
    "requeue",
}  # fmt: skip
"""Settings that may change when a study is resumed: they say which runs are wanted, not what a run is."""

UNITS = {
    "loss": "nat", "held_out_loss": "nat", "start": "nat", "seconds": "s", "best": "log2", "best_tried": "log2",
    "drift": "log2", "x": "log2", "loss_transferred": "nat", "loss_retuned": "nat",
}  # fmt: skip

NAMES = {"lr": "learning rate", "std": "initial scale"}


def run_of(settings: Transfer) -> Run:
    """A study, described; several processes may work on it at once."""
    names = (DATABASE, f"{DATABASE}-wal", f"{DATABASE}-shm", LOCKS)
    return Run(settings, writes=names, ignore=GROWS, shared=True)


def open_study(settings: Transfer, run: Run) -> Record:
    """Refuse the folder of another study; returns an empty record. The first scale says what all are measured by."""
    question = (
        f"Does the best {NAMES[settings.axis]} of the dense model serve sparse and wide ones, and under which rule?"
    )
    record = Record(question=question, settings=settings, seed=list(settings.seeds), units=dict(UNITS))
    run.resume(record, also={"log2_rates": list(settings.log2_rates[:1])} if settings.axis == "std" else {})
    return record


def work_(settings: Transfer, study: Study, inputs: Inputs, wanted: Sequence[Cell], signals: list[int]) -> None:
    """Claim and do runs until none is left; at a signal, stop once the run under way is finished."""

    def claim() -> tuple[Cell, Any] | None:
        # when none is left: take over from processes that have died since
        return study.claim(wanted) or (study.claim(wanted) if study.free_dead_() else None)

    done = len(study.results(wanted))
    with Progress("transfer", total=len(wanted), unit="run", resume_at=done) as bar:
        while (claimed := claim()) is not None:
            cell, trial = claimed
            try:
                result = train(settings, inputs, cell)
            except BaseException:
                study.release_(trial)
                raise
            study.finish(trial, result)
            bar.advance(rule=cell.rule, loss="diverged" if result["diverged"] else result["loss"])
            if signals:
                done, do = len(study.results(wanted)), "run the same command with --resume to go on"
                raise StoppedError(f"interrupted; {done} of {len(wanted)} runs are done; {do}")


def run(settings: Transfer) -> Record:
    """Do a transfer study, or a share of it, as the command line does; the record is also in OUT/record.jsonl."""
    needed()
    with run_of(settings) as run:
        record = open_study(settings, run)
        inputs = gather(settings)
        run.claim(defer_signals=False)
        wanted = cells(settings)
        fresh = settings.storage is not None and not settings.resume
        with Study(settings.out, study_name(run.mark), storage=settings.storage, fresh=fresh) as study:
            study.free_dead_(all_of_them=settings.requeue)
            with defer_signals() as signals:
                work_(settings, study, inputs, wanted, signals)
            with study.exclusive_record():
                analyse(record, settings, study.results(wanted))
                add_coordinates(record, settings, inputs)
                return run.finish(lambda record, path: write_page(record, path, settings))


def show(record: Record) -> None:
    """Print the tables of a study on standard output; the last line says where the page is."""
    print_tables(record, SUMMARY, OPTIMA, MOVED)
    print_page_path(record)
