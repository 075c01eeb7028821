"""What one exact or estimated hypergradient costs: bytes against unroll depth, seconds against a plain run and peers.

Run ``python -m benchmarks.hypergrad_cost`` (about twelve minutes on one quiet core); ``--part time``, ``--part memory``
and ``--part defaults`` do a part each. The peers are higher, TorchOpt and betty; ``benchmarks/peers/__init__.py`` says
how to get them, and one that is missing is left out. Problem: a weight for each of 1,024 MNIST images, 784-128-10
perceptron, full batch, SGD with momentum, one thread.

Seconds are CPU seconds of the process. Every round times one call of every arm in turn, so a machine that slows down
slows all alike; ratios are taken round by round. Least and most of seven rounds hold
the median with 98 % confidence.
Bytes are those of a fresh process: peak of the resident set during one call, less the resident set just before it, when
everything has been imported, the data loaded and a call on a tiny problem made. glibc returns blocks of 64 KiB and more
at once there (``ALLOCATOR``), for all arms alike; left alone it keeps what was freed, and the resident set of any long
run creeps up though what is held does not.
"""

from __future__ import annotations

import argparse
import gc
import importlib.util
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks.hypergrad_toys import Reweighting, reweighting
from sparing import hypergrad as hg
from sparing.report import Progress, Record, environment, print_table

