"""Model breadcrumbs: drop small changes and the very largest ones, and add up what lies between."""

from __future__ import annotations

from dataclasses import KW_ONLY, dataclass, field

import torch
import torch.nn.functional as F

from sparing.errors import require
from sparing.valley.merging.linear import TaskArithmetic
from sparing.valley.merging.method import Change, PerModel, Slices, check_settings, each_model
from sparing.valley.merging.thinning import Then, Thinning, check_thinning, of_model
from sparing.valley.merging.ties import largest, trimmed


@dataclass(frozen=True, slots=True)
class Breadcrumbs(Thinning):
    """Mask both tails of every task vector, tensor by tensor: ⌊γ n⌋ outliers and the smallest, so that ⌊k n⌋ stay.

    Where fewer than ⌊γ n⌋ elements need to go, fewer outliers do. Magnitudes equal to the last one kept stay too.

    Source: Davari & Belilovsky 2023, "Model Breadcrumbs" (arXiv:2312.06795); its β is 1 − k − γ.
    """

    keep: PerModel = 0.9
    """Share of elements kept in each task vector, in (0, 1], or one for each model; k."""
    outliers: PerModel = 0.01
    """Share of the largest magnitudes that are dropped, in [0, 1), or one for each model; γ."""
    _: KW_ONLY
    then: Then = field(default_factory=TaskArithmetic)
    """How the masked task vectors are merged; ``Ties(keep=1.0)`` elects signs."""

    def __post_init__(self) -> None:
        check_settings(keep=self.keep)
        check_thinning(self.then, 0.0)
        fine = all(0 <= share < 1 for share in each_model(self.outliers))
        require(
            fine, "outliers", self.outliers, "it is a share of the elements", "pass 0 <= outliers < 1, such as 0.01"
        )

    def _thinning(self, name: str, model: int, delta: Slices) -> Change:
        """Find the two thresholds, in passes of their own."""
        keep, outliers = of_model(self.keep, model), of_model(self.outliers, model)
        kept = int(keep * delta.count)
        top = min(int(outliers * delta.count), delta.count - kept)
        if keep >= 1:
            return iter
        if not kept:
            return lambda parts: (torch.zeros_like(part) for part in parts)
        low, high = largest(delta, lambda count: top + kept), largest(delta, lambda count: top + 1)
        return lambda parts: (trimmed(part, low) - F.hardshrink(part, high) for part in parts)
