"""DARE: drop most of every change at random and enlarge the rest, so that each change is kept in expectation."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import KW_ONLY, dataclass, field

import torch
from torch import Tensor

from sparing.seeds import stream
from sparing.valley.merging.linear import TaskArithmetic
from sparing.valley.merging.method import Change, PerModel, Slices
from sparing.valley.merging.thinning import Rescale, Then, Thinning, check_thinning, of_model, with_norm


@dataclass(frozen=True, slots=True)
class Dare(Thinning):
    """Drop each element of every task vector with probability p, divide the rest by 1 − p, then merge.

    What is merged has mean τ and variance τ² p / (1 − p), element by element.

    Source: Yu et al. 2024, "Language Models are Super Mario" (arXiv:2311.03099), Equations 1 and 2.
    """

    drop: PerModel = 0.9
    """Probability that an element is dropped, in [0, 1), p; one for all models, or one for each."""
    _: KW_ONLY
    then: Then = field(default_factory=TaskArithmetic)
    """How the rescaled task vectors are merged. ``Ties(keep=1.0)`` elects signs without a second trimming."""
    seed: int = 0
    """Seed of the draws; each model and tensor has its own stream, so that the order of tensors does not matter."""
    rescale: Rescale = "mean"
    """What is left is divided by 1 − p; with "norm" it gets the L1 norm that the task vector had, as in mergekit."""

    def __post_init__(self) -> None:
        check_thinning(self.then, self.drop, self.rescale)

    def _thinning(self, name: str, model: int, delta: Slices) -> Change:
        """Drop and rescale; every reading draws from the start of one stream, so that all are equal."""
        drop = of_model(self.drop, model)
        factor = 1 / (1 - drop) if self.rescale == "mean" else 1.0

        def thin(parts: Iterator[Tensor]) -> Iterator[Tensor]:
            generator = stream(self.seed, "valley", "dare", name, model)
            for part in parts:
                # Drawn in float32 on the CPU, so that all devices and dtypes see the same draw
                draws = torch.rand(part.shape, generator=generator)
                yield (part * torch.ge(draws, drop, out=draws).to(part)).mul_(factor)

        return with_norm(delta, thin) if self.rescale == "norm" else thin
