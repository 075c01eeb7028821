"""How collectives run: on our rings or the library's own; two-level, overlapped or flat; at full speed or throttled."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from sparing.errors import require
from sparing.sharding.lowbit.config import LowBit
from sparing.sharding.network.rings import Axis, Counter, RateLimit, Ring, Throttle
from sparing.sharding.planner.config import parse_rate


@dataclass(frozen=True, kw_only=True)
class Wires:
    """How the collectives of a mesh run; results are the same up to the order of sums, unless ``slow`` rounds them."""

    kind: Literal["ring", "builtin"] | None = None
    """Rings on point-to-point messages with counted bytes, or the collectives of NCCL or gloo, which nothing counts;
    none for rings over gloo, from main memory, and built-in ones over NCCL."""
    gather: Literal["two-level", "overlapped", "flat"] = "two-level"
    """Collectives over two axes: one after the other, both at once (PaRO-CC), or one ring over the world by rank."""
    rate: Mapping[str, float | str | RateLimit] = field(default_factory=dict)
    """Throttle by axis: what each rank may send: bytes per second, text such as "100Mbit/s", or a ``RateLimit``; axes
    without one are not throttled."""
    slow: LowBit | None = None
    """Few bits for gradients and changes of parameters on the outermost axis, between groups; none: exact."""

    def __post_init__(self) -> None:
        require(self.kind in {None, "ring", "builtin"}, "kind", self.kind, "there is no such wire", "ring or builtin")
        known = ("two-level", "overlapped", "flat")
        require(self.gather in known, "gather", self.gather, "there is no such order", " | ".join(known))
        ringless = self.kind == "builtin" and (self.gather == "overlapped" or bool(self.rate))
        require(not ringless, "kind", self.kind, "overlap and throttle live in the rings", 'pass kind="ring"')
        why, do = "low-bit wires are a collective of our rings, on one axis", 'pass kind="ring" and gather="two-level"'
        fits = self.slow is None or (self.kind != "builtin" and self.gather == "two-level")
        require(fits, "slow", f"LowBit on {self.kind or 'ring'} and {self.gather}", why, do)

    def pace(self, axis: str) -> RateLimit | None:
        """The throttle of one axis."""
        found = self.rate.get(axis)
        return found if found is None or isinstance(found, RateLimit) else RateLimit(rate=parse_rate(found))


# newer releases of torch warn about the older of two names
_gather_whole = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_scatter_whole = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


class RingCollectives:
    """Collectives by our rings."""

    def __init__(self, ring: Ring, order: Sequence[int] | None = None) -> None:
        self.ring, self._order = ring, order

    def all_gather_(self, whole: Tensor) -> None:
        """Fill the parts of the others; mine is in its place."""
        self.ring.all_gather_(self._parts(whole))

    def reduce_scatter_(self, whole: Tensor) -> Tensor:
        """Sum my part over the axis, leaving scratch in the others."""
        return self.ring.reduce_scatter_(self._parts(whole))

    def all_reduce_(self, whole: Tensor) -> None:
        """Sum all parts over the axis."""
        self.ring.all_reduce_(self._parts(whole))

    def _parts(self, whole: Tensor) -> Sequence[Tensor]:
        parts = whole.view(self.ring.width, -1).unbind(0)
        return parts if self._order is None else [parts[block] for block in self._order]


class HostCollectives:
    """Rings for tensors of a device, by way of main memory: for ranks that share a device, which NCCL cannot serve."""

    def __init__(self, rings: RingCollectives) -> None:
        self._rings = rings

    def all_gather_(self, whole: Tensor) -> None:
        """Fill the parts of the others; mine is in its place."""
        self._rings.all_gather_(host := whole.to("cpu", copy=True))
        whole.copy_(host)

    def reduce_scatter_(self, whole: Tensor) -> None:
        """Sum my part over the axis, leaving scratch in the others."""
        self._rings.reduce_scatter_(host := whole.to("cpu", copy=True))
        whole.copy_(host)

    def all_reduce_(self, whole: Tensor) -> None:
        """Sum all parts over the axis."""
        self._rings.all_reduce_(host := whole.to("cpu", copy=True))
        whole.copy_(host)


class BuiltinCollectives:
    """Collectives of the process group's own library; gloo's reduce-scatter is an all-reduce in disguise."""

    def __init__(self, axis: Axis, order: Sequence[int] | None = None) -> None:
        self._axis, self._order = axis, order
        self._place = axis.index if order is None else order[axis.index]

    def all_gather_(self, whole: Tensor) -> None:
        """Fill the parts of the others; mine is in its place."""
        parts = whole.view(self._axis.size, -1)
        found = whole if self._order is None else torch.empty_like(whole)
        _gather_whole(found, parts[self._place].clone(), group=self._axis.group)
        if self._order is not None:
            parts[list(self._order)] = found.view_as(parts)

    def reduce_scatter_(self, whole: Tensor) -> Tensor:
        """Sum my part over the axis, leaving scratch in the others."""
        parts = whole.view(self._axis.size, -1)
        mine = torch.empty_like(parts[self._place])
        ranked = whole if self._order is None else parts[list(self._order)].flatten()
        _scatter_whole(mine, ranked, group=self._axis.group)
        return parts[self._place].copy_(mine)

    def all_reduce_(self, whole: Tensor) -> None:
        """Sum all parts over the axis."""
        dist.all_reduce(whole, group=self._axis.group)


class Collectives(Protocol):
    """Blocking collectives of one axis on a contiguous tensor cut into equal parts, one per rank of the axis."""

    def all_gather_(self, whole: Tensor) -> None:
        """Fill the parts of the others; mine is in its place."""

    def reduce_scatter_(self, whole: Tensor) -> object:
        """Sum my part over the axis, leaving scratch in the others."""

    def all_reduce_(self, whole: Tensor) -> None:
        """Sum all parts over the axis."""


def collectives_of(
    axis: Axis, wires: Wires, counter: Counter, device: torch.device, order: Sequence[int] | None = None
) -> Collectives:
    """Collectives of an axis; ``order``: which part belongs to which of its ranks, None for the first to the first."""
    # gloo carries tensors of main memory only; NCCL needs a device for each rank
    near = device.type == "cpu" or (dist.is_initialized() and dist.get_backend(axis.group) == "gloo")
    kind = wires.kind or ("ring" if near else "builtin")
    asked = kind == "ring" or wires.gather == "overlapped" or bool(wires.rate)
    why, do = "rings, their overlap and throttle send from main memory, over gloo", "leave them out, or run over gloo"
    require(near or not asked, "wires", f"rings on {device.type}", why, do)
    if kind == "builtin":
        return BuiltinCollectives(axis, order)
    limit = wires.pace(axis.name)
    rings = RingCollectives(Ring(axis, counter, None if limit is None else Throttle(limit)), order)
    return rings if device.type == "cpu" else HostCollectives(rings)
