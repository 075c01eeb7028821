"""Collectives of tensors on CUDA: run at once, by the thread that asks and on its current stream.

``fully_shard`` calls them inside streams of its own, one for gathers and one for reductions, orders those streams by
events, and holds buffers until their last use has ended. A lane that stays on its stream has all of that: every rank
launches in the order of its program, as NCCL demands of several communicators, and no buffer is freed under a kernel.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import torch

from sparing.sharding.network.lanes import Handle, Lane

T = TypeVar("T")


class StreamHandle(Handle[T]):
    """A result whose kernels are queued; ``wait`` lets the current stream wait for them, and no processor."""

    __slots__ = ("_event",)

    def __init__(self, event: torch.cuda.Event | None) -> None:
        super().__init__()
        self._event = event

    def wait(self) -> T:
        """The value, for kernels launched from now on."""
        if self._event is not None:
            torch.cuda.current_stream().wait_event(self._event)
        return super().wait()


class StreamLane(Lane):
    """What is submitted runs before ``submit`` returns; its errors are raised there, and it has no thread."""

    def submit(self, function: Callable[[], T]) -> Handle[T]:
        """Launch a function on the current stream, without autograd."""
        # lanes write into tensors that others allocated, which inference mode would forbid
        with torch.inference_mode(False), torch.no_grad():
            value = function()
        # none in tests, which run this without a device
        event = torch.cuda.current_stream().record_event() if torch.cuda.is_available() else None
        handle: StreamHandle[T] = StreamHandle(event)
        handle.deliver(value)
        return handle

    def drain(self) -> None:
        """Wait until the device has done all that was queued."""
        if torch.cuda.is_available():
            torch.cuda.synchronize()
