"""The forecast from the validation rows: the gap of the plain average on them, with an interval over other rows."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import combinations
from typing import Any

from torch import Tensor

from sparing.jobs.merge.forecast import TOLERANCE, MergeForecasts
from sparing.jobs.merge.inputs import Inputs
from sparing.jobs.merge.sources import Source
from sparing.jobs.run import Run
from sparing.valley.forecast.calibration import METRICS
from sparing.valley.forecast.soft_labels import gaps_of
from sparing.valley.merging.linear import Linear


def told_forecasts(forecast: MergeForecasts, sources: Sequence[Source], inputs: Inputs, run: Run) -> MergeForecasts:
    """The forecasts of all pairs, told by the validation rows; what the weights said is kept beside it."""
    pairs = []
    for row, (one, other) in zip(forecast.pairs, combinations(sources, 2), strict=True):

        def work(one: Source = one, other: Source = other) -> Tensor:
            return told(one, other, inputs)

        pairs.append(_row(row, run.once(f"labelled rows: {one.label}, {other.label}", work)))
    return replace(forecast, pairs=pairs)


def told(a: Source, b: Source, inputs: Inputs) -> Tensor:
    """Gaps of every validation row in loss and error, float64, shape (rows, 2); one model in memory at a time.

    Their mean is that over all answers, as in ``gaps``.
    """
    rows = inputs.validation
    first, second = (rows.scores(inputs.load_(one.items(), refresh=True)) for one in (a, b))
    average = rows.scores(inputs.load_merged_(Linear(), [a, b], None))
    answered = average[:, 2] > 0
    gaps = (average - (first + second) / 2)[answered, :2]
    return gaps * (len(gaps) / average[:, 2].sum())


def _row(row: Mapping[str, Any], rows: Tensor) -> dict[str, Any]:
    """One pair of the table "forecast", told by rows."""
    gaps = gaps_of(rows, labelled=True)
    low, high = gaps["error"].interval
    verdict = "will not" if low > TOLERANCE else "will merge" if high <= TOLERANCE else "uncertain"
    found: dict[str, Any] = {**row, "verdict": verdict, "by_weights": row["verdict"], "rows": len(rows)}
    for metric in METRICS:
        found[f"by_weights_{metric}"] = row[f"gap_{metric}"]
        ends = (gaps[metric].value, *gaps[metric].interval)
        found |= {f"gap_{metric}{end}": value for end, value in zip(("", "_low", "_high"), ends, strict=True)}
    return found
