"""Second chapter: one synthetic image per digit class, learned through a whole training run by three methods."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Final

from torch import Tensor

from sparing.errors import UserError
from sparing.jobs.condense.inputs import Inputs, gather
from sparing.jobs.condense.loop import UNITS, bytes_of_a_step, fix_length_, train
from sparing.jobs.condense.methods import TITLES, build_method
from sparing.jobs.condense.outputs import save_images
from sparing.jobs.condense.settings import Condense, Method
from sparing.jobs.condense.state import TrainState, start
from sparing.jobs.demo.resuming import copy_tables, require_unchanged
from sparing.jobs.demo.settings import Scale
from sparing.jobs.demo.typeset import typeset_digits
from sparing.jobs.disk import load_tensors
from sparing.report import Record

LOG = logging.getLogger("sparing.demo")

METHODS: Final[tuple[Method, ...]] = ("checkpointed", "truncated", "forward-gradient")

WORK: Final = Condense(
    data="mnist", width=24, unroll=10, inner_lr=0.05, batch=128, directions=4, truncate=3, outer_lr=0.03, start="grey",
    seconds=25.0, eval_steps=100, eval_lr=0.02, eval_nets=3, looks=3,
)  # fmt: skip
"""The paper's experiment at the size of three minutes on two cores."""

WORKS: Final[Mapping[Scale, Condense]] = {
    "small": WORK,
    "tiny": dataclasses.replace(WORK, width=16, seconds=5.0, eval_steps=50, eval_nets=1, looks=2),
}

TABLES: Final = {"methods": "condensed", "curve": "condense_curve", "memory": "condense_memory"}
"""Table of a condensation -> table of the demo's record."""


def images_at(folder: Path, method: Method) -> Path:
    """File of the images that a method made."""
    return folder / f"condensed-{method}.safetensors"


def load_digits() -> Inputs:
    """MNIST, or digits typeset here where it cannot be fetched."""
    try:
        return gather(WORK.data, held_out=WORK.held_out)
    except UserError as missing:
        LOG.warning("demo: MNIST is not available (%s); digits are typeset here", missing)
        return typeset_digits()


def one_method(state: TrainState, folder: Path, method: Method) -> Record:
    """Condense by one method and leave its images on the disk; the record is of this run alone."""
    own = Record(question="", settings={}, seed=0, environment={})
    value = build_method(state.settings)
    fix_length_(state, own)
    own.add("memory", method=TITLES[method], peak=bytes_of_a_step(state, value))
    train(state, own)
    save_images(images_at(folder, method), state.images, state.labels, state.kept)
    return own


def run_chapter(record: Record, *, seed: int, path: Path, work: Condense = WORK) -> None:
    """Run every method that the record does not hold yet; the record is written after each."""
    record.units |= UNITS
    done = {row["method"] for row in record.table("condensed")}
    left = [m for m in METHODS if TITLES[m] not in done or not images_at(path.parent, m).exists()]
    if not left:
        return
    real = load_digits()
    require_unchanged(record, "condense_data", real.name)
    if not record.table("condense_data"):
        record.add("condense_data", name=real.name, classes=" ".join(real.classes))
    for method in left:
        state = start(dataclasses.replace(work, method=method, seed=seed), real)
        own = one_method(state, path.parent, method)
        copy_tables(record, own, TABLES)
        record.write(path)


def images_of(folder: Path, record: Record) -> dict[str, Tensor]:
    """The images that each method ended with, in the order of ``METHODS``, after the gray that all started from."""
    done = [method for method in METHODS if TITLES[method] in {row["method"] for row in record.table("condensed")}]
    saved = {TITLES[method]: load_tensors(images_at(folder, method)) for method in done}
    first = next(iter(saved.values()))
    return {"the start": first["step-00000000"], **{name: tensors["images"] for name, tensors in saved.items()}}
