"""SIGKILL at random moments, again and again within one run, resumed each time: are the final bits the same?

Each job goes through two ways, each way a run that nobody disturbs and one that is killed twelve times, the two in
interpreters of different hash seeds. A kill comes a drawn time after the process has begun to work: ten within the
first steps, two anywhere up to the end, so that exports and pages are hit too; in a job that is a list of results they
are spread over the run. Moments are drawn from the way's number;
where in the work they fall depends on the machine.
"""

from __future__ import annotations

import random
import signal
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.trust.cases import RESULTS, WAYS, Case, leftovers, newest, outcome
from benchmarks.trust.nursery import Nursery
from benchmarks.trust.store import Store

KILLS = 12
"""Kills within one run."""

EARLY = 1 / 16
"""Share of the undisturbed run's work within which the first kills fall."""


def run(jobs: Sequence[str], share: int, of: int) -> None:
    """Try every job in every way."""
    rows, todo = Store("kills"), [(job, at) for job in jobs for at in range(len(WAYS[job]))][share::of]
    with tempfile.TemporaryDirectory() as name, Nursery() as calm, Nursery(hash_seed=1) as deadly:
        place = Path(name)
        calm.prepare(place)
        for job, at in todo:
            case = Case(place=place, job=job, way=WAYS[job][at])
            rows.once(f"{job}, {' '.join(case.way)}", lambda case=case, at=at: trial(case, at, calm, deadly))


def trial(case: Case, number: int, calm: Nursery, deadly: Nursery) -> dict[str, Any]:
    """A run that nobody disturbs, and one that is killed; a row."""
    straight, out = (case.place / f"{case.job}-{number}-{kind}" for kind in ("straight", "killed"))
    run = case.start(calm, straight)
    begun = run.begun()
    run.end()
    took, draw = time.monotonic() - begun, random.Random(f"{case.job} {number}")
    if case.job in RESULTS:
        waits = [draw.random() * took * 2 / KILLS for _ in range(KILLS)]
    else:
        waits = [draw.random() * took * (1.0 if at % 6 == 5 else EARLY) for at in range(KILLS)]
    kills, wanted = killed(case, out, waits, deadly), outcome(case.job, straight)
    found = outcome(case.job, out)
    return {
        "job": case.job, "way": " ".join(case.way), "seed": number, "work_seconds": took,
        "kills": sum(kill["hit"] for kill in kills), "moments": kills,
        "same": found == wanted, "differ": sorted(k for k in {**found, **wanted} if found.get(k) != wanted.get(k)),
        "compared": sorted(wanted), "left_over": leftovers(out),
    }  # fmt: skip


def killed(case: Case, out: Path, waits: Sequence[float], nursery: Nursery, **changes: Any) -> list[dict[str, Any]]:
    """Kill, resume, kill … so many seconds after the work began, then let it end; a row for each kill."""
    kills = []
    for wait in waits:
        first = newest(case.job, out)
        run = case.start(nursery, out, resume=True, **changes)
        begun = run.begun()
        while run.child.poll() is None and time.monotonic() < begun + wait:
            time.sleep(0.002)
        run.child.kill()
        status = run.child.wait()
        if status > 0:
            run.end()
        moved = newest(case.job, out) != first
        hit = status == -signal.SIGKILL
        kills.append({"hit": hit, "after_seconds": wait, "saved_meanwhile": moved, "left_over": len(leftovers(out))})
    case.start(nursery, out, resume=True, **changes).end()
    return kills
