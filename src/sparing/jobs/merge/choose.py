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
from sparing.valley.merging.dare import Dare
from sparing.valley.merging.linear import Linear, TaskArithmetic
from sparing.valley.merging.method import Method
from sparing.valley.merging.sign_aware import SignAware
from sparing.valley.merging.soup import greedy_members
from sparing.valley.merging.ties import Ties

# Factors λ that validation rows choose from.
SCALES: Final[Mapping[str, tuple[float, ...]]] = {
    "task": (0.2, 0.3, 0.4, 0.5, 0.7, 1.0),
    "dare": (0.2, 0.3, 0.4, 0.5, 0.7, 1.0),
    "ties": (0.5, 0.7, 1.0, 1.5),
    "sign-aware": (0.5, 0.7, 1.0),
}

# Factors without validation rows: task and ties as in Yadav et al. 2023 (arXiv:2306.01708), the others like them.
BLIND: Final = {"task": 0.4, "dare": 0.4, "ties": 1.0, "sign-aware": 1.0}


@dataclass(frozen=True, slots=True)
class Candidate:
    """One way to merge, ready to do it."""

    how: How
    method: Method
    scale: float | None = None  # its factor on the changes, where it has one
    members: tuple[int, ...] = ()  # places of the models in it; () for all

    @property
    def name(self) -> str:
        """In words."""
        if self.members:
            return f"{self.how} of {' '.join(letter(at) for at in self.members)}"
        return self.how if self.scale is None else f"{self.how}, λ = {self.scale:g}"


def method_of(how: How, settings: Settings, scale: float) -> Method:
    """The method that a name means, at factor λ = ``scale``."""
    methods: dict[str, Method] = {
        "soup": Linear(),
        "linear": Linear(settings.linear.weights),
        "task": TaskArithmetic(scale),
        "ties": Ties(settings.ties.keep, scale=scale),
        "dare": Dare(settings.dare.drop, then=TaskArithmetic(scale), seed=settings.seed),
        "sign-aware": SignAware(settings.ties.keep, scale=scale),
    }
    return methods[how]


def subset(members: Sequence[int], count: int) -> Candidate:
    """The mean of some of ``count`` models, as a candidate of the kind greedy."""
    shares = tuple(float(at in members) for at in range(count))
    return Candidate("greedy", Linear(shares), members=tuple(sorted(members)))


def candidates(settings: Settings, *, measured: bool) -> list[Candidate]:
    """The candidates to try; one where nothing is open. ``measured``: whether validation rows can choose."""
    # DARE is not tried: its random drops are noise on top of task arithmetic.
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
