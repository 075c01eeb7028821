"""How the models of a round become one: their mean, or rules that a few wrong models cannot move far.

A rule sees one update of each client and treats them in the order of client numbers, so that the order of arrival
changes nothing. Sums run in float64. A tensor that only some clients sent is combined over those, and one that nobody
sent stays what it was.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal, Protocol

import torch
from torch import Tensor

from sparing.errors import UserError, require
from sparing.federated.methods.interface import Update, Vector

Rule = Callable[[Sequence[Tensor], Sequence[float]], Tensor]
"""Tensors of equal shapes and their weights -> one tensor, in float64."""


class Combine(Protocol):
    """A rule that makes one model of many."""

    def params(self, center: Vector, updates: Sequence[Update]) -> Vector:
        """Combine the parameters of at least one client; names, shapes and dtypes are those of ``center``."""

    def buffers(self, center: Vector, updates: Sequence[Update]) -> Vector:
        """Combine the buffers of the same clients: floating ones likewise, of integer ones the largest."""


class _Elementwise:
    """One rule for each element of each tensor, over the clients that sent it."""

    __slots__ = ()

    def _rule(self, tensors: Sequence[Tensor], weights: Sequence[float]) -> Tensor:
        raise NotImplementedError

    def params(self, center: Vector, updates: Sequence[Update]) -> Vector:
        """Combine the parameters."""
        return _each(center, updates, "params", self._rule)

    def buffers(self, center: Vector, updates: Sequence[Update]) -> Vector:
        """Combine floating buffers likewise; of integer ones take the largest."""
        return _each(center, updates, "buffers", self._rule)


@dataclass(frozen=True, slots=True)
class Mean(_Elementwise):
    """Σ w_k x_k / Σ w_k.

    Source: McMahan et al. 2017 (arXiv:1602.05629), Algorithm 1; with equal weights Li et al. 2024 (arXiv:2405.12489).
    """

    # The mean of running variances lacks the spread of the clients' means: under skewed labels it is too small, and
    # ``Schedule.batch_norm="recalibrate"`` is right.
    def _rule(self, tensors: Sequence[Tensor], weights: Sequence[float]) -> Tensor:
        return mean(tensors, weights)


@dataclass(frozen=True, slots=True)
class Median(_Elementwise):
    """The median of each element, of an even number the mean of the middle two; weights do not count.

    Source: Yin et al. 2018 (arXiv:1803.01498), Definition 1.
    """

    def _rule(self, tensors: Sequence[Tensor], weights: Sequence[float]) -> Tensor:
        return median(tensors, weights)


@dataclass(frozen=True, slots=True)
class TrimmedMean(_Elementwise):
    """The mean of each element without its smallest and largest values; weights do not count.

    Source: Yin et al. 2018 (arXiv:1803.01498), Definition 2, where β is ``share``.
    """

    share: float = 0.1
    """Share of the clients left out at each end, in [0, 0.5); rounded up, so that any share > 0 leaves out one, but
    never all."""

    def __post_init__(self) -> None:
        why, do = "both ends together must leave a client", "pass 0 <= share < 0.5"
        require(0 <= self.share < 0.5, "TrimmedMean.share", self.share, why, do)

    def _rule(self, tensors: Sequence[Tensor], weights: Sequence[float]) -> Tensor:
        count = len(tensors)
        # 0.28 · 25 is 7, not 7 + 9e-16.
        cut = min(math.ceil(self.share * count - 1e-9), (count - 1) // 2)
        return _sorted(tensors)[cut : count - cut].mean(0)


@dataclass(frozen=True, slots=True)
class Krum:
    """The model that is nearest to its nearest others, or the mean of the ``keep`` that are; weights do not count.

    The score of a model is the sum of its squared distances to the n − f − 2 nearest others; equal scores go to the
    lower client number. Buffers come from the same clients.

    Source: Blanchard et al. 2017 (arXiv:1703.02757), §4, where f is ``hostile`` and m of Multi-Krum is ``keep``.
    """

    hostile: int = 1  # f; a round needs at least 2f + 3 models
    keep: int | None = 1  # m, at most n − f; their mean is taken; None is n − f, which loses least with nobody hostile

    def __post_init__(self) -> None:
        require(self.hostile >= 0, "Krum.hostile", self.hostile, "it is a count", "pass an integer >= 0")
        fine = self.keep is None or self.keep >= 1
        require(fine, "Krum.keep", self.keep, "a model must be left", "pass an integer >= 1, or None")

    def params(self, center: Vector, updates: Sequence[Update]) -> Vector:
        """Return the parameters of the chosen."""
        return _each(center, self._chosen(updates), "params", mean)

    def buffers(self, center: Vector, updates: Sequence[Update]) -> Vector:
        """Return the buffers of the chosen."""
        return _each(center, self._chosen(updates), "buffers", mean)

    def _chosen(self, updates: Sequence[Update]) -> list[Update]:
        count = len(updates)
        keep = max(count - self.hostile, 1) if self.keep is None else self.keep
        why = f"to outvote {self.hostile} hostile models Krum needs {2 * self.hostile + 3}, and to keep {keep}"
        holds = count >= 2 * self.hostile + 3 and keep <= count - self.hostile
        require(holds, "Krum", f"{count} models", why, "draw more clients a round, or lower hostile= or keep=")
        ordered = [replace(update, weight=1.0) for update in sorted_by_client(updates)]
        if any(update.params.keys() != ordered[0].params.keys() for update in ordered):
            why = "Krum compares whole models, and these clients sent different blocks"
            raise UserError("Krum", got="partial models", why=why, do="pass combine=Median(), or blocks=None")
        distances = _squared_distances([update.params for update in ordered])
        # From 1: the nearest of all is the model itself.
        nearest = distances.sort(dim=1).values[:, 1 : count - self.hostile - 1]
        # Stable: equal scores go to the lower client number.
        best = torch.sort(nearest.sum(1), stable=True).indices[:keep].tolist()
        return [ordered[index] for index in best]


@dataclass(frozen=True, slots=True)
class Clipped:
    """Shorten each client's update x − g to at most ``norm``, and then combine.

    Source: Sun et al. 2019 (arXiv:1911.07963), §4, norm thresholding.
    """

    norm: float  # largest Euclidean norm of an update over all its parameters, > 0
    combine: Combine = field(default_factory=Mean)

    def __post_init__(self) -> None:
        require(self.norm > 0, "Clipped.norm", self.norm, "no client could move the model", "pass a norm > 0")

    def params(self, center: Vector, updates: Sequence[Update]) -> Vector:
        """Return the parameters combined from shortened updates."""
        return self.combine.params(center, [self._shortened(center, update) for update in updates])

    def buffers(self, center: Vector, updates: Sequence[Update]) -> Vector:
        """Return the buffers combined as they are: they are statistics, not updates."""
        return self.combine.buffers(center, updates)

    def _shortened(self, center: Vector, update: Update) -> Update:
        moves = {name: value.double() - center[name].double() for name, value in update.params.items()}
        length = math.sqrt(sum(float((move * move).sum()) for move in moves.values()))
        if length <= self.norm:
            return update
        short = {
            name: (center[name].double() + move * (self.norm / length)).to(center[name].dtype)
            for name, move in moves.items()
        }
        return replace(update, params=short)


def sorted_by_client(updates: Sequence[Update]) -> list[Update]:
    """Return the updates by client number; none at all, or a client twice, is refused."""
    require(len(updates) >= 1, "updates", 0, "a mean needs a model", "keep the global model when no client answers")
    ordered = sorted(updates, key=lambda update: update.client)
    numbers = [update.client for update in ordered]
    twice = [number for number, after in itertools.pairwise(numbers) if number == after]
    require(not twice, "updates", f"client {twice[:1]} twice", "a client counts once", "pass one update a client")
    return ordered


def mean(tensors: Sequence[Tensor], weights: Sequence[float]) -> Tensor:
    """Return the weighted mean in float64; of one tensor exactly itself."""
    # Exactly rounded, so the order of the weights changes nothing.
    whole = math.fsum(weights)
    total = torch.zeros_like(tensors[0], dtype=torch.float64)
    for tensor, weight in zip(tensors, weights, strict=True):
        total.add_(tensor.double(), alpha=weight / whole)
    return total


def median(tensors: Sequence[Tensor], weights: Sequence[float]) -> Tensor:
    """Return the median of each element in float64; the mean of the middle two if their number is even."""
    count = len(tensors)
    return _sorted(tensors)[(count - 1) // 2 : count // 2 + 1].mean(0)


def _sorted(tensors: Sequence[Tensor]) -> Tensor:
    return torch.stack([tensor.double() for tensor in tensors]).sort(dim=0).values


def _each(center: Vector, updates: Sequence[Update], part: Literal["params", "buffers"], rule: Rule) -> Vector:
    """Apply a rule to every name, over the clients that sent it."""
    ordered, combined = sorted_by_client(updates), {}
    for name, value in center.items():
        sent = [(update, getattr(update, part)) for update in ordered]
        tensors = [vector[name] for _, vector in sent if name in vector]
        if not tensors:
            combined[name] = value
        elif not value.is_floating_point():
            combined[name] = torch.stack([tensor.to(value.dtype) for tensor in tensors]).amax(0)
        else:
            weights = [update.weight for update, vector in sent if name in vector]
            combined[name] = rule(tensors, weights).to(value.dtype)
    return combined


def _squared_distances(models: Sequence[Vector]) -> Tensor:
    """Squared Euclidean distances of all pairs, shape (n, n), float64, zeros on the diagonal."""
    distances = torch.zeros(len(models), len(models), dtype=torch.float64)
    for i, model in enumerate(models):
        for j in range(i):
            pairs = ((value.double(), models[j][name].double()) for name, value in model.items())
            distances[i, j] = distances[j, i] = sum(float(((a - b) ** 2).sum()) for a, b in pairs)
    return distances