RESULT = Path(__file__).parent / "results" / "hypergrad_cost.jsonl"
MEMORY_DEPTHS = (5, 10, 20, 40, 80, 160, 320, 640)
TIME_DEPTHS = (10, 40, 160)
ALLOCATOR = {"MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "65536"}
Run = Callable[[], Tensor]


def ours(method: hg.Method, task: Reweighting) -> Run:
    """The library, by a method."""
    toy = task.toy()
    return lambda: hg.hypergradient(toy.problem, toy.phi, method, seed=0).grad["weights"]


def plain(task: Reweighting) -> Run:
    """The inner run alone, as the library does it; its result is no gradient and is not compared."""
    toy = task.toy()

    def run() -> Tensor:
        hg.solve(toy.problem, toy.phi, seed=0)
        return torch.full((len(task.labels),), torch.nan)

    return run


def peer(module: str, task: Reweighting, **how: Any) -> Run:
    """A peer's adaptor, imported only here."""
    return import_module(f"benchmarks.peers.{module}").prepare(task, **how)


EXACT: dict[str, Callable[[Reweighting], Run]] = {
    "plain run": plain,
    "Reverse": partial(ours, hg.Reverse()),
    "Checkpointed": partial(ours, hg.Checkpointed(states="sqrt")),
    "higher": partial(peer, "higher_run"),
    "torchopt": partial(peer, "torchopt_run"),
    "betty unroll": partial(peer, "betty_run", rule="unroll"),
}
SAMPLED = {f"ForwardGradient b={b}": partial(ours, hg.ForwardGradient(directions=b)) for b in (1, 8, 32)}
IMPLICIT = {f"betty {rule}": partial(peer, "betty_run", rule=rule) for rule in ("darts", "neumann", "cg")}
PACKAGES = {"higher": "higher", "torchopt": "torchopt", "betty": "betty"}


def present(arms: dict[str, Callable[[Reweighting], Run]]) -> dict[str, Callable[[Reweighting], Run]]:
    """The arms whose package is installed."""
    missing = {name for name, package in PACKAGES.items() if importlib.util.find_spec(package) is None}
    return {name: arm for name, arm in arms.items() if name.split()[0] not in missing}


def timed(arm: Callable[[Reweighting], Run], task: Reweighting) -> tuple[float, Tensor]:
    """CPU seconds of one call, and its gradient."""
    run = arm(task)
    gc.collect()
    start = time.process_time()
    gradient = run()
    return time.process_time() - start, gradient


def time_rows(steps: int, rounds: int) -> list[dict[str, Any]]:
    """Seconds of every arm at one depth, over ``rounds`` rounds after one that does not count."""
    arms = present(EXACT | SAMPLED | IMPLICIT)
    task = reweighting(steps=steps)
    seconds: dict[str, list[float]] = {name: [] for name in arms}
    gradients: dict[str, Tensor] = {}
    with Progress(f"T = {steps}", total=rounds + 1, unit="round") as bar:
        for turn in range(rounds + 1):
            for name, arm in arms.items():
                taken, gradients[name] = timed(arm, task)
                if turn:
                    seconds[name].append(taken)
            bar.advance()
    return [time_row(steps, name, seconds, gradients) for name in arms]


def time_row(steps: int, name: str, seconds: dict[str, list[float]], gradients: dict[str, Tensor]) -> dict[str, Any]:
    """Median and range of the seconds, of the ratios round by round, and how near the gradient is to the exact one."""
    row: dict[str, Any] = {"steps": steps, "arm": name, "n": len(seconds[name]), **spread("seconds", seconds[name])}
    for label, other in (("against_plain", "plain run"), ("against_higher", "higher")):
        if other in seconds:
            row |= spread(label, [mine / its for mine, its in zip(seconds[name], seconds[other], strict=True)])
    if name != "plain run":
        exact = gradients["Reverse"].double()
        found = gradients[name].double()
        row["cosine"] = float(torch.cosine_similarity(found, exact, dim=0))
        row["norm_ratio"] = float(found.norm() / exact.norm())
    return row


def spread(label: str, values: list[float]) -> dict[str, float]:
    """Median, least and most, by the naming of records."""
    return {label: statistics.median(values), f"{label}_low": min(values), f"{label}_high": max(values)}


def resident(line: str) -> int:
    """A line of this process's own status, in bytes; the maximum that ``getrusage`` gives starts from the parent's."""
    status = Path("/proc/self/status").read_text()
    return next(1024 * int(text.split()[1]) for text in status.splitlines() if text.startswith(line))


def memory_child(name: str, steps: int) -> None:
    """Inside a fresh process: warm up on a tiny problem, then one call; print what it took."""
    torch.set_num_threads(1)
    arm = (EXACT | SAMPLED)[name]
    arm(reweighting(steps=2, examples=8, hidden=4, side=4))()
    task = reweighting(steps=steps)
    run = arm(task)
    gc.collect()
    Path("/proc/self/clear_refs").write_text("5")  # the peak starts anew
    floor = resident("VmRSS")
    run()
    peak = resident("VmHWM")
    sys.stdout.write(json.dumps({"peak": peak - floor, "process": peak}) + "\n")


def memory_rows(depths: tuple[int, ...]) -> list[dict[str, Any]]:
    """Peak bytes of every arm at every depth, each in its own process."""
    arms = list(present(EXACT | SAMPLED))
    rows = []
    with Progress("memory", total=len(arms) * len(depths), unit="process") as bar:
        for name in arms:
            for steps in depths:
                rows.append({"arm": name, "steps": steps, **measured(name, steps, ALLOCATOR)})
                bar.advance(peak=rows[-1]["peak"] / 2**20)
    return rows


def default_rows(pairs: int = 3) -> list[dict[str, Any]]:
    """Peak bytes of the shortest and the longest run of one direction, where glibc is left alone."""
    name, depths = "ForwardGradient b=1", (10, 640)
    with Progress("allocator's defaults", total=pairs * len(depths), unit="process") as bar:
        rows = []
        for pair in range(pairs):
            for steps in depths:
                rows.append({"pair": pair, "arm": name, "steps": steps, **measured(name, steps, {})})
                bar.advance(process=rows[-1]["process"] / 2**20)
    return rows


def measured(name: str, steps: int, variables: dict[str, str]) -> dict[str, int]:
    """What a fresh process says of one call."""
    command = [sys.executable, "-W", "ignore", "-m", "benchmarks.hypergrad_cost", "--child", name, str(steps)]
    done = subprocess.run(command, capture_output=True, text=True, check=True, env=os.environ | variables)
    found: dict[str, int] = json.loads(done.stdout.splitlines()[-1])
    return found


def goals(times: list[dict[str, Any]], memory: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """What the issue asked for, beside what was measured; at the deepest unroll that was timed."""
    at = {(row["arm"], row["steps"]): row for row in times}
    held = {(row["arm"], row["steps"]): row for row in memory}
    rows = []
    for steps in sorted({row["steps"] for row in times}):
        one = at["plain run", steps]["seconds"]
        for arm, most in (("Reverse", 0.9), ("Checkpointed", 2.0)):
            if ("higher", steps) in at:
                rows.append(goal(f"{arm}, seconds against higher, T={steps}", at[arm, steps]["against_higher"], most))
        for b in (8, 32):
            extra = (at[f"ForwardGradient b={b}", steps]["seconds"] - one) / (b * one)
            rows.append(goal(f"gradient steps per direction, b={b}, T={steps}", extra, 1.3))
        if ("higher", steps) in held:
            share = held["Checkpointed", steps]["peak"] / held["higher", steps]["peak"]
            rows.append(goal(f"Checkpointed, bytes against higher, T={steps}", share, 0.25))
    for b in (1, 8, 32):
        name = f"ForwardGradient b={b}"
        if (name, 640) in held:
            for kind in ("peak", "process"):
                share = held[name, 640][kind] / held[name, 10][kind]
                rows.append(goal(f"{name}, {kind} bytes at T=640 against T=10", share, 1.05))
    return rows


def goal(name: str, value: float, most: float) -> dict[str, Any]:
    """One row."""
    return {"goal": name, "measured": value, "at_most": most, "met": value <= most}


def main() -> None:
    """Measure and write the record; a part that was not asked for is kept from the record that is there."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--part", choices=["time", "memory", "defaults", "all"], default="all")
    parser.add_argument("--quick", action="store_true", help="small depths and three rounds, to try it")
    parser.add_argument("--out", type=Path, default=RESULT)
    parser.add_argument("--child", nargs=2, metavar=("ARM", "T"))
    options = parser.parse_args()
    if options.quick and options.out == RESULT:
        parser.error("--quick: its numbers are not those of the page; pass another --out")
    if options.child:
        memory_child(options.child[0], int(options.child[1]))
        return
    torch.set_num_threads(1)
    before = Record.read(options.out) if options.out.exists() else None
    kept = {table: before.table(table) if before else [] for table in ("time", "memory", "defaults")}
    if options.part in {"time", "all"}:
        depths, rounds = ((10,), 3) if options.quick else (TIME_DEPTHS, options.rounds)
        kept["time"] = [row for steps in depths for row in time_rows(steps, rounds)]
    if options.part in {"memory", "all"}:
        kept["memory"] = memory_rows((5, 40) if options.quick else MEMORY_DEPTHS)
    if options.part in {"defaults", "all"}:
        kept["defaults"] = default_rows()
    write(kept, options.out, options.rounds)


def write(kept: dict[str, list[dict[str, Any]]], out: Path, rounds: int) -> None:
    """Write the record and print its tables."""
    units = {"seconds": "s", "against_plain": "×", "against_higher": "×", "peak": "B", "process": "B"}
    record = Record(
        question="What does one hypergradient cost, in bytes and seconds, beside the peers?",
        settings={"rounds": rounds, "examples": 1024, "net": "784-128-10", "optimizer": "SGD, momentum 0.9"},
        seed=0, environment=environment(), units=units,
    )  # fmt: skip
    judged = goals(kept["time"], kept["memory"]) if kept["time"] else []
    for table, rows in (kept | {"goals": judged}).items():
        for row in rows:
            record.add(table, **row)
        if rows:
            print_table(record.table(table), title=table, units=units)
    record.write(out)


if __name__ == "__main__":
    main()
