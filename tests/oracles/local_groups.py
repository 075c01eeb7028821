"""Groups that train alone and meet, by plain torch in one process: they know of no engine."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from oracles import lowbit, sharded
from oracles.sharded import Case
from sparing import sharding as sh


class Groups:
    """Copies of a net, one for each group, that an ordinary optimizer trains, and an outer one that brings together.

    ``inside`` ranks are in each; ``buckets`` are the names of parameters whose differences are rounded together.
    """

    def __init__(
        self, case: Case, inside: int, groups: int, local: sh.LocalSteps, buckets: Sequence[Sequence[str]] = ()
    ) -> None:
        self.case, self.inside, self.local, self.buckets = case, inside, local, buckets
        self.net = sharded.made(case)
        nesterov = {"momentum": local.momentum, "nesterov": True} if local.momentum else {}
        self.outer = torch.optim.SGD(trained(self.net), lr=local.rate, **nesterov)
        self.copies: list[nn.Module] = []
        self.inner: list[torch.optim.Optimizer] = []
        self.owed: dict[int, Any] = {}  # by bucket and place in the group
        self.norms: list[list[float]] = []
        self.done = 0
        self.become(groups)

    def become(self, groups: int, inside: int | None = None) -> None:
        """Another number of groups, between two intervals: group i goes on as group i modulo the old number did.

        What the wire owes is owed by the owner of each number, in proportion to the number of groups.
        """
        if self.copies:
            self._owe(groups, inside or self.inside)
        self.inside = inside or self.inside
        states = [optimizer.state_dict() for optimizer in self.inner]
        self.copies = [copy.deepcopy(self.net) for _ in range(groups)]
        factory = sharded.factory(self.case)
        self.inner = [factory(sharded.groups_for(net, self.case) or trained(net)) for net in self.copies]
        for at, optimizer in enumerate(self.inner if states else []):
            optimizer.load_state_dict(copy.deepcopy(states[at % len(states)]))

    def _owe(self, groups: int, inside: int) -> None:
        old, self.owed = self.owed, {}
        for bucket in {bucket for bucket, _ in old}:
            each = [old[bucket, place] for place in range(self.inside)]
            sums = [torch.tensor(owed, dtype=torch.float64).view(len(owed), -1).sum(0) for owed in each]
            length = sum(self.net.get_parameter(name).numel() for name in self.buckets[bucket])
            flat = torch.cat(sums)[:length] * groups / len(self.copies)
            shares = torch.nn.functional.pad(flat, (0, -length % (inside * groups))).view(inside, groups, -1)
            for place, share in enumerate(shares):
                parts = [
                    [(part if owner == k else part * 0).tolist() for k, part in enumerate(share)]
                    for owner in range(groups)
                ]
                self.owed[bucket, place] = parts

    def step(self, step: int, skips: Sequence[int] = ()) -> None:
        """One inner step of every group on the rows of its ranks; some skip it."""
        self.norms.append([])
        for group, (net, optimizer) in enumerate(zip(self.copies, self.inner, strict=True)):
            for micro in range(self.case.accumulate):
                for rank in range(group * self.inside, (group + 1) * self.inside):
                    sharded.loss_of(net, sharded.rows(self.case, step, micro, rank), self.case).backward()
            for p in trained(net):
                p.grad = torch.zeros_like(p) if p.grad is None else p.grad / (self.inside * self.case.accumulate)
            self.norms[-1].append(sharded.clip_(trained(net), self.case.clip))
            if group not in skips:
                optimizer.step()
            optimizer.zero_grad()
        self.done += 1
        if self.done == self.local.every:
            self.meet()

    def meet(self) -> None:
        """The outer step, if there was an inner one."""
        if not self.done:
            return
        starts = {name: p for name, p in self.net.named_parameters() if p.requires_grad}
        ends = [dict(net.named_parameters()) for net in self.copies]
        moved = [{name: p.detach() - each[name].detach() for name, p in starts.items()} for each in ends]
        sums = {name: torch.stack([each[name] for each in moved]).sum(0) for name in starts}
        if self.local.wire is not None:
            rounded = self._rounded if len(moved) > 1 else self._repaid
            for at, names in enumerate(self.buckets):
                sums |= rounded(at, names, moved) if names else {}
        for name, p in starts.items():
            p.grad = sums[name] / len(moved)
        self.outer.step()
        self.outer.zero_grad()
        with torch.no_grad():
            for name, p in starts.items():
                for each in ends:
                    each[name].copy_(p)
        self.done = 0

    def _rounded(self, bucket: int, names: Sequence[str], moved: Sequence[Mapping[str, Tensor]]) -> dict[str, Tensor]:
        """Sums of a bucket by the wire's arithmetic, number by number: each rank of a group sends its share."""
        wire, groups = self.local.wire, len(moved)
        assert wire is not None
        flat = [torch.cat([each[name].reshape(-1) for name in names]) for each in moved]
        length, world = flat[0].numel(), self.inside * groups
        padded = [torch.nn.functional.pad(each, (0, -length % world)) for each in flat]
        shares = torch.stack(padded).view(groups, self.inside, groups, -1)
        total: list[float] = []
        for place in range(self.inside):
            given = shares[:, place].tolist()
            owed = self.owed.get((bucket, place)) or [[[0.0] * len(part) for part in parts] for parts in given]
            sums, self.owed[bucket, place] = lowbit.summed(given, owed, wire.bits, wire.block, whole=True)
            total += [value for part in sums for value in part]
        return self._named(torch.tensor(total, dtype=torch.float64), names)

    def _repaid(self, bucket: int, names: Sequence[str], moved: Sequence[Mapping[str, Tensor]]) -> dict[str, Tensor]:
        """Of one group: nothing is sent, and what more groups owed is added."""
        found = {name: moved[0][name] for name in names}
        if (bucket, 0) in self.owed:
            owed = [value for place in range(self.inside) for value in self.owed.pop((bucket, place))[0][0]]
            found = {
                n: found[n] + more for n, more in self._named(torch.tensor(owed, dtype=torch.float64), names).items()
            }
        return found

    def _named(self, flat: Tensor, names: Sequence[str]) -> dict[str, Tensor]:
        each = [self.net.get_parameter(name) for name in names]
        parts = flat[: sum(p.numel() for p in each)].split([p.numel() for p in each])
        return {name: part.view(p.shape) for name, part, p in zip(names, parts, each, strict=True)}


def trained(net: nn.Module) -> list[nn.Parameter]:
    return [p for p in net.parameters() if p.requires_grad]
