"""Gaps of averages as unlabelled rows tell them, against the gaps on all test rows."""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterator
from typing import Any

from benchmarks.valley.cases import RESNET_CIFAR, TEST, VGG, Case, rows_of, whole_test
from benchmarks.valley.pairs import EPOCHS, STARTS, half_of
from benchmarks.valley.store import Store
from sparing.valley.forecast.soft_labels import measure_gaps
from sparing.valley.scans.evaluators import Classification
from sparing.valley.scans.interpolate import interpolate

ROWS = 256
"""Unlabelled rows of a forecast: the first of the validation rows."""
TRUTHS = (TEST, 10_000)
"""Test rows that the truth is taken from, the cheap one first."""
PLAN = ((VGG, (0, 1, 2, 3, 4)), (RESNET_CIFAR, (0, 1, 2)))
"""Nets with the seeds of their pairs; the second half of strangers is that of the next seed."""


def soft() -> None:
    """Every pair's gap as forecast and as measured."""
    store = Store("soft")
    for truth, (case, seed, start, epoch) in itertools.product(TRUTHS, pairs()):
        key = f"{case.name} {seed} {start} {epoch} {truth}"
        store.once(key, lambda at=(case, seed, start, epoch, truth): _row(*at))


def pairs() -> Iterator[tuple[Case, int, str, int]]:
    """Net, seed, kind of pair and epoch of every pair."""
    for case, seeds in PLAN:
        for seed, start, epoch in itertools.product(seeds, STARTS, EPOCHS):
            # The partner of the last seed's stranger belongs to a seed that is not trained
            if start != "strangers" or case is not RESNET_CIFAR or seed != seeds[-1]:
                yield case, seed, start, epoch


def _row(case: Case, seed: int, start: str, epoch: int, truth: int) -> dict[str, Any]:
    rows, (a, b) = rows_of(case.data), (half_of(case, seed, start, half, epoch) for half in (0, 1))
    begun = time.process_time()
    told = measure_gaps(a, b, [rows.validation[0][:ROWS]], calibrate=rows.calibration, labels=False).values
    seconds = time.process_time() - begun
    test = rows.test if truth == TEST else whole_test(case.data)
    line = interpolate(a, b, Classification(*test), lambdas=(0.5,), calibrate=rows.calibration)
    return {
        "case": case.name, "seed": seed, "start": start, "epoch": epoch, "truth": len(test[1]), "seconds": seconds,
        **{f"{metric} told": float(told[:, at].mean()) for at, metric in enumerate(("loss", "error"))},
        # standard error over rows
        **{f"{metric} sampling": float(told[:, at].std()) / ROWS**0.5 for at, metric in enumerate(("loss", "error"))},
        **{f"{metric} true": line.gap[metric] for metric in ("loss", "error")},
    }  # fmt: skip
