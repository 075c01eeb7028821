"""The whole job: open, walk curve by curve, report."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Final

from sparing.jobs.disk import digest
from sparing.jobs.folder import print_page_path
from sparing.jobs.run import Run
from sparing.jobs.scan.curves import TITLES, curve_specs, describe_, histogram_, measure_, present, try_
from sparing.jobs.scan.inputs import gather, hash_tensors, open_initial, open_other
from sparing.jobs.scan.page import PAGE, write_page
from sparing.jobs.scan.settings import Settings
from sparing.jobs.scan.shapes import check_shapes, shapes_of
from sparing.report import Progress, Record

UNITS: Final = {"seconds": "s", "loss": "nat", "plus_loss": "nat", "minus_loss": "nat"}

QUESTION: Final = (
    "Is one side of this model's valley flatter than the other, and do the signs of its weights say which?"
)


def run(settings: Settings) -> Record:
    """Run `sparing scan`; nothing is written before everything is known to open."""
    named = (settings.model, settings.data, settings.initial, *settings.towards, *settings.trajectory)
    reads = [Path(path) for path in named if path is not None and Path(path).exists()]
    with Run(settings, reads=reads, ignore={"workers", "model", "initial", "towards", "trajectory"}) as run:
        settings = run.settings
        inputs = gather(settings)
        initial = None if settings.initial is None else open_initial(settings.initial, inputs.model)
        others = [open_other(path, inputs.model) for path in (*settings.towards, *settings.trajectory)]
        check_shapes(inputs, others, settings)
        record = Record(question=QUESTION, settings=settings, seed=settings.seed, units=dict(UNITS))
        there = present(inputs.model, settings.parameter_groups)
        hashes = {
            "weights": hash_tensors(inputs.model.state_dict()),
            "data_file": digest(Path(settings.data)) if settings.data and Path(settings.data).is_file() else None,
            "initial_weights": None if initial is None else hash_tensors(initial),
            "other_weights": [hash_tensors(other.state_dict()) for other in others],
        }
        if not run.resume(record, hashes=hashes):
            try_(inputs, settings)
            describe_(record, inputs, settings.statistics)
            if "norms" in settings.parts:
                histogram_(record, inputs.model)
            for group in (group for group in settings.parameter_groups if group not in there):
                record.add("left_out", group=group)
        run.claim()
        wanted = curve_specs(settings, groups=there, started=initial is not None)
        shapes = shapes_of(record, inputs, others, settings)
        total = len(wanted) + len(shapes)
        with Progress("scan", total=total, unit="curve", resume_at=run.finished) as run.bar:
            for at, spec in enumerate(wanted, start=1):
                along = f"{TITLES[spec.kind]}, {spec.sign}, {spec.group}"
                work = partial(measure_, record, spec, inputs, settings, initial)
                run.once(f"curve {at} of {len(wanted)}", work, along=along)
            for name, measure in shapes.items():
                run.once(name, measure, along=name)
        return run.finish(write_page)


def show(record: Record) -> None:
    """Print the indices; the last line says where the page is."""
    PAGE.print_tables(record)
    print_page_path(record)
