"""What it costs to hold every replay to what the first pass saw.

Run ``python -m benchmarks.hypergrad_replays`` (about five minutes on one quiet core). As in ``hypergrad_cost``: a
weight for each of 1,024 MNIST images, 784-128-10 perceptron, full batch, SGD with momentum, one thread.

Each pair calls the method as it is and with all comparisons and watches taken out, and all second looks but those at
batches, in turns that swap; the ratio is of CPU seconds and taken pair by pair. The interval is that of the median by
order statistics.
"""

from __future__ import annotations

import contextlib
import gc
import json
import math
import statistics
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import torch

from benchmarks.hypergrad_toys import reweighting
from sparing import hypergrad as hg
from sparing.hypergrad import implicit, zeroth
from sparing.hypergrad.inner import checks, unroll
from sparing.report import Progress, Record, environment
from sparing.report.atomic import write_whole

RESULT = Path(__file__).parent / "results" / "hypergrad_replays.json"
STEPS = 20
PAIRS = 15
MOST = 1.03
"""The goal."""

METHODS: dict[str, Any] = {
    "Reverse": hg.Reverse(),
    "Checkpointed √T": hg.Checkpointed(),
    "Checkpointed, 3 states": hg.Checkpointed(states=3),
    "ForwardGradient b=8 in chunks of 4": hg.ForwardGradient(directions=8, chunk=4),
    "HessianFree": hg.HessianFree(),
    "FiniteDifference": hg.FiniteDifference(),
    "ConjugateGradient 20": hg.ConjugateGradient(),
    "ZerothOrder b=4": hg.ZerothOrder(directions=4, step=0.1),  # in float32 shorter ones are lost in rounding
}


@contextlib.contextmanager
def unwatched() -> Iterator[None]:
    """Inside, nothing is compared or watched, and only batches are looked at twice."""
    nothing: Callable[..., Any] = lambda *_, **__: contextlib.nullcontext()  # noqa: E731
    with (
        mock.patch.object(checks, "FirstPass", return_value=None),
        mock.patch.object(checks, "NoForeignWrites", nothing),
        mock.patch.object(unroll, "no_recomputation", nothing),
        mock.patch.object(unroll, "NoForeignWrites", nothing),
        mock.patch.object(implicit, "check_end_loss", nothing),
        mock.patch.object(zeroth, "_REPEAT_EVERY", 0),
    ):
        yield


def seconds(call: Callable[[], Any], *, watched: bool) -> float:
    """CPU seconds of one call."""
    gc.collect()
    with contextlib.nullcontext() if watched else unwatched():
        start = time.process_time()
        call()
        return time.process_time() - start


def middle(values: list[float]) -> tuple[float, float, float]:
    """Median, and the order statistics between which it lies with at least 95 %, of fewer than six values with less."""
    listed, n = sorted(values), len(values)
    below = next(k for k in range(n) if sum(math.comb(n, j) for j in range(k + 1)) / 2**n > 0.025)
    first = max(0, below - 1)
    return statistics.median(listed), listed[first], listed[n - 1 - first]


def main() -> None:
    """Measure and write the record."""
    torch.set_num_threads(1)
    toy = reweighting(steps=STEPS).toy()
    record = Record(
        question="What does it cost to hold every replay to what the first pass saw?",
        settings={"steps": STEPS, "pairs": PAIRS}, seed=0, environment=environment(), units={"seconds": "s"},
    )  # fmt: skip
    with Progress("pairs", total=PAIRS * len(METHODS)) as bar:
        for name, method in METHODS.items():
            call = lambda method=method: hg.hypergradient(toy.problem, toy.phi, method, seed=0)  # noqa: E731
            call()
            taken: dict[bool, list[float]] = {True: [], False: []}
            for pair in range(PAIRS):
                for watched in (True, False) if pair % 2 else (False, True):
                    taken[watched].append(seconds(call, watched=watched))
                bar.advance()
            ratios = [one / other for one, other in zip(taken[True], taken[False], strict=True)]
            ratio, low, high = middle(ratios)
            record.add(
                "replays", method=name, seconds=statistics.median(taken[True]), ratio=ratio, ratio_low=low,
                ratio_high=high, n=PAIRS,
            )  # fmt: skip
    write_whole(RESULT, json.dumps(record.document(), indent=1, ensure_ascii=False, allow_nan=False) + "\n")


if __name__ == "__main__":
    main()
