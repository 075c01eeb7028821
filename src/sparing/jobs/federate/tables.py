"""The rows of a record: who holds what, what it will cost, what it came to."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping
from typing import Any

from torch import Tensor

from sparing.federated.methods import Method
from sparing.federated.splits import Split
from sparing.jobs.federate.engines import Outcome, Setup
from sparing.jobs.federate.inputs import Inputs
from sparing.jobs.federate.price import Price
from sparing.report.pairs import mcnemar


def split_rows(split: Split, rows: Inputs) -> list[dict[str, Any]]:
    """Rows of each class per client."""
    counts = split.counts(rows.targets).tolist()
    names = [f"class_{which}" for which in range(rows.classes)]
    # A class without training rows may have no column in the counts, hence ``strict=False`` below.
    return [
        {"client": client, "rows": sum(one), **dict.fromkeys(names, 0), **dict(zip(names, one, strict=False))}
        for client, one in enumerate(counts)
    ]


def price_rows(label: str, known: Price) -> list[dict[str, Any]]:
    """What a method will send, one row per direction."""
    ways = (("down", known.down, known.down), ("up", known.up, known.up_full))
    return [
        {
            "method": label,
            "direction": way,
            "a_round": sum(each) / len(each),
            "in_all": sum(each),
            "of_full": sum(each) / sum(full),
            "updates": known.updates,
            "steps": known.steps,
        }
        for way, each, full in ways
    ]


def method_row(
    label: str, method: Method, outcome: Outcome, known: Price, setup: Setup, force: float | None, held: float | None
) -> dict[str, Any]:
    """What a method reached, beside its prediction."""
    last, rows = outcome.rounds[-1], outcome.rounds
    judged = [row["accuracy"] for row in rows if "accuracy" in row]
    low, high = wilson(last["accuracy"], n := len(setup.test.targets))
    seconds = [row["seconds"] for row in rows]
    made = [row["steps"] for row in rows]
    return {
        "method": label,
        "accuracy": last["accuracy"],
        "accuracy_low": low,
        "accuracy_high": high,
        "n": n,
        "last_ten": sum(judged[-10:]) / len(judged[-10:]),
        "validation_accuracy": held,
        "loss": last["loss"],
        "fusion_gap": last.get("fusion_gap"),
        "ssr_global": last.get("ssr_global"),
        "ssr_pairs": last.get("ssr_pairs"),
        "norm": last["norm"],
        "force": force,
        "answered": sum(row["answered"] for row in rows),
        "predicted_updates": known.updates,
        "steps": None if None in made else sum(made),
        "predicted_steps": known.steps,
        "bytes_down": sum(row["bytes_down"] for row in rows),
        "predicted_down": sum(known.down),
        "bytes_up": sum(row["bytes_up"] for row in rows),
        "predicted_up": sum(known.up),
        "seconds": sum(seconds),
        # The first round predicts the time: nothing else is known of this machine.
        "predicted_seconds": seconds[0] * len(seconds),
        "engine": outcome.engine,
        "value": repr(method) if len(repr(method)) < 400 else type(method).__name__,
    }


def pair_rows(right: Mapping[str, Tensor]) -> list[dict[str, Any]]:
    """Compare every two methods on the same test rows, the better first, by McNemar's exact test."""
    rows = []
    for pair in itertools.combinations(right, 2):
        first, second = sorted(pair, key=lambda name: -int(right[name].sum()))
        found = mcnemar(right[first], right[second])
        rows.append({"first": first, "second": second, "first_only": found.first_only,
                     "second_only": found.second_only, "difference": found.difference, "z": found.z,
                     "p": found.p})  # fmt: skip
    return rows


def wilson(share: float, n: int) -> tuple[float, float]:
    """95 % interval of a share counted in n rows (Wilson 1927).

    Example:
        >>> [round(end, 3) for end in wilson(0.5, 100)]
        [0.404, 0.596]
    """
    z = 1.959964
    middle = (share + z * z / (2 * n)) / (1 + z * z / n)
    # Unlike the normal interval, this one stays in [0, 1] and has width at shares of 0 and 1.
    half = z / (1 + z * z / n) * math.sqrt(share * (1 - share) / n + z * z / (4 * n * n))
    return max(middle - half, 0.0), min(middle + half, 1.0)
