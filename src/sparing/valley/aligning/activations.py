"""What the units of two nets answer to the same rows, as correlations: the second way to match them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, fx

from sparing.valley.aligning.axes import Axis, Leaf, Orders, indices, leaves, places
from sparing.valley.aligning.symmetry import Symmetry


class ActivationFit:
    """Correlations of the answers of two nets' units, summed over the net.

    Source: Li et al. 2016, "Convergent Learning" (arXiv:1511.07543); Ainsworth et al. 2023, section 3.1.
    """

    def __init__(
        self, symmetry: Symmetry, a: Mapping[str, Tensor], b: Mapping[str, Tensor], inputs: Sequence[Sequence[Any]]
    ) -> None:
        """Run both nets on every batch; ``inputs`` are the flat inputs of the recorded pass, a sequence a batch."""
        # with units in one dimension alone, all other dimensions are samples
        self.axes: dict[str, tuple[int, Axis]] = {}
        for name, axes in symmetry.answers.items():
            dims = [dim for dim, axis in enumerate(axes) if leaves(axis)]
            if len(dims) == 1:
                self.axes[name] = dims[0], axes[dims[0]]
        sums: dict[str, list[Tensor]] = {}
        with torch.no_grad():
            for batch in inputs:
                found = [_Recorder(symmetry, state, self.axes).of(batch) for state in (a, b)]
                for name, x in found[0].items():
                    y = found[1][name]
                    parts = [x.T @ y, x.sum(0), y.sum(0), (x * x).sum(0), (y * y).sum(0), torch.tensor(float(len(x)))]
                    known = sums.get(name)
                    sums[name] = parts if known is None else [old + new for old, new in zip(known, parts, strict=True)]
        self.correlations = {name: _correlation(*parts) for name, parts in sums.items()}

    def __call__(self, group: Leaf, orders: Orders) -> Tensor:
        """Sum of the correlations of unit i of a with unit j of b, the other groups ordered; shape (size, size)."""
        here = {leaf: order for leaf, order in orders.items() if leaf is not group}
        total = torch.zeros(group.size, group.size, dtype=torch.float64)
        for name, (_, axis) in self.axes.items():
            for spot in places(axis, group) if name in self.correlations else ():
                theirs = indices(axis, here)[spot]
                for at in range(spot.shape[1]):
                    total += self.correlations[name][spot[:, at, None], theirs[None, :, at]]
        return total

    def worth(self, orders: Orders) -> float:
        """Sum of the correlations of all units with those in their places."""
        return sum(
            float(found[torch.arange(len(found)), indices(self.axes[name][1], orders)].sum())
            for name, found in self.correlations.items()
        )


class _Recorder(fx.Interpreter):
    """Runs the recorded pass with the tensors of one net and keeps the answers of some operators."""

    def __init__(self, symmetry: Symmetry, state: Mapping[str, Tensor], wanted: Mapping[str, tuple[int, Axis]]) -> None:
        super().__init__(symmetry.graph)
        self.symmetry, self.state, self.wanted = symmetry, state, wanted
        self.kept: dict[str, Tensor] = {}

    def of(self, inputs: Sequence[Any]) -> dict[str, Tensor]:
        """Answers by operator, float64, shape (samples, units)."""
        rest = iter(inputs)
        names = [node.name for node in self.symmetry.graph.graph.nodes if node.op == "placeholder"]
        known = {name: self.state[of] for name, of in self.symmetry.inputs.items() if of in self.state}
        known |= self.symmetry.constants
        self.run(*(known[name] if name in known else next(rest) for name in names))
        return self.kept

    def run_node(self, n: fx.Node) -> Any:
        found = super().run_node(n)
        if n.name in self.wanted and isinstance(found, Tensor):
            found_in, size = found.movedim(self.wanted[n.name][0], -1), found.shape[self.wanted[n.name][0]]
            self.kept[n.name] = found_in.reshape(-1, size).double().cpu()
        return found


def _correlation(xy: Tensor, x: Tensor, y: Tensor, xx: Tensor, yy: Tensor, count: Tensor) -> Tensor:
    """Pearson's correlations of columns from their sums; 0 where a unit does not vary."""
    first, second = xx / count - (x / count) ** 2, yy / count - (y / count) ** 2
    together = xy / count - torch.outer(x / count, y / count)
    deviations = torch.outer(first.clamp(min=0).sqrt(), second.clamp(min=0).sqrt())
    return torch.where(deviations > 0, together / deviations.clamp(min=1e-30), 0.0)
