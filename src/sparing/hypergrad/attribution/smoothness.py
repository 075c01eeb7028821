"""Whether first-order predictions mean anything for a run: three short looks along a line before any metagradient."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from sparing.errors import RunError, require
from sparing.hypergrad.apply import overflow_message
from sparing.hypergrad.attribution.training import TrainingRun
from sparing.hypergrad.estimate import finite
from sparing.hypergrad.inner.checks import check_problem
from sparing.seeds import stream

LEAST = 0.5
"""Score below which a run is warned of: half-way between signs that agree by chance, 0, and a straight line, 1."""

MOST = 0.5
"""Bend above which it is warned of too: on a parabola the first derivative is then off by the whole change."""


@dataclass(frozen=True, kw_only=True)
class Smoothness:
    """How straight the end of a run moves as weights of rows go from one to zero."""

    score: float
    """Metasmoothness, −1 to 1: 1 where every weight of the model goes on as it began, 0 where the second half of the
    way says nothing of the first."""
    dropped: int
    """Rows whose weight went to zero (count)."""
    bend: float
    """‖second half − first half of the way of θ_T‖ / ‖the whole way‖: 0 on a straight line. On a parabola twice as
    much is the relative error of a first-order prediction of θ_T."""
    warning: str
    """One line where the score is low or the bend large; empty else."""


def metasmoothness(run: TrainingRun, *, share: float = 0.01, seed: int = 0) -> Smoothness:
    """Test in three plain runs whether the influence of rows can predict what dropping them does.

    A random share of the rows gets the weights 1, ½ and 0; the score is how far the first and the second move of the
    model's weights agree in sign, each weight counting by how far it moves in all.

    Args:
        run: The training run.
        share: Rows whose weight is moved (0 to 1), at least one.
        seed: Seed of dropout and of the rows drawn.

    Returns:
        The score, and a warning in one line where derivatives mean little.

    Raises:
        UserError: If the share is out of range.
        RunError: If the run overflows.

    Source: Engstrom et al. 2025 (arXiv:2503.13751), empirical metasmoothness, Section 4.

    Example:
        >>> from sparing import hypergrad as hg
        >>> x, y = torch.tensor([[1.0], [2.0], [3.0]]), torch.tensor([1.0, 2.0, 6.0])
        >>> run = hg.TrainingRun(
        ...     losses=lambda theta, rows: ((x[rows] @ theta - y[rows]) ** 2) / 2,
        ...     rows=3,
        ...     batches=[torch.tensor([0, 1, 2])] * 4,
        ...     init=torch.zeros(1),
        ...     optimizer=hg.SGD(lr=0.1),
        ... )
        >>> hg.metasmoothness(run).score
        1.0
    """
    require(0 < share <= 1, "share", share, "some rows must move", "pass a share above 0, at most 1")
    used = torch.unique(torch.cat([batch.cpu() for batch in run.batches]))
    count = max(1, round(share * len(used)))
    rows = used[torch.randperm(len(used), generator=stream(seed, "metasmoothness"))[:count]]
    ends: list[Tensor] = []
    for weight in (1.0, 0.5, 0.0):
        weights = run.weights()
        weights[rows.to(weights.device)] = weight
        unroll = check_problem(run.problem(), weights, seed)
        state = unroll.run(weights)
        if not finite(state.theta):
            raise RunError(overflow_message(unroll, weights))
        ends.append(torch.cat([leaf.reshape(-1).double() for leaf in state.theta]))
    first, second = ends[1] - ends[0], ends[2] - ends[1]
    way = (ends[2] - ends[0]).abs()
    total = way.sum()
    score = float((first.sign() * second.sign() * way).sum() / total) if total > 0 else 1.0
    bend = float((second - first).norm() / (ends[2] - ends[0]).norm()) if total > 0 else 0.0
    return Smoothness(score=score, dropped=count, bend=bend, warning=_warning(score, bend, count))


def _warning(score: float, bend: float, count: int) -> str:
    if score >= LEAST and bend <= MOST:
        return ""
    rows = "1 row" if count == 1 else f"{count} rows"
    return (
        f"metasmoothness {score:.2f}, bend {bend:.2f} for {rows}: influences predict little of what dropping rows does "
        "to this run; lower the learning rate, use a smooth activation such as GELU, or a larger batch"
    )
