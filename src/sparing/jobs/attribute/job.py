"""The whole job: train, attribute, retrain without random rows, report."""

from __future__ import annotations

import math
import sys
from functools import partial
from pathlib import Path
from typing import Any, Final

import torch
from torch import Tensor

from sparing import hypergrad as hg
from sparing.errors import shown
from sparing.jobs.attribute.checks import drop_set, retrained, spearman
from sparing.jobs.attribute.inputs import Inputs, gather
from sparing.jobs.attribute.page import PAGE, write_page
from sparing.jobs.attribute.settings import Settings
from sparing.jobs.disk import digest, save_tensors
from sparing.jobs.folder import print_page_path
from sparing.jobs.run import Run
from sparing.report import Progress, Record

FOUND: Final = "influence.safetensors"

UNITS: Final = {"seconds": "s", "loss": "nat", "influence": "nat", "predicted": "nat", "measured": "nat"}


def run(settings: Settings) -> Record:
    """Attribute as the command line does; beside the record lie the page, and all influences."""
    named = {"data": Path(settings.data), "test": settings.test}
    files = {name: path for name, path in named.items() if path is not None and path.is_file()}
    with Run(settings, writes=(FOUND,), reads=files.values(), ignore={"shown"}) as run:
        inputs = gather(settings)
        what = "predictions" if len(settings.predictions) > 1 else "prediction"
        question = f"Which of {inputs.run.rows:,} training rows made {len(settings.predictions)} {what}?"
        record = Record(question=question, settings=settings, seed=settings.seed, units=dict(UNITS))
        run.resume(record, hashes={name: digest(path) for name, path in files.items()})
        # nothing is lost when the one long piece of work is interrupted, so a signal ends it at once
        run.claim(defer_signals=False)
        with Progress("attribute", total=1 + settings.retrain, unit="run", resume_at=run.finished) as run.bar:
            found = run.once("attribution", partial(_attribute, record, inputs, settings))
            run.defer_signals()
            for number in range(settings.retrain):
                work = partial(_retrain, record, inputs, settings, found, number)
                run.once(f"drop set {number + 1} of {settings.retrain}", work)
        _summarise(record)
        _note_rows(record, inputs, settings, found["influence"])
        tensors = {"influence": found["influence"], "rows": inputs.numbers, "test_rows": inputs.test_numbers}
        save_tensors(run.folder.at(FOUND), tensors)
        return run.finish(lambda record, path: write_page(record, path, inputs))


def _attribute(record: Record, inputs: Inputs, settings: Settings) -> dict[str, Tensor]:
    """Influences and losses of the predictions; rows of "run" and "predictions"."""
    if inputs.left_out:
        name = Path(settings.data).name
        told = f"{name}: {inputs.left_out} rows have fewer than four bytes and are left out; row numbers count them"
        sys.stderr.write(f"note: {shown(told)}\n")
    smooth = hg.metasmoothness(inputs.run, share=settings.share, seed=settings.seed)
    if smooth.warning:
        sys.stderr.write(f"note: {shown(smooth.warning)}\n")
    found = hg.attribute(inputs.run, inputs.target, seed=settings.seed, check=0)
    record.add(
        "run", rows=inputs.run.rows, steps=len(inputs.run.batches), seconds=found.seconds,
        parameters=sum(weight.numel() for weight in inputs.run.init.values()), metasmoothness=smooth.score,
        bend=smooth.bend, warning=smooth.warning, left_out=inputs.left_out,
    )  # fmt: skip
    for at, test in enumerate(settings.predictions):
        record.add(
            "predictions", test=test, row=int(inputs.test_numbers[at]), label_or_text=inputs.test_words[at],
            loss=float(found.value[at]),
        )  # fmt: skip
    return {"influence": found.influence, "value": found.value}


def _note_rows(record: Record, inputs: Inputs, settings: Settings, influence: Tensor) -> None:
    """The table "rows": of each prediction those of largest influence (k, n) on either side of zero."""
    # a resumed run may show more or fewer
    record.rows[:] = [row for row in record.rows if row["table"] != "rows"]
    for test, each in zip(settings.predictions, influence, strict=True):
        for side, sign in (("helps", -1), ("harms", 1)):
            largest = (sign * each).topk(min(settings.shown, len(each)))
            for place, row in enumerate(largest.indices[largest.values > 0].tolist(), start=1):
                record.add(
                    "rows", test=test, side=side, place=place, row=int(inputs.numbers[row]), position=row,
                    label_or_text=inputs.train_words[row], influence=float(each[row]),
                )  # fmt: skip


def _retrain(record: Record, inputs: Inputs, settings: Settings, found: dict[str, Any], number: int) -> None:
    """One set of rows is dropped: a row of "drops" for each prediction."""
    drop = drop_set(inputs.run.rows, settings.share, settings.seed, number)
    measured = retrained(inputs, drop, settings.seed) - found["value"]
    predicted = -found["influence"][:, drop].sum(1)
    for at, test in enumerate(settings.predictions):
        record.add("drops", set=number, test=test, predicted=float(predicted[at]), measured=float(measured[at]))


def _summarise(record: Record) -> None:
    """A row of "agreement" for each prediction, where there are sets enough to rank."""
    for row in record.table("predictions"):
        drops = record.table("drops", test=row["test"])
        if len(drops) < 3 or record.table("agreement", test=row["test"]):
            continue
        predicted, measured = (torch.tensor([one[name] for one in drops]) for name in ("predicted", "measured"))
        rank = spearman(predicted, measured)
        if not math.isnan(rank):
            record.add(
                "agreement", test=row["test"], label_or_text=row["label_or_text"], rank_correlation=rank, n=len(drops)
            )


def show(record: Record) -> None:
    """Print the rows; the last line says where the page is."""
    PAGE.print_tables(record)
    print_page_path(record)
