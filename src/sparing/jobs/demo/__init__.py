"""``sparing demo``: the whole mission in miniature, on real data; one chapter per technique, one page to read."""

from __future__ import annotations

import logging
import os
import time
from pathlib import Path
from typing import Any, Final

from sparing.errors import UserError
from sparing.jobs.demo import condensation, federated, layers, sharding, transfer, valley
from sparing.jobs.demo.inputs import gather
from sparing.jobs.demo.overview import write_overview
from sparing.jobs.demo.page import finished, show, write_page
from sparing.jobs.demo.resuming import open_record
from sparing.jobs.demo.settings import NAMES, Name, Settings
from sparing.jobs.disk import refusing_to_write
from sparing.jobs.folder import PAGE, RECORD, Folder
from sparing.report import Record

LOG = logging.getLogger("sparing.demo")

UNITS = {
    "dev_loss": "nat/token", "loss": "nat/token", "loss_before": "nat/token", "loss_after": "nat/token", "seconds": "s",
    "seconds_per_step": "s", "params": "B", "grads": "B", "optimizer": "B", "activations": "B", "transient": "B",
    "peak": "B", "peak_predicted": "B", "peak_measured": "B",
}  # fmt: skip

FILES = ("overview.png", "overview.json", "tiny-model", "federated")

QUESTION = "What do six methods for training with little save, and what does it cost?"


def _memory(record: Record, settings: Settings, path: Path) -> None:
    """The first chapter; without a model it is omitted, unless the model was asked for by name."""
    if not layers.remaining(record):
        return
    try:
        inputs = gather(settings.source, settings.out, settings.scale)
    except UserError as missing:
        if settings.source != "auto":
            raise
        LOG.warning("demo: the chapter on memory is left out (%s)", missing)
        return
    layers.run_chapter(inputs, record, seed=settings.seed, path=path)


CHAPTERS: Final[dict[Name, Any]] = {
    "condense": condensation, "transfer": transfer, "shard": sharding, "valley": valley, "federate": federated,
}  # fmt: skip
"""Modules of the chapters whose work is a value by scale."""


def run(settings: Settings) -> Record:
    """Run the chapters and write record and page."""
    place = Folder(settings.out, resume=settings.resume, overwrite=settings.overwrite, names=FILES)
    path, page = place.at(RECORD), place.at(PAGE)
    place.check()
    kept = {"seed": settings.seed, "scale": settings.scale, "source": settings.source}
    fresh = Record(question=QUESTION, settings=kept, seed=settings.seed, units=dict(UNITS))
    record = open_record(fresh, place)
    for name in NAMES:
        if name in settings.chapters:
            run_one(name, record, settings, path)
    if not finished(record):
        why, do = "none of them could be run", "see the warnings above; `sparing fetch` tells what is available"
        raise UserError("chapters", got=" ".join(settings.chapters), why=why, do=do)
    record.add("run", page=str(page))
    with refusing_to_write("saving", settings.out):
        if len(finished(record)) == len(NAMES) and record.table("shard_runs"):
            write_overview(record, settings.out)
    place.finish_(record, write_page)
    return record


def run_one(name: Name, record: Record, settings: Settings, path: Path) -> None:
    """Do what is left of a chapter, and add a row to "chapters" if that was anything."""
    before, clock, worked = len(record.rows), time.monotonic(), _cpu_seconds()
    if name == "memory":
        _memory(record, settings, path)
    else:
        module = CHAPTERS[name]
        # the federated runs have folders of their own, which a resumed demo goes on with
        more = {"resume": settings.resume} if name == "federate" else {}
        module.run_chapter(record, seed=settings.seed, path=path, work=module.WORKS[settings.scale], **more)
    if len(record.rows) > before:
        record.add("chapters", chapter=name, seconds=time.monotonic() - clock, cpu_seconds=_cpu_seconds() - worked)
        record.write(path)


def _cpu_seconds() -> float:
    """Seconds that the processors worked for this process and for those it has waited for."""
    used = os.times()
    return used.user + used.system + used.children_user + used.children_system


__all__ = ["Settings", "run", "show"]
