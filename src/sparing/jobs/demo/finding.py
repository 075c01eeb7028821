"""What a headline may say of a difference: one is named only where its interval excludes zero."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final, Self

from sparing.report import format_number
from sparing.valley.scans.intervals import mean_interval

NOTHING_SHOWN: Final = "no difference shown"

ONE_RUN: Final = "one run, no interval"


@dataclass(frozen=True, kw_only=True, slots=True)
class Difference:
    """A mean of paired differences and its interval; of ratios, the differences are those of their logarithms."""

    mean: float
    low: float  # ends of the interval; NaN where there is a single run
    high: float
    n: int  # pairs (count)
    unit: str = ""  # of the differences; "×" for ratios
    bound: bool = False  # whether the mean is known to be at least so large, and no more

    @classmethod
    def of(cls, differences: Sequence[float], unit: str = "", *, bound: bool = False) -> Self:
        """The mean of paired differences with Student's 95 % interval."""
        low, high = mean_interval(differences)
        mean = math.fsum(differences) / len(differences)
        return cls(mean=mean, low=low, high=high, n=len(differences), unit=unit, bound=bound)

    @classmethod
    def of_ratios(cls, ratios: Sequence[float], *, bound: bool = False) -> Self:
        """The geometric mean of ratios with its interval."""
        return cls.of([math.log(one) for one in ratios], "×", bound=bound)

    @property
    def shown(self) -> bool:
        """Whether the interval excludes zero, which that of a single run never does."""
        return self.low > 0 or self.high < 0

    @property
    def headline(self) -> str:
        """The difference where it is shown, or that none is."""
        return self.text if self.shown else NOTHING_SHOWN

    @property
    def text(self) -> str:
        """The difference whether it is shown or not: only where its interval stands beside it."""
        if math.isnan(self.mean):
            return "unknown"
        return f"{'≥ ' if self.bound else ''}{self._written(self.mean, unit=True)}"

    @property
    def interval(self) -> str:
        """The interval in brackets and the number of pairs behind it."""
        if math.isnan(self.low):
            return ONE_RUN
        ends = f"[{self._written(self.low)}, {self._written(self.high)}]"
        return f"{ends}, n = {self.n}".replace("n = ", "n\N{NO-BREAK SPACE}=\N{NO-BREAK SPACE}")

    def beside(self, pairs: str = "") -> str:
        """What stands beside the headline: the interval, and the difference where the headline does not name it.

        ``pairs``: what the number of pairs counts, such as "seeds".
        """
        known = self.interval if self.shown else f"{self.text} {self.interval}"
        return f"{known} {pairs}" if pairs and not math.isnan(self.low) else known

    @property
    def whole(self) -> str:
        """Difference, interval and, where it is not shown, words that say so."""
        both = f"{self.text} {self.interval}"
        return both if self.shown else f"{NOTHING_SHOWN} ({both})"

    def says(self, above: str, below: str) -> str:
        """The word for a shown rise or fall, such as "better" and "worse"; otherwise that none is shown."""
        if not self.shown:
            return NOTHING_SHOWN
        return above if self.mean > 0 else below

    def _written(self, value: float, *, unit: bool = False) -> str:
        if self.unit == "×":
            return format_number(math.exp(value), "×")
        text = f"{value:+.1f}" if self.unit in {"points", "%"} else f"{value:+.3f}"
        return f"{text}{f' {self.unit}' if unit and self.unit else ''}".replace("-", "−")


def lowest(ends: Mapping[str, Sequence[float]]) -> str | None:
    """The name whose numbers, paired by position, are shown to lie below those of every other; none if there is none.

    Example:
        >>> lowest({"a": [1.0, 1.1, 1.2], "b": [2.0, 2.1, 2.3]}), lowest({"a": [1.0], "b": [2.0]})
        ('a', None)
    """
    name = min(ends, key=lambda one: math.fsum(ends[one]))
    others = [[b - a for a, b in zip(ends[name], ends[other], strict=True)] for other in ends if other != name]
    return name if all(Difference.of(gaps).low > 0 for gaps in others) else None
