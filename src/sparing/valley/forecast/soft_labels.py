"""The gap of an average from rows; without labels their ensemble's own answers stand in for them.

gap = E_ens[−log M] − ½ (E_ens[−log A] + E_ens[−log B]), where M is the average of the weights A and B, its batch-norm
statistics taken anew, and the ensemble is the mean of the two models' probabilities. The gap in error is the same with
the probability of a wrong answer in the place of −log. Where models are surer than they are right, as after many passes
over few rows, their own answers are poor labels: the average is then better than they tell. Text needs none, for its
next tokens are its labels.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from sparing.blocks.names import unwrap
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


def row_gaps(a: Tensor, b: Tensor, average: Tensor, targets: Tensor | None = None) -> Tensor:
    """Gaps in loss (nat) and error of every row, float64, shape (rows, 2), from logits, shape (rows, ..., classes).

    ``targets`` are labels, int64, shape (rows, ...), below 0 where there is none; without them the ensemble's answers
    are. The positions of a row are averaged; rows without any label are left out.
    """
    first, second, middle = every = [one.double().log_softmax(-1) for one in (a, b, average)]
    if targets is None:
        ensemble, there = (first.exp() + second.exp()) / 2, torch.ones_like(first[..., 0])
        loss = (ensemble * ((first + second) / 2 - middle)).sum(-1)
        right = [ensemble.gather(-1, one.argmax(-1, keepdim=True))[..., 0] for one in every]
    else:
        there = (targets >= 0).double()
        loss = ((first + second) / 2 - middle).gather(-1, targets.clamp(min=0)[..., None])[..., 0]
        right = [(one.argmax(-1) == targets).double() for one in every]
    counts = there.reshape(len(a), -1).sum(1)
    found = [(one * there).reshape(len(a), -1).sum(1) for one in (loss, (right[0] + right[1]) / 2 - right[2])]
    return (torch.stack(found, 1) / counts[:, None])[counts > 0]


def gaps_of(rows: Tensor, *, labelled: bool = False) -> dict[str, SoftGap]:
    """Mean gaps with their intervals, from gaps of rows, shape (rows, 2), by soft labels or by true ones."""
    found = {}
    for at, metric in enumerate(("loss", "error")):
        values = rows[:, at]
        mean, count = float(values.mean()), len(values)
        if count < FEWEST or not math.isfinite(mean):
            found[metric] = SoftGap(mean, (math.nan, math.nan))
            continue
        spread = float(values.std()) * math.hypot(1 / math.sqrt(count), 0 if labelled else MISSES[metric])
        reach = student_t_quantile((1 + LEVEL) / 2, count - 1) * spread
        if metric == "error" and spread == 0:
            reach = -math.log((1 - LEVEL) / 2) / count  # behind rows that are all alike a share as large may hide
        found[metric] = SoftGap(mean, (mean - reach, mean + reach))
    return found


@dataclass(frozen=True, slots=True)
class RowGaps:
    """Gaps of rows, and what they were taken by."""

    values: Tensor  # in loss (nat) and error (share), float64, shape (rows, 2)
    labelled: bool  # whether by true labels


@torch.no_grad()
def measure_gaps(
    a: Model,
    b: Model,
    rows: Iterable[Batch],
    *,
    calibrate: Iterable[Batch] | None = None,
    model: nn.Module | None = None,
    labels: bool = True,
) -> RowGaps:
    """Gaps of every row by ``row_gaps``; batch norm of the average is re-estimated on ``calibrate`` or the rows.

    Labels are those of the batches, (inputs, targets) or a mapping with ``labels``; of token ids the next ones. With
    ``labels=False`` they are not looked at.
    """
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
        labelled = set()
        for batch in batches:
            answers = []
            for state in fresh:
                load(state)
                inputs = batch[0] if isinstance(batch, tuple | list) else batch
                answers.append(logits_of(run_model(host, inputs)).cpu())
            targets, shifted = _targets(batch, answers[0], causal=_is_causal(host)) if labels else (None, False)
            labelled.add(targets is not None)
            # What stands behind the last token has no next one
            if shifted or (targets is None and answers[0].ndim == 3 and answers[0].shape[1] > 1):
                answers = [each[:, :-1] for each in answers]
            a_logits, b_logits, average = answers
            found.append(row_gaps(a_logits, b_logits, average, targets))
    why, do = "a gap is taken by true labels or by soft ones", "give all batches labels, or pass inputs alone"
    require(len(labelled) == 1, "rows", "batches with labels and without", why, do)
    return RowGaps(torch.cat(found), labelled.pop())


def _is_causal(model: nn.Module) -> bool:
    """Whether a model of transformers answers with the next token."""
    return type(unwrap(model)).__name__.endswith(("ForCausalLM", "LMHeadModel"))


def _targets(batch: Any, logits: Tensor, *, causal: bool) -> tuple[Tensor | None, bool]:
    """Labels of a batch, below 0 where there is none, and whether they are next tokens; None where it has none."""
    if isinstance(batch, tuple | list) and len(batch) > 1:
        given, shifted = batch[1], False
    else:
        inputs = batch[0] if isinstance(batch, tuple | list) else batch
        ids = inputs.get("input_ids") if isinstance(inputs, Mapping) else inputs
        given, shifted = ids if causal else None, causal
        if isinstance(inputs, Mapping) and "labels" in inputs:
            given = inputs["labels"]
        elif isinstance(inputs, Mapping) and given is not None and (mask := inputs.get("attention_mask")) is not None:
            given = given.masked_fill(mask == 0, -1)
    if not isinstance(given, Tensor) or given.is_floating_point() or given.is_complex():
        return None, False
    given = given[:, 1:] if shifted else given
    wanted = (*logits.shape[:1], logits.shape[1] - 1) if shifted else tuple(logits.shape[:-1])
    why, do = f"the model answers {wanted}", "pass a class for each answer, or inputs alone"
    require(tuple(given.shape) == wanted, "labels", f"shape {tuple(given.shape)}", why, do)
    if causal and not shifted and isinstance(batch[0], Tensor) and given.shape == batch[0].shape:
        same, mask = torch.equal(given, batch[0]), int(given.min()) >= 0 and int(given.max()) <= 1
        why, do = "a tuple's labels are not shifted", "pass the token ids alone, or a mapping with attention_mask"
        require(not (same or mask), "labels", "the token ids themselves" if same else "a mask of 0 and 1", why, do)
    return given.long().cpu(), shifted
