"""FSDP2 given our rings: its all-gather and reduce-scatter on point-to-point messages, on a lane of their own.

gloo's own reduce-scatter moves what an all-reduce moves and its all-gather is slow, so a comparison with FSDP2 on gloo
alone would credit a plan with what is the library's doing. Its all-reduce across groups stays gloo's, which is a ring.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule

from sparing.sharding.network.lanes import Handle, Lane
from sparing.sharding.network.rings import Axis, Counter, Ring


class Pending(dist.Work):
    """What FSDP2 waits for: a handle of our lane."""

    def __init__(self, handle: Handle[Any]) -> None:
        super().__init__()
        self.handle = handle

    def wait(self, timeout: object = None) -> bool:
        """Block until it is done."""
        self.handle.wait()
        return True


class _Rings:
    """What both collectives share."""

    def __init__(self, ring: Ring, lane: Lane) -> None:
        self.ring, self.lane = ring, lane

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        """A fresh buffer, as by default."""
        return torch.empty(*size, dtype=dtype, device=device)

    def _run(self, handle: Handle[Any], later: bool) -> Pending | None:
        """Leave it to the lane, or wait for it."""
        if later:
            return Pending(handle)
        handle.wait()
        return None


class RingGather(_Rings):
    """All-gather."""

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: dist.ProcessGroup, async_op: bool = False
    ) -> Pending | None:
        """Fill the output from all ranks of the ring."""
        parts = output_tensor.view(self.ring.width, -1).unbind(0)

        def work() -> None:
            if parts[self.ring.me].data_ptr() != input_tensor.data_ptr():
                parts[self.ring.me].copy_(input_tensor)
            self.ring.all_gather_(parts)

        return self._run(self.lane.submit(work), async_op)


class RingScatter(_Rings):
    """Reduce-scatter; a sum, since FSDP2 is told to scale by itself."""

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: dist.ProcessGroup, op: Any, async_op: bool = False
    ) -> Pending | None:
        """Sum over all ranks of the ring; the input is a buffer of FSDP2 that nobody reads afterwards."""
        parts = input_tensor.view(self.ring.width, -1).unbind(0)
        return self._run(self.lane.submit(lambda: output_tensor.copy_(self.ring.reduce_scatter_(parts))), async_op)


def give_rings(blocks: Sequence[FSDPModule], mesh: DeviceMesh) -> Lane:
    """Replace the collectives of every block.

    Args:
        blocks: The groups of parameters of FSDP2.
        mesh: One-dimensional: the ranks that parameters are sharded over.

    Returns:
        The lane they run on, to be closed.
    """
    ranks = tuple(mesh.mesh.tolist())
    group = dist.new_group(ranks, use_local_synchronization=True)  # not the one that FSDP2 keeps for itself
    axis = Axis(name="fsdp", size=len(ranks), index=mesh.get_local_rank(), ranks=ranks, group=group)
    ring, lane = Ring(axis, Counter()), Lane("fsdp")
    for block in blocks:
        block.set_force_sum_reduction_for_comms(True)
        block.set_custom_all_gather(RingGather(ring, lane))  # type: ignore[arg-type]
        block.set_custom_reduce_scatter(RingScatter(ring, lane))  # type: ignore[arg-type]
    return lane
