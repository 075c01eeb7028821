"""Our collectives inside ``fully_shard``: what it asks for is queued on the lanes of a mesh.

``fully_shard`` lays the pieces of its ranks out by rank, r = i·m + j; our transitions want slices that nest, innermost
axis first. Where only one axis has ranks both are the same, elsewhere a tensor is copied from one order to the other.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
from torch import Tensor
from torch.distributed import ProcessGroup, Work

from sparing.sharding.network.lanes import Handle
from sparing.sharding.network.transitions import Transitions


def nested(by_rank: Tensor, sizes: Sequence[int]) -> Tensor:
    """Equal pieces in the order of ranks, put into that of nested slices; a view where at most one axis has ranks.

    Example:
        >>> nested(torch.arange(4), (2, 2)).tolist()  # piece i·2 + j -> place j·2 + i
        [0, 2, 1, 3]
    """
    return _turned(by_rank.view(*reversed(sizes), -1))


def ranked(slices: Tensor, sizes: Sequence[int]) -> Tensor:
    """The inverse of ``nested``."""
    return _turned(slices.view(*sizes, -1))


def _turned(pieces: Tensor) -> Tensor:
    axes = pieces.ndim - 1
    return pieces.permute(*reversed(range(axes)), axes).reshape(-1)


class Arrival(Work):
    """A handle of a lane as torch knows work that is under way."""

    def __init__(self, handle: Handle[Any]) -> None:
        super().__init__()
        self._handle = handle

    def wait(self, timeout: timedelta = timedelta(0)) -> bool:
        """Block until the collective has ended; its error is raised here."""
        self._handle.wait()
        return True


class _Buffers:
    """Buffers of collectives, from the allocator."""

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        """As ``fully_shard`` asks for one."""
        # lanes write into it from threads of their own, which inference mode would forbid
        with torch.inference_mode(False):
            return torch.empty(*size, dtype=dtype, device=device)


class Gather(_Buffers):
    """All-gather for ``set_custom_all_gather``: returns before the values have come; torch waits for its work."""

    def __init__(self, transitions: Transitions, level: int, name: str) -> None:
        self._transitions, self._level, self._name = transitions, level, name

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: ProcessGroup, async_op: bool = False
    ) -> Work | None:
        """Fill the pieces of all ranks of the inner axes; ``fully_shard`` has put mine in its place."""
        del group, async_op  # the mesh knows the ranks
        moving, sizes = self._transitions, self._transitions.sizes[: self._level]
        moving.log.mark(self._name)
        if sum(size > 1 for size in sizes) < 2:
            return Arrival(moving.gather_(output_tensor, self._level, 0))
        whole = self.allocate(output_tensor.shape, dtype=output_tensor.dtype, device=output_tensor.device)
        moving.slice(whole, 0, self._level).copy_(input_tensor)
        return Arrival(
            moving.gather_(whole, self._level, 0, then=lambda found: output_tensor.copy_(ranked(found, sizes)))
        )


class Reduce(_Buffers):
    """Reduce-scatter for ``set_custom_reduce_scatter``: hands the whole gradients over and returns at once.

    ``fully_shard`` does not look at the sum: its factor is 1, and what it puts into ``grad`` is a view of
    ``output_tensor`` that our step fills later.
    """

    def __init__(self, take: Callable[[Tensor, Tensor], None]) -> None:
        self._take = take

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: ProcessGroup, op: Any, async_op: bool = False
    ) -> Work | None:
        """Take the gradients of a micro-step, by rank; the sum of mine goes to ``output_tensor``."""
        del group, op, async_op  # sums only, over the ranks of the mesh
        self._take(input_tensor, output_tensor)
        return None
