"""DARE: drop most of every change at random and enlarge the rest, so that each change is kept in expectation."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import KW_ONLY, dataclass, field

import torch
from torch import Tensor

from sparing.errors import require
from sparing.seeds import stream
from sparing.valley.merging.linear import TaskArithmetic
from sparing.valley.merging.method import Rule, Slices, TaskVectorMethod
from sparing.valley.merging.ties import Ties


@dataclass(frozen=True, slots=True)
class Dare(TaskVectorMethod):
    """Drop each element of every task vector with probability p, divide the rest by 1 − p, then merge.

    What is merged has mean τ and variance τ² p / (1 − p), element by element.

    Source: Yu et al. 2024, "Language Models are Super Mario" (arXiv:2311.03099), Equations 1 and 2.
    """

    drop: float = 0.9
    """Probability that an element is dropped, in [0, 1), p."""
    _: KW_ONLY
    then: TaskArithmetic | Ties = field(default_factory=TaskArithmetic)
    """How the rescaled task vectors are merged. ``Ties(keep=1.0)`` elects signs without a second trimming."""
    seed: int = 0
    """Of the draws; each model and tensor has its own stream, so that the order of tensors does not matter."""

    def __post_init__(self) -> None:
        why = "it is a probability, and 1 would leave nothing"
        require(0 <= self.drop < 1, "drop", self.drop, why, "pass 0 <= drop < 1, such as 0.9")
        whole = not (isinstance(self.then, Ties) and self.then.across == "model")
        why = "thresholds over the whole model would need all draws at once"
        require(whole, "then", 'Ties(across="model")', why, 'use Ties(across="tensor")')

    def _deltas(self, name: str, deltas: list[Slices]) -> list[Slices]:
        return [self.thinned(name, model, delta) for model, delta in enumerate(deltas)]

    def _rule(self, name: str, deltas: Sequence[Slices]) -> Rule:
        return self.then._rule(name, deltas)

    def thinned(self, name: str, model: int, delta: Slices) -> Slices:
        """Drop and rescale one task vector; every reading draws from the start of one stream, so that all are equal."""

        def read() -> Iterator[Tensor]:
            generator = stream(self.seed, "valley", "dare", name, model)
            for part in delta():
                # Drawn in float32 on the CPU, so that all devices and dtypes see the same draw
                draws = torch.rand(part.shape, generator=generator)
                yield torch.where((draws >= self.drop).to(part.device), part / (1 - self.drop), 0.0)

        return read
