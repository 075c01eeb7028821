"""The whole job: prepare once, then every method in turn, then the page."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

from sparing.jobs.adapt import meta
from sparing.jobs.adapt.answering import evaluate_network, passage_rows, sample_rows, stream_weights, token_rows
from sparing.jobs.adapt.arms import LABELS, arm_of
from sparing.jobs.adapt.evaluate import adapt_model, score
from sparing.jobs.adapt.outputs import BASE, folder_of, identity, weights_of
from sparing.jobs.adapt.page import write_page
from sparing.jobs.adapt.prepare import Inputs, prepare
from sparing.jobs.adapt.settings import Adapt, Name
from sparing.jobs.adapt.weights import Phi
from sparing.jobs.disk import load_tensors, save_tensors
from sparing.jobs.folder import tell_page
from sparing.jobs.interrupts import patient, save_when_due
from sparing.report import Progress, Record, print_table

QUESTION = "Which tokens should a language model learn from, and which way of learning that answers best?"

UNITS = {
    "nll": "nat/token", "kl": "nat/token", "objective": "nat/token", "outer": "nat/token", "em": "%", "f1": "%",
    "seconds": "s", "total_seconds": "s", "weight": "× mean",
}  # fmt: skip


def new_record(settings: Adapt) -> Record:
    """An empty record of the job."""
    return Record(question=QUESTION, settings=settings, seed=settings.seed, units=dict(UNITS))


def _save(settings: Adapt, name: str, state: meta.TrainState, record: Record) -> Path:
    """One checkpoint; they are numbered by the outer steps of all methods together."""
    number = len(record.table("meta")) + len(record.table("answers")) * 10_000
    tree = {"method": name, "course": meta.state_of(state), "rows": record.rows}
    return folder_of(settings).save(number, tree)


def _validate(inputs: Inputs, state: meta.TrainState, settings: Adapt, name: str, record: Record) -> None:
    """Add the marks on the validation stream at this moment; keep the network if it is the best."""
    phi, window = state.phi, inputs.validation
    theta = adapt_model(
        inputs.lm, stream_weights(phi, window), window.stream.texts, lr=settings.lr, clip=settings.inner_clip
    )
    found, _ = score(inputs.lm, theta, window)
    meta.keep_best_(state, found.nll + settings.locality * found.kl)
    row = {"nll": found.nll, "em": found.em, "f1": found.f1, "kl": found.kl}
    record.add("curve", method=name, step=state.step, seconds=state.seconds, **row)


def _percent(share: float) -> int:
    return int(100 * min(share, 1.0))


def learn(
    inputs: Inputs, settings: Adapt, name: Name, record: Record, tree: dict[str, Any] | None, signals: list[int]
) -> meta.TrainState:
    """Meta-train one method to the end of its budget, or to a signal, after which it has saved."""
    arm, state = arm_of(name, settings), meta.start(inputs.test.features.shape[1], settings)
    if tree is not None:
        meta.restore_(state, tree)
    else:
        _validate(inputs, state, settings, name, record)
    if arm.method is None:
        return state
    with Progress(LABELS[name], total=100, resume_at=_percent(meta.budget_used(state, settings)), unit="%") as bar:
        while not meta.ended(state, settings):
            before = meta.budget_used(state, settings)
            row = meta.outer_step_(state, inputs.lm, inputs.data, settings, arm)
            record.add("meta", **row)
            now = meta.budget_used(state, settings)
            bar.advance(_percent(now) - _percent(before), answers=row["outer"], outer_step=str(state.step))
            if meta.evaluation_due(before, now, settings.looks):
                _validate(inputs, state, settings, name, record)
            save, heard = (
                partial(_save, settings, name, state, record),
                () if meta.ended(state, settings) else signals,
            )
            save_when_due(save, heard, step=state.step, every=1, done=f"{name}, outer step {state.step}")
    return state


def _base(inputs: Inputs, record: Record) -> list[str]:
    """Marks without adapting."""
    found, given = score(inputs.lm, inputs.lm.theta, inputs.test)
    marked = {"lr": None, "nll": found.nll, "em": found.em, "f1": found.f1, "kl": found.kl}
    record.add("answers", method="base", steps=0, seconds=0.0, **marked)
    return given


def _evaluate(inputs: Inputs, settings: Adapt, name: Name, state: meta.TrainState, record: Record) -> None:
    """Rate, marks and answers of a finished method; its network goes to the disk."""
    save_tensors(weights_of(settings, name), state.best)
    row, tried, given = evaluate_network(inputs, state.best, settings)
    for line in tried:
        record.add("sweep", method=name, **line)
    record.add("answers", method=name, steps=state.step, seconds=state.seconds, **row)
    _note_answers(record, name, given)
    for line in token_rows(inputs.lm, inputs.test, stream_weights(state.best, inputs.test)):
        record.add("tokens", method=name, **line)


def _note_answers(record: Record, name: str, given: list[str]) -> None:
    for number, said in enumerate(given):
        record.add("said", method=name, number=number, said=said)


def _close(inputs: Inputs, settings: Adapt, record: Record) -> None:
    """The rows that compare methods: questions with answers, one document token by token."""
    names = [row["method"] for row in record.table("answers")]
    given = {name: [row["said"] for row in record.table("said") if row["method"] == name] for name in names}
    record.rows[:] = [row for row in record.rows if row["table"] not in {"said", "passage", "samples"}]
    for row in sample_rows(inputs.test, given):
        record.add("samples", **row)
    learnt: dict[str, Phi] = {name: load_tensors(weights_of(settings, name)) for name in names[1:]}
    for row in passage_rows(
        inputs.lm, inputs.test, {name: stream_weights(phi, inputs.test) for name, phi in learnt.items()}
    ):
        record.add("passage", **row)


def run(settings: Adapt) -> Record:
    """Learn the weights every way and compare the answers; the record is also in OUT/record.jsonl."""
    folder = folder_of(settings)
    folder.check()
    mark = identity(settings)
    tree = folder.latest(mark, files={"files"})
    folder.claim_(mark)
    record = new_record(settings)
    inputs = prepare(settings, folder.at(BASE))
    if tree is None:
        _note_answers(record, "base", _base(inputs, record))
    else:
        record.rows[:] = tree["rows"]
    done = {row["method"] for row in record.table("answers")}
    with patient() as signals:
        for name in settings.methods:
            if name in done:
                continue
            inside = tree["course"] if tree is not None and tree["method"] == name else None
            state = learn(inputs, settings, name, record, inside, signals)
            _evaluate(inputs, settings, name, state, record)
            _save(settings, name, state, record)
    _close(inputs, settings, record)
    folder.finish_(record, write_page)
    return record


def show(record: Record) -> None:
    """Print the result; the last line says where the page is."""
    rows = [{**row, "method": LABELS[row["method"]]} for row in record.table("answers")]
    print_table(rows, title="Answers after one pass over the test documents", units=record.units)
    tell_page(record)
