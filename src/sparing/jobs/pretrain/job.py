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
from sparing.jobs.pretrain.evaluate import evaluate, sample_texts
from sparing.jobs.pretrain.export import plain_copy, save_model
from sparing.jobs.pretrain.inputs import Inputs, gather
from sparing.jobs.pretrain.loop import UNITS, advance_
from sparing.jobs.pretrain.models import config_for, context_of, fresh_model, shape_of
from sparing.jobs.pretrain.outputs import FILES, MODEL, folder_of, identity
from sparing.jobs.pretrain.page import NAMES, write_page
from sparing.jobs.pretrain.prices import displayed, fill_measured, note_predicted
from sparing.jobs.pretrain.settings import Pretrain
from sparing.jobs.pretrain.sharded import ShardedRun
from sparing.jobs.pretrain.state import TrainState, check_, choose_backends_, make_plan, restore_, start, state_of
from sparing.jobs.ranks_page import TABLES
from sparing.jobs.sharded import heard, newest, part_, ranks, refuse_cut
from sparing.jobs.step import DivergedError, SpoiltError
from sparing.report import Record, print_table
from sparing.sharding.consistency import check_same
from sparing.sharding.mesh import Mesh
from sparing.sharding.on_ranks import on_all_ranks, on_first_rank


def _save(state: TrainState, record: Record) -> Path:
    """Write a checkpoint, and the record beside it for whoever watches."""
    check_(state)
    folder = folder_of(state.settings)
    path = folder.save(state.step, {**state_of(state), "rows": record.rows})
    _write(state, record)
    return path


def _write(state: TrainState, record: Record) -> None:
    """Write the record alone."""
    folder = folder_of(state.settings)
    with refusing_to_write("saving", folder.path):
        record.write(folder.at(RECORD))


def _set_up(settings: Pretrain, inputs: Inputs, model: nn.Module, tree: Any, record: Record) -> TrainState:
    """Scale the model, or put it where a checkpoint found it; what is known before the first step is noted."""
    plan = make_plan(settings, model)
    state = start(settings, model, inputs.train, plan)
    if tree is not None:
        restore_(state, tree)
        record.rows[:] = tree["rows"]
        return state
    choose_backends_(state)
    check_(state)
    folder_of(settings).claim_(identity(settings, inputs))
    tables.note_plan(state, record)
    _show_plan(settings, record)
    note_predicted(state, record)
    return state


@dataclass(frozen=True, slots=True)
class Way:
    """How a run goes: in one process, or over several ranks."""

    save: Callable[[TrainState, Record], Path] = _save
    tell: Callable[[TrainState, Record], None] = _write
    hear: Callable[[list[int]], list[int]] = list  # signals on account of which to stop, from those noted
    walk: Callable[..., None] = advance_
    always: bool = False  # whether a second signal is noted too


def _train(state: TrainState, inputs: Inputs, record: Record, way: Way) -> None:
    """Train to the end and leave a checkpoint of it."""
    settings = state.settings
    with patient(always=way.always) as signals:

        def after(state: TrainState) -> None:
            stop = way.hear(signals)
            if state.step < settings.steps:  # the end is saved below
                save, done = partial(way.save, state, record), f"step {state.step} of {settings.steps}"
                save_when_due(save, stop, step=state.step, every=settings.checkpoint_every, done=done)

        try:
            way.walk(state, record, inputs.validation, after=after)
        except SpoiltError as error:
            way.tell(state, record)
            raise SpoiltError(f"{error}; no model is saved; start anew with --lr {settings.lr / 4:g}") from None
        except DivergedError as error:
            path = way.save(state, record)
            why = f"the step was not applied and the state before it is in {path}"
            raise DivergedError(f"{error}; {why}; start anew with --lr {settings.lr / 4:g}") from None
        way.save(state, record)


def _train_shared(settings: Pretrain, inputs: Inputs, model: nn.Module, mesh: Mesh, record: Record) -> TrainState:
    """Set up and train over several ranks; the model is whole afterwards."""
    sharded, folder, now = ShardedRun(mesh, settings, record), folder_of(settings), identity(settings, inputs)
    check_same(mesh, now, "run")
    state, path = sharded.start(model, inputs.train, make_plan(settings, model)), newest(folder)
    if path is not None:
        record.rows[:0] = sharded.restore_(state, path)["rows"]
    else:
        on_first_rank(mesh, lambda: folder.claim_(now))
        tables.note_plan(state, record)
        if mesh.rank == 0:
            _show_plan(settings, record)

    def save(state: TrainState, record: Record) -> Path:
        state.plan.check_optimizer(state.optimizer)
        return sharded.save(folder, state, record)

    def tell(state: TrainState, record: Record) -> None:
        on_first_rank(mesh, lambda: _write(state, record))

    _train(state, inputs, record, Way(save, tell, partial(heard, mesh), sharded.walk, always=mesh.world > 1))
    part_(sharded.engine)
    return state


