"""One rank: reads jobs as JSON lines, measures the arms of a cell in interleaved rounds, answers with JSON lines.

Started by ``runs``, never by hand. A rank ends when its input does, so nothing outlives the run that started it.
"""

from __future__ import annotations

import contextlib
import gc
import json
import os
import platform
import queue
import sys
import threading
import time
import traceback
from datetime import timedelta
from importlib import metadata
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from benchmarks.network.arms import ARMS, Running, Seat
from benchmarks.network.cells import Cell
from benchmarks.network.collectives import collectives_job
from benchmarks.network.links import p2p_job, probe_job
from benchmarks.network.namespaces import DEVICE

TIMEOUT = timedelta(seconds=300)


def jobs() -> queue.SimpleQueue[dict[str, Any]]:
    """Jobs as they come in; the process ends with its input, whatever it waits for."""
    waiting: queue.SimpleQueue[dict[str, Any]] = queue.SimpleQueue()

    def read() -> None:
        for line in sys.stdin:
            waiting.put(json.loads(line))
        os._exit(0)

    threading.Thread(target=read, daemon=True).start()
    return waiting


def answer(kind: str, **cells: Any) -> None:
    """Send one line."""
    sys.stdout.write(json.dumps({"kind": kind, "rank": dist.get_rank(), **cells}) + "\n")
    sys.stdout.flush()


def sent() -> dict[str, int]:
    """Bytes that have left this namespace's interfaces so far."""
    lines = Path("/proc/self/net/dev").read_text().splitlines()[2:]
    fields = {name.strip(): rest.split() for name, rest in (line.split(":", 1) for line in lines)}
    return {axis: int(fields[dev][8]) if dev in fields else 0 for axis, dev in (("inter", DEVICE), ("intra", "lo"))}


def measured(arm: Running, steps: int, *, warm: bool = True) -> dict[str, Any]:
    """Wall and CPU seconds and bytes of one step, the mean of ``steps`` in the steady state.

    An arm that leaves work in flight after its step takes one period more, untimed, at the beginning: every timed
    step waits for what the one before it left; what the last leaves is finished outside the clock. Bytes and CPU
    seconds are of all steps from beginning to end. The round that warms up (``warm=False``) goes without that step.
    """
    lead = getattr(arm, "period", 1) if warm and getattr(arm, "lazy", False) else 0
    gc.collect()
    dist.barrier()
    before, ring, cpu = sent(), payload(arm), time.process_time()
    losses = [arm.step() for _ in range(lead)]
    start = time.perf_counter()
    losses += [arm.step() for _ in range(steps)]
    seconds = time.perf_counter() - start
    if lead:
        arm.flush()  # type: ignore[attr-defined]
    spent, rung = time.process_time() - cpu, payload(arm)
    dist.barrier()
    after, taken = sent(), steps + lead
    return {
        "seconds": seconds / steps,
        "cpu": spent / taken,
        "sent": {axis: (after[axis] - before[axis]) / taken for axis in after},
        "payload": {axis: (rung[axis] - ring.get(axis, 0)) / taken for axis in rung},
        "losses": losses,
        "parts": getattr(arm, "parts", {}),
    }


def payload(arm: Running) -> dict[str, int]:
    """Payload bytes that an arm of ours has counted so far; nothing is known of others."""
    count = getattr(arm, "sent", None)
    return count() if count is not None else {}


def cell_job(job: dict[str, Any]) -> None:
    """All arms of a cell in turn, round after round; the first round warms up and says how many steps fit."""
    seat = Seat(cell=Cell(**job["cell"]), rank=dist.get_rank(), throttled=job["throttled"])
    arms: dict[str, Running] = {}
    steps: dict[str, int] = {}
    try:
        for name in job["arms"]:
            answer("at", arm=name, doing="build")
            arms[name] = ARMS[name](seat)
        gc.collect()
        gc.freeze()  # a collection before every turn would walk all engines and modules: longer than a step
        for turn in range(job["rounds"] + 1):
            for name, arm in arms.items():
                answer("at", arm=name, doing=f"round {turn}")
                period = getattr(arm, "period", 1)
                found = measured(arm, steps.get(name, period), warm=turn > 0)
                if turn == 0:
                    steps[name] = fitting(found["seconds"], job, period)
                answer("round", arm=name, turn=turn, steps=steps[name], **found)
    finally:
        for arm in arms.values():
            arm.close()
        seat.close()
        arms.clear()
        gc.unfreeze()
        gc.collect()


def fitting(seconds: float, job: dict[str, Any], period: int) -> int:
    """Steps of one round: as many whole periods as fit into the job's seconds, the same on all ranks; at least one."""
    slowest = torch.tensor([seconds])
    dist.all_reduce(slowest, dist.ReduceOp.MAX)
    return period * max(1, min(job["steps"], int(job["seconds"] / slowest.item())) // period)


def curves(job: dict[str, Any]) -> None:
    """Loss curves; what they need is not in every environment that ranks are started in."""
    from benchmarks.network.curves import curves_job

    curves_job(job, answer)


def lowbit(job: dict[str, Any]) -> None:
    """Held-out loss on low-bit wires; for the same reason."""
    from benchmarks.network.lowbit_loss import lowbit_job

    lowbit_job(job, answer)


def local(job: dict[str, Any]) -> None:
    """A run of the study of local steps."""
    from benchmarks.network.local_loss import local_job

    local_job(job, answer)


KINDS = {
    "cell": cell_job,
    "p2p": lambda job: p2p_job(job, answer),
    "probe": lambda job: probe_job(job, answer),
    "collectives": lambda job: collectives_job(job, answer),
    "curves": curves,
    "lowbit": lowbit,
    "local": local,
}


def versions() -> list[str]:
    """What the ranks run on, which may be another environment than that of who started them."""
    found = [f"python {platform.python_version()}", f"torch {torch.__version__}"]
    with contextlib.suppress(metadata.PackageNotFoundError):
        found.append(f"deepspeed {metadata.version('deepspeed')}")
    return found


def main() -> None:
    """Join, then work until the input ends."""
    torch.set_num_threads(1)
    waiting = jobs()
    dist.init_process_group("gloo", timeout=TIMEOUT)
    answer("ready", versions=", ".join(versions()))
    while True:
        job = waiting.get()
        try:
            KINDS[job["kind"]](job)
        except Exception:  # noqa: BLE001 - whatever it was, the run that started us decides
            answer("failed", error=traceback.format_exc(limit=8))
        answer("done")


if __name__ == "__main__":
    main()
