"""Chapter on sharding: a model that fits no GPU on a slow network, planned; and four processes that do it."""

from __future__ import annotations

import json
import logging
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, Final

from sparing.errors import RunError
from sparing.jobs.demo import shard_ranks
from sparing.jobs.demo.settings import Scale, Settings
from sparing.jobs.demo.shard_ranks import Work
from sparing.jobs.run import Run
from sparing.sharding import LowBit, Plan, Topology, Workload, effective, predict, simulate
from sparing.sharding.planner.config import BucketSpec
from sparing.sharding.planner.prediction import live_bytes
from sparing.sharding.planner.traffic import Traffic

LOG = logging.getLogger("sparing.demo")

CLUSTER: Final = Topology(groups=4, per_group=8, inter="80Gbps", intra="2000Gbps")

MEMORY: Final = 80e9  # of one of its GPUs (bytes)
ACCUMULATE: Final = 10  # micro-steps of its experiments

WORKS: Final[dict[Scale, Work]] = {
    "small": Work(),
    "tiny": Work(plans=("NNN", "IIG", "GGG"), width=256, blocks=2, batch=8, accumulate=2, steps=3, rounds=1),
}

SECONDS: Final = 300.0  # after which the processes are ended


EXACT_BITS: Final = 32  # of an element on exact wires


CASES: Final[dict[str, tuple[float, float, int]]] = {
    "65B, full": (65e9, 1, 80), "65B, 1/16": (65e9, 1 / 16, 80), "65B, 3/1000": (65e9, 3 / 1000, 80),
    "7B, full": (7e9, 1, 32), "7B, 1/16": (7e9, 1 / 16, 32),
}  # fmt: skip
"""Models and what of them trains -> parameters (count), share that trains, blocks (count)."""


def run_chapter(run: Run) -> None:
    """Plan for the paper's cluster, and run a few plans here, if processes can be started."""
    settings: Settings = run.settings
    record, work = run.record, replace(WORKS[settings.scale], seed=settings.seed)

    def price() -> None:
        for row in plan_cases(CASES):
            record.add("shards", **row)

    def run_here() -> None:
        found = run_ranks(work)
        for row in found:
            record.add("shard_rounds", plan=named(row), round=row["round"], seconds=row["seconds"])
        # bytes and losses are the same in every round
        for row in (row for row in found if row["round"] == 0):
            alike = [one["seconds"] for one in found if named(one) == named(row)]
            record.add("shard_runs", **plan_row(work, row | {"seconds": statistics.median(alike)}))
            for step, loss in enumerate(row["losses"]):
                record.add("shard_losses", plan=named(row), step=step, loss=loss)

    run.once("shard: prices", price)
    try:
        run.once("shard: processes", run_here)
    except (OSError, RunError) as failure:
        LOG.warning("demo: no plan is run here, the processes could not work (%s)", failure)


def named(row: Mapping[str, Any]) -> str:
    """A plan, with the bits that cross between groups where they are few."""
    return str(row["plan"]) if row["bits"] == EXACT_BITS else f"{row['plan']}, {row['bits']} bits"


def plan_cases(cases: Mapping[str, tuple[float, float, int]]) -> list[dict[str, Any]]:
    """Every plan for every case on the paper's cluster: bytes held, and seconds by formula and simulation."""
    rows = []
    for case, (params, trainable, blocks) in cases.items():
        work = Workload(params=params, trainable=trainable, blocks=blocks, accumulate=ACCUMULATE)
        for plan in effective():
            price = predict(work, CLUSTER, plan)
            rows.append({
                "case": case, "plan": plan.name, "known_as": plan.known_as, "params": price.params,
                "grads": price.grads, "optimizer": price.optimizer, "held": price.static,
                "fits": price.static <= MEMORY, "guideline": price.paper_seconds,
                "seconds": simulate(work, CLUSTER, plan).seconds,
            })  # fmt: skip
    return rows


def run_ranks(work: Work) -> list[dict[str, Any]]:
    """Start the processes and wait for what they find, a row per plan."""
    with tempfile.TemporaryDirectory() as folder:
        given, found = Path(folder) / "work.json", Path(folder) / "found.json"
        given.write_text(json.dumps(asdict(work)), encoding="utf-8")
        command = [sys.executable, "-P", str(shard_ranks.__file__), str(given), str(found)]
        # with a launcher's variables the processes would try to join its group
        launched = {"RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR"}
        alone = {name: value for name, value in os.environ.items() if name not in launched} | {"OMP_NUM_THREADS": "1"}
        try:
            done = subprocess.run(command, env=alone, timeout=SECONDS, check=False)
        except subprocess.TimeoutExpired:
            raise RunError(f"the processes were not done after {SECONDS:g} s") from None
        if done.returncode or not found.exists():
            raise RunError(f"a process ended with status {done.returncode}")
        rows: list[dict[str, Any]] = json.loads(found.read_text(encoding="utf-8"))
        return rows


def plan_row(work: Work, found: Mapping[str, Any]) -> dict[str, Any]:
    """What a plan cost on the processes, beside what was predicted: bytes sent by axis, bytes held, seconds."""
    specs = tuple(BucketSpec(**spec) for spec in found["buckets"])
    here = Topology(groups=work.groups, per_group=work.per_group, inter=work.inter, intra=work.intra)
    plan, sizes = Plan(found["plan"]), here.sizes
    slow = None if found["bits"] == EXACT_BITS else LowBit(bits=found["bits"])
    floats = {"param_bytes": 4, "grad_bytes": 4}
    sent = Traffic.of_step(
        plan, sizes, specs, accumulate=work.accumulate, gather_bytes=4, reduce_bytes=4, slow=slow
    ).total
    load = Workload.of(specs, accumulate=work.accumulate, wire_bytes=4, state_bytes=8, slow=slow, **floats)
    return {
        "plan": named(found), "known_as": plan.known_as if slow is None else None, "sent_intra": found["sent"]["intra"],
        "predicted_intra": sent[0], "sent_inter": found["sent"]["inter"], "predicted_inter": sent[1],
        "held": found["held"],
        "predicted_held": live_bytes(specs, sizes, plan, views=True, param_bytes=4, slow=slow).total,
        "seconds": found["seconds"], "predicted_seconds": simulate(load, here, plan).seconds,
        "loss": found["losses"][-1],
    }  # fmt: skip
