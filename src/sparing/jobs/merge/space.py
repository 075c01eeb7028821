"""What ``--search`` searches: the weights of the models, and the settings that a method has beside them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, Final

from sparing.jobs.merge.choose import Candidate, method_of
from sparing.jobs.merge.settings import SCALED, WEIGHTED, How, Settings

FACTORS: Final = (0.05, 2.0)  # λ, from hardly anything of the changes to twice all of them

# Settings of a method beside weights and λ: group, setting and the range that is searched
_PARTS: Final[Mapping[str, Sequence[tuple[str, str, float, float]]]] = {
    "ties": [("ties", "keep", 0.05, 1.0)],
    "sign-aware": [("ties", "keep", 0.05, 1.0)],
    "dare": [("dare", "drop", 0.0, 0.95)],
    "dare-ties": [("dare", "drop", 0.0, 0.95)],
    "breadcrumbs": [("breadcrumbs", "keep", 0.05, 0.95), ("breadcrumbs", "outliers", 0.0, 0.05)],
    "breadcrumbs-ties": [("breadcrumbs", "keep", 0.05, 0.95), ("breadcrumbs", "outliers", 0.0, 0.05)],
    "della": [("della", "drop", 0.2, 0.8)],
    "della-linear": [("della", "drop", 0.2, 0.8)],
    "sce": [("sce", "keep", 0.05, 1.0)],
    "slerp": [("slerp", "t", 0.0, 1.0)],
}


def names(settings: Settings) -> list[How]:
    """Methods to search among: of auto those that it tries, without those that drop at random."""
    if settings.method != "auto":
        return [settings.method]
    found: list[How] = ["linear", *(["slerp"] if len(settings.models) == 2 else [])]  # type: ignore[list-item]
    return found + (["task", "ties", "sign-aware"] if settings.base is not None else [])


def propose(trial: Any, settings: Settings) -> Candidate:
    """A candidate from the numbers that an optuna trial suggests; every method's are its own."""
    known = names(settings)
    how: How = trial.suggest_categorical("how", known) if len(known) > 1 else known[0]

    def number(name: str, low: float, high: float) -> float:
        return float(trial.suggest_float(f"{how}.{name}", low, high))

    told = []
    changes: dict[str, Any] = {}
    if how in WEIGHTED:
        changes["model_weights"] = weights = _weights(number, len(settings.models))
        told.append(f"weights {' '.join(f'{weight:.3g}' for weight in weights)}")
    scale = None
    if how in SCALED:
        scale = number("factor", *FACTORS)
        told.append(f"λ = {scale:.3g}")
    for group, name, low, high in _PARTS.get(how, ()):
        value = number(name, low, high)
        changes[group] = replace(changes.get(group, getattr(settings, group)), **{name: value})
        told.append(f"{name} {value:.3g}")
    method = method_of(how, replace(settings, method=how, search=None, **changes), scale or 1.0)
    return Candidate(how, method, scale, told=", ".join([how, *told]))


def numbers_of(way: Candidate, settings: Settings) -> dict[str, Any] | None:
    """What a trial would have to suggest to be a fixed recipe with equal weights; None outside what is searched."""
    how = "linear" if way.how == "soup" else way.how
    known = names(settings)
    if how not in known or way.members:
        return None
    found: dict[str, Any] = {}
    if how in WEIGHTED:
        count = len(settings.models)
        places = ["share"] if count == 2 else [f"weight {at}" for at in range(count)]
        found |= dict.fromkeys((f"{how}.{place}" for place in places), 0.5)
    ranges = [
        (name, getattr(getattr(settings, group), name), low, high) for group, name, low, high in _PARTS.get(how, ())
    ]
    if how in SCALED:
        ranges.append(("factor", way.scale, *FACTORS))
    if not all(low <= value <= high for _, value, low, high in ranges):
        return None
    found |= {f"{how}.{name}": value for name, value, _, _ in ranges}
    return found | ({"how": how} if len(known) > 1 else {})


def _weights(number: Callable[[str, float, float], float], models: int) -> tuple[float, ...]:
    """Weights of mean 1: of two models by one share, of more by one number each."""
    if models == 2:
        share = number("share", 0.0, 1.0)
        return 2 * (1 - share), 2 * share
    found = [number(f"weight {at}", 0.0, 1.0) for at in range(models)]
    total = sum(found)
    return tuple(models * one / total for one in found) if total > 0 else (1.0,) * models
