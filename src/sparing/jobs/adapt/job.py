"""The whole job: prepare once, then every method in turn, then the page."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from torch import Tensor

from sparing.jobs.adapt import meta
from sparing.jobs.adapt.evaluate import (
    adapt_model,
    evaluate_weights,
    name_weights,
    passage_rows,
    sample_rows,
    score,
    stream_weights,
    token_rows,
)
from sparing.jobs.adapt.meta import LABELS, arm_of
from sparing.jobs.adapt.page import PAGE, write_page
from sparing.jobs.adapt.problem import Inputs, Window, count_rows, load, prepare
from sparing.jobs.adapt.settings import Adapt, Name
from sparing.jobs.disk import digest, load_tensors, save_tensors
from sparing.jobs.folder import print_page_path
from sparing.jobs.run import Run
from sparing.report import Progress, Record

WEIGHTS, BASE = "weights", "base.safetensors"  # learned weights by method; the tuned θ₀

HARMLESS = {"methods"}
"""Settings that may differ when a run is resumed; not the budget, which is the same for every method."""


def weights_of(settings: Adapt, name: str) -> Path:
    """File of the network that a method learned."""
    return settings.out / WEIGHTS / f"{name}.safetensors"


QUESTION = "Which tokens should a language model learn from, and which way of learning that answers best?"

UNITS = {
    "nll": "nat/token", "kl": "nat/token", "objective": "nat/token", "outer": "nat/token", "em": "%", "f1": "%",
    "seconds": "s", "total_seconds": "s", "weight": "× mean",
}  # fmt: skip


def new_record(settings: Adapt) -> Record:
    """An empty record of the job."""
    return Record(question=QUESTION, settings=settings, seed=settings.seed, units=dict(UNITS))


def _validate(inputs: Inputs, state: meta.TrainState, settings: Adapt, name: str, record: Record) -> None:
    """Add the marks on the validation stream at this moment; keep the network if it is the best."""
    weights, texts = stream_weights(state.phi, inputs.validation), inputs.validation.stream.texts
    theta = adapt_model(inputs.lm, weights, texts, lr=settings.inner_lr, clip=settings.inner_clip)
    found, _ = score(inputs.lm, theta, inputs.validation)
    meta.keep_best_(state, found["nll"] + settings.locality * found["kl"])
    record.add("curve", method=name, step=state.step, seconds=state.seconds, **found)


def learn(inputs: Inputs, settings: Adapt, name: Name, run: Run) -> None:
    """Meta-train one method to the end of its budget, and measure what it learned."""
    arm, state = arm_of(name, settings), meta.start(inputs.test.features.shape[1], settings)
    if run.interrupted is not None:
        meta.restore_(state, run.interrupted)
    else:
        _validate(inputs, state, settings, name, run.record)

    def take_step() -> dict[str, Any]:
        before = meta.budget_used(state, settings)
        row = meta.outer_step_(state, inputs.lm, inputs.data, settings, arm)
        run.record.add("meta", **row)
        if meta.evaluation_due(before, meta.budget_used(state, settings), settings.measurements):
            _validate(inputs, state, settings, name, run.record)
        return {"answers": row["outer"], "outer_step": str(state.step)}

    def percent() -> int:
        return int(100 * min(meta.budget_used(state, settings), 1.0))

    if arm.method is not None:
        with Progress(LABELS[name], total=100, resume_at=percent(), unit="%") as bar:
            run.steps(
                state, take_step, total=settings.steps, label=name, unit="outer step", every=1, bar=bar,
                progress=percent, until=lambda: meta.ended(state, settings),
            )  # fmt: skip
    _evaluate(inputs, settings, name, state, run.record)


def _base(inputs: Inputs, settings: Adapt, record: Record) -> None:
    """Documents there are; marks and answers without adapting."""
    for row in count_rows(inputs.data, settings):
        record.add("documents", **row)
    found, given = score(inputs.lm, inputs.lm.theta, inputs.test)
    record.add("answers", method="base", steps=0, seconds=0.0, lr=None, **found)
    _note_answers(record, "base", given)


def _names(inputs: Inputs, settings: Adapt, record: Record) -> None:
    """The rule that learns nothing: the same rates, marks and answers, and no network."""
    _answer(inputs, settings, "names", partial(name_weights, inputs.lm), record, steps=0, seconds=0.0)


def _answer(
    inputs: Inputs, settings: Adapt, name: Name, weigh: Callable[[Window], Tensor], record: Record, **took: float
) -> None:
    """Choose the rate of adapting for some weights; their marks and answers."""
    row, tried, given = evaluate_weights(inputs, weigh, settings)
    for line in tried:
        record.add("sweep", method=name, **line)
    record.add("answers", method=name, **took, **row)
    _note_answers(record, name, given)


def _evaluate(inputs: Inputs, settings: Adapt, name: Name, state: meta.TrainState, record: Record) -> None:
    """Rate, marks and answers of a finished method; its network goes to the disk."""
    save_tensors(weights_of(settings, name), state.best)
    weigh = partial(stream_weights, state.best)
    _answer(inputs, settings, name, weigh, record, steps=state.step, seconds=state.seconds)
    for line in token_rows(inputs.lm, inputs.test, stream_weights(state.best, inputs.test)):
        record.add("tokens", method=name, **line)


def _note_answers(record: Record, name: str, given: list[str]) -> None:
    for number, said in enumerate(given):
        record.add("said", method=name, number=number, said=said)


def _close(inputs: Inputs, settings: Adapt, record: Record) -> None:
    """The rows that compare methods: questions with answers, one document token by token."""
    names = [row["method"] for row in record.table("answers")]
    given = {name: [row["said"] for row in record.table("said", method=name)] for name in names}
    record.rows[:] = [row for row in record.rows if row["table"] not in {"said", "passage", "samples"}]
    for row in sample_rows(inputs.test, given):
        record.add("samples", **row)
    weights = {
        name: name_weights(inputs.lm, inputs.test) if name == "names"
        else stream_weights(load_tensors(weights_of(settings, name)), inputs.test)
        for name in names[1:]
    }  # fmt: skip
    for row in passage_rows(inputs.lm, inputs.test, weights):
        record.add("passage", **row)


def run(settings: Adapt) -> Record:
    """Learn the weights every way and compare the answers; the record is also in OUT/record.jsonl."""
    reads = (Path(settings.model), *settings.data, settings.elsewhere)
    with Run(settings, writes=(WEIGHTS, BASE), reads=reads, ignore=HARMLESS) as run:
        settings = run.settings
        lm, data = load(settings)
        files = {str(at): digest(path) for at, path in enumerate(settings.data)}
        if settings.elsewhere is not None:
            files["elsewhere"] = digest(settings.elsewhere)
        # the model counts by its name, texts by their hash
        also = {"data": None, "elsewhere": None, "model": Path(settings.model).name, "files": files}
        record = new_record(settings)
        run.resume(record, also=also, files={"files"})
        run.claim(defer_signals=False)
        # outside the deferred signals: this tunes a model, which a signal may stop at once
        inputs = prepare(lm, data, settings, run.folder.at(BASE))
        run.defer_signals()
        run.once("base", partial(_base, inputs, settings, record))
        for name in settings.methods:
            ruled = partial(_names, inputs, settings, record)
            run.once(name, ruled if name == "names" else partial(learn, inputs, settings, name, run))
        _close(inputs, settings, record)
        return run.finish(write_page)


def show(record: Record) -> None:
    """Print the result; the last line says where the page is."""
    PAGE.print_tables(record)
    print_page_path(record)
