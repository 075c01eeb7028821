"""The whole job: prepare once, then every method in turn, then the page."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

from sparing.jobs.adapt import meta
from sparing.jobs.adapt.answering import judged, passage_rows, sample_rows, token_rows, unit
from sparing.jobs.adapt.arms import LABELS, arm
from sparing.jobs.adapt.evaluate import adapted, marks
from sparing.jobs.adapt.outputs import BASE, folder_of, identity, weights_of
from sparing.jobs.adapt.page import write_page
from sparing.jobs.adapt.prepare import Bench, prepare
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


def begun(settings: Adapt) -> Record:
    """An empty record of the job."""
    return Record(question=QUESTION, settings=settings, seed=settings.seed, units=dict(UNITS))


def _save(settings: Adapt, name: str, course: meta.Course, record: Record) -> Path:
    """One checkpoint; they are numbered by the outer steps of all methods together."""
    number = len(record.table("meta")) + len(record.table("answers")) * 10_000
    tree = {"method": name, "course": meta.state_of(course), "rows": record.rows}
    return folder_of(settings).save(number, tree)


def _look(bench: Bench, course: meta.Course, settings: Adapt, name: str, record: Record) -> None:
    """Add the marks on the validation stream at this moment; keep the network if it is the best."""
    phi, window = course.phi, bench.validation
    theta = adapted(bench.lm, unit(phi, window), window.stream.texts, lr=settings.lr, clip=settings.inner_clip)
    found, _ = marks(bench.lm, theta, window)
    meta.keep_(course, found.nll + settings.locality * found.kl)
    row = {"nll": found.nll, "em": found.em, "f1": found.f1, "kl": found.kl}
    record.add("curve", method=name, step=course.step, seconds=course.seconds, **row)


def _percent(share: float) -> int:
    return int(100 * min(share, 1.0))


def learn(
    bench: Bench, settings: Adapt, name: Name, record: Record, tree: dict[str, Any] | None, signals: list[int]
) -> meta.Course:
    """Meta-train one method to the end of its budget, or to a signal, after which it has saved."""
    way, course = arm(name, settings), meta.begin(bench.test.read.shape[1], settings)
    if tree is not None:
        meta.restore_(course, tree)
    else:
        _look(bench, course, settings, name, record)
    if way.method is None:
        return course
    with Progress(LABELS[name], total=100, resume_at=_percent(meta.share(course, settings)), unit="%") as bar:
        while not meta.ended(course, settings):
            before = meta.share(course, settings)
            row = meta.outer_step_(course, bench.lm, bench.data, settings, way)
            record.add("meta", **row)
            now = meta.share(course, settings)
            bar.advance(_percent(now) - _percent(before), answers=row["outer"], outer_step=str(course.step))
            if meta.due(before, now, settings.looks):
                _look(bench, course, settings, name, record)
            save, heard = (
                partial(_save, settings, name, course, record),
                () if meta.ended(course, settings) else signals,
            )
            save_when_due(save, heard, step=course.step, every=1, done=f"{name}, outer step {course.step}")
    return course


def _base(bench: Bench, record: Record) -> list[str]:
    """Marks without adapting."""
    found, given = marks(bench.lm, bench.lm.theta, bench.test)
    marked = {"lr": None, "nll": found.nll, "em": found.em, "f1": found.f1, "kl": found.kl}
    record.add("answers", method="base", steps=0, seconds=0.0, **marked)
    return given


def _judge(bench: Bench, settings: Adapt, name: Name, course: meta.Course, record: Record) -> None:
    """Rate, marks and answers of a finished method; its network goes to the disk."""
    save_tensors(weights_of(settings, name), course.best)
    row, tried, given = judged(bench, course.best, settings)
    for line in tried:
        record.add("sweep", method=name, **line)
    record.add("answers", method=name, steps=course.step, seconds=course.seconds, **row)
    _note_answers(record, name, given)
    for line in token_rows(bench.lm, bench.test, unit(course.best, bench.test)):
        record.add("tokens", method=name, **line)


def _note_answers(record: Record, name: str, given: list[str]) -> None:
    for number, said in enumerate(given):
        record.add("said", method=name, number=number, said=said)


def _close(bench: Bench, settings: Adapt, record: Record) -> None:
    """The rows that compare methods: questions with answers, one document token by token."""
    names = [row["method"] for row in record.table("answers")]
    given = {name: [row["said"] for row in record.table("said") if row["method"] == name] for name in names}
    record.rows[:] = [row for row in record.rows if row["table"] not in {"said", "passage", "samples"}]
    for row in sample_rows(bench.test, given):
        record.add("samples", **row)
    learnt: dict[str, Phi] = {name: load_tensors(weights_of(settings, name)) for name in names[1:]}
    for row in passage_rows(bench.lm, bench.test, {name: unit(phi, bench.test) for name, phi in learnt.items()}):
        record.add("passage", **row)


def run(settings: Adapt) -> Record:
    """Learn the weights every way and compare the answers; the record is also in OUT/record.jsonl."""
    folder = folder_of(settings)
    folder.check()
    mark = identity(settings)
    tree = folder.latest(mark, files={"files"})
    folder.claim_(mark)
    record = begun(settings)
    bench = prepare(settings, folder.at(BASE))
    if tree is None:
        _note_answers(record, "base", _base(bench, record))
    else:
        record.rows[:] = tree["rows"]
    done = {row["method"] for row in record.table("answers")}
    with patient() as signals:
        for name in settings.methods:
            if name in done:
                continue
            inside = tree["course"] if tree is not None and tree["method"] == name else None
            course = learn(bench, settings, name, record, inside, signals)
            _judge(bench, settings, name, course, record)
            _save(settings, name, course, record)
    _close(bench, settings, record)
    folder.finish_(record, write_page)
    return record


def show(record: Record) -> None:
    """Print the result; the last line says where the page is."""
    rows = [{**row, "method": LABELS[row["method"]]} for row in record.table("answers")]
    print_table(rows, title="Answers after one pass over the test documents", units=record.units)
    tell_page(record)
