"""Moves optimizer state between device and host beside the computation, in order and without memory of its own.

The copies of a draw start when blocks change: first what leaves goes out, then what enters comes in, into the same
memory. They run beside the forward and backward pass, and the optimizer's step waits for them.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import Tensor


class Copies(Protocol):
    """Copies that run beside the computation, one after the other."""

    def frees(self, device: torch.device) -> bool:
        """Tell whether it is the memory of this device that is scarce."""
        ...

    def copy_(self, target: Tensor, source: Tensor) -> None:
        """Copy after all work issued so far; neither may be read or written before ``wait`` or ``finish``."""
        ...

    def wait(self) -> None:
        """Let all work that is issued from now on come after the copies."""
        ...

    def finish(self) -> None:
        """Return when the copies are done."""
        ...


class SideStreams:
    """Copies on a stream of its own for each CUDA device; tensors in host memory stay where they are."""

    def __init__(self) -> None:
        self._streams: dict[torch.device, torch.cuda.Stream] = {}

    def frees(self, device: torch.device) -> bool:
        """Tell whether a device is not the host."""
        return device.type != "cpu"

    def copy_(self, target: Tensor, source: Tensor) -> None:
        """Copy on the side stream of the device that takes part."""
        device = target.device if self.frees(target.device) else source.device
        if device.type != "cuda":
            target.copy_(source)
            return
        if device not in self._streams:
            self._streams[device] = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        stream = self._streams[device]
        stream.wait_stream(torch.cuda.current_stream(device))
        with torch.cuda.stream(stream):
            target.copy_(source, non_blocking=True)
        for value in (target, source):
            if value.is_cuda:
                value.record_stream(stream)  # its memory is not given to others before the copy is done

    def wait(self) -> None:
        """Let the current streams wait; the host goes on."""
        for device, stream in self._streams.items():
            torch.cuda.current_stream(device).wait_stream(stream)

    def finish(self) -> None:
        """Let the host wait."""
        for stream in self._streams.values():
            stream.synchronize()


_Kind = tuple[torch.Size, tuple[int, ...], torch.dtype, torch.device]


def _kind(value: Tensor, device: torch.device) -> _Kind:
    return value.shape, value.stride(), value.dtype, device


@dataclass(slots=True, eq=False)
class Offload:
    """Tensors on their way to the host and back; what leaves makes room for what enters."""

    copies: Copies = field(default_factory=SideStreams)
    _free: dict[_Kind, list[Tensor]] = field(default_factory=lambda: defaultdict(list))

    def to_host(self, value: Tensor) -> Tensor:
        """Start a copy to host memory, pinned for a CUDA device; a tensor that is there already is returned."""
        if not self.copies.frees(value.device):
            return value
        # pinned, so that copies can overlap with computation
        host = torch.empty_like(value, device="cpu", pin_memory=value.device.type == "cuda")
        self.copies.copy_(host, value)
        self._free[_kind(value, value.device)].append(value)
        return host

    def to_device(self, value: Tensor, device: torch.device) -> Tensor:
        """Start a copy to a device, into memory of what has left where it fits."""
        if value.device == device and not self.copies.frees(device):
            return value
        free = self._free[_kind(value, device)]
        target = free.pop() if free else torch.empty_like(value, device=device)
        self.copies.copy_(target, value)
        return target

    def settle(self) -> None:
        """Give memory that nothing entered into back."""
        self._free.clear()
