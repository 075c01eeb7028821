"""What does a graph in a file instead of in memory take? ``python -m benchmarks.hypergrad_offload``.

Reverse and √T checkpoints on the problem of ``benchmarks.hypergrad_cost``. Bytes are the peak resident set of a fresh
process less what it held before, with the same settings of the allocator; the file is the ``offloaded`` of the report.
Seconds, of the CPU and on the wall, are of calls in rounds of alternating order, in one process. Each round is written;
run it again to go on.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

from benchmarks.hypergrad_cost import ALLOCATOR, resident
from benchmarks.hypergrad_toys import reweighting
from sparing import hypergrad as hg
from sparing.report import environment
from sparing.report.atomic import write_whole

RESULT = Path(__file__).parent / "results" / "hypergrad_offload.json"
DEPTHS, ROUNDS = (40, 160, 640), 7
ARMS = ("Reverse", "Reverse, to a file", "Checkpointed", "Checkpointed, to a file")


def method(arm: str, folder: str) -> hg.Reverse | hg.Checkpointed:
    """What an arm stands for; its file lies in the folder."""
    place = folder if arm.endswith("file") else None
    return hg.Reverse(offload=place) if arm.startswith("Reverse") else hg.Checkpointed(offload=place)


def warm(arm: str, steps: int, folder: str, **sizes: int) -> None:
    """One hypergradient that loads the kernels."""
    toy = reweighting(steps=steps, **sizes).toy()
    hg.hypergradient(toy.problem, toy.phi, method(arm, folder), seed=0)


def child(arm: str, steps: int, folder: str) -> None:
    """Inside a fresh process: warm up on a tiny problem, then one call; print what it took."""
    torch.set_num_threads(1)
    warm(arm, 2, folder, examples=8, hidden=4, side=4)
    toy = reweighting(steps=steps).toy()
    gc.collect()
    Path("/proc/self/clear_refs").write_text("5")  # the peak starts anew
    floor = resident("VmRSS")
    found = hg.hypergradient(toy.problem, toy.phi, method(arm, folder), seed=0)
    peak = resident("VmHWM") - floor
    sys.stdout.write(json.dumps({"bytes": peak, "file": found.report.offloaded or 0}) + "\n")


def held(arm: str, steps: int, folder: str) -> dict[str, int]:
    """What a fresh process says of one call."""
    command = [sys.executable, "-W", "ignore", "-m", "benchmarks.hypergrad_offload", "--child", arm, str(steps), folder]
    done = subprocess.run(command, capture_output=True, text=True, check=True, env=os.environ | ALLOCATOR)
    found: dict[str, int] = json.loads(done.stdout.splitlines()[-1])
    return found


def timed(arm: str, steps: int, folder: str) -> dict[str, float]:
    """CPU and wall seconds of one call."""
    toy, way = reweighting(steps=steps).toy(), method(arm, folder)
    gc.collect()
    begin, start = time.process_time(), time.perf_counter()
    hg.hypergradient(toy.problem, toy.phi, way, seed=0)
    return {"cpu": time.process_time() - begin, "wall": time.perf_counter() - start}


def fill(out: Path, *, depths: tuple[int, ...], rounds: int) -> dict[str, Any]:
    """Measure what is left, and write after every round."""
    cells: dict[str, Any] = json.loads(out.read_text())["cells"] if out.exists() else {}
    with tempfile.TemporaryDirectory(dir=Path.cwd()) as folder:  # a disk, where /tmp may be memory
        for steps in depths:
            cell = cells.setdefault(str(steps), {"held": {}, "rounds": []})
            for arm in ARMS:
                if arm not in cell["held"]:
                    cell["held"][arm] = held(arm, steps, folder)
            if len(cell["rounds"]) < rounds:
                for arm in ARMS:
                    warm(arm, 4, folder)
            while len(cell["rounds"]) < rounds:
                order = ARMS if len(cell["rounds"]) % 2 else ARMS[::-1]
                taken = {arm: timed(arm, steps, folder) for arm in order}
                cell["rounds"].append({arm: taken[arm] for arm in ARMS})
                head = {"units": {"held": "B", "rounds": "s"}, "environment": dict(environment())}
                write_whole(out, json.dumps(head | {"cells": cells}, indent=1) + "\n")
    return cells


def main() -> None:
    """Measure what is missing."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    parser.add_argument("--depths", type=int, nargs="+", default=DEPTHS)
    parser.add_argument("--out", type=Path, default=RESULT)
    parser.add_argument("--child", nargs=3, metavar=("ARM", "STEPS", "FOLDER"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        arm, steps, folder = options.child
        child(arm, int(steps), folder)
        return
    torch.set_num_threads(1)
    for steps, cell in fill(options.out, depths=tuple(options.depths), rounds=options.rounds).items():
        print(steps, cell["held"], cell["rounds"][-1])


if __name__ == "__main__":
    main()
