"""Bring one net's units into the order of another's, so that the two can be averaged.

Source: Ainsworth, Hayase & Srinivasa 2023, "Git Re-Basin" (arXiv:2209.04836). The batch-norm statistics of an average
are taken anew afterwards, as in Jordan et al. 2023, "REPAIR" (arXiv:2211.08403): ``merge`` averages, ``interpolate``
and ``soup`` refresh.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, get_args

import torch
from torch import Tensor, nn
from torch.func import functional_call

from sparing.blocks import tied
from sparing.blocks.modes import evaluating
from sparing.blocks.names import unwrap
from sparing.errors import RunError, require
from sparing.valley.aligning.activations import ActivationFit
from sparing.valley.aligning.axes import Orders
from sparing.valley.aligning.matching import WeightFit, ascend
from sparing.valley.aligning.symmetry import Symmetry, symmetry_of
from sparing.valley.merging.compatible import Model, is_statistic, require_compatible, state_of

By = Literal["weights", "activations"]

# Largest difference between the answers before and after, as a share of the largest answer: sums are rounded in
# another order, which a deep net in float32 turns into a few times 1e-6 (and norms of a float64 net may be in float32)
TOLERANCE = 1e-5
_COARSE = 0.05  # of number formats of 16 bits


@dataclass(frozen=True, kw_only=True, slots=True)
class Alignment:
    """A model with its units in the order of another's."""

    state: Mapping[str, Tensor]
    """The reordered model's parameters and buffers by name; its function is that of the model before."""
    orders: Mapping[str, Tensor]
    """By group of units, named after one of their parameters: unit i is taken from place order[i], int64."""
    before: float
    """What was maximised, before: the inner product of all weights, or the sum of correlations of units."""
    after: float
    """The same afterwards."""
    difference: float
    """Largest difference between the outputs of the model and of its reordered form, as a share of the largest
    output."""

    @property
    def moved(self) -> float:
        """Share of the units whose place has changed."""
        total = sum(len(order) for order in self.orders.values())
        stay = sum(int((order == torch.arange(len(order))).sum()) for order in self.orders.values())
        return 1 - stay / total


@torch.no_grad()
def align(
    model: nn.Module,
    other: Model,
    batches: Iterable[Tensor | Mapping[str, Any]],
    *,
    by: By = "weights",
    seed: int = 0,
) -> Alignment:
    """Reorder the units of another model so that they match those of a model.

    Models trained from different starts have their units in different orders, and the average of two such nets is
    useless. Which units may be reordered, and what else with them (the next layer's inputs, batch norm, a residual
    stream, the heads of an attention layer and the channels in them), is read off one recorded forward pass.

    Args:
        model: The net whose order is kept; any net of linear, convolution, norm, attention and elementwise layers.
        other: Another of the same architecture, live or a state.
        batches: Inputs: tensors, shape (rows, ...), or mappings of keyword arguments. The first is what the forward
            pass is recorded on; ``by="activations"`` runs both models on all that have its shape.
        by: "weights" makes the inner product of all weights largest, "activations" the correlation of the units'
            outputs.
        seed: Seed of the order in which groups are visited.

    Returns:
        The reordered state and what it was reordered by. Average it with ``merge`` and refresh batch norm.

    Raises:
        UserError: If the models are of different architectures or not finite, the forward pass cannot be recorded, it
            has an operator whose symmetry is not known, or no unit can be reordered.
        RunError: If the reordered model gives other outputs, which would be a bug of ours.

    Source: Ainsworth et al. 2023 (arXiv:2209.04836), Algorithm 1.

    Example:
        >>> net = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3))
        >>> order = torch.randperm(8)
        >>> stranger = {n: x[order] if len(x) == 8 else x for n, x in net.state_dict().items()}
        >>> stranger["2.weight"] = stranger["2.weight"][:, order]
        >>> found = align(net, stranger, [torch.randn(16, 4)])
        >>> all(torch.equal(found.state[name], value) for name, value in net.state_dict().items())
        True
    """
    require(by in get_args(By), "by", repr(by), "no such way", f"pass one of {get_args(By)}")
    model, rows = unwrap(model), list(batches)
    require(bool(rows), "batches", "none", "the forward pass is recorded on one", "pass inputs, shape (rows, ...)")
    first, second = state_of(model), state_of(other)
    require_compatible([first, second])
    symmetry = symmetry_of(model, *_call(rows[0]))
    fit: WeightFit | ActivationFit
    if by == "weights":
        once: dict[int, str] = {}  # a tied tensor counts once, under its first name
        for name, axes in symmetry.tensors.items():
            if name in first and first[name].is_floating_point() and not is_statistic(name):
                once.setdefault(id(axes), name)
        mine, theirs = ({name: state[name] for name in once.values()} for state in (first, second))
        fit = WeightFit(mine, theirs, symmetry.tensors)
    else:
        same = [_flat(one) for one in rows if _shapes(one) == _shapes(rows[0])]
        fit = ActivationFit(symmetry, first, second, same)
    orders = ascend(symmetry.groups, fit, {}, fit.worth, seed)
    state = symmetry.reordered(second, orders)
    found = {leaf: orders.get(leaf, torch.arange(leaf.size)) for leaf in symmetry.groups}
    return Alignment(
        state=state,
        orders=_named(symmetry, found),
        before=fit.worth({}),
        after=fit.worth(orders),
        difference=_difference(model, second, state, rows[0]),
    )


