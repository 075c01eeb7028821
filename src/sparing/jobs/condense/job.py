"""The whole job: load, condense, judge, save, report."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from torch import Tensor

from sparing.jobs.condense.inputs import Inputs, gather
from sparing.jobs.condense.loop import UNITS, advance_, bytes_of_a_step, fix_length_
from sparing.jobs.condense.methods import TITLES, build_method
from sparing.jobs.condense.outputs import IMAGES, PICTURE, folder_of, identity, save_images
from sparing.jobs.condense.page import write_page
from sparing.jobs.condense.pictures import gallery
from sparing.jobs.condense.ranks import Ranks, join_ranks
from sparing.jobs.condense.settings import Condense
from sparing.jobs.condense.state import TrainState, restore_, start, state_of
from sparing.jobs.disk import refusing_to_write
from sparing.jobs.folder import Folder, tell_page
from sparing.jobs.interrupts import patient, save_when_due
from sparing.jobs.limits import at_least
from sparing.report import Record, print_table
from sparing.sharding.agree import checksum


@dataclass(slots=True)
class Run:
    """A run with its files."""

    state: TrainState
    record: Record
    kept: dict[int, Tensor] = field(default_factory=dict)  # images at the looks so far, by outer step

    def save(self) -> Path:
        """Write a checkpoint."""
        tree = {"course": state_of(self.state), "kept": self.kept, "rows": self.record.rows}
        return folder_of(self.state.settings).save(self.state.step, tree)

    def restore_(self, tree: dict[str, Any]) -> None:
        """Go back to where ``save`` was called."""
        restore_(self.state, tree["course"])
        self.kept.update({int(step): images for step, images in tree["kept"].items()})
        self.record.rows[:] = tree["rows"]


def begin_(run: Run) -> None:
    """What comes before the first step: the length of the run and the bytes of a step."""
    state, record = run.state, run.record
    fix_length_(state, record)
    chosen = state.settings.method
    others = [method for method in TITLES if method not in {chosen, "two-phase"}] if state.settings.compare else []
    for method in (chosen, *others):
        value = state.ranks.per_rank(build_method(dataclasses.replace(state.settings, method=method)))
        record.add("memory", method=TITLES[method], setting=str(value), peak=bytes_of_a_step(state, value))


def walk_(run: Run) -> None:
    """The outer loop, with checkpoints and a clean stop at a signal."""
    every, ranks = run.state.settings.save_every, run.state.ranks
    with patient(always=ranks.several) as signals:

        def after(state: TrainState) -> None:
            stop = ranks.heard(signals)
            if state.step < state.steps and ranks.first:
                done = f"outer step {state.step} of {state.steps}"
                save_when_due(run.save, stop, step=state.step, every=every, done=done)

        label = f"condense {run.state.inputs.name}, {TITLES[run.state.settings.method]}"
        advance_(run.state, run.record, run.kept, label=label, after=after)


def finish(run: Run) -> None:
    """Write images, record and page."""
    state, out = run.state, run.state.settings.out
    classes = state.inputs.classes
    title = f"{state.inputs.name} condensed to {len(state.images)} images"
    save_images(out / IMAGES, state.images, state.labels, run.kept)
    with refusing_to_write("saving", out):
        gallery(state.images, classes, title=title).save_png(out / PICTURE)
    folder_of(state.settings).finish_(run.record, lambda record, path: write_page(record, path, run.kept, classes))


def run(settings: Condense) -> Record:
    """Condense a data set as the command line does; under torchrun the first process's record is whole and written."""
    at_least(1, settings, "looks", why="the page shows the way")
    with join_ranks(settings) as ranks:
        now = _read(settings, ranks)
        walk_(now)
        if ranks.first:
            finish(now)
    return now.record


def _read(settings: Condense, ranks: Ranks) -> Run:
    """Read all there is, then begin a run or go on with it, on all processes alike."""
    folder, mark = folder_of(settings), identity(settings)

    def read() -> tuple[dict[str, Any] | None, Inputs]:
        if ranks.first:
            folder.check()
        return folder.latest(mark), gather(settings.data, held_out=settings.held_out)

    tree, inputs = ranks.in_turn(read)
    each = "one condensed image" if settings.per_class == 1 else f"{settings.per_class} condensed images"
    question = f"How well do nets do that are trained on {each} per class alone?"
    record = Record(question=question, settings=settings, seed=settings.seed, units=dict(UNITS))
    now = Run(start(settings, inputs), record)
    state = now.state
    state.ranks = ranks
    if tree is not None:
        now.restore_(tree)
    ranks.agree(mark | {"outer step": state.step, "images": checksum(state.images)})
    if tree is None:
        ranks.on_first(partial(_begin_in, folder, mark, now))
        state.steps, state.turn = ranks.broadcast(state.steps, state.turn)
    return now


def _begin_in(folder: Folder, mark: dict[str, Any], run: Run) -> None:
    folder.claim_(mark)
    begin_(run)


def show(record: Record) -> None:
    """Print the tables of a run on standard output; the last line says where the page is."""
    for name, title in (("curve", "One net's accuracy on the way"), ("methods", "Fresh nets"), ("memory", "Bytes")):
        print_table(record.table(name), title=title, units=record.units)
    tell_page(record)
