"""Sixth chapter: clients that keep their data, with and without pushing signs, and with fewer blocks on the wire."""

from __future__ import annotations

import importlib.util
import logging
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Final

from sparing.errors import UserError
from sparing.jobs.demo.resuming import copy_tables
from sparing.jobs.demo.settings import Scale
from sparing.jobs.disk import load_tensors
from sparing.jobs.federate import job
from sparing.jobs.federate.settings import Settings
from sparing.jobs.folder import CHECKPOINTS
from sparing.report import Record

LOG = logging.getLogger("sparing.demo")


@dataclass(frozen=True, kw_only=True, slots=True)
class Work:
    """Size of the chapter."""

    main: Settings = field(
        default_factory=lambda: Settings(
            method=("fedavg", "fedsign", "own-sign", "feddyn"), net="mlp", alpha=0.3, rounds=80, lr=0.1,
            warmup_rounds=5, gamma=0.01, feddyn_alpha=0.1, validation=0.0, test_rows=None, members=False, every=2,
        )
    )  # fmt: skip
    """FedAvg, FedSign and its control, FedDyn, on the same clients."""
    blocks: int = 1  # body blocks that a client draws in the second run (count)
    flower_rounds: int = 3  # of the short run on Flower (count)


WORK: Final = Work()  # a minute on two cores

WORKS: Final[Mapping[Scale, Work]] = {
    "small": WORK,
    "tiny": Work(main=replace(WORK.main, rounds=20, every=4), flower_rounds=1),
}

RUNS: Final = ("main", "blocks", "flower")  # folders below the demo's


def settings_of(run: str, work: Work, seed: int, folder: Path, *, resume: bool = False) -> Settings:
    """What ``sparing federate`` is asked in each run; "embedded" is the one that Flower's is compared with."""
    at = folder / "federated" / run
    interrupted = resume and (at / CHECKPOINTS).exists()
    own = replace(work.main, seed=seed, out=at, resume=interrupted, overwrite=at.exists() and not interrupted)
    if run == "main":
        return own
    alone = replace(own, method=("fedavg",))
    if run == "blocks":
        return replace(alone, blocks=work.blocks)
    short = replace(alone, rounds=work.flower_rounds, resume=False, overwrite=at.exists())
    return replace(short, engine="flower" if run == "flower" else "embedded")


def _done(record: Record) -> set[str]:
    return {row["run"] for row in record.table("federated_methods")}


def _run(record: Record, path: Path, run: str, settings: Settings) -> None:
    """Federate, and take over the tables."""
    found = job.run(settings)
    names = ("data", "partition", "rounds", "price", "methods", "pairs")
    copy_tables(record, found, {name: f"federated_{name}" for name in names}, run=run)
    record.write(path)


def _flower(record: Record, path: Path, work: Work, seed: int) -> None:
    """A few rounds by Flower's messages, and the same in one process: how far the two models are apart."""
    if importlib.util.find_spec("flwr") is None:
        LOG.info("demo: Flower is not installed; its run is left out (pip install 'sparing[flower]')")
        return
    models = []
    for run in ("embedded", "flower"):
        settings = settings_of(run, work, seed, path.parent)
        if run not in _done(record):
            _run(record, path, run, settings)
        models.append(load_tensors(settings.out / job.MODELS / "fedavg.safetensors"))
    one, other = models
    apart = max(float((one[name] - other[name]).abs().max()) for name in one)
    record.add("federated_flower", rounds=work.flower_rounds, apart=apart)
    record.write(path)


def run_chapter(record: Record, *, seed: int, path: Path, work: Work = WORK, resume: bool = False) -> None:
    """Do the runs that the record does not hold yet; ``resume`` goes on with what an interrupted one left."""
    try:
        for run in ("main", "blocks"):
            if run not in _done(record):
                _run(record, path, run, settings_of(run, work, seed, path.parent, resume=resume))
    except UserError as missing:
        LOG.warning("demo: the chapter on federated learning is left out (%s)", missing)
        return
    if not record.table("federated_flower"):
        _flower(record, path, work, seed)
