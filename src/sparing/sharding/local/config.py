"""How often groups meet, and what they do then."""

from __future__ import annotations

import math
from dataclasses import dataclass

from sparing.errors import require
from sparing.sharding.lowbit.config import LowBit


@dataclass(frozen=True, kw_only=True)
class LocalSteps:
    """Steps of each group alone, with an outer step of all groups together now and then: DiLoCo.

    Between two outer steps a group trains by itself: gradients are means over its ranks, and nothing travels between
    groups. In an outer step the mean over groups of what each has moved by, start minus end, is the gradient of a step
    with Nesterov's momentum from the common start; all groups continue from there. Inner optimizer state stays with its
    group. With ``every=1, rate=1, momentum=0`` and SGD the result is that of ordinary steps.

    Example:
        >>> LocalSteps(every=32).rate
        0.7

    Source: Douillard et al. 2023 (DiLoCo, arXiv:2311.08105); differences in few bits as in Jaghouar et al. 2024
    (INTELLECT-1, arXiv:2412.01152).
    """

    every: int
    """Inner steps between two outer steps (count), H."""

    rate: float = 0.7
    """Outer learning rate."""

    momentum: float = 0.9
    """Outer momentum, Nesterov's."""

    wire: LowBit | None = None
    """Few bits for the differences that cross between groups, with error feedback; none: exact."""

    def __post_init__(self) -> None:
        require(self.every >= 1, "LocalSteps.every", self.every, "it counts inner steps", "pass 1 or more")
        sound = 0 < self.rate < math.inf
        require(sound, "LocalSteps.rate", self.rate, "it is a learning rate", "pass a positive number")
        why, do = "it is the share of the last outer step that the next one keeps", "pass 0 or more, below 1"
        require(0 <= self.momentum < 1, "LocalSteps.momentum", self.momentum, why, do)
        given = None if self.wire is None else self.wire.params
        why, do = "no parameters travel between groups, only differences", "pass LowBit(bits=…) alone"
        require(given is None, "LocalSteps.wire", f"LowBit(params={given})", why, do)
