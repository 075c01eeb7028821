"""Random sets of rows that are dropped: what was predicted of them, and how well its ranks are those of retraining."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from sparing import hypergrad as hg
from sparing.errors import RunError
from sparing.jobs.attribute.inputs import Inputs
from sparing.seeds import stream


def drop_set(rows: int, share: float, seed: int, number: int) -> Tensor:
    """Numbers of the rows in a random set, int64."""
    order = torch.randperm(rows, generator=stream(seed, "attribute", "drop", number))
    return order[: max(1, round(share * rows))]


def retrained(inputs: Inputs, drop: Tensor, seed: int) -> Tensor:
    """Losses of the predictions after a run without these rows, (k,); NaN where it diverges."""
    try:
        theta = hg.solve(inputs.run.problem(), inputs.run.weights(drop=drop), seed=seed)
    except RunError:
        return torch.full((len(inputs.test_numbers),), math.nan)
    with torch.no_grad():
        return inputs.target(theta)


def spearman(first: Tensor, second: Tensor) -> float:
    """Rank correlation of two rows of numbers, equal ones sharing their rank; NaN where one is constant or holds a NaN.

    Example:
        >>> spearman(torch.tensor([1.0, 2.0, 4.0]), torch.tensor([0.0, 9.0, 99.0]))
        1.0
    """
    # compared with a NaN nothing is larger, so that it would rank as the smallest
    if bool(first.isnan().any() or second.isnan().any()):
        return math.nan
    one, two = (_ranks(part) for part in (first, second))
    return float(torch.corrcoef(torch.stack((one, two)))[0, 1])


def _ranks(values: Tensor) -> Tensor:
    """Mean rank of each value, float64."""
    below = (values[:, None] > values[None]).sum(1)
    equal = (values[:, None] == values[None]).sum(1)
    return below.double() + (equal.double() - 1) / 2
