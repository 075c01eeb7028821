"""The whole job: read, plan, train, save, measure, export, report."""

from __future__ import annotations

import copy
import hashlib
import sys
from functools import partial
from pathlib import Path
from typing import Any

from torch import nn

from sparing.jobs.disk import digest, write_folder
from sparing.jobs.folder import print_page_path
from sparing.jobs.lm.controls import failed
from sparing.jobs.lm.models import save_pretrained
from sparing.jobs.lm.page import ONE_RUN
from sparing.jobs.lm.texts import sample_texts
from sparing.jobs.parallel import NO_PLAN, PARALLEL, meet_ranks
from sparing.jobs.pretrain import tables
from sparing.jobs.pretrain.control import note_controls
from sparing.jobs.pretrain.inputs import Inputs, gather
from sparing.jobs.pretrain.loop import UNITS, evaluate, train
from sparing.jobs.pretrain.models import config_for, context_of, fresh_model, shape_of
from sparing.jobs.pretrain.page import NAMES, PAGE, write_page
from sparing.jobs.pretrain.settings import Pretrain
from sparing.jobs.pretrain.state import (
    TrainState,
    choose_backends_,
    local_stepper,
    make_plan,
    restore_,
    shard_model,
    start,
)
from sparing.jobs.pretrain.tables import fill_measured, note_predicted
from sparing.jobs.ranks import ONE_PROCESS, Ranks
from sparing.jobs.run import Run
from sparing.jobs.sharded import ShardedStepper
from sparing.jobs.torch_state import device_for
from sparing.report import Record, print_table
from sparing.report.declared import applicable
from sparing.scaling.masks.mask_set import masks_of
from sparing.scaling.model.fold import fold_
from sparing.scaling.sparse.backends import convert_


def run(settings: Pretrain) -> Record:
    """Run `sparing pretrain`; nothing is written before every setting is checked."""
    with meet_ranks(settings) as ranks, run_of(settings, ranks) as run:
        settings = run.settings
        ranks.on_all_ranks(lambda: device_for(settings.device))
        inputs = ranks.on_all_ranks(lambda: gather(settings, context_of(settings)))
        config = config_for(settings, len(inputs.tokenizer), inputs.tokenizer.eos_token_id)
        model = fresh_model(config, seed=settings.seed, device=device_for(settings.device))
        texts = ", ".join(Path(name).name for name in settings.data)
        question = f"How well does a {shape_of(model)} write after {settings.steps:,} steps on {texts}?"
        record = Record(question=question, settings=settings, seed=settings.seed, units=dict(UNITS))
        resumed = ranks.on_all_ranks(lambda: resume(run, record, inputs))
        ranks.check_same(run.mark | {"step": run.interrupted_at})
        state = _train(run, ranks, inputs, model, resumed=resumed)
    if not ranks.first:
        return record
    _finish(state, inputs, record)
    caveats = _caveats(settings, inputs)
    return run.finish(lambda record, path: write_page(record, path, caveats))


def _train(run: Run, ranks: Ranks, inputs: Inputs, model: nn.Module, *, resumed: bool) -> TrainState:
    """Scale the model, or put it where a checkpoint found it, and train to the end; the model is whole afterwards."""
    settings, record = run.settings, run.record
    sharded = settings.plan != NO_PLAN or run.sharded
    make = partial(shard_model, inputs.train, ranks, record) if sharded else local_stepper
    state = start(settings, model, inputs.train, make_plan(settings, model), ranks=ranks, make_stepper=make)
    stepper = state.stepper
    if isinstance(stepper, ShardedStepper):
        run.attach(stepper)
    if resumed:
        restore_(state, run.interrupted)
    elif not sharded:
        choose_backends_(state)
    state.check()
    run.claim(defer_signals=False)
    if not resumed:
        tables.note_plan(state, record)
        if ranks.first:
            print_table(
                record.table("rates"), title=f"Plan: {NAMES[settings.rule]}", units=record.units, file=sys.stderr
            )
        if not sharded:
            note_predicted(state, record)
    run.defer_signals()
    anew = f"start anew with --lr {settings.lr / 4:g}"
    with run.explain_divergence(state, anew=anew, leave=lambda: f"; {anew}"):
        train(state, record, inputs.validation, steps=run.steps, every=settings.save_every)
    if isinstance(stepper, ShardedStepper):
        stepper.note_traffic(record)
    run.save(state)
    if isinstance(stepper, ShardedStepper):
        state.model = stepper.unshard_()
    return state


