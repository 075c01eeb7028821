"""Rules for one model of many that look at whole models: Bulyan, the geometric median, centred clipping, and buckets.

Those of ``robust`` beside them; all see one update of each client, in the order of client numbers, in float64.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, fields, is_dataclass, replace
from typing import Any

import torch
from torch import Tensor

from sparing.errors import UserError, require
from sparing.federated.methods.interface import Update, Vector
from sparing.federated.server.robust import Combine, Mean, Median, mean, median, sorted_by_client
from sparing.seeds import stream


@dataclass(frozen=True, slots=True)
class Bulyan:
    """Krum chooses n − 2f models one after another; of each element, the mean of those n − 4f nearest to their median.

    Weights do not count. Buffers are medians of the chosen.

    Source: El Mhamdi, Guerraoui & Rouault 2018 (arXiv:1802.07927), §4, where f is ``hostile``.
    """

    hostile: int = 1  # f; a round needs at least 4f + 3 models

    def __post_init__(self) -> None:
        require(self.hostile >= 0, "Bulyan.hostile", self.hostile, "it is a count", "pass an integer >= 0")

    def params(self, center: Vector, updates: Sequence[Update]) -> Vector:
        """Return the trimmed mean of the chosen."""
        chosen = self._chosen(updates)
        keep, found = len(chosen) - 2 * self.hostile, {}
        for name, value in center.items():
            stacked = torch.stack([update.params[name].double() for update in chosen])
            middle = median(list(stacked), [1.0] * len(chosen))
            nearest = (stacked - middle).abs().sort(dim=0, stable=True).indices[:keep]
            found[name] = stacked.gather(0, nearest).mean(0).to(value.dtype)
        return found

    def buffers(self, center: Vector, updates: Sequence[Update]) -> Vector:
        """Return the medians of the chosen."""
        return Median().buffers(center, self._chosen(updates))

    def _chosen(self, updates: Sequence[Update]) -> list[Update]:
        left, count = whole_models("Bulyan", updates), len(updates)
        need = 4 * self.hostile + 3
        why = f"to outvote {self.hostile} hostile models Bulyan needs {need}"
        require(count >= need, "Bulyan", f"{count} models", why, "draw more clients a round, or lower hostile=")
        # Every choice is Krum's among those that are left.
        # n² numbers, read one choice after another
        distances = pairwise(left).cpu()
        chosen: list[Update] = []
        alive = list(range(count))
        while len(chosen) < count - 2 * self.hostile:
            inside = distances[alive][:, alive].sort(dim=1).values
            scores = inside[:, 1 : max(len(alive) - self.hostile - 1, 2)].sum(1)
            chosen.append(left[alive.pop(int(torch.sort(scores, stable=True).indices[0]))])
        return sorted_by_client(chosen)


@dataclass(frozen=True, slots=True)
class GeometricMedian:
    """The model z of least Σ w_k ‖z − x_k‖, by Weiszfeld's steps from the mean; buffers by the same weights.

    Source: Pillutla, Kakade & Harchaoui 2022 (arXiv:1912.13445), Algorithm 2, where ν is ``smoothing``.
    """

    steps: int = 32  # at most (count)
    smoothing: float = 1e-6  # ν, distances below which count as ν, in units of the weights, > 0

    def __post_init__(self) -> None:
        require(self.steps >= 1, "GeometricMedian.steps", self.steps, "it is a count", "pass an integer >= 1")
        fine = self.smoothing > 0
        require(fine, "GeometricMedian.smoothing", self.smoothing, "a distance of zero divides", "pass a number > 0")

    def params(self, center: Vector, updates: Sequence[Update]) -> Vector:
        """Return the geometric median."""
        return Mean().params(center, self._weighed(updates))

    def buffers(self, center: Vector, updates: Sequence[Update]) -> Vector:
        """Return the mean by the weights of the parameters."""
        return Mean().buffers(center, self._weighed(updates))

    def _weighed(self, updates: Sequence[Update]) -> list[Update]:
        ordered = whole_models("GeometricMedian", updates)
        rows = torch.stack([flat(update) for update in ordered])
        given = torch.tensor([update.weight for update in ordered], dtype=torch.float64).to(rows.device)
        weights = given / given.sum()
        for _ in range(self.steps):
            # From distances alone of the mean's point: the mean itself is made once, by the caller.
            far = torch.linalg.vector_norm(rows - weights @ rows, dim=1).clamp_min(self.smoothing)
            after = given / far
            after = after / after.sum()
            done = bool((after - weights).abs().max() < 1e-12)
            weights = after
            if done:
                break
        return [replace(update, weight=float(w)) for update, w in zip(ordered, weights, strict=True)]


@dataclass(frozen=True, slots=True)
class CenteredClipping:
    """v ← v + mean of x_k − v shortened to ``radius``, from the global model; weights do not count; buffers: medians.

    Source: Karimireddy, He & Jaggi 2021 (arXiv:2012.10333), Algorithm 2, where τ is ``radius`` and L ``steps``.
    """

    radius: float  # τ, > 0, in units of the weights: about the distance between honest updates
    steps: int = 3  # L (count)

    def __post_init__(self) -> None:
        require(self.radius > 0, "CenteredClipping.radius", self.radius, "nobody could move it", "pass a radius > 0")
        require(self.steps >= 1, "CenteredClipping.steps", self.steps, "it is a count", "pass an integer >= 1")

    def params(self, center: Vector, updates: Sequence[Update]) -> Vector:
        """Return v after the steps."""
        ordered = whole_models("CenteredClipping", updates)
        v = {name: value.double() for name, value in center.items()}
        for _ in range(self.steps):
            moves = [{name: value.double() - v[name] for name, value in one.params.items()} for one in ordered]
            lengths = [math.sqrt(math.fsum(float((m * m).sum()) for m in one.values())) for one in moves]
            factors = [min(self.radius / length, 1.0) if length else 1.0 for length in lengths]
            for name in v:
                pulls = [one[name] * factor for one, factor in zip(moves, factors, strict=True)]
                v[name] = v[name] + mean(pulls, [1.0] * len(pulls))
        return {name: v[name].to(value.dtype) for name, value in center.items()}

    def buffers(self, center: Vector, updates: Sequence[Update]) -> Vector:
        """Return the medians: the radius is not in their units."""
        return Median().buffers(center, updates)


@dataclass(frozen=True, slots=True)
class Bucketing:
    """Means of ``size`` clients at random, and then another rule over the means: unlike clients become alike.

    One hostile client spoils a whole bucket, so the rule has to bear ``size`` times the share. Who shares a bucket is
    drawn anew in every round, by the seed and by who answered. With ``weight`` a bucket counts as its clients do
    together.

    Source: Karimireddy, He & Jaggi 2022 (arXiv:2006.09365), Algorithm 1, where s is ``size``.
    """

    combine: Combine
    size: int = 2  # s (count)
    seed: int = field(default=0, kw_only=True)
    number: int = field(default=0, kw_only=True, repr=False)  # of the round, 0 is the first; the server sets it

    def __post_init__(self) -> None:
        require(self.size >= 1, "Bucketing.size", self.size, "a bucket needs a client", "pass an integer >= 1")

    def params(self, center: Vector, updates: Sequence[Update]) -> Vector:
        """Return the rule over the buckets' means."""
        return self.combine.params(center, [replace(one, params=Mean().params(center, group), buffers={})
                                            for one, group in self._buckets(updates)])  # fmt: skip

    def buffers(self, center: Vector, updates: Sequence[Update]) -> Vector:
        """Return the rule over the buckets' mean buffers; it sees their mean parameters too, as Krum has to."""
        made = []
        for one, group in self._buckets(updates):
            whole = Mean().params(dict(one.params), group)
            made.append(replace(one, params=whole, buffers=Mean().buffers(center, group)))
        return self.combine.buffers(center, made)

    def _buckets(self, updates: Sequence[Update]) -> list[tuple[Update, list[Update]]]:
        ordered = whole_models("Bucketing", updates)
        source = stream(self.seed, "federated", "buckets", self.number, *(update.client for update in ordered))
        order = torch.randperm(len(ordered), generator=source).tolist()
        groups = [[ordered[at] for at in order[start : start + self.size]] for start in range(0, len(order), self.size)]
        return [(replace(one[0], weight=math.fsum(u.weight for u in one)), one) for one in groups]


