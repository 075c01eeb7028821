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
from sparing.jobs.finetune.course import Course, begun, restore_, state_of
from sparing.jobs.finetune.evaluate import continuations, movement
from sparing.jobs.finetune.loop import UNITS, advance_
from sparing.jobs.finetune.material import Material, gather
from sparing.jobs.finetune.outputs import ADAPTER, FILES, MODEL, folder_of, identity
from sparing.jobs.finetune.page import write_page
from sparing.jobs.finetune.settings import Finetune
from sparing.jobs.finetune.sharded import Crew
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


def _save(settings: Finetune, course: Course, record: Record) -> Path:
    return folder_of(settings).save(course.step, {**state_of(course), "rows": record.rows})


def _save_model(settings: Finetune, model: Any, tokenizer: Any) -> nn.Module:
    """Write model/, and before it adapter/ for LoRA; returns the model without additions."""
    if isinstance(settings.training().method, Lora):
        adapter = partial(model.save_pretrained, save_embedding_layers=False)
        write_folder(settings.out / ADAPTER, adapter)
        model = model.merge_and_unload()
    write_folder(settings.out / MODEL, lambda draft: save_pretrained(model, tokenizer, draft))
    return model  # type: ignore[no-any-return]


def _generate(material: Material, model: nn.Module, settings: Finetune) -> list[str]:
    return continuations(
        model, material.tokenizer, material.prompts, max_new_tokens=settings.max_new_tokens, special=not material.chat
    )


def _command(settings: Finetune, model: Path, out: Path) -> str:
    return f"sparing finetune {model} {settings.data} --out {out}"


def _give_up(settings: Finetune, course: Course, material: Material, record: Record, error: DivergedError) -> str:
    """Save the last good state; returns the line that says where it is and how to go on."""
    path = _save(settings, course, record)
    _leave(settings, course.model, material, record)
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


def _train(settings: Finetune, material: Material, tree: dict[str, Any] | None, record: Record) -> nn.Module:
    """Train to the end and leave model and checkpoint on the disk; returns the model without additions."""
    with begun(material.model, settings.training(), rows=material.data.rows) as course, patient() as signals:
        if tree is not None:
            restore_(course, tree)
            record.rows[:] = tree["rows"]

        def after(course: Course) -> None:
            if course.step < course.steps:  # the end is saved below
                save, done = partial(_save, settings, course, record), f"step {course.step} of {course.steps}"
                save_when_due(save, signals, step=course.step, every=settings.save_every, done=done)

        if tree is None:
            folder_of(settings).claim_(identity(settings))
            _note_before(settings, material, course.model, record)
        try:
            advance_(
                course, material.data, record, held_out=material.held_out, label="fine-tune", memory=True, after=after
            )
        except SpoiltError as error:
            _write_record(settings, record)
            raise SpoiltError(_start_anew(settings, error)) from None
        except DivergedError as error:
            raise DivergedError(_give_up(settings, course, material, record, error)) from None
        _save(settings, course, record)
        _note_after(settings, material, course.model, record)
        trained = course.model
        course.optimizer.state.clear()
    return _save_model(settings, trained, material.tokenizer)


def _note_before(settings: Finetune, material: Material, model: nn.Module, record: Record) -> None:
    for prompt, text in zip(material.prompts, _generate(material, model, settings), strict=True):
        record.add("samples", prompt=prompt, before=text, after=None)


def _note_after(settings: Finetune, material: Material, model: nn.Module, record: Record) -> None:
    texts = iter(_generate(material, model, settings))
    for row in record.rows:
        if row["table"] == "samples":
            row["after"] = next(texts)


def _train_shared(settings: Finetune, material: Material, mesh: Mesh, record: Record) -> nn.Module:
    """The same over several ranks: all train and save slices, rank 0 alone writes the rest and returns the result."""
    crew, folder, now = Crew(mesh, settings, material.data, record), folder_of(settings), identity(settings)
    check_same(mesh, now, "run")
    path = newest(folder)
    if path is None and mesh.rank == 0:
        _note_before(settings, material, material.model, record)  # slices would have all ranks write along
    with (
        patient(always=mesh.world > 1) as signals,
        begun(material.model, settings.training(), rows=material.data.rows, equip=crew.equip) as course,
    ):
        if path is not None:
            record.rows[:0] = crew.restore_(course, path)["rows"]
        else:
            on_first_rank(mesh, lambda: folder.claim_(now))

        def after(course: Course) -> None:
            stop = heard(mesh, signals)
            if course.step < course.steps:
                save, done = partial(crew.save, folder, course, record), f"step {course.step} of {course.steps}"
                save_when_due(save, stop, step=course.step, every=settings.save_every, done=done)

        try:
            crew.walk(course, material.data, record, held_out=material.held_out, after=after)
        except SpoiltError as error:
            told = _start_anew(settings, error)
            on_first_rank(mesh, lambda: _write_record(settings, record))
            raise SpoiltError(told) from None
        except DivergedError as error:
            path = crew.save(folder, course, record)
            part_(crew.engine)
            on_first_rank(mesh, lambda: _leave(settings, course.model, material, record))
            raise DivergedError(_advice(settings, path, error)) from None
        crew.save(folder, course, record)
        part_(crew.engine)
        trained = course.model
    if mesh.rank == 0:
        _note_after(settings, material, trained, record)
        trained = _save_model(settings, trained, material.tokenizer)
    return trained


def _leave(settings: Finetune, model: nn.Module, material: Material, record: Record) -> None:
    """Write record and model of a run that ends early."""
    _write_record(settings, record)
    _save_model(settings, model, material.tokenizer)


def _caveats(settings: Finetune, material: Material) -> list[str]:
    """What a reader should know before leaning on the numbers."""
    data, held = material.data, material.held_out
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
    """Fine-tune a model as the command line does.

    Args:
        settings: All of them; nothing is written before all of them are known to work.

    Returns:
        The record, also in OUT/record.jsonl, with tables "train", "held_out", "switches", "memory" (in one process),
        "sharding" (under a plan), "movement", "samples" and "speed". Under torchrun that of rank 0 is written.

    Raises:
        UserError: If a setting or file is at fault, or the disk is full.
        StoppedError: After SIGINT or SIGTERM, once the step is finished and saved.
        DivergedError: If loss or gradient are not finite; the state before that step is saved.
        RunError: If a rank is lost; the newest checkpoint is whole.
    """
    with ranks(settings) as mesh:
        folder = folder_of(settings)
        material = _read(settings, folder, mesh)
        question = f"What does fine-tuning {settings.model.name} on {settings.data.name} change, and what does it cost?"
        record = Record(question=question, settings=settings, seed=settings.seed, units=dict(UNITS))
        caveats = _caveats(settings, material)
        if mesh is None:
            refuse_cut(folder)
            tree = folder.latest(identity(settings), files=FILES) if settings.resume else None  # hashes take a while
            trained = _train(settings, material, tree, record)
        else:
            trained = _train_shared(settings, material, mesh, record)
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


def _read(settings: Finetune, folder: Folder, mesh: Mesh | None) -> Material:
    """Check the directory and read everything, on all ranks; a mistake is the same on each."""

    def work() -> Material:
        folder.check()
        material = gather(settings)
        if mesh is not None and settings.resume:
            folder.check_same(identity(settings), files=FILES)
        return material

    return work() if mesh is None else on_all_ranks(mesh, work)


def show(record: Record) -> None:
    """Print the tables of a run on standard output; the last line says where the page is.

    Args:
        record: What ``run`` returned.
    """
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
