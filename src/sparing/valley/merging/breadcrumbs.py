"""Model breadcrumbs: drop small changes and the very largest ones, and add up what lies between."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import KW_ONLY, dataclass, field

import torch
from torch import Tensor

from sparing.errors import require
from sparing.valley.merging.linear import TaskArithmetic
from sparing.valley.merging.method import PerModel, Slices, check_settings, each_model
from sparing.valley.merging.thinning import Then, Thinning, check_thinning, of_model
from sparing.valley.merging.ties import largest


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

    def thinned(self, name: str, model: int, delta: Slices) -> Slices:
        """Mask one task vector; its two thresholds are found in passes of their own, at the first reading."""
        keep, outliers = of_model(self.keep, model), of_model(self.outliers, model)
        kept = int(keep * delta.count)
        top = min(int(outliers * delta.count), delta.count - kept)
        limits: list[float] = []

        def read() -> Iterator[Tensor]:
            if keep < 1 and kept and not limits:
                limits.append(largest(delta, lambda count: top + kept))
                limits.append(largest(delta, lambda count: top + 1))
            for part in delta():
                if not limits:
                    yield part if keep >= 1 else torch.zeros_like(part)
                else:
                    sizes = part.abs()
                    yield torch.where((sizes >= limits[0]) & (sizes <= limits[1]), part, 0.0)

        return Slices(read, delta.shape)
