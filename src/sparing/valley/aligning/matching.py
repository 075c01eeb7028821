"""The order of one net's units that fits another's best, by their weights or by what they answer.

Weight matching solves a linear assignment for one group of units at a time, the others as they are, until no group
gains any more. Source: Ainsworth, Hayase & Srinivasa 2023, "Git Re-Basin" (arXiv:2209.04836), Algorithm 1.
"""

from __future__ import annotations

import importlib
import math
from collections.abc import Callable, Mapping, Sequence

import numpy as np
import torch
from torch import Tensor

from sparing.errors import UserError, require
from sparing.seeds import stream
from sparing.valley.aligning.axes import Axis, Leaf, Orders, indices, leaves, places

# (a group, the orders by now) -> how well each unit of the first net fits each of the other's, shape (size, size)
Fit = Callable[[Leaf, Orders], Tensor]

ROUNDS = 100  # passes over all groups, in which a gain is found each time (count)
_TINY = 1e-9  # share of a fit's scale: a smaller gain is rounding, and would turn in a circle


def assignment(fit: Tensor) -> Tensor:
    """The order of columns that makes the sum of the diagonal largest, int64, shape (size,)."""
    try:
        linear_sum_assignment = importlib.import_module("scipy.optimize").linear_sum_assignment
    except ImportError as error:
        why, do = "the assignment of units is SciPy's", "pip install 'sparing[curvature]'"
        raise UserError("scipy", got="nothing", why=why, do=do) from error
    require(bool(torch.isfinite(fit).all()), "models", "weights that are not finite", "no order fits them", "retrain")
    return torch.from_numpy(np.asarray(linear_sum_assignment(fit.double().numpy(), maximize=True)[1], dtype=np.int64))


def ascend(groups: Sequence[Leaf], fit: Fit, start: Orders, worth: Callable[[Orders], float], seed: int) -> Orders:
    """Give each group its best order in turn, in rounds of drawn sequence, as long as the worth of all rises."""
    orders, generator = dict(start), stream(seed, "alignment")
    best = worth(orders)
    for _ in range(ROUNDS):
        gained = False
        for at in torch.randperm(len(groups), generator=generator).tolist():
            group = groups[at]
            found = assignment(fit(group, orders))
            if torch.equal(found, orders.get(group, torch.arange(group.size))):
                continue
            # With a group on two sides of one matrix the assignment is of a linearised problem, and may lose
            value = worth({**orders, group: found})
            if value > best + _TINY * max(abs(best), 1.0):
                orders[group], best, gained = found, value, True
        if not gained:
            break
    return orders


class WeightFit:
    """Inner products of the weights of two nets, unit by unit."""

    def __init__(self, a: Mapping[str, Tensor], b: Mapping[str, Tensor], axes: Mapping[str, Sequence[Axis]]) -> None:
        """Take the tensors that count, in pairs of equal name, and their axes."""
        self.axes = {name: axes[name] for name in a}
        # float64 for a float64 net; half precision would decide near ties by rounding
        wide = {name: torch.promote_types(value.dtype, torch.float32) for name, value in a.items()}
        self.a = {name: value.to("cpu", wide[name]) for name, value in a.items()}
        self.b = {name: b[name].to("cpu", wide[name]) for name in a}
        self.by_group: dict[Leaf, list[str]] = {}
        for name, dims in self.axes.items():
            for leaf in dict.fromkeys(leaf for axis in dims for leaf in leaves(axis)):
                self.by_group.setdefault(leaf, []).append(name)

    def __call__(self, group: Leaf, orders: Orders) -> Tensor:
        """Sum over tensors of the inner products of unit i of a with unit j of b, the other groups ordered."""
        total = torch.zeros(group.size, group.size, dtype=torch.float64)
        for name in self.by_group.get(group, ()):
            axes = self.axes[name]
            for dim, axis in enumerate(axes):
                spots = places(axis, group)
                if not spots:
                    continue
                # here the group itself is what is asked for; in another dimension it is as it is by now
                here = {leaf: order for leaf, order in orders.items() if leaf is not group}
                other = _ordered(self.b[name], axes, [here if at == dim else orders for at in range(len(axes))])
                for spot in spots:
                    total += _rows(self.a[name], dim, spot) @ _rows(other, dim, spot).T
        return total

    def worth(self, orders: Orders) -> float:
        """Inner product of all weights that count, those of b ordered."""
        parts = []
        for name, value in self.a.items():
            other = _ordered(self.b[name], self.axes[name], [orders] * value.ndim)
            parts.append(float(torch.sum(value * other, dtype=torch.float64)))
        return math.fsum(parts)


def _ordered(value: Tensor, axes: Sequence[Axis], orders: Sequence[Orders]) -> Tensor:
    for dim, (axis, each) in enumerate(zip(axes, orders, strict=True)):
        if any(leaf in each for leaf in leaves(axis)):
            value = value.index_select(dim, indices(axis, each))
    return value


def _rows(value: Tensor, dim: int, spot: Tensor) -> Tensor:
    """A row for each unit of a group, of all numbers that belong to it; ``spot`` has its places in a dimension."""
    chosen = value.movedim(dim, 0)[spot.flatten()]
    return chosen.reshape(len(spot), -1).double()
