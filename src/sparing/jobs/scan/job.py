"""The whole job: open, walk curve by curve, report."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any, Final

from sparing.jobs import folder
from sparing.jobs.disk import digest
from sparing.jobs.folder import Folder, tell_page
from sparing.jobs.interrupts import patient, save_when_due
from sparing.jobs.scan.checkpoints import Inputs, fingerprint, open_initial
from sparing.jobs.scan.curves import TITLES, CurveSpec, curve_specs, present
from sparing.jobs.scan.inputs import gather
from sparing.jobs.scan.measure import describe_, histogram_, measure_, try_
from sparing.jobs.scan.page import curve_rows, write_page
from sparing.jobs.scan.settings import Settings
from sparing.report import Progress, Record, print_table
from sparing.vectors import Vector

UNITS: Final = {"seconds": "s", "loss": "nat", "plus_loss": "nat", "minus_loss": "nat"}
# Names in the mark of a run under which hashes stand.
FILES: Final = frozenset({"weights", "data_file", "initial_weights"})

QUESTION: Final = (
    "Is one side of this model's valley flatter than the other, and do the signs of its weights say which?"
)


def folder_of(settings: Settings) -> Folder:
    """The directory of a run."""
    named = (settings.checkpoint, settings.data, settings.initial)
    reads = tuple(Path(path) for path in named if path is not None and Path(path).exists())
    return Folder(settings.out, resume=settings.resume, overwrite=settings.overwrite, reads=reads)


def identity(settings: Settings, inputs: Inputs, initial: Vector | None) -> dict[str, Any]:
    """What makes two scans the same; the model counts by the hash of its weights."""
    mark = folder.identity(settings, harmless=("workers", "checkpoint", "initial"))
    mark["weights"] = fingerprint(inputs.model.state_dict())
    mark["data_file"] = digest(Path(settings.data)) if settings.data and Path(settings.data).is_file() else None
    mark["initial_weights"] = None if initial is None else fingerprint(initial)
    return mark


def _walk_(record: Record, settings: Settings, inputs: Inputs, initial: Vector | None, wanted: list[CurveSpec]) -> None:
    """Every curve that the record does not hold yet; saved after each."""
    done = {(row["kind"], row["ratio"], row["group"]) for row in record.table("curves")}
    left = [spec for spec in wanted if (spec.kind, spec.ratio, spec.group) not in done]
    total = len(wanted)
    with Progress("scan", total=total, unit="curve", resume_at=total - len(left)) as bar, patient() as signals:
        for at, spec in enumerate(left, start=total - len(left) + 1):
            measure_(record, spec, inputs, settings, initial)
            bar.advance(along=f"{TITLES[spec.kind]}, {spec.sign}, {spec.group}")
            save = partial(folder_of(settings).save, at, {"rows": record.rows})
            save_when_due(save, signals, step=at, every=1, done=f"curve {at} of {total}")


def run(settings: Settings) -> Record:
    """Run `sparing scan`; nothing is written before everything is known to open."""
    place = folder_of(settings)
    place.check()
    inputs = gather(settings)
    initial = None if settings.initial is None else open_initial(settings.initial, inputs.model)
    mark = identity(settings, inputs, initial)
    tree = place.latest(mark, files=FILES)
    record = Record(question=QUESTION, settings=settings, seed=settings.seed, units=dict(UNITS))
    there = present(inputs.model, settings.groups)
    if tree is None:
        try_(inputs, settings)
        describe_(record, inputs, settings.statistics)
        if "norms" in settings.parts:
            histogram_(record, inputs.model)
        for group in (group for group in settings.groups if group not in there):
            record.add("left_out", group=group)
    else:
        record.rows = tree["rows"]
    place.claim_(mark)
    _walk_(record, settings, inputs, initial, curve_specs(settings, groups=there, started=initial is not None))
    place.finish_(record, write_page)
    return record


def show(record: Record) -> None:
    """Print the indices; the last line says where the page is."""
    if record.table("curves"):
        print_table(curve_rows(record), title=record.question, units=record.units)
    tell_page(record)
