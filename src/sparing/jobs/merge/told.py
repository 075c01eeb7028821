"""The forecast from the validation rows, whose labels it does not use: see ``sparing.valley.forecast.soft_labels``."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import combinations
from typing import Any

import torch
from torch import Tensor

from sparing.jobs.lm.models import vocabulary
from sparing.jobs.merge.forecast import TOLERANCE, MergeForecasts
from sparing.jobs.merge.inputs import Inputs
from sparing.jobs.merge.scores import LOGITS
from sparing.jobs.merge.sources import Source
from sparing.jobs.run import Run
from sparing.valley.forecast.calibration import METRICS
from sparing.valley.forecast.soft_labels import gaps_of, row_gaps
from sparing.valley.merging.linear import Linear

_BATCH = 64  # images that are run at once (count)


def told_forecasts(forecast: MergeForecasts, sources: Sequence[Source], inputs: Inputs, run: Run) -> MergeForecasts:
    """The forecasts of all pairs, told by the validation rows; what the weights said is kept beside it."""
    pairs = []
    for row, (one, other) in zip(forecast.pairs, combinations(sources, 2), strict=True):

        def work(one: Source = one, other: Source = other) -> Tensor:
            return told(one, other, inputs)

        pairs.append(_row(row, run.once(f"rows: {one.label}, {other.label}", work)))
    return replace(forecast, pairs=pairs)


def told(a: Source, b: Source, inputs: Inputs) -> Tensor:
    """Gaps of every validation row in loss and error, float64, shape (rows, 2); one model in memory at a time."""
    rows = inputs.validation
    # the logits of three models are held at once
    size = max(1, LOGITS // (rows.width * vocabulary(inputs.body))) if rows.texts else len(rows)
    batch = size if rows.texts else _BATCH
    found = []
    for at in range(0, len(rows), size):
        part = rows.take(slice(at, at + size))
        first, second = (part.logits(inputs.load_(one.items(), refresh=True), batch) for one in (a, b))
        average = part.logits(inputs.load_merged_(Linear(), [a, b], None), batch)
        found.append(row_gaps(first, second, average) * part.padding[:, None])
    return torch.cat(found)


def _row(row: Mapping[str, Any], rows: Tensor) -> dict[str, Any]:
    """One pair of the table "forecast", told by rows."""
    gaps = gaps_of(rows)
    low, high = gaps["error"].interval
    verdict = "will not" if low > TOLERANCE else "will merge" if high <= TOLERANCE else "uncertain"
    found: dict[str, Any] = {**row, "verdict": verdict, "by_weights": row["verdict"], "rows": len(rows)}
    for metric in METRICS:
        found[f"by_weights_{metric}"] = row[f"gap_{metric}"]
        ends = (gaps[metric].value, *gaps[metric].interval)
        found |= {f"gap_{metric}{end}": value for end, value in zip(("", "_low", "_high"), ends, strict=True)}
    return found