def _named(symmetry: Symmetry, orders: Orders) -> dict[str, Tensor]:
    """Orders by the name of their group; groups that lie in one parameter are numbered."""
    named: dict[str, Tensor] = {}
    for leaf, order in orders.items():
        name, count = symmetry.name_of(leaf), 2
        key = name
        while key in named:
            key, count = f"{name} ({count})", count + 1
        named[key] = order
    return named


def _call(batch: Tensor | Mapping[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    return ((), dict(batch)) if isinstance(batch, Mapping) else ((batch,), {})


def _flat(batch: Tensor | Mapping[str, Any]) -> list[Any]:
    """Inputs in the order of the recorded pass."""
    return list(batch.values()) if isinstance(batch, Mapping) else [batch]


def _shapes(batch: Tensor | Mapping[str, Any]) -> list[Any]:
    return [tuple(one.shape) if isinstance(one, Tensor) else one for one in _flat(batch)]


def _difference(
    model: nn.Module, before: Mapping[str, Tensor], after: Mapping[str, Tensor], batch: Tensor | Mapping[str, Any]
) -> float:
    """Compare the answers of a net with its reordered form on one batch; refuse to return a net that differs."""
    args, kwargs = _call(batch)
    with evaluating(model):
        # a tied tensor goes by its first name
        states = [
            {name: value for name, value in state.items() if name not in tied(model)} for state in (before, after)
        ]
        pairs = [_answers(functional_call(model, state, args, kwargs)) for state in states]
    scale = max(float(one.abs().max()) for one in pairs[0])
    apart = max(float((one - two).abs().max()) for one, two in zip(*pairs, strict=True))
    share = apart / scale if scale else apart
    fine = min(torch.finfo(value.dtype).bits for value in before.values() if value.is_floating_point()) >= 32
    if not share <= (TOLERANCE if fine else _COARSE):
        why = f"the reordered model answers differently, by {share:.1e} of its largest answer"
        raise RunError(f"align: {why}; report the architecture, and average without aligning")
    return share


def _answers(output: Any) -> Sequence[Tensor]:
    """All floating tensors of an output."""
    if isinstance(output, Tensor):
        return [output] if output.is_floating_point() else []
    parts = output.values() if isinstance(output, Mapping) else output if isinstance(output, list | tuple) else ()
    return [one for part in parts for one in _answers(part)]
