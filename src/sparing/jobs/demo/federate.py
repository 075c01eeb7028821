"""Chapter on federated learning: clients that keep their data, with pushed signs, and with fewer blocks on the wire."""

from __future__ import annotations

import importlib.util
import itertools
import logging
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Final

from sparing.jobs.demo.chapter import copy_tables, load_or_omit, seeds_of
from sparing.jobs.demo.settings import Scale
from sparing.jobs.demo.settings import Settings as Demo
from sparing.jobs.disk import load_tensors
from sparing.jobs.federate import job
from sparing.jobs.federate.groups import Dirichlet, FedDyn, FedSign
from sparing.jobs.federate.settings import Settings
from sparing.jobs.folder import CHECKPOINTS
from sparing.jobs.run import Run

LOG = logging.getLogger("sparing.demo")


@dataclass(frozen=True, kw_only=True, slots=True)
class Work:
    """Size of the chapter."""

    main: Settings = field(
        default_factory=lambda: Settings(
            methods=("fedavg", "fedsign", "own-sign", "feddyn"), fedsign=FedSign(gamma=0.01), feddyn=FedDyn(alpha=0.1),
            net="mlp", dirichlet=Dirichlet(alpha=0.3), rounds=80, lr=0.1, warmup_rounds=5, held_out=0.0, test_rows=None,
            members=False, evaluate_every=2,
        )
    )  # fmt: skip
    """FedAvg, FedSign and its control, FedDyn, on the same clients."""
    blocks: int = 1  # body blocks that a client draws in the second run (count)
    flower_rounds: int = 3  # of the short run on Flower (count)


WORK: Final = Work()  # a minute on two cores for each seed

WORKS: Final[dict[Scale, Work]] = {
    "small": WORK,
    "tiny": Work(main=replace(WORK.main, rounds=20, evaluate_every=4), flower_rounds=1),
}

FOLDER: Final = "federated"  # of the runs, in the folder of the demo
TABLES: Final = ("data", "partition", "rounds", "price", "methods", "pairs")


def settings_of(run: str, work: Work, demo: Demo, seed: int | None = None) -> Settings:
    """What ``sparing federate`` is asked in each run; "embedded" is the one that Flower's is compared with."""
    seed = demo.seed if seed is None else seed
    at = demo.out / FOLDER / (run if seed == demo.seed else f"{run}-{seed}")
    # an interrupted run has checkpoints of its own; anything else in its place is of no use
    interrupted = demo.resume and (at / CHECKPOINTS).exists()
    own = replace(work.main, seed=seed, out=at, resume=interrupted, overwrite=at.exists() and not interrupted)
    if run == "main":
        return own
    alone = replace(own, methods=("fedavg",))
    if run == "blocks":
        return replace(alone, blocks=work.blocks)
    short = replace(alone, rounds=work.flower_rounds, resume=False, overwrite=at.exists())
    return replace(short, engine="flower" if run == "flower" else "embedded")


def run_chapter(run: Run) -> None:
    """All methods and the mean with fewer blocks, seed by seed; a few rounds by Flower and in one process."""
    demo: Demo = run.settings
    work = WORKS[demo.scale]

    def federate(name: str) -> None:
        found = job.run(settings_of(name, work, demo))
        copy_tables(run.record, found, {table: f"federated_{table}" for table in TABLES}, run=name)

    def compare() -> None:
        models = (demo.out / FOLDER / name / job.MODELS / "fedavg.safetensors" for name in ("embedded", "flower"))
        one, other = map(load_tensors, models)
        apart = max(float((one[name] - other[name]).abs().max()) for name in one)
        run.record.add("federated_flower", rounds=work.flower_rounds, apart=apart)

    def repeat(name: str, seed: int) -> None:
        found = job.run(settings_of(name, work, demo, seed))
        for row in found.table("methods"):
            run.record.add("federated_again", run=name, seed=seed, method=row["method"], accuracy=row["accuracy"])

    for seed, name in itertools.product(seeds_of(demo)[1:], ("main", "blocks")):
        load_or_omit(partial(run.once, f"federate: {name}, seed {seed}", partial(repeat, name, seed)))
    for name in ("main", "blocks"):
        load_or_omit(partial(run.once, f"federate: {name}", partial(federate, name)))
    if run.record.table("federated_flower"):
        return
    if importlib.util.find_spec("flwr") is None:
        LOG.info("demo: Flower is not installed; its run is left out (pip install 'sparing[flower]')")
        return
    for name in ("embedded", "flower"):
        run.once(f"federate: {name}", partial(federate, name))
    run.once("federate: comparison", compare)
