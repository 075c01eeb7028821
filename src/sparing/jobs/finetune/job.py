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
from sparing.jobs.disk import digest, write_folder
from sparing.jobs.finetune.inputs import Inputs, gather
from sparing.jobs.finetune.loop import UNITS, train
from sparing.jobs.finetune.movement import Stored, movement
from sparing.jobs.finetune.page import PAGE, write_page
from sparing.jobs.finetune.settings import Finetune
from sparing.jobs.finetune.sharded import shard_model
from sparing.jobs.finetune.state import local_stepper, restore_, start
from sparing.jobs.folder import print_page_path
from sparing.jobs.lm.models import hash_folder, load_model, save_pretrained
from sparing.jobs.lm.page import ONE_RUN
from sparing.jobs.lm.texts import continuations
from sparing.jobs.parallel import NO_PLAN, PARALLEL, meet_ranks
from sparing.jobs.ranks import ONE_PROCESS, Ranks
from sparing.jobs.run import Run
from sparing.jobs.sharded import ShardedStepper
from sparing.report import Record
from sparing.report.declared import applicable


def run(settings: Finetune) -> Record:
    """Run `sparing finetune`; nothing is written before every setting is checked."""
    with meet_ranks(settings) as ranks, run_of(settings, ranks) as run:
        inputs = ranks.on_all_ranks(lambda: gather(settings))
        question = f"What does fine-tuning {settings.model.name} on {settings.data.name} change, and what does it cost?"
        record = Record(question=question, settings=settings, seed=settings.seed, units=dict(UNITS))
        caveats = _caveats(settings, inputs)
        resumed = ranks.on_all_ranks(lambda: resume(run, record))
        ranks.check_same(run.mark | {"step": run.interrupted_at})
        trained = _train(run, ranks, inputs, resumed=resumed)
    if not ranks.first:
        return record
    texts = iter(_continued(settings, inputs, trained))
    for row in record.rows:
        if row["table"] == "samples":
            row["after"] = next(texts)
    trained = _save_model(settings.out, trained, inputs.tokenizer)
    original: Mapping[str, Tensor] = (stored := Stored(settings.model))
    # only transformers can read the files
    if not stored.holds(trained):
        loaded = load_model(settings.model, dtype=getattr(torch, settings.dtype), device="cpu")
        original = named_parameters(loaded)
    for row in movement(trained, original):
        record.add("movement", **row)
    return run.finish(lambda record, path: write_page(record, path, caveats))


def _train(run: Run, ranks: Ranks, inputs: Inputs, *, resumed: bool) -> nn.Module:
    """Train to the end and leave a checkpoint; returns the model with its additions, whole on every rank."""
    settings, record, rows = run.settings, run.record, inputs.data.rows
    sharded = settings.plan != NO_PLAN or run.sharded
    make = partial(shard_model, settings, inputs.data, ranks, record) if sharded else local_stepper
    # once the model is sharded, all ranks would have to write along
    if not resumed and ranks.first:
        for prompt, text in zip(inputs.prompts, _continued(settings, inputs, inputs.model), strict=True):
            record.add("samples", prompt=prompt, before=text, after=None)
    with start(inputs.model, settings.training(), rows=rows, ranks=ranks, make_stepper=make) as state:
        stepper = state.stepper
        if isinstance(stepper, ShardedStepper):
            run.attach(stepper)
        if resumed:
            restore_(state, run.interrupted)
        run.claim()

        def make_whole_() -> None:
            if isinstance(stepper, ShardedStepper):
                stepper.unshard_()
            else:
                # AdamW's moments are as large as two models, and nothing from here on reads them
                stepper.optimizer.state.clear()

        again = f"start anew with a lower rate: {_command(settings, settings.model)}"

        def leave() -> str:
            make_whole_()
            ranks.on_first_rank(lambda: _save_model(settings.out, state.model, inputs.tokenizer))
            model = settings.out / MODEL
            return f" and, as a model, in {model}; go on from there with a lower rate: {_command(settings, model)}"

        with run.explain_divergence(state, anew=again, leave=leave):
            how: dict[str, Any] = {"label": "fine-tune", "every": settings.save_every, "memory": not sharded}
            train(state, inputs.data, record, held_out=inputs.held_out, steps=run.steps, **how)
        if isinstance(stepper, ShardedStepper):
            stepper.note_traffic(record)
        # while the slices are there: samples, weights and page can then be made again from here
        run.save(state)
        make_whole_()
    return state.model


def _command(settings: Finetune, model: Path) -> str:
    """What to type after a rate that was too high."""
    out = settings.out.with_name(settings.out.name + "-2")
    return f"sparing finetune {model} {settings.data} --out {out} --lr {settings.training().peak / 4:g}"


def _continued(settings: Finetune, inputs: Inputs, model: nn.Module) -> list[str]:
    length, special = settings.max_new_tokens, not inputs.chat
    return continuations(model, inputs.tokenizer, inputs.prompts, max_new_tokens=length, special=special)


def _save_model(out: Path, model: Any, tokenizer: Any) -> nn.Module:
    """Write model/, and before it adapter/ for LoRA; returns the model without additions."""
    if hasattr(model, "merge_and_unload"):
        # before the merge, which takes the adapters out of the model
        write_folder(out / ADAPTER, partial(model.save_pretrained, save_embedding_layers=False))
        model = model.merge_and_unload()
    write_folder(out / MODEL, lambda draft: save_pretrained(model, tokenizer, draft))
    return model  # type: ignore[no-any-return]


def _caveats(settings: Finetune, inputs: Inputs) -> list[str]:
    """What a reader should know before leaning on the numbers."""
    data, copies = inputs.data, settings.plan != NO_PLAN or (settings.method == "lisa" and settings.lisa.masters)
    unseen = "Nothing was held out, so nothing says how well the model does on text that it has not seen."
    dropped = f"{data.dropped} records or ends of records were left out: no token to learn fitted into a row."
    short = "Weights are bfloat16 without 32-bit copies: updates below 1/256 of a weight may be rounded away."
    return applicable(
        (True, ONE_RUN),
        (inputs.held_out is None, unseen),
        (data.dropped, dropped),
        (data.cut, f"{data.cut} tokens were cut off at the end of rows of {settings.length}."),
        (settings.dtype == "bfloat16" and not copies, short),
    )


def show(record: Record) -> None:
    """Print the tables of a run; the last line says where the page is."""
    PAGE.print_tables(record)
    for row in record.table("unpredicted"):
        sys.stdout.write(f"{row['quantity']}: {row['why']}\n")
    print_page_path(record)


MODEL, ADAPTER = "model", "adapter"  # directories that a run writes beside what every job does

# Settings that may differ when a run is resumed: they do not change what is learnt.
HARMLESS = {"evaluate_every", "device", *PARALLEL}


def run_of(settings: Finetune, ranks: Ranks = ONE_PROCESS) -> Run:
    """A run, described."""
    reads = (settings.model, settings.data, settings.held_out_data)
    return Run(settings, writes=(MODEL, ADAPTER), reads=reads, ignore=HARMLESS, ranks=ranks)


def resume(run: Run, record: Record) -> bool:
    """Take up what an interrupted run on the same files left, if there is any."""
    settings: Finetune = run.settings
    hashes = {
        "model": hash_folder(settings.model),
        "data": digest(settings.data),
        "held_out_data": settings.held_out_data and digest(settings.held_out_data),
    }
    return run.resume(record, hashes=hashes)
