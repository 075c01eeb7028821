"""Strangers averaged: as they are, with refreshed batch norm, and with their units brought into one order before."""

from __future__ import annotations

import time
from dataclasses import replace
from typing import Any

from benchmarks.valley.cases import SEEDS, VGG, Case, rows_of
from benchmarks.valley.store import Store
from sparing.valley.aligning.align import align
from sparing.valley.scans.evaluators import Classification
from sparing.valley.scans.interpolate import interpolate

RESNET = Case("resnet", "batch", "fashion-mnist")
CASES = (VGG, RESNET, replace(VGG, wide=2), replace(RESNET, wide=4))
"""Nets by rising cost of their training; the pairs are neighbouring seeds."""
WAYS = ("stale", "refresh", "weights", "activations")
"""No alignment and no refresh; refresh alone; and both laws with it."""


def strangers() -> None:
    """Errors of both ends and of the middle, by net, seed and way."""
    store = Store("strangers")
    for case in CASES:
        for seed in SEEDS:
            for way in WAYS:
                store.once(f"{case.name} {seed} {way}", lambda at=(case, seed, way): _row(*at))


def _row(case: Case, seed: int, way: str) -> dict[str, Any]:
    rows, a, b = rows_of(case.data), case.trained(seed), case.trained(seed + 1)
    begun, state, found = time.process_time(), b.state_dict(), None
    if way in {"weights", "activations"}:
        found = align(a, b, rows.calibration, by="weights" if way == "weights" else "activations", seed=seed)
        state = found.state
    seconds = time.process_time() - begun
    line = interpolate(
        a, dict(state), Classification(*rows.test), lambdas=(0.5,), calibrate=rows.calibration,
        statistics="stale" if way == "stale" else "exact",
    )  # fmt: skip
    return {
        "case": case.name, "seed": seed, "way": way,
        "ends": [line.at("error", 0.0), line.at("error", 1.0)], "middle": line.at("error", 0.5),
        "gap": line.gap["error"], "gap_loss": line.gap["loss"],
        "moved": found.moved if found else 0.0, "difference": found.difference if found else 0.0,
        "seconds": seconds,
    }  # fmt: skip
