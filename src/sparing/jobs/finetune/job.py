"""The whole job: read, train, save, measure, report."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from sparing.blocks import named_parameters
from sparing.errors import shown
from sparing.jobs import hub
from sparing.jobs.disk import digest, write_folder
from sparing.jobs.finetune.best import BEST, Best
from sparing.jobs.finetune.card import CARD, card, command_of
from sparing.jobs.finetune.inputs import Inputs, gather
from sparing.jobs.finetune.logs import LOGS, check_log, open_log
from sparing.jobs.finetune.loop import UNITS, train
from sparing.jobs.finetune.movement import Stored, movement
from sparing.jobs.finetune.page import PAGE, write_page
from sparing.jobs.finetune.settings import Finetune
from sparing.jobs.finetune.sharded import shard_model
from sparing.jobs.finetune.state import TrainState, local_stepper, restore_, start
from sparing.jobs.folder import print_page_path
from sparing.jobs.lm.adapters import Lora, as_made
from sparing.jobs.lm.controls import failed, learnt_ngram_losses, rows_of
from sparing.jobs.lm.files import files_of
from sparing.jobs.lm.losses import held_out_loss, perplexity
from sparing.jobs.lm.models import hash_folder, load_model, save_pretrained, vocabulary
from sparing.jobs.lm.page import ONE_RUN
from sparing.jobs.lm.texts import continuations
from sparing.jobs.parallel import NO_PLAN, PARALLEL, meet_ranks
from sparing.jobs.ranks import ONE_PROCESS, Ranks
from sparing.jobs.run import Run
from sparing.jobs.sharded import ShardedStepper
from sparing.jobs.torch_state import device_for
from sparing.layersample.lowbit import wake_all_
from sparing.report import Record
from sparing.report.declared import applicable


def run(settings: Finetune) -> Record:
    """Run `sparing finetune`; nothing is written before every setting is checked."""
    check_log(settings)
    with meet_ranks(settings) as ranks, run_of(settings, ranks) as run:
        settings = run.settings
        inputs = ranks.on_all_ranks(lambda: gather(settings))
        if ranks.first:
            sys.stderr.writelines(f"note: {shown(note)}\n" for note in inputs.notes)
        names = ", ".join(map(hub.title, settings.data))
        question = f"What does fine-tuning {hub.title(settings.model)} on {names} change, and what does it cost?"
        record = Record(question=question, settings=settings, seed=settings.seed, units=dict(UNITS))
        caveats = _caveats(settings, inputs)
        resumed = ranks.on_all_ranks(lambda: resume(run, record))
        if not resumed:
            for row in inputs.sources:
                record.add("data", **row)
        ranks.check_same(run.mark | {"step": run.interrupted_at})
        trained = _train(run, ranks, inputs, resumed=resumed)
    if not ranks.first:
        return record
    _note_controls(inputs, trained, record)
    if told := failed(record.table("controls")):
        caveats.append(told)
    texts = iter(_continued(settings, inputs, trained))
    for row in record.rows:
        if row["table"] == "samples":
            row["after"] = next(texts)
    trained = _save_model(settings, record, trained, inputs.tokenizer)
    original: Mapping[str, Tensor] = (stored := Stored(hub.folder_of(settings.model)))
    # only transformers can read the files
    if not stored.holds(trained):
        loaded = load_model(settings.model, dtype=getattr(torch, settings.dtype), device="cpu")
        original = named_parameters(loaded)
    for row in movement(trained, original):
        record.add("movement", **row)
    return run.finish(lambda record, path: write_page(record, path, caveats))


def _note_samples(settings: Finetune, inputs: Inputs, record: Record) -> None:
    """What the model says before it is trained: once it is sharded, all ranks would have to write along."""
    for prompt, text in zip(inputs.prompts, _continued(settings, inputs, inputs.model), strict=True):
        record.add("samples", prompt=prompt, before=text, after=None)


def _train(run: Run, ranks: Ranks, inputs: Inputs, *, resumed: bool) -> nn.Module:
    """Train to the end and leave a checkpoint; returns the model with its additions, whole on every rank."""
    settings, record, rows = run.settings, run.record, inputs.data.rows
    sharded = settings.plan != NO_PLAN or run.sharded
    make = partial(shard_model, settings, inputs.data, ranks, record) if sharded else local_stepper
    if not resumed and ranks.first:
        _note_samples(settings, inputs, record)
    with start(inputs.model, settings.training(), rows=rows, ranks=ranks, make_stepper=make) as state:
        stepper = state.stepper
        if isinstance(stepper, ShardedStepper):
            run.attach(stepper)
        elif settings.weights is not None:
            state.model.to(device_for(settings.device))
        if resumed:
            restore_(state, tree := run.interrupted)
            # it holds what the next step replaces, such as masters
            tree.clear()
        run.claim()

        best = Best(settings.out, record) if settings.keep == "best" else None
        leave = partial(_leave, settings, state, record, inputs.tokenizer)
        with (
            run.explain_divergence(state, anew=_anew(settings), leave=leave),
            open_log(settings, state.step) if ranks.first else contextlib.nullcontext() as log,
        ):
            how: dict[str, Any] = {"label": "fine-tune", "every": settings.save_every, "memory": not sharded}
            watch = [told for told in (best, log) if told is not None]
            train(state, inputs.data, record, held_out=inputs.held_out, steps=run.steps, watch=watch, **how)
        if isinstance(stepper, ShardedStepper):
            stepper.note_traffic(record)
        # while the slices are there: samples, weights and page can then be made again from here
        run.save(state)
        _make_whole_(settings, state)
        if best is not None:
            best.restore_(state)
        _measure_saved(settings, state.model, inputs, record)
    return state.model


def _leave(settings: Finetune, state: TrainState, record: Record, tokenizer: Any) -> str:
    """Save the model of a run that diverged, and say how to go on from it."""
    _make_whole_(settings, state)
    # before the merge: the model that is left has the adapter in it, and gets another of its form
    lora = as_made(state.model, settings.lora) if settings.method == "lora" else settings.lora
    state.ranks.on_first_rank(lambda: _save_model(settings, record, state.model, tokenizer))
    model = settings.out / MODEL
    command = _command(settings, model=model, lora=lora)
    return f" and, as a model, in {model}; go on from there with a lower rate: {command}"


def _make_whole_(settings: Finetune, state: TrainState) -> None:
    """Turn slices and weights at rest into ordinary ones, and drop what only training reads."""
    if isinstance(state.stepper, ShardedStepper):
        state.model = state.stepper.unshard_()
        return
    # AdamW's moments are as large as two models, and nothing from here on reads them
    state.forget_()
    if settings.weights is not None:
        # the device may be too small for the whole model
        wake_all_(state.model.to("cpu"))


def _measure_saved(settings: Finetune, model: nn.Module, inputs: Inputs, record: Record) -> None:
    """Note the held-out loss of the model that is saved, where training saw one with rounded blocks."""
    exact = settings.weights is not None and settings.method == "lisa" and settings.lisa.exact
    # on a device that held the rounded model only, the exact one is in main memory now, and slow
    here = device_for(settings.device).type == "cpu"
    if exact and here and inputs.held_out is not None and not record.table("saved"):
        loss, tokens = held_out_loss(model, inputs.held_out, batch=settings.batch)
        record.add("saved", loss=loss, perplexity=perplexity(loss), tokens=tokens)


def _note_controls(inputs: Inputs, model: nn.Module, record: Record) -> None:
    """Note what counts of the text reach on what was held out, where the weights that are saved have their loss."""
    if inputs.held_out is None or record.table("controls"):
        return
    last = record.table("held_out")[-1:]
    own = (record.table("saved") or record.table("exported") or last)[0]["loss"]
    counted = learnt_ngram_losses(inputs.data, inputs.held_out, vocabulary=vocabulary(model))
    for row in rows_of(counted, own):
        record.add("controls", **row)


def _anew(settings: Finetune) -> str:
    return f"start anew with a lower rate: {_command(settings)}"


def _command(settings: Finetune, **changes: Any) -> str:
    """What to type after a rate that was too high."""
    out, lr = settings.out.with_name(settings.out.name + "-2"), float(f"{settings.training().peak / 4:g}")
    return command_of(replace(settings, out=out, lr=lr, resume=False, overwrite=False, **changes), whole=True)


def _continued(settings: Finetune, inputs: Inputs, model: nn.Module) -> list[str]:
    length, special = settings.max_new_tokens, not inputs.templated
    return continuations(model, inputs.tokenizer, inputs.prompts, max_new_tokens=length, special=special)


def _save_model(settings: Finetune, record: Record, model: Any, tokenizer: Any) -> nn.Module:
    """Write model/, and before it adapter/ for LoRA, each with its card; returns the model without additions."""
    lora: Lora | None = None

    def save_adapter(draft: Path) -> None:
        model.save_pretrained(draft, save_embedding_layers=False)
        # in place of peft's, which has a path of this machine and nothing of the run
        (draft / CARD).write_text(card(settings, record, "adapter", lora), encoding="utf-8")

    if hasattr(model, "merge_and_unload"):
        # before the merge, which takes the adapters out of the model
        lora = as_made(model, settings.lora)
        write_folder(settings.out / ADAPTER, save_adapter)
        model = model.merge_and_unload()

    def save_whole(draft: Path) -> None:
        save_pretrained(model, tokenizer, draft)
        (draft / CARD).write_text(card(settings, record, lora=lora), encoding="utf-8")

    write_folder(settings.out / MODEL, save_whole)
    return model  # type: ignore[no-any-return]


def _caveats(settings: Finetune, inputs: Inputs) -> list[str]:
    """What a reader should know before leaning on the numbers."""
    data, copies = inputs.data, settings.plan != NO_PLAN or settings.masters
    unseen = "Nothing was held out, so nothing says how well the model does on text that it has not seen."
    dropped = f"{data.dropped} records or ends of records were left out: no token to learn fitted into a row."
    rounded = f"Frozen blocks were rounded to {settings.weights} while training, and losses are those of that model"
    if settings.method == "lisa" and settings.lisa.exact:
        rounded += "; main memory kept their exact weights, which count in no figure here, and model/ has them."
    else:
        rounded += "; model/ has the rounded weights in full size, with what was learnt."
    short = "Weights are bfloat16 without 32-bit copies: updates below 1/256 of a weight may be rounded away."
    return inputs.notes + applicable(
        (True, ONE_RUN),
        (inputs.held_out is None, unseen),
        (data.dropped, dropped),
        (data.cut, f"{data.cut} tokens were cut off at the end of rows of {settings.length}."),
        (settings.weights is not None, rounded),
        (settings.dtype == "bfloat16" and not copies, short),
    )


def show(record: Record) -> None:
    """Print the tables of a run; the last line says where the page is."""
    PAGE.print_tables(record)
    if told := failed(record.table("controls")):
        sys.stdout.write(f"{told}\n")
    for row in record.table("unpredicted"):
        sys.stdout.write(f"{row['quantity']}: {row['why']}\n")
    print_page_path(record)


MODEL, ADAPTER = "model", "adapter"  # directories that a run writes beside what every job does

# Settings that may differ when a run is resumed: they do not change what is learnt.
HARMLESS = {"evaluate_every", "device", "log", *PARALLEL}


def run_of(settings: Finetune, ranks: Ranks = ONE_PROCESS) -> Run:
    """A run, described."""
    reads = (settings.model, *settings.data, settings.held_out_data, _adapter_of(settings))
    # which weights are the best depends on when they are measured
    harmless = HARMLESS - {"evaluate_every"} if settings.keep == "best" else HARMLESS
    return Run(settings, writes=(MODEL, ADAPTER, BEST, *LOGS), reads=reads, ignore=harmless, ranks=ranks)


def _adapter_of(settings: Finetune) -> Path | None:
    return settings.lora.adapter if settings.method == "lora" else None


def resume(run: Run, record: Record) -> bool:
    """Take up what an interrupted run on the same files left, if there is any."""
    settings: Finetune = run.settings
    apart, adapter = settings.held_out_data, _adapter_of(settings)
    hashes: dict[str, Any] = {
        "model": hash_folder(settings.model),
        "data": [digest(file) for path in settings.data for file in files_of(path)],
        "held_out_data": apart and [digest(file) for file in files_of(apart, held_out=True)],
    }
    if adapter is not None:
        hashes["lora.adapter"] = hash_folder(adapter)
    return run.resume(record, hashes=hashes)
