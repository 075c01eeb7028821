"""The density of each layer: one number, numbers by pattern, or laws that give small layers more (ER, ERK)."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from fractions import Fraction
from typing import TypeVar

from sparing.errors import UserError, require
from sparing.scaling.roles.find import Facts
from sparing.scaling.rules import Role


@dataclass(frozen=True, kw_only=True, slots=True)
class ERK:
    """Erdős–Rényi with kernels: density in proportion to (sum of dimensions)/(their product), at most 1.

    Source: Evci et al. 2020, section 3 (arXiv:1911.11134).
    """

    total: float
    """Share of live weights, over all masked layers together."""

    def __post_init__(self) -> None:
        """Refuse a total outside (0, 1]."""
        require(0 < self.total <= 1, "ERK.total", self.total, "it is a share of the weights", "pass 0 < total <= 1")

    def of(self, shapes: Mapping[str, Sequence[int]]) -> dict[str, float]:
        """Return densities; layers that would exceed 1 are dense and the others share the rest, until the total is met.

        Args:
            shapes: Layer -> shape of its weight.

        Returns:
            Layer -> density.

        Example:
            >>> ERK(total=0.5).of({"wide": (8, 8), "narrow": (2, 2)})
            {'wide': 0.46875, 'narrow': 1.0}
        """
        size = {name: math.prod(shape) for name, shape in shapes.items()}
        live = self.total * sum(size.values())
        dense: set[str] = set()
        # Each pass makes layers that would exceed 1 dense and shares what they leave among the others.
        while True:
            open_ = [name for name in shapes if name not in dense]
            left = live - sum(size[name] for name in dense)
            scale = left / sum(sum(shapes[name]) for name in open_) if open_ else 0.0
            density = {name: scale * sum(shapes[name]) / size[name] for name in open_}
            full = {name for name in open_ if density[name] >= 1}
            if not full:
                return {name: 1.0 if name in dense else density[name] for name in shapes}
            dense |= full


@dataclass(frozen=True, kw_only=True, slots=True)
class ER:
    """Erdős–Rényi: density ε (n_in + n_out)/(n_in n_out), at most 1. Mocanu et al. 2018 (arXiv:1707.04780)."""

    epsilon: float = 20.0
    """About how many live weights a unit has (count), ε."""

    def __post_init__(self) -> None:
        """Refuse an ε that leaves no weights."""
        require(self.epsilon > 0, "ER.epsilon", self.epsilon, "no weight would live", "pass epsilon > 0")

    def of(self, shapes: Mapping[str, Sequence[int]]) -> dict[str, float]:
        """Return densities of layers by the first two dimensions of their weights.

        Args:
            shapes: Layer -> shape of its weight.

        Returns:
            Layer -> density.
        """
        return {
            name: min(1.0, self.epsilon * (shape[0] + shape[1]) / (shape[0] * shape[1]))
            for name, shape in shapes.items()
        }


Value = TypeVar("Value")

Density = float | str | Mapping[str, float] | ERK | ER
"""One for all, by pattern of names (the first that fits; others are dense), or a law, also in words (``"erk:0.1"``)."""


def parse_law(word: str) -> ERK | ER:
    """Read a law as the command line spells it: ``erk:0.1`` or ``erk:1/10`` (the total), ``er:20`` (ε)."""
    law, _, rest = word.partition(":")
    try:
        number = float(Fraction(rest.strip()))
    except (ValueError, ZeroDivisionError):
        number = math.nan
    if law not in {"erk", "er"} or math.isnan(number):
        why = "a law in words has a name and a number: of ERK the share that lives of all weights together, of ER ε"
        raise UserError("density", got=repr(word), why=why, do='pass "erk:0.1", "er:20", or a share as a number')
    return ERK(total=number) if law == "erk" else ER(epsilon=number)


def densities(
    known: Mapping[str, Facts],
    roles: Mapping[str, Role],
    density: Density,
    *,
    sparse: Sequence[str] | None = None,
    least_fan_in: int = 4,
) -> dict[str, float]:
    """Return canonical name -> density of every weight that gets a mask; density 1 gets none.

    Hidden weights are masked, or those that the patterns in ``sparse`` match. ``least_fan_in`` is the number of live
    inputs that a unit must keep: below about 8 the corrections lose their accuracy, and units may die.
    """
    names = _masked(known, roles, sparse)
    found = _values(density, {name: known[name].shape for name in names})
    for name, value in found.items():
        if not 0 < value <= 1:
            raise UserError("density", got=f"{value} for {name}", why="it is a share", do="pass 0 < density <= 1")
    # Dense layers are exempt: their width is the author's choice.
    _require_live({name: value * known[name].fan_in for name, value in found.items() if value < 1}, least_fan_in)
    return {name: float(value) for name, value in found.items() if value < 1}


def _masked(known: Mapping[str, Facts], roles: Mapping[str, Role], sparse: Sequence[str] | None) -> list[str]:
    if sparse is None:
        return [name for name, role in roles.items() if role == "hidden"]
    _require_fits(sparse, known, "sparse")
    chosen = [name for name in known if any(fnmatchcase(name, pattern) for pattern in sparse)]
    if flat := [name for name in chosen if len(known[name].shape) < 2]:
        raise UserError("sparse", got=flat[0], why="a vector cannot be sparse", do="let the patterns fit weights only")
    return chosen


def _values(density: Density, shapes: Mapping[str, Sequence[int]]) -> dict[str, float]:
    if isinstance(density, str):
        density = parse_law(density)
    if isinstance(density, ERK | ER):
        return density.of(shapes)
    if isinstance(density, Mapping):
        _require_fits(list(density), shapes, "density")
        return by_pattern(density, shapes)
    if isinstance(density, bool) or not isinstance(density, int | float) or not 0 < density <= 1:
        do = 'pass 0 < density <= 1, {"pattern": share}, ERK(total=...) or "erk:0.1", ER() or "er:20"'
        raise UserError("density", got=repr(density), why="it is a share of live weights", do=do)
    return dict.fromkeys(shapes, float(density))


def by_pattern(patterns: Mapping[str, Value], names: Iterable[str]) -> dict[str, Value]:
    """Return for each name the value of the first pattern that matches it; names without a match are omitted."""
    first = {name: next((p for p in patterns if fnmatchcase(name, p)), None) for name in names}
    return {name: patterns[pattern] for name, pattern in first.items() if pattern is not None}


def _require_fits(patterns: Sequence[str], names: Mapping[str, object], what: str) -> None:
    for pattern in patterns:
        if not any(fnmatchcase(name, pattern) for name in names):
            raise UserError(
                what, got=repr(pattern), why="no weight that may be masked fits", do="use names that the report lists"
            )


def _require_live(live: Mapping[str, float], least: int) -> None:
    """Refuse layers with too few live inputs to a unit, naming them."""
    low = [f"{name} ({count:.3g})" for name, count in live.items() if count < least]
    if low:
        raise UserError(
            "density",
            got=f"fewer than {least} live inputs to a unit in {len(low)} layers: {', '.join(low[:4])}"
            + (" …" if len(low) > 4 else ""),
            why="such a layer's scale and rate are mostly noise",
            do="raise the density, give these layers a higher one by pattern, or pass least_fan_in= to go on",
        )