def with_buckets_of(value: Any, number: int) -> Any:
    """Return a method, or a rule, whose buckets are those of a round."""
    held = inner_rules(value)
    changed = {name: new for name, one in held.items() if (new := with_buckets_of(one, number)) is not one}
    if isinstance(value, Bucketing):
        changed["number"] = number
    return replace(value, **changed) if changed else value


def inner_rules(value: Any) -> dict[str, Any]:
    """Methods and rules that a method or a rule is made of."""
    names = {each.name for each in fields(value)} if is_dataclass(value) else set()
    return {name: getattr(value, name) for name in ("method", "combine") if name in names}


def whole_models(rule: str, updates: Sequence[Update]) -> list[Update]:
    """Return the updates by client number; models of which parts are missing are refused."""
    ordered = sorted_by_client(updates)
    if any(update.params.keys() != ordered[0].params.keys() for update in ordered):
        why = f"{rule} compares whole models, and these clients sent different blocks"
        raise UserError(rule, got="partial models", why=why, do="pass combine=Median(), or blocks=None")
    return ordered


def flat(update: Update) -> Tensor:
    """Return all parameters of an update in one vector, float64, by name."""
    return torch.cat([update.params[name].double().flatten() for name in sorted(update.params)])


def pairwise(updates: Sequence[Update]) -> Tensor:
    """Squared distances of all pairs, shape (n, n), float64."""
    rows = torch.stack([flat(update) for update in updates])
    # Not by ‖a‖² + ‖b‖² − 2ab, which loses the digits of models that lie close together.
    return torch.stack([(rows - row).square().sum(1) for row in rows])
