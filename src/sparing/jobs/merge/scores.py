"""What a model scores on each row, and what a merge loses against its parents, with an interval over the rows."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch.nn import functional

from sparing.jobs.live import measuring
from sparing.seeds import stream

LOGITS: Final = 1 << 25
"""Numbers that the model may give at once (count): 128 MiB in float32."""

DRAWS: Final = 1000
"""Bootstrap samples of an interval (count)."""

METRICS: Final = ("loss", "error")
"""Cross-entropy in nats, and the share of wrong answers: labels of images, next tokens of text."""


@dataclass(frozen=True, slots=True, eq=False)
class Rows:
    """Rows to measure on: images with their labels, or texts that are their own."""

    inputs: Tensor
    """Images, float32, shape (N, channels, side, side), or token ids, int64, shape (N, length)."""

    targets: Tensor | None = None
    """Labels, int64, shape (N,); None for texts."""

    def __len__(self) -> int:
        """Rows (count)."""
        return len(self.inputs)

    def scores(self, model: nn.Module) -> Tensor:
        """Measure a model.

        Args:
            model: Inputs -> logits, or an output that has ``logits``.

        Returns:
            Shape (N, 3), float64: summed cross-entropy (nats), wrong answers, answers.
        """
        texts = self.targets is None
        per_row = self.inputs.shape[1] * _vocabulary(model) if texts else 4096 * self.inputs[0].numel()
        batch = max(1, min(256, LOGITS // per_row))
        with measuring(model):
            parts = [self._part(model, slice(at, at + batch)) for at in range(0, len(self), batch)]
        return torch.cat(parts)

    def _part(self, model: nn.Module, rows: slice) -> Tensor:
        inputs = self.inputs[rows]
        if self.targets is None:
            logits, targets = model(input_ids=inputs, use_cache=False).logits[:, :-1].float(), inputs[:, 1:]
        else:
            found: Any = model(inputs)
            logits, targets = getattr(found, "logits", found).float()[:, None], self.targets[rows, None]
        losses = functional.cross_entropy(logits.transpose(1, 2), targets, reduction="none").double()
        wrong = (logits.argmax(2) != targets).double()
        return torch.stack([losses.sum(1), wrong.sum(1), torch.full((len(targets),), targets.shape[1]).double()], 1)


def means(scores: Tensor) -> dict[str, float]:
    """Mean loss and error of a model.

    Args:
        scores: Of its rows, shape (N, 3).

    Returns:
        ``loss`` (nats per answer) and ``error`` (share of the answers).
    """
    total = scores.sum(0)
    return {"loss": float(total[0] / total[2]), "error": float(total[1] / total[2])}


@dataclass(frozen=True, slots=True)
class Gap:
    """A merge against the mean of its parents."""

    value: float
    """Metric of the merge less the mean metric of the parents: above 0, the merge is worse."""

    low: float
    """Lower end of its 95 % interval over rows."""

    high: float
    """Upper end."""


def gaps(merged: Tensor, parents: Sequence[Tensor], *, seed: int) -> Mapping[str, Gap]:
    """The gap of each metric.

    The interval resamples rows, the same ones for all models: rows that are hard are hard for all, so the difference
    varies less than either. It is about these models on other rows, not about other models.

    Args:
        merged: Scores of the merge, shape (N, 3).
        parents: Scores of each parent on the same rows.
        seed: Of the resampling.

    Returns:
        Gap by metric.
    """
    several = torch.stack([merged, *parents])
    drawn = torch.randint(len(merged), (DRAWS, len(merged)), generator=stream(seed, "merge", "bootstrap"))
    found = {}
    for at, name in enumerate(METRICS):
        value = _difference(several.sum(1), at)
        totals = torch.stack([each[drawn].sum(1) for each in several])  # one model at a time: rows × draws are many
        ends = torch.quantile(_difference(totals, at), torch.tensor([0.025, 0.975], dtype=torch.float64))
        found[name] = Gap(float(value), float(ends[0]), float(ends[1]))
    return found


def _difference(totals: Tensor, metric: int) -> Tensor:
    """First model less the mean of the others, of shape (models, …, 3)."""
    ratios = totals[..., metric] / totals[..., 2]
    return ratios[0] - ratios[1:].mean(0)


def _vocabulary(model: Any) -> int:
    return int(model.get_input_embeddings().weight.shape[0])
