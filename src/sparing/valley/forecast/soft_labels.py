"""The gap of an average from rows without labels: their ensemble's own answers stand in for the labels.

gap = E_ens[−log M] − ½ (E_ens[−log A] + E_ens[−log B]), where M is the average of the weights A and B, its batch-norm
statistics taken anew, and the ensemble is the mean of the two models' probabilities. The gap in error is the same with
the probability of a wrong answer in the place of −log.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from sparing.errors import require
from sparing.valley.apply import live_model, loading_states
from sparing.valley.merging.compatible import Model, state_of
from sparing.valley.merging.merge import merge
from sparing.valley.scans.batch_norm import Batch, Refresher, run_model
from sparing.valley.scans.evaluators import logits_of
from sparing.valley.scans.intervals import student_t_quantile

LEVEL = 0.9  # of the interval

# By how much soft labels miss true ones, as a share of the deviation between rows, which more rows do not make smaller.
# So that the interval holds the gap of nine in ten pairs of seed 0 of docs/results/valley.md; the other seeds and the
# language models there had no part in it
MISSES: Mapping[str, float] = {"loss": 0.316, "error": 0.25}

FEWEST = 10  # rows: with fewer there is no interval


@dataclass(frozen=True, slots=True)
class SoftGap:
    """A gap as rows without labels tell it."""

    value: float  # expected value of the average less the mean of the two
    interval: tuple[float, float]  # that holds the gap on other rows in nine of ten pairs; NaN for fewer than 10 rows


def row_gaps(a: Tensor, b: Tensor, average: Tensor) -> Tensor:
    """Gaps in loss (nat) and error of every row, float64, shape (rows, 2), from logits, shape (rows, ..., classes).

    The positions of a row are averaged.
    """
    first, second, middle = (one.double().log_softmax(-1) for one in (a, b, average))
    ensemble = (first.exp() + second.exp()) / 2
    loss = (ensemble * ((first + second) / 2 - middle)).sum(-1)
    right = [ensemble.gather(-1, one.argmax(-1, keepdim=True))[..., 0] for one in (first, second, middle)]
    error = (right[0] + right[1]) / 2 - right[2]
    return torch.stack([one.reshape(len(a), -1).mean(1) for one in (loss, error)], 1)


def gaps_of(rows: Tensor) -> dict[str, SoftGap]:
    """Mean gaps with their intervals, from gaps of rows, shape (rows, 2)."""
    found = {}
    for at, metric in enumerate(("loss", "error")):
        values = rows[:, at]
        mean, count = float(values.mean()), len(values)
        if count < FEWEST or not math.isfinite(mean):
            found[metric] = SoftGap(mean, (math.nan, math.nan))
            continue
        spread = float(values.std()) * math.hypot(1 / math.sqrt(count), MISSES[metric])
        reach = student_t_quantile((1 + LEVEL) / 2, count - 1) * spread
        found[metric] = SoftGap(mean, (mean - reach, mean + reach))
    return found


@torch.no_grad()
def soft_gaps(
    a: Model,
    b: Model,
    rows: Iterable[Batch],
    *,
    calibrate: Iterable[Batch] | None = None,
    model: nn.Module | None = None,
) -> Tensor:
    """Gaps of every row by ``row_gaps``; batch norm of the average is re-estimated on ``calibrate`` or the rows."""
    batches: Sequence[Any] = list(rows)
    require(bool(batches), "rows", "none", "the forecast is measured on inputs", "pass batches of inputs")
    host, states = live_model([a, b], model), [dict(state_of(one)) for one in (a, b)]
    # Copies: the live model's buffers are overwritten, and a live end shares them
    states = [{name: value.clone() for name, value in state.items()} for state in states]
    found = []
    with loading_states(host) as load:
        refresher = Refresher(host, batches if calibrate is None else calibrate)
        fresh = []
        # All three alike, as ``interpolate`` does: the statistics of a model in training lag behind its weights
        for state in (*states, merge(states)):
            load(state)
            with refresher.at_point():
                fresh.append({name: value.detach().clone() for name, value in host.state_dict().items()})
        for batch in batches:
            answers = []
            for state in fresh:
                load(state)
                answers.append(_logits(host, batch))
            found.append(row_gaps(*answers))
    return torch.cat(found)


def _logits(model: nn.Module, batch: Any) -> Tensor:
    """Logits of a batch; of sequences without those behind the last token, which have no next one."""
    inputs = batch[0] if isinstance(batch, tuple | list) else batch
    found = logits_of(run_model(model, inputs)).cpu()
    return found[:, :-1] if found.ndim == 3 and found.shape[1] > 1 else found
