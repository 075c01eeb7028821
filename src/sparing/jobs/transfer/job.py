"""The whole job: claim runs until none is left, analyse, write the page."""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, NoReturn

from sparing.errors import UserError
from sparing.jobs.folder import print_page_path
from sparing.jobs.interrupts import StoppedError, defer_signals
from sparing.jobs.lm.controls import CONTROLS, failed
from sparing.jobs.run import Run
from sparing.jobs.sweeps import needed
from sparing.jobs.transfer.analysis import add_controls, add_coordinates, analyse
from sparing.jobs.transfer.draws import add_draws, best_draw, control_cells, draw_cells, draw_of, of_draws
from sparing.jobs.transfer.inputs import Inputs, Tokens, gather
from sparing.jobs.transfer.page import DRAWS, MOVED, OPTIMA, SUMMARY, write_page
from sparing.jobs.transfer.settings import Cell, Draw, Transfer, cells
from sparing.jobs.transfer.study import DATABASE, LOCKS, Study, study_name
from sparing.jobs.transfer.train import given, train
from sparing.report import Progress, Record
from sparing.report.declared import print_tables

PAUSE = 1.0  # between looks at what other processes are at (s)

Results = dict[Cell, dict[str, Any]]

GROWS = {
    "log2_rates", "log2_stds", "log2_around", "widths", "densities", "pairs", "rules", "seeds", "least_live",
    "coordinates", "control", "storage", "requeue",
}  # fmt: skip
"""Settings that may change when a study is resumed: they say which runs are wanted, not what a run is."""

UNITS = {
    "loss": "nat", "held_out_loss": "nat", "start": "nat", "seconds": "s", "best": "log2", "best_tried": "log2",
    "drift": "log2", "x": "log2", "loss_transferred": "nat", "loss_retuned": "nat", "model_below": "nat",
    "log2_rate": "log2", "log2_std": "log2", "log2_input": "log2", "log2_output": "log2",
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
    also: dict[str, Any] = {"log2_rates": list(settings.log2_rates[:1])} if settings.axis == "std" else {}
    if settings.tune.tries or settings.follow == "spectral":
        # the unit of all rates is found on this seed alone
        also["seeds"] = list(settings.seeds[:1])
    run.resume(record, also=also)
    return record


def work_(
    study: Study, wanted: Sequence[Cell], train_one: Callable[[Cell], dict[str, Any]], signals: list[int], label: str
) -> None:
    """Claim and do runs until none is left; at a signal, stop once the run under way is finished."""

    def claim() -> tuple[Cell, Any] | None:
        # when none is left: take over from processes that have died since
        return study.claim(wanted) or (study.claim(wanted) if study.free_dead_() else None)

    done = len(study.results(wanted))
    with Progress(label, total=len(wanted), unit="run", resume_at=done) as bar:
        while (claimed := claim()) is not None:
            cell, trial = claimed
            try:
                result = train_one(cell)
            except BaseException:
                study.release_(trial)
                raise
            study.finish(trial, result)
            bar.advance(rule=cell.rule, loss="diverged" if result["diverged"] else result["loss"])
            if signals:
                _stop(study, wanted)


def _stop(study: Study, wanted: Sequence[Cell]) -> NoReturn:
    done, do = len(study.results(wanted)), "run the same command with --resume to go on"
    raise StoppedError(f"interrupted; {done} of {len(wanted)} runs are done; {do}")


def finish_(
    study: Study, wanted: Sequence[Cell], train_one: Callable[[Cell], dict[str, Any]], signals: list[int], label: str
) -> Results:
    """Do runs whose results all that follows depends on: wait for those that other processes are at."""
    while True:
        work_(study, wanted, train_one, signals, label)
        found = study.results(wanted)
        if len(found) == len(wanted):
            return found
        if signals:
            _stop(study, wanted)
        time.sleep(PAUSE)


def search_(settings: Transfer, study: Study, inputs: Inputs, signals: list[int]) -> Results:
    """Do all draws on the base, or wait for others to."""
    own = of_draws(settings)

    def train_one(cell: Cell) -> dict[str, Any]:
        return train(own, inputs, replace(cell, x=0.0), draw_of(settings, int(cell.x)))

    return finish_(study, draw_cells(settings), train_one, signals, "transfer, draws")


def tuned(settings: Transfer, found: Results) -> Draw:
    """The draw that all runs go by: the best one, or what was given where there was no search."""
    if not found:
        return given(settings)
    if (best := best_draw(settings, found)) is None:
        got, why = f"{len(found)} draws that all diverged", "there is nothing to go by"
        raise UserError("tune", got=got, why=why, do="pass a --tune.log2-rate with lower ends")
    return best


def run(settings: Transfer) -> Record:
    """Do a transfer study, or a share of it, as the command line does; the record is also in OUT/record.jsonl."""
    needed()
    with run_of(settings) as run, contextlib.ExitStack() as stack:
        record = open_study(settings, run)
        inputs = gather(settings)
        run.claim(defer_signals=False)
        fresh = settings.storage is not None and not settings.resume

        def opened(part: str = "") -> Study:
            name = study_name(run.mark) + part
            study = stack.enter_context(Study(settings.out, name, storage=settings.storage, fresh=fresh))
            study.free_dead_(all_of_them=settings.requeue)
            return study

        wanted, study = cells(settings), opened()
        draws, bare = Results(), Results()
        with defer_signals() as signals:
            if settings.tune.tries:
                draws = search_(settings, opened("-draws"), inputs, signals)
            draw = tuned(settings, draws)
            work_(study, wanted, lambda cell: train(settings, inputs, cell, draw), signals, "transfer")
            if settings.control and isinstance(inputs, Tokens):
                own, without = control_cells(settings), opened("-control")
                bare = finish_(
                    without, own, lambda cell: train(settings, inputs, cell, draw, bare=True), signals, "control"
                )
        with study.exclusive_record():
            add_draws(record, settings, draws)
            analyse(record, settings, study.results(wanted))
            add_controls(record, settings, inputs, bare)
            add_coordinates(record, settings, inputs)
            return run.finish(lambda record, path: write_page(record, path, settings))


def show(record: Record) -> None:
    """Print the tables of a study on standard output; the last line says where the page is."""
    print_tables(record, SUMMARY, OPTIMA, MOVED, DRAWS, CONTROLS)
    if told := failed(record.table("controls")):
        sys.stdout.write(f"{told}\n")
    print_page_path(record)