def _show_plan(settings: Pretrain, record: Record) -> None:
    print_table(record.table("rates"), title=f"Plan: {NAMES[settings.rule]}", units=record.units, file=sys.stderr)


def _finish(state: TrainState, inputs: Inputs, record: Record) -> None:
    """Export the model, and measure and sample what was exported."""
    settings, model = state.settings, plain_copy(state)
    if not record.table("test"):
        row = evaluate(model, inputs.test, batch=settings.batch)
        record.add("test", **row)
        how = {"length": min(settings.sample_tokens, settings.context), "seed": settings.seed}
        texts = sample_texts(model, inputs.tokenizer, inputs.openings, **how)
        for opening, text in zip(inputs.openings, texts, strict=True):
            record.add("samples", prompt=opening, after=text)
        tables.note_layers(state, record)
        fill_measured(state, record)
    save_model(model, inputs.tokenizer, settings.out / MODEL)


def _caveats(settings: Pretrain, inputs: Inputs) -> list[str]:
    """What a reader should know before leaning on the numbers."""
    seen = settings.steps * settings.batch * settings.context / len(inputs.train)
    notes = ["One run with one seed: no spread is known."]
    if seen > 1.5:
        notes.append(f"Every token was seen about {seen:.0f} times: held-out loss can rise while training loss falls.")
    if inputs.unknown:
        notes.append(f"{inputs.unknown} held-out characters are not in the training part; all count as one token.")
    if settings.rule != "sp" and settings.base_width is not None:
        notes.append(f"The rate is right if {settings.lr:g} is right for a dense model of width {settings.base_width}.")
    if settings.dynamic in {"rigl", "gmp"}:
        notes.append("No rule is known to transfer rates under masks that follow magnitude; the rate is a first guess.")
    return notes


def run(settings: Pretrain) -> Record:
    """Run `sparing pretrain`; nothing is written before every setting is checked."""
    with ranks(settings) as mesh:
        folder = folder_of(settings)
        inputs = _read(settings, folder, mesh)
        config = config_for(settings, len(inputs.tokenizer), inputs.tokenizer.eos_token_id)
        model = fresh_model(config, seed=settings.seed, device=device_for(settings.device))
        texts = ", ".join(Path(name).name for name in settings.data)
        question = f"How well does a {shape_of(model)} write after {settings.steps:,} steps on {texts}?"
        record = Record(question=question, settings=settings, seed=settings.seed, units=dict(UNITS))
        if mesh is None:
            refuse_cut(folder)
            tree = folder.latest(identity(settings, inputs), files=FILES)
            state = _set_up(settings, inputs, model, tree, record)
            _train(state, inputs, record, Way())
        else:
            state = _train_shared(settings, inputs, model, mesh, record)
    if mesh is not None and mesh.rank:
        return record
    _finish(state, inputs, record)
    caveats = _caveats(settings, inputs)
    folder.finish_(record, lambda record, path: write_page(record, path, caveats))
    return record


def _read(settings: Pretrain, folder: Folder, mesh: Mesh | None) -> Inputs:
    """Check the directory and read everything, on all ranks; a mistake is the same on each."""

    def work() -> Inputs:
        folder.check()
        device_for(settings.device)
        inputs = gather(settings, context_of(settings))
        if mesh is not None and settings.resume:
            folder.check_same(identity(settings, inputs), files=FILES)
        return inputs

    return work() if mesh is None else on_all_ranks(mesh, work)


def show(record: Record) -> None:
    """Print the tables of a run; the last line says where the page is."""
    titles = {"held_out": "Held-out loss", "test": "Test loss", "speed": "Speed", **TABLES}
    for name, title in titles.items():
        if rows := record.table(name):
            print_table(rows, title=title, units=record.units)
    if rows := record.table("cost"):
        print_table(displayed(rows), title="A step: predicted beside measured")
    tell_page(record)
