"""Which way to merge: the method values a setting means, and what ``auto`` chooses among them, with the reason."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from torch import Tensor

from sparing.jobs.merge.scores import decisive
from sparing.jobs.merge.settings import How, Settings, letter
from sparing.report import format_number
from sparing.valley.merging.breadcrumbs import Breadcrumbs
from sparing.valley.merging.dare import Dare
from sparing.valley.merging.della import Della
from sparing.valley.merging.linear import Linear, TaskArithmetic
from sparing.valley.merging.method import Method
from sparing.valley.merging.sce import Sce
from sparing.valley.merging.sign_aware import SignAware
from sparing.valley.merging.soup import greedy_members
from sparing.valley.merging.spherical import ModelStock, MultiSlerp, Slerp
from sparing.valley.merging.ties import Ties

_ADDED: Final = (0.2, 0.3, 0.4, 0.5, 0.7, 1.0)
_ELECTED: Final = (0.5, 0.7, 1.0, 1.5)

# Factors λ that validation rows choose from, and those without such rows: task and ties as in Yadav et al. 2023
# (arXiv:2306.01708), the others like them.
SCALES: Final[Mapping[str, tuple[float, ...]]] = {
    **dict.fromkeys(("task", "dare", "breadcrumbs", "della-linear"), _ADDED),
    **dict.fromkeys(("ties", "dare-ties", "breadcrumbs-ties", "della", "sce"), _ELECTED),
    "sign-aware": (0.5, 0.7, 1.0),
}
BLIND: Final = {how: 0.4 if scales is _ADDED else 1.0 for how, scales in SCALES.items()}


@dataclass(frozen=True, slots=True)
class Candidate:
    """One way to merge, ready to do it."""

    how: How
    method: Method
    scale: float | None = None  # its factor on the changes, where it has one
    members: tuple[int, ...] = ()  # places of the models in it; () for all
    told: str = ""  # its settings in words, where a search found them

    @property
    def name(self) -> str:
        """In words."""
        if self.told:
            return self.told
        if self.members:
            return f"{self.how} of {' '.join(letter(at) for at in self.members)}"
        return self.how if self.scale is None else f"{self.how}, λ = {self.scale:g}"


def method_of(how: How, settings: Settings, scale: float) -> Method:
    """The method that a name means, at factor λ = ``scale``."""
    weights, seed = settings.model_weights, settings.seed
    added = TaskArithmetic(scale, weights=weights)
    if how == "task":
        return added
    if how == "sce":
        return Sce(settings.sce.keep, scale=scale)
    if how == "ties":
        return Ties(settings.ties.keep, scale=scale, weights=weights)
    if how == "sign-aware":
        return SignAware(settings.ties.keep, scale=scale, weights=weights)
    if how in SCALES:
        then = added if how in {"dare", "breadcrumbs", "della-linear"} else Ties(1.0, scale=scale, weights=weights)
        if how.startswith("dare"):
            return Dare(settings.dare.drop, then=then, seed=seed)
        if how.startswith("breadcrumbs"):
            return Breadcrumbs(settings.breadcrumbs.keep, settings.breadcrumbs.outliers, then=then)
        return Della(settings.della.drop, settings.della.spread, then=then, seed=seed)
    return _of_models(how, settings)


def _of_models(how: How, settings: Settings) -> Method:
    """A method that combines whole models, or turns their changes where the base is known."""
    weights, around = settings.model_weights, settings.base is not None
    if how == "slerp":
        return Slerp(settings.slerp.t, across=settings.slerp.across)
    if how == "nuslerp":
        t = 0.5 if weights is None else weights[1] / sum(weights)
        return Slerp(t, across=settings.slerp.across, of_changes=around, straight_above=1.0)
    if how == "multislerp":
        return MultiSlerp(weights, of_changes=around)
    if how == "karcher":
        return MultiSlerp(weights, steps=10)
    if how == "model-stock":
        return ModelStock(settings.model_stock.across)
    return Linear(weights)


def subset(members: Sequence[int], count: int) -> Candidate:
    """The mean of some of ``count`` models, as a candidate of the kind greedy."""
    shares = tuple(float(at in members) for at in range(count))
    return Candidate("greedy", Linear(shares), members=tuple(sorted(members)))


def candidates(settings: Settings, *, measured: bool, known: Method | None = None) -> list[Candidate]:
    """The candidates to try; one where nothing is open. ``measured``: whether validation rows can choose.

    ``known`` is the method where it had to be measured itself.
    """
    if known is not None:
        return [Candidate(settings.method, known)]
    # Methods that drop at random are not tried: their draws are noise on top of task arithmetic and TIES.
    names: list[How] = ["soup"] if settings.method in {"auto", "greedy"} else [settings.method]
    if settings.method == "auto" and settings.base is not None and measured:
        names += ["task", "ties", "sign-aware"]
    found = []
    for how in names:
        if how not in SCALES:
            found.append(Candidate(how, method_of(how, settings, 1.0)))
            continue
        fixed = settings.factor or BLIND[how]
        scales = SCALES[how] if measured and settings.factor is None else (fixed,)
        found += [Candidate(how, method_of(how, settings, scale), scale) for scale in scales]
    return found


def greedy(validation: Sequence[Tensor], score: Callable[[Candidate], Tensor]) -> Candidate:
    """Add models to the mean, best first, as long as the validation loss does not rise.

    Source: Wortsman et al. 2022, Recipe 1 (arXiv:2203.05482).
    """
    losses = [decisive(scores) for scores in validation]
    members = greedy_members(losses, lambda members: decisive(score(subset(members, len(losses)))))
    return subset(members, len(losses))


@dataclass(frozen=True, slots=True)
class Decision:
    """What is done, and why."""

    candidate: Candidate | None  # the way; None where no merge is made
    reason: str
    fixed: Candidate | None = None  # the best on the validation rows of those that no search made, where one searched
    searched: Candidate | None = None  # the best of the search


def by_rows(tried: Mapping[str, float], parents: Sequence[float], ways: Sequence[Candidate], low: float) -> Decision:
    """Choose by losses (nats) on the validation rows; ``low``: lower end of the interval of the best one's gap."""
    # Measurement outranks prediction: a merge that does not lose against the mean of its parents is made whatever was
    # predicted, and one that loses is not.
    best = min(ways, key=lambda way: tried[way.name])
    loss, mean = tried[best.name], sum(parents) / len(parents)
    said = f"{format_number(loss)} nats on the validation rows, the models' own mean is {format_number(mean)}"
    if not math.isfinite(loss):
        return Decision(None, f"no way gives finite losses; {said}")
    if len(best.members) == 1:
        return Decision(None, f"no mean is better than {letter(best.members[0])} alone: {said}")
    if low > 0:
        return Decision(None, f"the best way, {best.name}, has {said}: the merge would be worse than its parts")
    if len(ways) == 1:
        return Decision(best, f"{best.name} has {said}")
    return Decision(best, f"of {len(ways)} ways tried, {best.name} is best: {said}")
