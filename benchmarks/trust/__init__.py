"""What holds when a machine fails, when users bring what no test did, and when a command line is nonsense.

Run ``python -m benchmarks.trust`` for everything, or one part of it with ``--only``. A finished row is not measured
again. ``--part 0/2`` does every second piece, for two processes on two cores; ``--job`` names the jobs.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from importlib import import_module

JOBS = ("finetune", "pretrain", "condense", "federate", "scan", "merge", "invert", "adapt", "transfer")
"""Verbs that are tried."""

KILLED = (*JOBS, "demo")
"""Those that are killed; the demo is chapters of other verbs, which are tried by themselves."""

PARTS: dict[str, Callable[[Sequence[str], int, int], None]] = {
    name: lambda jobs, share, of, name=name: import_module(f"benchmarks.trust.{name}").run(jobs, share, of)
    for name in ("kills", "disks", "mutations", "idioms", "fuzz")
}
"""Part -> what measures it, given the jobs and which share of how many."""
