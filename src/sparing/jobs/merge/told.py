"""The forecast from the validation rows, whose labels it does not use: see ``sparing.valley.forecast.soft_labels``."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import combinations
from typing import Any

import torch
from torch import Tensor, nn

from sparing.jobs.lm.models import vocabulary
from sparing.jobs.merge.forecast import TOLERANCE, MergeForecasts
from sparing.jobs.merge.inputs import Inputs
from sparing.jobs.merge.scores import LOGITS
from sparing.jobs.merge.sources import Source
from sparing.jobs.run import Run
from sparing.jobs.torch_state import measuring
from sparing.valley.forecast.calibration import METRICS
from sparing.valley.forecast.soft_labels import gaps_of, row_gaps
from sparing.valley.merging.linear import Linear
from sparing.valley.scans.evaluators import logits_of

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
    rows, texts = inputs.validation.inputs, inputs.validation.targets is None
    # the logits of three models are held at once
    size = max(1, LOGITS // (rows.shape[1] * vocabulary(inputs.body))) if texts else len(rows)
    found = []
    for part in torch.split(rows, size):
        first, second = (_logits(inputs.load_(one.items(), refresh=True), part, texts) for one in (a, b))
        average = _logits(inputs.load_merged_(Linear(), [a, b], None), part, texts)
        found.append(row_gaps(first, second, average))
    return torch.cat(found)


def _logits(model: nn.Module, rows: Tensor, texts: bool) -> Tensor:
    with measuring(model):
        if texts:
            return torch.as_tensor(model(input_ids=rows, use_cache=False).logits[:, :-1].float())
        return torch.cat([logits_of(model(part)).float() for part in torch.split(rows, _BATCH)])


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
