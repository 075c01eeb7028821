"""Fourth chapter: a model that fits no GPU on a cluster with a slow network, planned; and four processes that do it."""

from __future__ import annotations

import json
import logging
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Final

from sparing.errors import RunError
from sparing.jobs.demo import sharding_ranks
from sparing.jobs.demo.settings import Scale
from sparing.jobs.demo.sharding_ranks import Work
from sparing.report import Record
from sparing.sharding import Plan, Topology, Workload, effective, predict, simulate
from sparing.sharding.config import BucketSpec
from sparing.sharding.prediction import live_bytes
from sparing.sharding.traffic import Traffic

LOG = logging.getLogger("sparing.demo")

CLUSTER: Final = Topology(groups=4, per_group=8, inter="80Gbps", intra="2000Gbps")

MEMORY: Final = 80e9  # of one of its GPUs (bytes)
ACCUMULATE: Final = 10  # micro-steps of its experiments

WORKS: Final[Mapping[Scale, Work]] = {
    "small": Work(),
    "tiny": Work(plans=("NNN", "IIG", "GGG"), width=256, blocks=2, batch=8, accumulate=2, steps=3),
}

SECONDS: Final = 300.0  # after which the processes are ended


@dataclass(frozen=True, kw_only=True, slots=True)
class Case:
    """A model and what of it trains."""

    name: str
    params: float  # count
    trainable: float  # share that trains
    blocks: int  # count


CASES: Final = (
    Case(name="65B, full", params=65e9, trainable=1, blocks=80),
    Case(name="65B, 1/16", params=65e9, trainable=1 / 16, blocks=80),
    Case(name="65B, 3/1000", params=65e9, trainable=3 / 1000, blocks=80),
    Case(name="7B, full", params=7e9, trainable=1, blocks=32),
    Case(name="7B, 1/16", params=7e9, trainable=1 / 16, blocks=32),
)


def run_chapter(record: Record, *, seed: int, path: Path, work: Work = WORKS["small"]) -> None:
    """Plan for the paper's cluster, and run a few plans here, as far as the record does not hold them."""
    if not record.table("shards"):
        for row in plan_cases(CASES):
            record.add("shards", **row)
        record.write(path)
    if record.table("shard_runs"):
        return
    work = replace(work, seed=seed)
    try:
        found = run_ranks(work)
    except (OSError, RunError) as failure:
        LOG.warning("demo: no plan is run here, the processes could not work (%s)", failure)
        return
    for row in found:
        record.add("shard_runs", **plan_row(work, row))
        for step, loss in enumerate(row["losses"]):
            record.add("shard_losses", plan=row["plan"], step=step, loss=loss)
    record.write(path)


def plan_cases(cases: Sequence[Case]) -> list[dict[str, Any]]:
    """Every plan for every case on the paper's cluster: bytes held, and seconds by its formula and by simulation."""
    rows = []
    for case in cases:
        work = Workload(params=case.params, trainable=case.trainable, blocks=case.blocks, accumulate=ACCUMULATE)
        for plan in effective():
            price = predict(work, CLUSTER, plan)
            rows.append({
                "case": case.name, "plan": plan.name, "known_as": plan.known_as, "params": price.params,
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
        command = [sys.executable, "-P", str(sharding_ranks.__file__), str(given), str(found)]
        try:
            done = subprocess.run(command, env=_clean_environment(os.environ), timeout=SECONDS, check=False)
        except subprocess.TimeoutExpired:
            raise RunError(f"the processes were not done after {SECONDS:g} s") from None
        if done.returncode or not found.exists():
            raise RunError(f"a process ended with status {done.returncode}")
        rows: list[dict[str, Any]] = json.loads(found.read_text(encoding="utf-8"))
        return rows


def _clean_environment(environment: Mapping[str, str]) -> dict[str, str]:
    """The environment with one thread a process, and of no other group of processes."""
    # with a launcher's variables the processes would try to join its group
    left = {k: v for k, v in environment.items() if k not in {"RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR"}}
    return left | {"OMP_NUM_THREADS": "1"}


def plan_row(work: Work, found: Mapping[str, Any]) -> dict[str, Any]:
    """What a plan cost on the processes, beside what was predicted: bytes sent by axis, bytes held, seconds."""
    specs = tuple(BucketSpec(**spec) for spec in found["buckets"])
    here = Topology(groups=work.groups, per_group=work.per_group, inter=work.inter, intra=work.intra)
    plan, sizes = Plan(found["plan"]), here.sizes
    floats = {"param_bytes": 4, "grad_bytes": 4}
    sent = Traffic.of_step(plan, sizes, specs, accumulate=work.accumulate, gather_bytes=4, reduce_bytes=4).total
    load = Workload.of(specs, accumulate=work.accumulate, wire_bytes=4, state_bytes=8, **floats)
    return {
        "plan": plan.name, "known_as": plan.known_as, "sent_intra": found["sent"]["intra"], "predicted_intra": sent[0],
        "sent_inter": found["sent"]["inter"], "predicted_inter": sent[1], "held": found["held"],
        "predicted_held": live_bytes(specs, sizes, plan, views=True, **floats).total, "seconds": found["seconds"],
        "predicted_seconds": simulate(load, here, plan).seconds, "loss": found["losses"][-1],
    }  # fmt: skip
