"""The whole job: open, walk curve by curve, report."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any, Final

from sparing.jobs.disk import digest
from sparing.jobs.folder import tell_page
from sparing.jobs.run import Run
from sparing.jobs.scan.checkpoints import Inputs, hash_tensors, open_initial
from sparing.jobs.scan.curves import TITLES, curve_specs, present
from sparing.jobs.scan.inputs import gather
from sparing.jobs.scan.measure import describe_, histogram_, measure_, try_
from sparing.jobs.scan.page import curve_rows, write_page
from sparing.jobs.scan.settings import Settings
from sparing.report import Progress, Record, print_table
from sparing.vectors import Vector

UNITS: Final = {"seconds": "s", "loss": "nat", "plus_loss": "nat", "minus_loss": "nat"}

QUESTION: Final = (
    "Is one side of this model's valley flatter than the other, and do the signs of its weights say which?"
)


def _hashes(settings: Settings, inputs: Inputs, initial: Vector | None) -> dict[str, Any]:
    """What counts by its content, the model by its weights."""
    return {
        "weights": hash_tensors(inputs.model.state_dict()),
        "data_file": digest(Path(settings.data)) if settings.data and Path(settings.data).is_file() else None,
        "initial_weights": None if initial is None else hash_tensors(initial),
    }


def run(settings: Settings) -> Record:
    """Run `sparing scan`; nothing is written before everything is known to open."""
    named = (settings.checkpoint, settings.data, settings.initial)
    reads = [Path(path) for path in named if path is not None and Path(path).exists()]
    with Run(settings, reads=reads, ignore={"workers", "checkpoint", "initial"}) as run:
        inputs = gather(settings)
        initial = None if settings.initial is None else open_initial(settings.initial, inputs.model)
        record = Record(question=QUESTION, settings=settings, seed=settings.seed, units=dict(UNITS))
        there = present(inputs.model, settings.groups)
        if not run.resume(record, hashes=_hashes(settings, inputs, initial)):
            try_(inputs, settings)
            describe_(record, inputs, settings.statistics)
            if "norms" in settings.parts:
                histogram_(record, inputs.model)
            for group in (group for group in settings.groups if group not in there):
                record.add("left_out", group=group)
        run.claim()
        wanted = curve_specs(settings, groups=there, started=initial is not None)
        with Progress("scan", total=len(wanted), unit="curve", resume_at=run.finished) as run.bar:
            for at, spec in enumerate(wanted, start=1):
                along = f"{TITLES[spec.kind]}, {spec.sign}, {spec.group}"
                work = partial(measure_, record, spec, inputs, settings, initial)
                run.once(f"curve {at} of {len(wanted)}", work, along=along)
        return run.finish(write_page)


def show(record: Record) -> None:
    """Print the indices; the last line says where the page is."""
    if record.table("curves"):
        print_table(curve_rows(record), title=record.question, units=record.units)
    tell_page(record)