def _finish(state: TrainState, inputs: Inputs, record: Record) -> None:
    """Export the model, and measure and sample what was exported."""
    settings, model = state.settings, plain_copy(state)
    if not record.table("test"):
        row = evaluate(model, inputs.test, batch=settings.batch)
        record.add("test", **row)
        config = state.model.config
        note_controls(settings, inputs, config, record, loss=row["loss"])
        how = {"length": min(settings.sample_tokens, settings.length), "seed": settings.seed}
        texts = sample_texts(model, inputs.tokenizer, inputs.openings, **how)
        for opening, text in zip(inputs.openings, texts, strict=True):
            record.add("samples", prompt=opening, after=text)
        tables.note_layers(state, record)
        fill_measured(state, record)
    save_model(model, inputs.tokenizer, settings.out / MODEL)


def _caveats(settings: Pretrain, inputs: Inputs) -> list[str]:
    """What a reader should know before leaning on the numbers."""
    seen = settings.steps * settings.batch * settings.length / len(inputs.train)
    often = f"Every token was seen about {seen:.0f} times: held-out loss can rise while training loss falls."
    unknown = f"{inputs.unknown} held-out characters are not in the training part; all count as one token."
    base = f"The rate is right if {settings.lr:g} is right for a dense model of width {settings.base_width}."
    guess = "No rule is known to transfer rates under masks that follow magnitude; the rate is a first guess."
    scaled = settings.rule != "sp" and settings.base_width is not None
    magnitude = settings.dynamic in {"rigl", "gmp"}
    return applicable(
        (True, ONE_RUN), (seen > 1.5, often), (inputs.unknown, unknown), (scaled, base), (magnitude, guess)
    )


def show(record: Record) -> None:
    """Print the tables of a run; the last line says where the page is."""
    PAGE.print_tables(record)
    if told := failed(record.table("controls")):
        sys.stdout.write(f"{told}\n")
    print_page_path(record)


MODEL = "model"  # directory of the finished model, beside what every job writes

# Settings that may differ when a run is resumed: they do not change what is learnt, or count by their tokens.
HARMLESS = {
    "data", "first", "tokenizer", "evaluate_every", "device", "control", "samples", "sample_tokens", *PARALLEL,
}  # fmt: skip


def run_of(settings: Pretrain, ranks: Ranks = ONE_PROCESS) -> Run:
    """A run, described."""
    named = [Path(name) for name in (*settings.data, settings.tokenizer)]
    reads = [path for path in (*named, settings.model_config) if path is not None and path.exists()]
    return Run(settings, writes=(MODEL,), reads=reads, ignore=HARMLESS, watched=True, ranks=ranks)


def resume(run: Run, record: Record, inputs: Inputs) -> bool:
    """Take up what an interrupted run on the same text left, if there is any."""
    parts = (inputs.train, inputs.validation.rows.ids, inputs.test.rows.ids)
    hashes = {"text": hashlib.sha256(b"".join(part.numpy().tobytes() for part in parts)).hexdigest()}
    path: Path | None = run.settings.model_config
    if path is not None:
        hashes["model_config"] = digest(path / "config.json" if path.is_dir() else path)
    return run.resume(record, hashes=hashes)


def plain_copy(state: TrainState) -> nn.Module:
    """A copy of the model that needs nothing of this package: evaluation mode, masked weights zero."""
    model = copy.deepcopy(state.model)
    # gradients were copied along
    model.zero_grad(set_to_none=True)
    masks = masks_of(model)
    convert_(model, masks, backend="dense")
    fold_(model, masks)
    return model.eval()


def save_model(model: Any, tokenizer: Any, target: Path) -> None:
    """Write model and tokenizer, whole or not at all."""
    write_folder(target, lambda draft: save_pretrained(model.cpu(), tokenizer, draft))
