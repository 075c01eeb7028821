"""What methods share that drop elements of task vectors before they are merged: by chance, by rank, or both."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from typing import Literal, Protocol

from sparing.errors import require
from sparing.valley.merging.linear import TaskArithmetic
from sparing.valley.merging.method import Change, PerModel, Rule, Slices, TaskVectorMethod, branch, changed, each_model
from sparing.valley.merging.ties import Ties

# What is left is enlarged so that each element keeps its mean, or the vector its L1 norm as in mergekit; or not at all
Rescale = Literal["mean", "norm", "none"]

# How thinned task vectors are merged
Then = TaskArithmetic | Ties


class Thinning(TaskVectorMethod, Protocol):
    """A method that thins every task vector and then merges them by another."""

    __slots__ = ()

    then: Then

    @abstractmethod
    def _thinning(self, name: str, model: int, delta: Slices) -> Change:
        """Read one task vector where that is needed, and return what thins it, the same at every reading."""
        ...

    def thinned(self, name: str, model: int, delta: Slices) -> Slices:
        """Thin one task vector; every reading gives the same."""
        return changed(delta, self._thinning(name, model, delta))

    def _changes(self, name: str, deltas: Sequence[Slices]) -> Sequence[Change]:
        return [self._thinning(name, model, delta) for model, delta in enumerate(deltas)]

    def _rule(self, name: str, deltas: Sequence[Slices]) -> Rule:
        return self.then._rule(name, deltas)


def check_thinning(then: Then, drop: PerModel, rescale: Rescale = "none") -> None:
    """Refuse a share to drop outside [0, 1), another rescaling, and thresholds over the whole model."""
    why = "it is a share of the elements, and 1 would leave nothing"
    require(all(0 <= share < 1 for share in each_model(drop)), "drop", drop, why, "pass 0 <= drop < 1, such as 0.9")
    do = 'pass "mean", "norm" or "none"'
    require(rescale in {"mean", "norm", "none"}, "rescale", repr(rescale), "there is no such rescaling", do)
    whole = not (isinstance(then, Ties) and then.across == "model")
    why = "thresholds over the whole model would need all draws at once"
    require(whole, "then", 'Ties(across="model")', why, 'use Ties(across="tensor")')


def of_model(value: PerModel, model: int) -> float:
    """The value of a setting for a model, by position; the one for all where there is one."""
    each = each_model(value)
    why, do = "there are more models", "pass one number, or one for each model in order"
    require(not isinstance(value, tuple) or model < len(each), "setting", value, why, do)
    return each[model] if isinstance(value, tuple) else each[0]


def with_norm(delta: Slices, thin: Change) -> Change:
    """Thin and multiply a task vector so that it has the L1 norm that it had; not where either is zero."""
    whole, thinned = branch(delta(), 2)
    norms = [[float(part.abs().sum()) for part in pair] for pair in zip(whole, thin(thinned), strict=True)]
    before, after = map(sum, zip(*norms, strict=True)) if norms else (0.0, 0.0)
    factor = before / after if min(before, after) >= 1e-7 else 1.0
    return lambda parts: (part.mul_(factor) for part in thin(parts))
