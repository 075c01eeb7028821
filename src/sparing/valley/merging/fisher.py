"""Fisher merging: every weight is averaged by how much the loss of each model depends on it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from sparing.blocks import named_parameters
from sparing.blocks.modes import evaluating
from sparing.errors import require
from sparing.valley.merging.linear import Linear
from sparing.valley.merging.method import Method, Slices, check_settings, slices_of, weights_for, zip_slices


@dataclass(frozen=True, slots=True)
class Fisher(Method):
    """The mean of models weighted, element by element, by their Fisher information: Σ w_t F_t θ_t / Σ w_t F_t.

    F is the diagonal, estimated by the mean over rows of the squared gradient of a row's loss. Where it is zero in all
    models, and for tensors without it, the mean is that of ``Linear``.

    Source: Matena & Raffel 2022, "Merging Models with Fisher-Weighted Averaging" (arXiv:2111.09832), with the labels of
    the rows in place of draws from the model.

    Example:
        >>> rare = Fisher(({"w": torch.tensor([3.0, 0.0])}, {"w": torch.tensor([1.0, 0.0])}))
        >>> rare.tensor("w", [torch.tensor([0.0, 0.0]), torch.tensor([1.0, 1.0])])
        tensor([0.2500, 0.5000])
    """

    information: Sequence[Mapping[str, Tensor | Slices]]
    """F of each model in order, by name, of the shape of its tensor; ``Slices`` where they are on disk."""
    weights: tuple[float, ...] | None = None
    """Weights of the models in order, ≥ 0 (dimensionless); None for equal weights."""

    def __post_init__(self) -> None:
        check_settings(weights=self.weights)

    @classmethod
    def of(
        cls, models: Sequence[nn.Module], rows: Iterable[Any], loss: Callable[[nn.Module, Any], Tensor],
        weights: tuple[float, ...] | None = None,
    ) -> Fisher:  # fmt: skip
        """Measure models on rows that a scalar ``loss(model, row)`` is defined for; memory holds F of each model."""
        known = list(rows)
        return cls([squared_gradients(model, known, loss) for model in models], weights)

    @property
    def needs_base(self) -> bool:
        """False: a mean needs no ancestor."""
        return False

    def slices(self, name: str, models: Sequence[Slices], base: Slices | None = None) -> Iterator[Tensor]:
        """Merge the tensors of one name in slices."""
        why, do = "each model has its own", "pass one mapping for each, in order"
        require(len(self.information) == len(models), "information", len(self.information), why, do)
        plain = Linear(self.weights).slices(name, models)
        if any(name not in one for one in self.information):
            yield from plain
            return
        weights = weights_for(self.weights, len(models))
        found = [one[name] for one in self.information]
        known = [one if isinstance(one, Slices) else slices_of(one) for one in found]
        for one in known:
            why, do = "it is of the shape of the weights", "measure these very models"
            require(one.shape == models[0].shape, f"information at {name!r}", one.shape, why, do)
        for parts, shares, mean in zip(zip_slices(models), zip_slices(known), plain, strict=True):
            # In float64: squared gradients reach below what float32 holds with full precision
            wide = [weight * share.double() for share, weight in zip(shares, weights, strict=True)]
            total = torch.stack(wide).sum(0)
            why, do = "weights of a mean are numbers", "measure again, without rows of which the loss is not finite"
            require(bool(total.isfinite().all()), f"information at {name!r}", "what is not finite", why, do)
            merged = sum((w * part.double() for w, part in zip(wide, parts, strict=True)), torch.zeros_like(total))
            yield torch.where(total > 0, merged / torch.where(total > 0, total, 1.0), mean.double()).to(parts[0].dtype)


def squared_gradients(
    model: nn.Module, rows: Iterable[Any], loss: Callable[[nn.Module, Any], Tensor]
) -> dict[str, Tensor]:
    """The mean over rows of the squared gradient of each row's loss, by parameter; one row's gradient in memory."""
    parameters = {name: one for name, one in named_parameters(model).items() if one.is_floating_point()}
    frozen = [one for one in parameters.values() if not one.requires_grad]
    wide = {name: torch.promote_types(one.dtype, torch.float32) for name, one in parameters.items()}
    total = {name: torch.zeros(one.shape, dtype=wide[name], device=one.device) for name, one in parameters.items()}
    count = 0
    try:
        for one in frozen:
            one.requires_grad_(True)
        # dropout would be a chance, and batch norm would take single rows for the statistics of the data
        with evaluating(model), torch.enable_grad():
            for row in rows:
                value = loss(model, row)
                why, do = "every mean that it enters would be none", "leave out rows without labels, and such inputs"
                require(bool(value.isfinite()), f"loss of row {count}", value.item(), why, do)
                gradients = torch.autograd.grad(value, list(parameters.values()), allow_unused=True)
                for sums, gradient in zip(total.values(), gradients, strict=True):
                    if gradient is not None:
                        sums.add_(gradient.to(sums.dtype).square())
                count += 1
    finally:
        for one in frozen:
            one.requires_grad_(False)
    require(count > 0, "rows", "none", "squared gradients are a mean over rows", "pass some")
    return {name: sums.div_(count) for name, sums in total.items()}
