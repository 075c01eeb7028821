"""What the answers of a candidate say before its loss is measured: the forecast of ``predict_merge(rows=)``, for any.

All models together answer some rows; a merge whose answers lie farther from theirs than those of the worst of the
models does not work, whatever the labels are. See ``sparing.valley.forecast.soft_labels``.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Final

import torch
from torch import Tensor, nn

from sparing.jobs.lm.models import vocabulary
from sparing.jobs.merge.choose import Candidate
from sparing.jobs.merge.inputs import Inputs
from sparing.jobs.merge.scores import LOGITS
from sparing.jobs.merge.sources import Source
from sparing.valley.forecast.soft_labels import FEWEST, gaps_of

SHARE: Final = 4  # one in so many validation rows is answered for the forecast
MOST: Final = 64  # and no more than these (count)


class Answers:
    """What all models together answer on some rows, without labels, and how far each of them is from it."""

    def __init__(self, inputs: Inputs, models: Sequence[Callable[[], nn.Module]]) -> None:
        """Answer with each model in turn; twice, so that one model's answers are in memory at a time."""
        every = inputs.validation
        count = min(max(len(every) // SHARE, FEWEST), MOST, len(every))
        # evenly, for several tasks lie one behind the other
        self.rows = every.take(torch.linspace(0, len(every) - 1, count).long())
        most = max(1, LOGITS // (count * vocabulary(inputs.body))) if every.texts else 1
        self.most = most  # places of a row that memory has room for (count)
        total: Tensor | None = None
        for load in models:
            found = self._log_shares(load()).exp_()
            total = found if total is None else total.add_(found)
        assert total is not None
        self.shares = total.div_(len(models))
        each = torch.stack([self._distance(load()) for load in models])
        self.worst = each[each.mean(1).argmax()]  # of every row, the distance of the model farthest off

    def _log_shares(self, model: nn.Module) -> Tensor:
        if not self.rows.texts:
            return self.rows.logits(model, len(self.rows)).log_softmax(-1)
        parts = [self.rows.take(slice(at, at + 1)).logits(model, 1) for at in range(len(self.rows))]
        # Of long rows places are taken evenly
        places = torch.linspace(0, parts[0].shape[1] - 1, min(parts[0].shape[1], self.most)).long()
        return torch.cat([part[:, places].log_softmax(-1) for part in parts])

    def _distance(self, model: nn.Module) -> Tensor:
        """Cross-entropy of a model's answers against those of all, of every row, float64, (rows,) (nats)."""
        found = -(self.shares * self._log_shares(model)).sum(-1).double()
        return found.reshape(len(self.rows), -1).mean(1) * self.rows.padding

    def tell(self, model: nn.Module) -> tuple[float, bool]:
        """By how much a model is farther from all than the worst of them is (nats), and whether clearly so."""
        beyond = self._distance(model) - self.worst
        gap = gaps_of(torch.stack([beyond, beyond], 1))["loss"]
        return gap.value, not math.isfinite(gap.value) or gap.interval[0] > 0


def answers(inputs: Inputs, sources: Sequence[Source]) -> Answers:
    """Of the models as they lie on the disk, batch-norm statistics as the merges have theirs."""
    return Answers(inputs, [lambda one=one: inputs.load_(one.items(), refresh=True) for one in sources])  # type: ignore[misc]


def forecaster(
    inputs: Inputs, sources: Sequence[Source], base: Source | None
) -> Callable[[Candidate], tuple[float, bool]]:
    """What tells of candidates, with the models' answers found when it is first asked."""
    known: list[Answers] = []

    def tell(way: Candidate) -> tuple[float, bool]:
        if not known:
            known.append(answers(inputs, sources))
        return known[0].tell(inputs.load_merged_(way.method, sources, base))

    return tell
