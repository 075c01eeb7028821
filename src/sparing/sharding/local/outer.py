"""The outer step: what groups have moved by since they last met, averaged, with Nesterov's momentum.

anchor   the weights from which all groups began; this rank's part of what a group's ranks share out, S/m elements
d        anchor - weights of this group, summed over the groups and divided by their number
v        momentum · v + d
anchor   anchor - rate · (d + momentum · v), from which all groups go on
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from functools import partial

import torch
from torch import Tensor

from sparing.errors import RunError, require
from sparing.sharding.local.config import LocalSteps
from sparing.sharding.lowbit.residuals import Residual
from sparing.sharding.lowbit.wires import GradientWires
from sparing.sharding.network.consistency import by_rank
from sparing.sharding.network.lanes import Handle
from sparing.sharding.network.mesh import Mesh
from sparing.sharding.network.wires import RingCollectives


class Outer:
    """Where groups are since they last met, and what they share of each bucket; ``mesh`` is that of all ranks."""

    def __init__(self, settings: LocalSteps, mesh: Mesh) -> None:
        self.settings, self.mesh = settings, mesh
        self.inner = 0  # steps since the last outer step
        self.anchors: dict[str, Tensor] = {}  # by bucket
        self.momenta: dict[str, Tensor] = {}

    @property
    def groups(self) -> int:
        """How many there are."""
        return self.mesh.sizes[-1]

    def require_together(self, what: str) -> None:
        """Refuse what all groups must agree on while each has weights of its own."""
        got, why = f"inner step {self.inner} of {self.settings.every}", "each group has weights of its own there"
        require(not self.inner, what, got, why, "call it after an outer step, or call engine.outer_step() first")

    def begin_(self, name: str, weights: Tensor) -> None:
        """Before the first step of an interval: it starts from here. Momentum is zero where there was none."""
        if name in self.anchors:
            self.anchors[name].copy_(weights)
        else:
            self.anchors[name] = weights.clone()
        if name not in self.momenta:
            self.momenta[name] = torch.zeros_like(weights)

    def forget_(self, name: str) -> None:
        """Drop what groups share of a bucket that stops training."""
        for held in (self.anchors, self.momenta):
            held.pop(name, None)

    def meet(self, names: Sequence[str], sums: Sequence[int]) -> list[bool]:
        """Wait for all groups, at the same step and with the same buckets; which of ``sums`` differ between ranks."""
        row = torch.tensor([self.inner, zlib.crc32("\n".join(names).encode()), *sums])
        try:
            rows = self.mesh.gather_scalars(row)
        except RuntimeError as error:
            raise RunError(
                "outer step: ranks of another group are gone, or later than make_mesh(patience=…) allows, and nobody "
                "can be left out of a process group; start again with the groups that are there, from the last "
                "checkpoint"
            ) from error
        at = [str(tuple(found)) for found in rows[:, :2].tolist()]
        why, do = "groups meet after the same steps of the same blocks", "freeze the same blocks in every group"
        require(len(set(at)) == 1, "outer step", by_rank("inner steps and blocks", at, self.mesh.ranks), why, do)
        return [bool(differs) for differs in (rows[:, 2:] != rows[0, 2:]).any(0)]

    def submit(self, name: str, weights: Tensor, residual: Residual | None) -> Handle[Tensor]:
        """Start to sum what the groups have moved by; ``residual`` is what the wire owes."""
        return self.mesh.lanes[-1].submit(partial(self._sum, self.anchors[name] - weights, residual))

    def _sum(self, moved: Tensor, residual: Residual | None) -> Tensor:
        between, wire = self.mesh.between_groups, self.settings.wire
        if between is None:
            # nothing crosses; what is owed is of a run that had more groups
            if residual is not None:
                moved.add_(residual.value)
                residual.value.zero_()
        elif wire is None:
            between.all_reduce_(moved)
        else:
            assert isinstance(between, RingCollectives)
            GradientWires(between.ring, wire.grads, residual).all_reduce_(moved)
            if residual is not None:
                residual.end_(applied=True)
        return moved

    def move_(self, name: str, total: Tensor) -> Tensor:
        """Step by the sum of what all groups have moved by; returns where all of them go on."""
        anchor, momentum, share = self.anchors[name], self.momenta[name], self.settings.momentum
        mean = total.div_(self.groups)
        momentum.mul_(share).add_(mean)
        return anchor.sub_(mean.add_(momentum, alpha=share), alpha=self.settings.rate)
