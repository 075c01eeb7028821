"""The whole job: load, condense, judge, save, report."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from torch import Tensor

from sparing.jobs.condense.course import Course, begun, restore_, state_of
from sparing.jobs.condense.loop import UNITS, advance_, bytes_of_a_step, fix_length_
from sparing.jobs.condense.material import Material, gather
from sparing.jobs.condense.methods import TITLES, simple
from sparing.jobs.condense.outputs import IMAGES, PICTURE, folder_of, identity, save_images
from sparing.jobs.condense.page import write_page
from sparing.jobs.condense.pictures import gallery
from sparing.jobs.condense.ranks import Crew, crew
from sparing.jobs.condense.settings import Condense
from sparing.jobs.disk import refusing_to_write
from sparing.jobs.folder import Folder, tell_page
from sparing.jobs.interrupts import patient, save_when_due
from sparing.jobs.limits import at_least
from sparing.report import Record, print_table
from sparing.sharding.consistency import checksum


@dataclass(slots=True)
class Run:
    """A run with its files."""

    course: Course
    """The outer loop."""
    record: Record
    """Rows so far."""
    kept: dict[int, Tensor] = field(default_factory=dict)
    """Images at the looks so far, by outer step."""

    def save(self) -> Path:
        """Write a checkpoint."""
        tree = {"course": state_of(self.course), "kept": self.kept, "rows": self.record.rows}
        return folder_of(self.course.settings).save(self.course.step, tree)

    def restore_(self, tree: dict[str, Any]) -> None:
        """Go back to where ``save`` was called."""
        restore_(self.course, tree["course"])
        self.kept.update({int(step): images for step, images in tree["kept"].items()})
        self.record.rows[:] = tree["rows"]


def begin_(run: Run) -> None:
    """What comes before the first step: the length of the run and the bytes of a step.

    Args:
        run: At step 0; its record is filled.
    """
    course, record = run.course, run.record
    fix_length_(course, record)
    chosen = course.settings.method
    others = [method for method in TITLES if method not in {chosen, "two-phase"}] if course.settings.compare else []
    for method in (chosen, *others):
        value = course.crew.own(simple(dataclasses.replace(course.settings, method=method)))
        record.add("memory", method=TITLES[method], setting=str(value), peak=bytes_of_a_step(course, value))


def walk_(run: Run) -> None:
    """The outer loop, with checkpoints and a clean stop at a signal.

    Args:
        run: At its first step or at a restored one.

    Raises:
        StoppedError: After SIGINT or SIGTERM, once the step is finished and saved.
    """
    every, ranks = run.course.settings.save_every, run.course.crew
    with patient(always=ranks.several) as signals:

        def after(course: Course) -> None:
            stop = ranks.heard(signals)
            if course.step < course.steps and ranks.first:
                done = f"outer step {course.step} of {course.steps}"
                save_when_due(run.save, stop, step=course.step, every=every, done=done)

        label = f"condense {run.course.material.name}, {TITLES[run.course.settings.method]}"
        advance_(run.course, run.record, run.kept, label=label, after=after)


def finish(run: Run) -> None:
    """Write images, record and page.

    Args:
        run: At its end.
    """
    course, out = run.course, run.course.settings.out
    classes = course.material.classes
    title = f"{course.material.name} condensed to {len(course.images)} images"
    save_images(out / IMAGES, course.images, course.labels, run.kept)
    with refusing_to_write("saving", out):
        gallery(course.images, classes, title=title).save_png(out / PICTURE)
    folder_of(course.settings).finish_(run.record, lambda record, path: write_page(record, path, run.kept, classes))


def run(settings: Condense) -> Record:
    """Condense a data set as the command line does.

    Args:
        settings: All of them; nothing is written before all of them are known to work.

    Returns:
        The record, also in OUT/record.jsonl, with tables "length", "memory", "curve", "train" and "methods". Under
        torchrun that of the first process is whole and written.

    Raises:
        UserError: If a setting or file is at fault, or the disk is full.
        StoppedError: After SIGINT or SIGTERM, once the step is finished and saved.
        RunError: If a hypergradient is not finite, or the first of several processes is lost.
    """
    at_least(1, settings, "looks", why="the page shows the way")
    with crew(settings) as ranks:
        now = _read(settings, ranks)
        walk_(now)
        if ranks.first:
            finish(now)
    return now.record


def _read(settings: Condense, ranks: Crew) -> Run:
    """Read all there is, then begin a run or go on with it, on all processes alike."""
    folder, mark = folder_of(settings), identity(settings)

    def read() -> tuple[dict[str, Any] | None, Material]:
        if ranks.first:
            folder.check()
        return folder.latest(mark), gather(settings.data, held_out=settings.held_out)

    tree, material = ranks.in_turn(read)
    each = "one condensed image" if settings.per_class == 1 else f"{settings.per_class} condensed images"
    question = f"How well do nets do that are trained on {each} per class alone?"
    record = Record(question=question, settings=settings, seed=settings.seed, units=dict(UNITS))
    now = Run(begun(settings, material), record)
    course = now.course
    course.crew = ranks
    if tree is not None:
        now.restore_(tree)
    ranks.agree(mark | {"outer step": course.step, "images": checksum(course.images)})
    if tree is None:
        ranks.on_first_rank(partial(_begin_in, folder, mark, now))
        course.steps, course.turn = ranks.told(course.steps, course.turn)
    return now


def _begin_in(folder: Folder, mark: dict[str, Any], run: Run) -> None:
    folder.claim_(mark)
    begin_(run)


def show(record: Record) -> None:
    """Print the tables of a run on standard output; the last line says where the page is.

    Args:
        record: What ``run`` returned.
    """
    for name, title in (("curve", "One net's accuracy on the way"), ("methods", "Fresh nets"), ("memory", "Bytes")):
        print_table(record.table(name), title=title, units=record.units)
    tell_page(record)
