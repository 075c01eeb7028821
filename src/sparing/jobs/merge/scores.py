"""What a model scores on each row, and what a merge loses against its parents, with an interval over the rows."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch.nn import functional

from sparing.jobs.lm.models import vocabulary
from sparing.jobs.torch_state import measuring
from sparing.report.pairs import can_bound, mcnemar, paired_bootstrap

LOGITS: Final = 1 << 25  # numbers that the model may give at once (count): 128 MiB in float32

NONE: Final = -100  # the target of a place that is no answer, as transformers has it

# Cross-entropy in nats, and the share of wrong answers: labels of images, next tokens of text.
METRICS: Final = ("loss", "error")


@dataclass(frozen=True, slots=True, eq=False)
class Rows:
    """Rows to measure on: images with their labels, texts that are their own, or texts with what is answered."""

    inputs: Tensor  # images, float32, shape (N, channels, side, side), or token ids, int64, shape (N, length)
    # labels, int64, shape (N,); tokens to answer, (N, T), −100 where there is none; None for texts, their own answers
    targets: Tensor | None = None
    places: Tensor | None = None  # places of the answers in the inputs, (N, T); None for those of a decoder
    mask: Tensor | None = None  # 1 where an input is read, (N, length); None for everywhere

    def __len__(self) -> int:
        """Rows (count)."""
        return len(self.inputs)

    @property
    def texts(self) -> bool:
        """Whether the inputs are tokens."""
        return self.targets is None or self.targets.ndim == 2

    @property
    def width(self) -> int:
        """Places of a text that the model gives logits for (count)."""
        longest = self.inputs if self.targets is None or self.places is not None else self.targets
        return int(longest.shape[1])

    @property
    def highest(self) -> int:
        """The largest token (index)."""
        answers = -1 if self.targets is None else int(self.targets.max())
        return max(int(self.inputs.max()), answers)

    def take(self, which: Tensor | slice) -> Rows:
        """Some of the rows."""
        parts = (self.inputs, self.targets, self.places, self.mask)
        return Rows(*(None if one is None else one[which] for one in parts))  # type: ignore[arg-type]

    def scores(self, model: nn.Module) -> Tensor:
        """Scores per row, float64, (N, 3): summed cross-entropy (nats), wrong answers, answers."""
        # Of texts, logits bound the memory; of images, activations, guessed at 4096 numbers per number of the input.
        per_row = self.width * vocabulary(model) if self.texts else 4096 * self.inputs[0].numel()
        batch = max(1, min(256, LOGITS // per_row))
        with measuring(model):
            parts = [self._part(model, slice(at, at + batch)) for at in range(0, len(self), batch)]
        return torch.cat(parts)

    def logits(self, model: nn.Module, batch: int) -> Tensor:
        """Logits of every answer, float32, shape (N, T, classes), (N, classes) of images; zeros where there is none."""
        with measuring(model):
            found = [self._answers(model, slice(at, at + batch)) for at in range(0, len(self), batch)]
        every = torch.cat([logits.masked_fill((targets == NONE)[..., None], 0.0) for logits, targets in found])
        return every if self.texts else every[:, 0]

    @property
    def padding(self) -> Tensor:
        """Of every row, places of answers over answers: what a mean over places is to be multiplied by, (N,)."""
        if self.targets is None or not self.texts:
            return torch.ones(len(self), dtype=torch.float64)
        return self.targets.shape[1] / (self.targets != NONE).sum(1).double()

    def loss(self, model: nn.Module, at: int) -> Tensor:
        """Summed cross-entropy of one row (nats), with its graph; the model is in evaluation mode."""
        return self._part(model, slice(at, at + 1))[0, 0]

    def _answers(self, model: nn.Module, rows: slice) -> tuple[Tensor, Tensor]:
        """Logits, (n, T, classes), and targets, (n, T), of some rows."""
        inputs = self.inputs[rows]
        if self.targets is None:
            return model(input_ids=inputs, use_cache=False).logits[:, :-1].float(), inputs[:, 1:]
        targets = self.targets[rows]
        if targets.ndim == 1:
            found: Any = model(inputs)
            return getattr(found, "logits", found).float()[:, None], targets[:, None]
        if self.places is not None:
            logits = model(input_ids=inputs).logits
            return logits[torch.arange(len(inputs))[:, None], self.places[rows]].float(), targets
        mask = None if self.mask is None else self.mask[rows]
        # The decoder reads the right answers, each shifted by one
        return model(input_ids=inputs, attention_mask=mask, labels=targets, use_cache=False).logits.float(), targets

    def _part(self, model: nn.Module, rows: slice) -> Tensor:
        logits, targets = self._answers(model, rows)
        losses = functional.cross_entropy(logits.transpose(1, 2), targets, reduction="none", ignore_index=NONE).double()
        there = targets != NONE
        wrong = (logits.argmax(2) != targets) & there
        return torch.stack([losses.sum(1), wrong.sum(1).double(), there.sum(1).double()], 1)


def decisive(scores: Tensor) -> float:
    """Mean loss that a choice is made by (nats): infinite where it is no number, so that it is never the best."""
    found = means(scores)["loss"]
    return math.inf if math.isnan(found) else found


def means(scores: Tensor) -> dict[str, float]:
    """``loss`` (nats per answer) and ``error`` (share of the answers) of scores of shape (N, 3)."""
    total = scores.sum(0)
    return {"loss": float(total[0] / total[2]), "error": float(total[1] / total[2])}


@dataclass(frozen=True, slots=True)
class Gap:
    """How much worse one model is than others on the same rows."""

    value: float  # metric of the merge less that of what it is held against: above 0, the merge is worse

    # Lower end of its 95 % interval over rows; NaN where a row is not finite or there are fewer than 10 rows, or fewer
    # than 10 that differ and are not right or wrong.
    low: float
    high: float
    p: float = math.nan  # McNemar's exact p-value, of the error against one model with one answer a row; else NaN

    @property
    def cautious(self) -> float:
        """The lower end, or the value where there is no interval; infinite where nothing is finite."""
        found = self.value if math.isnan(self.low) else self.low
        return math.inf if math.isnan(found) else found


def gaps(merged: Tensor, parents: Sequence[Tensor], *, seed: int) -> Mapping[str, Gap]:
    """Gap of each metric to the mean of the parents, paired by rows; scores of shape (N, 3)."""
    return {name: _gap(merged, parents, at, seed) for at, name in enumerate(METRICS)}


def _gap(merged: Tensor, parents: Sequence[Tensor], metric: int, seed: int) -> Gap:
    # Weighted by answers, so that the mean over rows is the mean over answers. The interval resamples rows, the same
    # for all models: hard rows are hard for all, so the difference varies less than either. It is about these models on
    # other rows, not about other models.
    first, *others = (each[:, metric] * (len(each) / each[:, 2].sum()) for each in (merged, *parents))
    second = torch.stack(others).mean(0)
    value = float((first - second).mean())
    if not can_bound(first, second):
        return Gap(value, math.nan, math.nan)
    low, high = paired_bootstrap(first, second, seed=seed).interval
    single = METRICS[metric] == "error" and len(parents) == 1 and bool((merged[:, 2] == 1).all())
    return Gap(value, low, high, mcnemar(first == 0, second == 0).p if single else math.nan)
