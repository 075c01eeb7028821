"""The whole job: read, train, save, measure, report."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from sparing.blocks import named_parameters
from sparing.jobs.disk import refusing_to_write, write_folder
from sparing.jobs.finetune.evaluate import continuations, movement
from sparing.jobs.finetune.inputs import Inputs, gather
from sparing.jobs.finetune.loop import UNITS, advance_
from sparing.jobs.finetune.outputs import ADAPTER, FILES, MODEL, folder_of, identity
from sparing.jobs.finetune.page import write_page
from sparing.jobs.finetune.settings import Finetune
from sparing.jobs.finetune.sharded import ShardedRun
from sparing.jobs.finetune.state import TrainState, restore_, start, state_of
from sparing.jobs.folder import RECORD, Folder, tell_page
from sparing.jobs.interrupts import patient, save_when_due
from sparing.jobs.lm.adapters import Lora
from sparing.jobs.lm.models import load_model, save_pretrained
from sparing.jobs.lm.stored import Stored
from sparing.jobs.ranks_page import TABLES
from sparing.jobs.sharded import ALONE, heard, newest, part_, ranks, refuse_cut
from sparing.jobs.step import DivergedError, SpoiltError
from sparing.report import Record, print_table
from sparing.sharding.consistency import check_same
from sparing.sharding.mesh import Mesh
from sparing.sharding.on_ranks import on_all_ranks, on_first_rank


def _save(settings: Finetune, state: TrainState, record: Record) -> Path:
    return folder_of(settings).save(state.step, {**state_of(state), "rows": record.rows})


def _save_model(settings: Finetune, model: Any, tokenizer: Any) -> nn.Module:
    """Write model/, and before it adapter/ for LoRA; returns the model without additions."""
    if isinstance(settings.training().method, Lora):
        adapter = partial(model.save_pretrained, save_embedding_layers=False)
        write_folder(settings.out / ADAPTER, adapter)
        model = model.merge_and_unload()
    write_folder(settings.out / MODEL, lambda draft: save_pretrained(model, tokenizer, draft))
    return model  # type: ignore[no-any-return]


def _generate(inputs: Inputs, model: nn.Module, settings: Finetune) -> list[str]:
    return continuations(
        model, inputs.tokenizer, inputs.prompts, max_new_tokens=settings.max_new_tokens, special=not inputs.chat
    )


def _command(settings: Finetune, model: Path, out: Path) -> str:
    return f"sparing finetune {model} {settings.data} --out {out}"


def _give_up(settings: Finetune, state: TrainState, inputs: Inputs, record: Record, error: DivergedError) -> str:
    """Save the last good state; returns the line that says where it is and how to go on."""
    path = _save(settings, state, record)
    _leave(settings, state.model, inputs, record)
    return _advice(settings, path, error)


def _advice(settings: Finetune, path: Path, error: DivergedError) -> str:
    again = _command(settings, settings.out / MODEL, settings.out.with_name(settings.out.name + "-2"))
    return (
        f"{error}; the step was not applied and the state before it is in {path} and, as a model, in "
        f"{settings.out / MODEL}; go on from there with a lower rate: {again} --lr {settings.training().peak / 4:g}"
    )


def _start_anew(settings: Finetune, error: SpoiltError) -> str:
    again = _command(settings, settings.model, settings.out.with_name(settings.out.name + "-2"))
    return f"{error}; no model is saved; start anew with a lower rate: {again} --lr {settings.training().peak / 4:g}"


def _write_record(settings: Finetune, record: Record) -> None:
    with refusing_to_write("saving", settings.out):
        record.write(settings.out / RECORD)


def _train(settings: Finetune, inputs: Inputs, tree: dict[str, Any] | None, record: Record) -> nn.Module:
    """Train to the end and leave model and checkpoint on the disk; returns the model without additions."""
    with start(inputs.model, settings.training(), rows=inputs.data.rows) as state, patient() as signals:
        if tree is not None:
            restore_(state, tree)
            record.rows[:] = tree["rows"]

        def after(state: TrainState) -> None:
            if state.step < state.steps:  # the end is saved below
                save, done = partial(_save, settings, state, record), f"step {state.step} of {state.steps}"
                save_when_due(save, signals, step=state.step, every=settings.save_every, done=done)

        if tree is None:
            folder_of(settings).claim_(identity(settings))
            _note_before(settings, inputs, state.model, record)
        try:
            advance_(state, inputs.data, record, held_out=inputs.held_out, label="fine-tune", memory=True, after=after)
        except SpoiltError as error:
            _write_record(settings, record)
            raise SpoiltError(_start_anew(settings, error)) from None
        except DivergedError as error:
            raise DivergedError(_give_up(settings, state, inputs, record, error)) from None
        _save(settings, state, record)
        _note_after(settings, inputs, state.model, record)
        trained = state.model
        state.optimizer.state.clear()
    return _save_model(settings, trained, inputs.tokenizer)


def _note_before(settings: Finetune, inputs: Inputs, model: nn.Module, record: Record) -> None:
    for prompt, text in zip(inputs.prompts, _generate(inputs, model, settings), strict=True):
        record.add("samples", prompt=prompt, before=text, after=None)


def _note_after(settings: Finetune, inputs: Inputs, model: nn.Module, record: Record) -> None:
    texts = iter(_generate(inputs, model, settings))
    for row in record.rows:
        if row["table"] == "samples":
            row["after"] = next(texts)


def _train_shared(settings: Finetune, inputs: Inputs, mesh: Mesh, record: Record) -> nn.Module:
    """The same over several ranks: all train and save slices, rank 0 alone writes the rest and returns the result."""
    sharded, folder, now = ShardedRun(mesh, settings, inputs.data, record), folder_of(settings), identity(settings)
    check_same(mesh, now, "run")
    path = newest(folder)
    if path is None and mesh.rank == 0:
        _note_before(settings, inputs, inputs.model, record)  # slices would have all ranks write along
    with (
        patient(always=mesh.world > 1) as signals,
        start(inputs.model, settings.training(), rows=inputs.data.rows, make_optimizer=sharded.make_optimizer) as state,
    ):
        if path is not None:
            record.rows[:0] = sharded.restore_(state, path)["rows"]
        else:
            on_first_rank(mesh, lambda: folder.claim_(now))

        def after(state: TrainState) -> None:
            stop = heard(mesh, signals)
            if state.step < state.steps:
                save, done = partial(sharded.save, folder, state, record), f"step {state.step} of {state.steps}"
                save_when_due(save, stop, step=state.step, every=settings.save_every, done=done)

        try:
            sharded.walk(state, inputs.data, record, held_out=inputs.held_out, after=after)
        except SpoiltError as error:
            told = _start_anew(settings, error)
            on_first_rank(mesh, lambda: _write_record(settings, record))
            raise SpoiltError(told) from None
        except DivergedError as error:
            path = sharded.save(folder, state, record)
            part_(sharded.engine)
            on_first_rank(mesh, lambda: _leave(settings, state.model, inputs, record))
            raise DivergedError(_advice(settings, path, error)) from None
        sharded.save(folder, state, record)
        part_(sharded.engine)
        trained = state.model
    if mesh.rank == 0:
        _note_after(settings, inputs, trained, record)
        trained = _save_model(settings, trained, inputs.tokenizer)
    return trained


def _leave(settings: Finetune, model: nn.Module, inputs: Inputs, record: Record) -> None:
    """Write record and model of a run that ends early."""
    _write_record(settings, record)
    _save_model(settings, model, inputs.tokenizer)


def _caveats(settings: Finetune, inputs: Inputs) -> list[str]:
    """What a reader should know before leaning on the numbers."""
    data, held = inputs.data, inputs.held_out
    notes = ["One run with one seed: no spread is known."]
    if held is None:
        notes.append("Nothing was held out, so nothing says how well the model does on text that it has not seen.")
    if data.dropped:
        notes.append(f"{data.dropped} records or ends of records were left out: no token to learn fitted into a row.")
    if data.cut:
        notes.append(f"{data.cut} tokens were cut off at the end of rows of {settings.length}.")
    copies = settings.plan != ALONE or (settings.method == "lisa" and settings.lisa.masters)
    if settings.dtype == "bfloat16" and not copies:
        notes.append("Weights are bfloat16 without 32-bit copies: updates below 1/256 of a weight may be rounded away.")
    return notes


def run(settings: Finetune) -> Record:
    """Run `sparing finetune`; nothing is written before every setting is checked."""
    with ranks(settings) as mesh:
        folder = folder_of(settings)
        inputs = _read(settings, folder, mesh)
        question = f"What does fine-tuning {settings.model.name} on {settings.data.name} change, and what does it cost?"
        record = Record(question=question, settings=settings, seed=settings.seed, units=dict(UNITS))
        caveats = _caveats(settings, inputs)
        if mesh is None:
            refuse_cut(folder)
            tree = folder.latest(identity(settings), files=FILES) if settings.resume else None  # hashes take a while
            trained = _train(settings, inputs, tree, record)
        else:
            trained = _train_shared(settings, inputs, mesh, record)
    if mesh is not None and mesh.rank:
        return record
    for row in movement(trained, _original(settings, trained)):
        record.add("movement", **row)
    folder.finish_(record, lambda record, path: write_page(record, path, caveats))
    return record


def _original(settings: Finetune, trained: nn.Module) -> Mapping[str, Tensor]:
    """The weights before: in their files, or loaded where only transformers can read those."""
    stored = Stored(settings.model)
    if stored.holds(trained):
        return stored
    return named_parameters(load_model(settings.model, dtype=getattr(torch, settings.dtype), device="cpu"))


def _read(settings: Finetune, folder: Folder, mesh: Mesh | None) -> Inputs:
    """Check the directory and read everything, on all ranks; a mistake is the same on each."""

    def work() -> Inputs:
        folder.check()
        inputs = gather(settings)
        if mesh is not None and settings.resume:
            folder.check_same(identity(settings), files=FILES)
        return inputs

    return work() if mesh is None else on_all_ranks(mesh, work)


def show(record: Record) -> None:
    """Print the tables of a run; the last line says where the page is."""
    for name, title in (
        ("held_out", "Held-out loss"),
        ("memory", "Memory at the peak of a step"),
        ("speed", "Speed"),
        *TABLES.items(),
    ):
        if rows := record.table(name):
            print_table(rows, title=title, units=record.units)
    for row in record.table("unpredicted"):
        sys.stdout.write(f"{row['quantity']}: {row['why']}\n")
    tell_page(record)
