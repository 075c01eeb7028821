"""The whole job: open, measure one model after the other, compare, report."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from functools import partial
from typing import Any, Final

from sparing.errors import shown
from sparing.jobs import hub
from sparing.jobs.evaluate import harness, paired
from sparing.jobs.evaluate.inputs import Cut, Inputs, Subject, gather
from sparing.jobs.evaluate.losses import Measurement
from sparing.jobs.evaluate.page import PAGE, write_page
from sparing.jobs.evaluate.settings import Settings
from sparing.jobs.folder import print_page_path
from sparing.jobs.lm.losses import perplexity
from sparing.jobs.run import Run
from sparing.report import Record

UNITS: Final = {"loss": "nat/token", "bits_per_byte": "bit/byte", "bytes": "B"}

# Settings that may differ when a run is resumed: rows come one by one whatever their number.
HARMLESS: Final = {"device"}

BIT: Final = 0.6931471805599453
"""Nats of a bit."""


def run(settings: Settings) -> Record:
    """Run `sparing evaluate`; nothing is written before everything is known to open."""
    reads = (settings.model, settings.against, *settings.data, *settings.tasks)
    with Run(settings, reads=reads, ignore=HARMLESS) as run:
        settings = run.settings
        inputs = gather(settings)
        for subject in inputs.subjects:
            _warn(subject, inputs)
        record = Record(question=_question(settings, inputs), settings=settings, seed=0, units=dict(UNITS))
        run.resume(record, hashes=inputs.hashes)
        run.claim()
        losses, tasks = [], []
        for subject in inputs.subjects:
            losses.append([_losses(run, settings, subject, at) for at in range(len(inputs.sources))])
            tasks.append([_task(run, settings, subject, task) for task in inputs.tasks])
            # before the next is loaded: two may not fit
            subject.forget_()
        _note_losses(record, inputs, losses)
        _note_tasks(record, inputs, tasks)
        return run.finish(write_page)


def _question(settings: Settings, inputs: Inputs) -> str:
    names = [one.label for one in inputs.subjects]
    on = [source.name for source in inputs.sources] + [task.name for task in inputs.tasks]
    if len(names) == 1:
        return f"How well does {hub.title(settings.model)} do on {', '.join(on)}?"
    return f"Does {names[0]} do better than {names[1]} on {', '.join(on)}?"


def _warn(subject: Subject, inputs: Inputs) -> None:
    for source, cut in zip(inputs.sources, subject.cuts, strict=True):
        if cut.left_out:
            told = f"{source.name}: {cut.left_out} records have nothing that {subject.label} could be measured on"
            sys.stderr.write(f"note: {shown(told)}\n")
        if cut.dropped or cut.cut:
            told = (
                f"{source.name}: {cut.dropped} prompts fill a row and are left out, {cut.cut} tokens of answers are cut"
            )
            sys.stderr.write(f"note: {shown(told)}; a larger --length takes them in\n")


def _losses(run: Run, settings: Settings, subject: Subject, at: int) -> dict[str, Any]:
    """Sums of losses and counts of tokens of a source's records, measured once however often the run stops."""
    name = f"loss of {subject.label} on source {at + 1}"

    def measure() -> dict[str, Any]:
        how: dict[str, Any] = {"length": settings.length, "batch": settings.batch, "pad": subject.pad}
        state = Measurement(subject.cuts[at].records, left=run.interrupted, **how)
        model = subject.model
        run.steps(
            state, partial(state.take_step, model), total=state.total, label=subject.label, unit="batch", every=50
        )
        return {"sums": state.sums, "counts": state.counts}

    return run.once(name, measure)  # type: ignore[no-any-return]


def _task(run: Run, settings: Settings, subject: Subject, task: harness.Task) -> list[dict[str, Any]]:
    how: dict[str, Any] = {"batch": settings.batch, "shots": settings.shots, "items": settings.items}
    name = f"task {task.name} of {subject.label}"
    return run.once(name, lambda: harness.measure(subject.model, subject.tokenizer, task, **how))  # type: ignore[no-any-return]


def _note_losses(record: Record, inputs: Inputs, losses: Sequence[Sequence[dict[str, Any]]]) -> None:
    for subject, known in zip(inputs.subjects, losses, strict=True):
        for source, cut, found in zip(inputs.sources, subject.cuts, known, strict=True):
            counted = [(s, c) for s, c in zip(found["sums"], found["counts"], strict=True) if c]
            loss = paired.ratio(*zip(*counted, strict=True))
            record.add(
                "loss", model=subject.label, source=source.name, **loss.row("loss"), perplexity=perplexity(loss.value),
                bits_per_byte=loss.value * cut.tokens / cut.bytes / BIT if cut.bytes else None,
                tokens=sum(found["counts"]), left_out=cut.left_out, dropped=cut.dropped, cut=cut.cut,
            )  # fmt: skip
    if len(losses) < 2:
        return
    for at, source in enumerate(inputs.sources):
        cuts = [subject.cuts[at] for subject in inputs.subjects]
        record.add("against", source=source.name, **_loss_gap(cuts, [one[at] for one in losses]))


def _loss_gap(cuts: Sequence[Cut], found: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """How much lower the first model's loss is: per token where both read the same tokens, else per byte of texts."""
    first, second = cuts
    if [one.ids for one in first.records] == [one.ids for one in second.records] and (
        [one.labels for one in first.records] == [one.labels for one in second.records]
    ):
        kept = [at for at, count in enumerate(found[0]["counts"]) if count]
        sums = [[one["sums"][at] for at in kept] for one in found]
        gap = paired.ratio_gap(sums[0], sums[1], [found[0]["counts"][at] for at in kept])
        return {**gap.row("difference"), "per": "nat/token"}
    if first.sizes and first.sizes == second.sizes:
        gap = paired.ratio_gap(_bits(first, found[0]), _bits(second, found[1]), first.sizes)
        return {**gap.row("difference"), "per": "bit/byte"}
    nothing = {"difference": None, "difference_low": None, "difference_high": None, "n": len(first.records)}
    return {**nothing, "per": "not comparable"}


def _bits(cut: Cut, found: dict[str, Any]) -> list[float]:
    """Bits of every text: the mean of its predicted tokens stands for those that open a row, as in bits per byte."""
    every = cut.tokens / sum(found["counts"])
    return [one * every / BIT for one in found["sums"]]


def _note_tasks(record: Record, inputs: Inputs, tasks: Sequence[Sequence[list[dict[str, Any]]]]) -> None:
    for subject, known in zip(inputs.subjects, tasks, strict=True):
        for task, rows in zip(inputs.tasks, known, strict=True):
            for row in rows:
                score = paired.mean(row["items"], value=row["value"]) if row["items"] else None
                cells = score.row("value") if score else {"value": row["value"]}
                record.add("tasks", model=subject.label, task=task.name, metric=row["metric"], **cells)
    if len(tasks) < 2:
        return
    for task, first, second in zip(inputs.tasks, *tasks, strict=True):
        for one, other in zip(first, second, strict=True):
            if one["items"] and len(one["items"]) == len(other["items"]):
                found = paired.gap(one["items"], other["items"]).row("difference")
                p = paired.differing(one["items"], other["items"])
                record.add("tasks_against", task=task.name, metric=one["metric"], **found, p=p)


def show(record: Record) -> None:
    """Print the tables; the last line says where the page is."""
    PAGE.print_tables(record)
    print_page_path(record)
