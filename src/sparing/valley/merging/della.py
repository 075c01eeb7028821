"""DELLA: drop small changes more often than large ones, elect signs, and average what has them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import KW_ONLY, dataclass, field

import torch
from torch import Tensor

from sparing.errors import require
from sparing.seeds import stream
from sparing.valley.merging.method import Change, PerModel, Slices, cut_rows, each_model, recut, slice_lengths
from sparing.valley.merging.thinning import Rescale, Then, Thinning, check_thinning, of_model, with_norm
from sparing.valley.merging.ties import Ties


@dataclass(frozen=True, slots=True)
class Della(Thinning):
    """Drop each element with a probability that falls with the rank of its magnitude in its row, then merge.

    The smallest element of a row is dropped with probability p + ε, the largest with p − ε, those between evenly; what
    is left is divided by its probability to be left. A vector is one row.

    Source: Deep et al. 2024, "DELLA-Merging" (arXiv:2406.11617), MagPrune, then elect and fuse as in TIES.
    """

    drop: PerModel = 0.7
    """Mean probability that an element is dropped, p, in (0, 1); one for all models, or one for each."""
    spread: PerModel = 0.15
    """How far probabilities lie on both sides of it, ε; p ± ε stays within (0, 1)."""
    _: KW_ONLY
    then: Then = field(default_factory=lambda: Ties(1.0))
    """How the thinned task vectors are merged; ``TaskArithmetic()`` adds them up."""
    seed: int = 0
    """Seed of the draws; each model and tensor has its own stream."""
    rescale: Rescale = "mean"
    """With "norm" what is left gets the L1 norm that the task vector had, as in mergekit."""

    def __post_init__(self) -> None:
        check_thinning(self.then, self.drop, self.rescale)
        drops, spreads = each_model(self.drop), each_model(self.spread)
        count = max(len(drops), len(spreads))
        pairs = [(drops[at % len(drops)], spreads[at % len(spreads)]) for at in range(count)]
        # Where nothing is dropped there is nothing to spread
        fine = all(spread >= 0 and (drop == 0 or 0 < drop - spread <= drop + spread < 1) for drop, spread in pairs)
        got = f"{self.spread} with drop={self.drop}"
        require(fine, "spread", got, "drop − spread and drop + spread are probabilities", "pass a smaller spread")

    def _thinning(self, name: str, model: int, delta: Slices) -> Change:
        """Drop and rescale; every reading draws from the start of one stream, so that all are equal."""
        drop, spread = of_model(self.drop, model), of_model(self.spread, model)
        if drop == 0 or not delta.count:
            return iter
        width = delta.shape[-1] if len(delta.shape) > 1 else delta.count

        def rows(parts: Iterator[Tensor]) -> Iterator[Tensor]:
            generator = stream(self.seed, "valley", "della", name, model)
            for part in cut_rows(parts, delta.count, width):
                kept = keep_probability(part, 1 - drop, spread)
                draws = torch.rand(part.shape, generator=generator).to(kept)
                stay = torch.lt(draws, kept, out=draws)
                yield (part * (stay.div_(kept) if self.rescale == "mean" else stay)).view(-1)

        def thin(parts: Iterator[Tensor]) -> Iterator[Tensor]:
            return recut(rows(parts), slice_lengths(delta.count))

        return with_norm(delta, thin) if self.rescale == "norm" else thin


def keep_probability(rows: Tensor, keep: float, spread: float) -> Tensor:
    """Probability to be kept of each element of rows: by its rank, from keep − spread to keep + spread."""
    width = rows.shape[1]
    # A row of one element is its own largest and smallest
    by_rank = torch.linspace(keep - spread, keep + spread, width) if width > 1 else torch.tensor([keep])
    return torch.empty_like(rows).scatter_(1, _order(rows), by_rank.to(rows).expand_as(rows))


def _order(rows: Tensor) -> Tensor:
    """Places of the elements of each row from the smallest magnitude to the largest, the earlier first where equal."""
    if rows.device.type != "cpu" or rows.dtype != torch.float32:
        return rows.abs().argsort(dim=1, stable=True)
    # Magnitudes are ordered as their bits; with the place below them each is one integer, which NumPy sorts many times
    # as fast as torch sorts pairs
    keys = rows.abs().view(torch.int32).to(torch.int64).bitwise_left_shift_(32)
    keys += torch.arange(rows.shape[1])
    keys.numpy().sort(axis=1)
    return keys.bitwise_and_((1 << 32) - 1)
