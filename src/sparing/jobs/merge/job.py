"""The whole job: open, predict, choose, merge on the disk, measure, report."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from sparing.jobs.disk import digest
from sparing.jobs.folder import tell_page
from sparing.jobs.lm.models import hash_folder
from sparing.jobs.merge.choose import Candidate, Decision
from sparing.jobs.merge.forecast import Outlook, look_ahead
from sparing.jobs.merge.inputs import gather
from sparing.jobs.merge.output import MODEL, WEIGHTS, place_of, write_merge
from sparing.jobs.merge.page import columns_of, write_page
from sparing.jobs.merge.pipeline import ADVICE, Pipeline
from sparing.jobs.merge.settings import Settings
from sparing.jobs.merge.sources import Source, differences, open_all, open_source
from sparing.jobs.run import Run
from sparing.report import Progress, Record, print_table

UNITS: Final = {"loss": "nats", "gap_loss": "nats", "size": "B"}
# Tables that the terminal shows, with their titles.
SHOWN: Final = {
    "forecast": "What the weights say",
    "tried": "On validation rows",
    "models": "On test rows",
    "gap": "Gap: the merge less the mean of its parents",
    "best": "The merge less its best parent, on the same rows",
}


def _marks(settings: Settings, sources: list[Source], base: Source | None) -> dict[str, str]:
    """Hashes of what is read, so that a resumed run goes on with the same."""
    checkpoints = [*sources, *([base] if base else [])]
    found = {one.label: hash_folder(one.path) if one.is_folder else digest(one.path) for one in checkpoints}
    if settings.data is not None and Path(settings.data).is_file():
        found["data"] = digest(Path(settings.data))
    return found


def run(settings: Settings) -> Record:
    """Run `sparing merge`; nothing is written before the models are read once and checked."""
    named = (*settings.models, *([settings.base] if settings.base else []))
    reads = [path for one in named for path in (one, one / MODEL)]  # a run's folder stands for the model in it
    with Run(settings, writes=(MODEL, WEIGHTS), reads=reads) as run:
        sources, base = open_all(settings.models, settings.labels, settings.base)
        pipeline = Pipeline(settings, sources, base, gather(settings, sources), run)
        question = f"Can {_listed(settings.labels)} be merged, and what does the merge lose?"
        record = Record(question=question, settings=settings, seed=settings.seed, units=dict(UNITS))
        run.resume(record, hashes=_marks(settings, sources, base))
        outlook = Outlook.of(run.once("prediction", lambda: look_ahead(sources, base).plain()))
        sys.stderr.write(f"prediction: {outlook.sentence}\n")
        notes = differences(sources, base)
        sys.stderr.writelines(f"note: {sentence}\n" for sentence in notes)
        run.claim()
        with Progress("merge", total=pipeline.units(), resume_at=run.finished) as run.bar:
            decision = pipeline.choose(outlook)
            merged = _make(pipeline, decision.candidate) if decision.candidate else None
            found, between = pipeline.test(merged), pipeline.between()
        # every number is a result of the run by now: the rows are made anew from them
        for sentence in notes:
            record.add("differences", what=sentence)
        for table, rows in outlook.tables().items():
            for row in rows:
                record.add(table, **row)
        _note(pipeline, decision, record)
        for row in found["models"]:
            record.add("models", **row)
        for row in found["gap"]:
            record.add("gap", **row, **outlook.predicted(row["metric"]))
        for row in found["best"]:
            record.add("best", **row)
        for row in between:
            record.add("between", **row)
        for file in _written(settings, merged):
            record.add("written", **file)
        return run.finish(write_page)


def _make(pipeline: Pipeline, way: Candidate) -> Source:
    """Write the merge, unless an interrupted run did so."""
    place = place_of(pipeline.settings.out, pipeline.sources[0])

    def work() -> bool:
        statistics, size = pipeline.statistics(way), sum(entry.size for entry in pipeline.sources[0].entries.values())
        with Progress("write", total=size, unit="B") as bar:
            write_merge(
                place, way.method, pipeline.sources, pipeline.base, statistics, lambda name, size: bar.advance(size)
            )
        return True

    if not place.exists():  # a checkpoint may outlive what its user deleted
        pipeline.run.forget("the merge")
    pipeline.run.once("the merge", work)
    return open_source(place, "the merge")


def _note(pipeline: Pipeline, decision: Decision, record: Record) -> None:
    way, inputs = decision.candidate, pipeline.inputs
    stale = any(name.endswith("running_var") for name in pipeline.sources[0]) and not (inputs and inputs.refreshes)
    record.add(
        "decision", merged=way is not None, way=way.name if way else "none", reason=decision.reason,
        advice="" if way else ADVICE, metric=inputs.metric if inputs else "loss",
        source=inputs.source if inputs else "", stale=stale and way is not None,
    )  # fmt: skip
    for row in pipeline.tried():
        record.add("tried", **row)


def _written(settings: Settings, merged: Source | None) -> list[Mapping[str, Any]]:
    if merged is None:
        return []
    files = sorted(merged.path.iterdir()) if merged.is_folder else [merged.path]
    return [{"file": str(file.relative_to(settings.out)), "size": file.stat().st_size} for file in files]


def _listed(labels: tuple[str, ...]) -> str:
    return f"{', '.join(labels[:-1])} and {labels[-1]}"


def show(record: Record) -> None:
    """Print prediction, choice and measurement; the last line says where the page is."""
    for name, title in SHOWN.items():
        if rows := record.table(name):
            print_table(rows, title=title, units=record.units, columns=columns_of(rows))
    (decision,) = record.table("decision")
    if decision["merged"]:
        place = MODEL if any(row["file"].startswith(f"{MODEL}/") for row in record.table("written")) else WEIGHTS
        sys.stdout.write(f"{decision['way']}: {decision['reason']}\nmodel: {Path(record.settings['out']) / place}\n")
    else:
        sys.stdout.write(f"no merge: {decision['reason']}; {decision['advice']}\n")
    tell_page(record)
