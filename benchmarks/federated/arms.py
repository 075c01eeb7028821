"""The methods of the study as values, and the settings that each of them may choose from."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from benchmarks.federated.cases import Case
from sparing.federated import FedSign
from sparing.federated.methods.controls import Hinge, NormMatched, OwnSign, tensor_norms
from sparing.federated.methods.fedavg import FedAvg
from sparing.federated.methods.feddyn import FedDyn
from sparing.federated.methods.fedpan import FedPAN
from sparing.federated.methods.fedprox import FedProx
from sparing.federated.methods.interface import Method, State, Update, Vector
from sparing.federated.methods.moon import MOON
from sparing.federated.methods.scaffold import SCAFFOLD
from sparing.vectors import norm

BUDGET = 6
"""Settings that are tried for every method at first; a best one at the edge of them gets neighbours."""

PLAIN_FACTOR = 4.0
"""How much larger SCAFFOLD's rate is without momentum: a dozen steps at β = 0.9 go about so much further."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Setting:
    """One of the settings of a method."""

    lr: float
    strength: Any = None
    momentum: float = 0.9

    @property
    def label(self) -> str:
        """For rows."""
        return f"{self.lr:g}" if self.strength is None else f"{self.lr:g} {self.strength}"


def _scaffold(strength: Any) -> Method:
    return SCAFFOLD(momentum=0.9 if strength == "momentum" else 0.0)


METHODS: dict[str, tuple[Callable[[Any], Method], tuple[Any, ...]]] = {
    "fedavg": (lambda _: FedAvg(), ()),
    "fedsign": (lambda gamma: FedSign(gamma=gamma), (0.01, 0.1)),
    "own-sign": (lambda gamma: OwnSign(gamma=gamma), (0.01, 0.1)),
    "hinge": (lambda gamma: Hinge(gamma=gamma), (0.01, 0.1)),
    "fedprox": (lambda mu: FedProx(mu=mu), (0.01, 0.1)),
    "feddyn": (lambda alpha: FedDyn(alpha=alpha), (0.01, 0.1)),
    "scaffold": (_scaffold, ("momentum", "plain")),
    "fedpan": (
        lambda name: (
            FedPAN(operation="mul", periods=4, amplitude=0.1)
            if name == "mul"
            else FedPAN(operation="add", periods=1, amplitude=0.15)
        ),
        ("mul", "add"),
    ),
    "moon": (lambda mu: MOON(mu=mu), (0.1, 1.0)),
}
"""Method -> what makes it of its strength, and the two strengths tried."""

MATCHED = ("fedavg, same rate", "fedavg, grown", "fedsign, held")
"""FedAvg at FedSign's chosen rate; the same with each tensor scaled to the norm it had in FedSign's run; and FedSign
with each tensor scaled to the norm it had in FedAvg's run at that rate. They have FedSign's setting and no own."""

SWAPPED = {
    "own-sign, FedSign's setting": ("own-sign", "fedsign"),
    "fedsign, own-sign's setting": ("fedsign", "own-sign"),
}
"""Arm -> the method, and the one whose chosen rate and strength it gets: the two differ in nothing else then."""

ARMS = (*list(METHODS)[:4], *SWAPPED, *MATCHED, *list(METHODS)[4:])
"""In the order in which they are run."""

LATE = ("moon",)
"""Methods that cost several times as much as the others, and run when all others are done."""


def settings(arm: str, case: Case) -> list[Setting]:
    """The six settings that are tried for a method: six rates, or three with two strengths each."""
    strengths = METHODS[arm][1]
    if not strengths:
        return [Setting(lr=rate) for rate in case.rates]
    plain = {"plain": (PLAIN_FACTOR, 0.0)}
    found = []
    for rate in case.rates[2:5]:
        for strength in strengths:
            factor, momentum = plain.get(strength, (1.0, 0.9)) if isinstance(strength, str) else (1.0, 0.9)
            found.append(Setting(lr=factor * rate, strength=strength, momentum=momentum))
    return found


def beyond(best: Setting, case: Case) -> list[Setting]:
    """The neighbours that a setting must have beaten to lie inside its sweep: next rates, and strengths × 10 and / 10.

    Kinds (words) have no neighbours; FedAvg has no strength.
    """
    plain = PLAIN_FACTOR if best.strength == "plain" else 1.0
    rates = case.rates
    at = min(range(len(rates)), key=lambda index: abs(plain * rates[index] - best.lr))
    inside = math.isclose(plain * rates[at], best.lr, rel_tol=1e-6)
    lower = plain * rates[at - 1] if inside and at else best.lr / 2
    upper = plain * rates[at + 1] if inside and at + 1 < len(rates) else best.lr * 2
    found = [replace(best, lr=float(f"{rate:.6g}")) for rate in (lower, upper)]
    if isinstance(best.strength, float):
        found += [replace(best, strength=float(f"{best.strength * factor:.6g}")) for factor in (0.1, 10.0)]
    return found


@dataclass(frozen=True, slots=True)
class Sweep:
    """The settings of a method that have a score, best first found."""

    scores: dict[Setting, float]
    """Mean accuracy on the validation rows."""
    best: Setting
    """Of the highest score; of equals the first."""
    open: tuple[Setting, ...]
    """Neighbours of the best that were not tried; none if the best lies inside its sweep."""


def sweep(arm: str, case: Case, score: Callable[[Setting], float | None], first: Sequence[Setting] = ()) -> Sweep:
    """Widen a method's six settings, or the ``first`` ones, until the best one has beaten its neighbours.

    Args:
        arm: The method.
        case: Data and net.
        score: Validation accuracy of a setting, or None if it is not measured and shall not be.
        first: What is tried at first, the method's six settings if empty.

    Returns:
        What was tried, the best, and what stays open.
    """
    wanted: list[Setting] = list(first) or settings(arm, case)
    scores: dict[Setting, float] = {}
    while True:
        found = {setting: score(setting) for setting in wanted if setting not in scores}
        scores |= {setting: value for setting, value in found.items() if value is not None}
        best = max(scores, key=scores.__getitem__)  # the first of equals
        wanted = [setting for setting in beyond(best, case) if setting not in scores]
        if not wanted or all(value is None for value in found.values()):
            return Sweep(scores, best, tuple(wanted))


def method_of(arm: str, setting: Setting, norms: Sequence[Mapping[str, float]] | None = None) -> Method:
    """The method of an arm; the matched arms need the norms of the other run."""
    arm = SWAPPED.get(arm, (arm,))[0]
    if arm in MATCHED:
        inner: Method = FedSign(gamma=setting.strength) if arm == "fedsign, held" else FedAvg()
        return inner if norms is None else NormMatched(inner, norms)
    return METHODS[arm][0](setting.strength)


class Watched:
    """A method that remembers how long its model was at first, and each tensor after every round."""

    def __init__(self, method: Method) -> None:
        """Watch a method."""
        self._method = method
        self.first = 0.0
        self.norms: list[dict[str, float]] = []

    def __getattr__(self, name: str) -> Any:
        """As the method."""
        return getattr(self._method, name)

    def server_state(self, params: Vector) -> State:
        """As the method; the run begins here."""
        self.first = float(norm(params))
        return self._method.server_state(params)

    def aggregate(
        self, global_params: Vector, updates: Sequence[Update], server_state: State, clients: int
    ) -> tuple[Vector, State, State]:
        """As the method."""
        found = self._method.aggregate(global_params, updates, server_state, clients)
        self.norms.append(tensor_norms(found[0]))
        return found
