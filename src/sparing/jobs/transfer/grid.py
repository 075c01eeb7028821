"""The cells of a study, and the lines along which best rates are compared."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from sparing.jobs.transfer.settings import RuleName, Transfer

Along = Literal["density", "width", "pairs"]


@dataclass(frozen=True, slots=True, order=True)
class Cell:
    """One training run."""

    rule: RuleName
    width: int  # d (count)
    density: float  # ρ
    x: float  # log2 of what is swept
    seed: int  # of weights, masks and batches

    @property
    def params(self) -> dict[str, Any]:
        """As the parameters of a trial."""
        return {name: getattr(self, name) for name in self.__dataclass_fields__}


@dataclass(frozen=True, slots=True)
class Line:
    """Places whose best rates are compared with the first one's."""

    rule: RuleName
    along: Along  # what changes on it
    name: str  # what stays, in words
    places: tuple[tuple[int, float], ...]  # (width, density), the reference first


def places(settings: Transfer) -> list[tuple[int, float]]:
    """Widths and densities with enough live inputs, in the order of the settings."""
    return [(width, density) for width, density in settings.places if width * density >= settings.least_live]


def omitted(settings: Transfer) -> list[tuple[int, float]]:
    """Widths and densities that are omitted for too few live inputs."""
    kept = places(settings)
    return [place for place in settings.places if place not in kept]


def cells(settings: Transfer) -> list[Cell]:
    """Every run of a study, seed by seed, so that an unfinished one is balanced."""
    return [
        Cell(rule, width, float(density), float(x), seed)
        for seed in settings.seeds
        for rule in settings.rules
        for width, density in places(settings)
        for x in settings.swept
    ]


def lines(settings: Transfer) -> list[Line]:
    """The comparisons: along density at each width, along width at the highest density, or along the pairs."""
    known = places(settings)
    found: list[Line] = []
    for rule in settings.rules:
        if settings.pairs:
            found.append(Line(rule, "pairs", "the pairs as given", tuple(known)))
            continue
        for width in settings.widths:
            mine = sorted((place for place in known if place[0] == width), key=lambda place: -place[1])
            found.append(Line(rule, "density", f"width {width}", tuple(mine)))
        densest = max(density for _, density in known)
        wide = sorted(place for place in known if place[1] == densest)
        found.append(Line(rule, "width", f"density {densest:g}", tuple(wide)))
    return [line for line in found if len(line.places) >= 2]
