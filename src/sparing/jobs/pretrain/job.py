"""The whole job: read, plan, train, save, measure, export, report."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from torch import nn

from sparing.jobs.disk import refusing_to_write
from sparing.jobs.folder import RECORD, Folder, tell_page
from sparing.jobs.interrupts import patient, save_when_due
from sparing.jobs.live import device_for
from sparing.jobs.pretrain import tables
from sparing.jobs.pretrain.course import Course, begin, check_, choose_backends_, planned, restore_, state_of
from sparing.jobs.pretrain.evaluate import measured, written
from sparing.jobs.pretrain.export import ordinary, save_model
from sparing.jobs.pretrain.loop import UNITS, advance_
from sparing.jobs.pretrain.material import Material, gather
from sparing.jobs.pretrain.models import config_for, context_of, fresh, shape_of
from sparing.jobs.pretrain.outputs import FILES, MODEL, folder_of, identity
from sparing.jobs.pretrain.page import NAMES, write_page
from sparing.jobs.pretrain.prices import fill_measured, note_predicted, shown
from sparing.jobs.pretrain.settings import Pretrain
from sparing.jobs.pretrain.sharded import Crew
from sparing.jobs.ranks_page import TABLES
from sparing.jobs.sharded import heard, newest, part_, ranks, refuse_cut
from sparing.jobs.step import DivergedError, SpoiltError
from sparing.report import Record, print_table
from sparing.sharding.consistency import check_same
from sparing.sharding.mesh import Mesh
from sparing.sharding.on_ranks import on_all_ranks, on_first_rank


def _save(course: Course, record: Record) -> Path:
    """Write a checkpoint, and the record beside it for whoever watches."""
    check_(course)
    folder = folder_of(course.settings)
    path = folder.save(course.step, {**state_of(course), "rows": record.rows})
    _write(course, record)
    return path


def _write(course: Course, record: Record) -> None:
    """Write the record alone."""
    folder = folder_of(course.settings)
    with refusing_to_write("saving", folder.path):
        record.write(folder.at(RECORD))


def _set_up(settings: Pretrain, material: Material, model: nn.Module, tree: Any, record: Record) -> Course:
    """Scale the model, or put it where a checkpoint found it; what is known before the first step is noted."""
    plan = planned(settings, model)
    course = begin(settings, model, material.train, plan)
    if tree is not None:
        restore_(course, tree)
        record.rows[:] = tree["rows"]
        return course
    choose_backends_(course)
    check_(course)
    folder_of(settings).claim_(identity(settings, material))
    tables.note_plan(course, record)
    _show_plan(settings, record)
    note_predicted(course, record)
    return course


@dataclass(frozen=True, slots=True)
class Way:
    """How a run goes: in one process, or over several ranks."""

    save: Callable[[Course, Record], Path] = _save
    """Writes a checkpoint."""

    tell: Callable[[Course, Record], None] = _write
    """Writes the record alone."""

    hear: Callable[[list[int]], list[int]] = list
    """Signals on account of which to stop, from those noted."""

    walk: Callable[..., None] = advance_
    """Walks to the end."""

    always: bool = False
    """Whether a second signal is noted too."""


def _train(course: Course, material: Material, record: Record, way: Way) -> None:
    """Train to the end and leave a checkpoint of it."""
    settings = course.settings
    with patient(always=way.always) as signals:

        def after(course: Course) -> None:
            stop = way.hear(signals)
            if course.step < settings.steps:  # the end is saved below
                save, done = partial(way.save, course, record), f"step {course.step} of {settings.steps}"
                save_when_due(save, stop, step=course.step, every=settings.checkpoint_every, done=done)

        try:
            way.walk(course, record, material.validation, after=after)
        except SpoiltError as error:
            way.tell(course, record)
            raise SpoiltError(f"{error}; no model is saved; start anew with --lr {settings.lr / 4:g}") from None
        except DivergedError as error:
            path = way.save(course, record)
            why = f"the step was not applied and the state before it is in {path}"
            raise DivergedError(f"{error}; {why}; start anew with --lr {settings.lr / 4:g}") from None
        way.save(course, record)


def _train_shared(settings: Pretrain, material: Material, model: nn.Module, mesh: Mesh, record: Record) -> Course:
    """Set up and train over several ranks; the model is whole afterwards."""
    crew, folder, now = Crew(mesh, settings, record), folder_of(settings), identity(settings, material)
    check_same(mesh, now, "run")
    course, path = crew.begin(model, material.train, planned(settings, model)), newest(folder)
    if path is not None:
        record.rows[:0] = crew.restore_(course, path)["rows"]
    else:
        on_first_rank(mesh, lambda: folder.claim_(now))
        tables.note_plan(course, record)
        if mesh.rank == 0:
            _show_plan(settings, record)

    def save(course: Course, record: Record) -> Path:
        course.plan.check_optimizer(course.optimizer)
        return crew.save(folder, course, record)

    def tell(course: Course, record: Record) -> None:
        on_first_rank(mesh, lambda: _write(course, record))

    _train(course, material, record, Way(save, tell, partial(heard, mesh), crew.walk, always=mesh.world > 1))
    part_(crew.engine)
    return course


def _show_plan(settings: Pretrain, record: Record) -> None:
    print_table(record.table("rates"), title=f"Plan: {NAMES[settings.rule]}", units=record.units, file=sys.stderr)


def _finish(course: Course, material: Material, record: Record) -> None:
    """Export the model, and measure and sample what was exported."""
    settings, model = course.settings, ordinary(course)
    if not record.table("test"):
        row = measured(model, material.test, batch=settings.batch)
        record.add("test", **row)
        how = {"length": min(settings.sample_tokens, settings.context), "seed": settings.seed}
        texts = written(model, material.tokenizer, material.openings, **how)
        for opening, text in zip(material.openings, texts, strict=True):
            record.add("samples", prompt=opening, after=text)
        tables.note_layers(course, record)
        fill_measured(course, record)
    save_model(model, material.tokenizer, settings.out / MODEL)


def _caveats(settings: Pretrain, material: Material) -> list[str]:
    """What a reader should know before leaning on the numbers."""
    seen = settings.steps * settings.batch * settings.context / len(material.train)
    notes = ["One run with one seed: no spread is known."]
    if seen > 1.5:
        notes.append(f"Every token was seen about {seen:.0f} times: held-out loss can rise while training loss falls.")
    if material.unknown:
        notes.append(f"{material.unknown} held-out characters are not in the training part; all count as one token.")
    if settings.rule != "sp" and settings.base_width is not None:
        notes.append(f"The rate is right if {settings.lr:g} is right for a dense model of width {settings.base_width}.")
    if settings.dynamic in {"rigl", "gmp"}:
        notes.append("No rule is known to transfer rates under masks that follow magnitude; the rate is a first guess.")
    return notes


def run(settings: Pretrain) -> Record:
    """Train a language model from scratch as the command line does.

    Args:
        settings: All of them; nothing is written before all of them are known to work.

    Returns:
        The record, also in OUT/record.jsonl, with tables "plan", "rates", "layers", "cost" (in one process), "train",
        "held_out", "density", "sharding" (under a plan), "speed", "test" and "samples".

    Raises:
        UserError: If a setting or file is at fault, a checkpoint does not fit, or the disk is full.
        StoppedError: After SIGINT or SIGTERM, once the step is finished and saved.
        DivergedError: If loss or gradient are not finite; the state before that step is saved.
        SpoiltError: If a step was applied that spoilt the weights; no model is saved.
        RunError: If a rank is lost; the newest checkpoint is whole.
    """
    with ranks(settings) as mesh:
        folder = folder_of(settings)
        material = _read(settings, folder, mesh)
        config = config_for(settings, len(material.tokenizer), material.tokenizer.eos_token_id)
        model = fresh(config, seed=settings.seed, device=device_for(settings.device))
        texts = ", ".join(Path(name).name for name in settings.data)
        question = f"How well does a {shape_of(model)} write after {settings.steps:,} steps on {texts}?"
        record = Record(question=question, settings=settings, seed=settings.seed, units=dict(UNITS))
        if mesh is None:
            refuse_cut(folder)
            tree = folder.latest(identity(settings, material), files=FILES)
            course = _set_up(settings, material, model, tree, record)
            _train(course, material, record, Way())
        else:
            course = _train_shared(settings, material, model, mesh, record)
    if mesh is not None and mesh.rank:
        return record
    _finish(course, material, record)
    caveats = _caveats(settings, material)
    folder.finish_(record, lambda record, path: write_page(record, path, caveats))
    return record


def _read(settings: Pretrain, folder: Folder, mesh: Mesh | None) -> Material:
    """Check the directory and read everything, on all ranks; a mistake is the same on each."""

    def work() -> Material:
        folder.check()
        device_for(settings.device)
        material = gather(settings, context_of(settings))
        if mesh is not None and settings.resume:
            folder.check_same(identity(settings, material), files=FILES)
        return material

    return work() if mesh is None else on_all_ranks(mesh, work)


def show(record: Record) -> None:
    """Print the tables of a run on standard output; the last line says where the page is.

    Args:
        record: What ``run`` returned.
    """
    titles = {"held_out": "Held-out loss", "test": "Test loss", "speed": "Speed", **TABLES}
    for name, title in titles.items():
        if rows := record.table(name):
            print_table(rows, title=title, units=record.units)
    if rows := record.table("cost"):
        print_table(shown(rows), title="A step: predicted beside measured")
    tell_page(record)
