"""The curves of a scan, each once, in the order in which they are walked."""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Iterable
from dataclasses import dataclass
from typing import Final

from torch import nn

from sparing.errors import UserError
from sparing.jobs.scan.settings import GroupName, NoiseName, Settings
from sparing.valley.config import Noise, Special, SpecialKind
from sparing.valley.selection import selected
from sparing.vectors import Vector

# Directions as the paper writes them; μ is the mean of each tensor.
TITLES: Final[dict[str, str]] = {
    "gaussian": "G(0, 1)", "uniform": "U(−1, 1)", "ternary": "{−1, 0, 1}", "shifted-gaussian": "G(1, 1)",
    "positive-uniform": "U(0, 1)", "binary": "{0, 1}", "one": "{1}",
    "initial": "θ₀, the start", "self": "θ, the weights", "sign": "sign(θ)", "centred-sign": "sign(θ − μ)",
    "positive": "1 where θ > 0", "centred-positive": "1 where θ > μ",
}  # fmt: skip

SPECIALS: Final[tuple[SpecialKind, ...]] = (
    "initial", "self", "sign", "centred-sign", "positive", "centred-positive",
)  # fmt: skip

GROUPS: Final[dict[str, str]] = {
    "all": "all", "classifier": "classifier (CLF)", "features": "all but the classifier (FEAT)",
    "first": "first blocks (FIRST)", "conv": "convolutions (CONV)", "norm": "norm layers (NORM)",
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class CurveSpec:
    """One curve: what to walk along."""

    kind: NoiseName | SpecialKind  # noise or special direction
    ratio: float = 0.0  # sign-change ratio: 0 is raw, 1 is sign-consistent
    group: GroupName = "all"  # parameters that move

    @property
    def special(self) -> bool:
        """Whether it is deterministic."""
        return self.kind in SPECIALS

    @property
    def sign(self) -> str:
        """Its signs in a word."""
        return {0.0: "raw", 1.0: "consistent"}.get(self.ratio, f"{self.ratio:g}")

    def direction(self, settings: Settings, initial: Vector | None) -> Noise | Special:
        """The direction as ``sparing.valley`` takes it; ``initial`` are the weights before training."""
        if self.special:
            start = initial if self.kind == "initial" else None
            return Special(self.kind, initial=start, norm=settings.norm)  # type: ignore[arg-type]
        sign = {0.0: "raw", 1.0: "consistent"}.get(self.ratio, self.ratio)
        return Noise(self.kind, sign=sign, norm=settings.norm, group=self.group)  # type: ignore[arg-type]


def present(model: nn.Module, groups: Iterable[GroupName]) -> list[GroupName]:
    """Those groups that have a parameter that may move, in the same order."""
    found = []
    for group in groups:
        with contextlib.suppress(UserError):
            selected(model, group)
            found.append(group)
    return found


def curve_specs(settings: Settings, *, groups: Collection[str], started: bool) -> list[CurveSpec]:
    """Every curve that the settings want, each once though several parts share it."""
    wanted: list[CurveSpec] = []
    if "noises" in settings.parts:
        wanted += [CurveSpec(kind, ratio) for kind in settings.noises for ratio in (0.0, 1.0)]
    if "ratio" in settings.parts:
        wanted += [CurveSpec("gaussian", float(ratio)) for ratio in settings.ratios]
    if "groups" in settings.parts:
        kept = [group for group in settings.groups if group in groups]
        wanted += [CurveSpec("gaussian", ratio, group) for group in kept for ratio in (0.0, 1.0)]
    if "special" in settings.parts:
        wanted += [CurveSpec(kind) for kind in SPECIALS if started or kind != "initial"]
    # Parts overlap: a noise, a ratio and a group can name the same curve.
    return list(dict.fromkeys(wanted))
