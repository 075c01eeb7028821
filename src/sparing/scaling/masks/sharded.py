"""Gates on weights that FSDP2 or tensor parallelism has cut into DTensors: each process masks its own part.

The mask is a DTensor beside the weight, cut as the weight is, so that it takes no more memory than its share and a
distributed checkpoint holds it. What ``fully_shard`` gathers for a pass is masked already, since the parts are, and
gradients are masked as soon as a part has them, before anything clips or steps.
"""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import Tensor, nn

from sparing.scaling.masks.gates import _BY_PARAMETER, SUFFIX, Gate


def is_sharded(tensor: Tensor | None) -> bool:
    """Tell whether a tensor is a DTensor, without importing them."""
    return hasattr(tensor, "device_mesh")


def whole(tensor: Tensor) -> Tensor:
    """Return a tensor with the parts of all processes, who must call this together; others as they are."""
    return cast("Any", tensor).detach().full_tensor() if is_sharded(tensor) else tensor


def part(tensor: Tensor) -> Tensor:
    """Return this process's part, in the same memory; an ordinary tensor is all of it."""
    return cast("Any", tensor).detach().to_local() if is_sharded(tensor) else tensor


def cut_as(tensor: Tensor, like: Tensor) -> Tensor:
    """Cut a tensor that all processes hold alike as another one is cut; nothing is sent."""
    if not is_sharded(like):
        return tensor
    from torch.distributed.tensor import distribute_tensor

    held = cast("Any", like)
    return distribute_tensor(tensor, held.device_mesh, held.placements, src_data_rank=None)


class ShardedGate(Gate):
    """The gate of a weight that is a DTensor between passes."""

    @property
    def parameter(self) -> nn.Parameter:
        """The DTensor, also while ``fully_shard`` has put the gathered weight in its place."""
        found = self.module._parameters.get(self.local)
        return cast("nn.Parameter", found if is_sharded(found) else self._hooked)

    @property
    def live(self) -> tuple[int, int]:
        """How many entries of all processes' parts live, and how many there are (counts)."""
        return int(whole(self.mask).sum()), self.mask.numel()

    @property
    def is_current(self) -> bool:
        """Whether the module still has the parameter that was hooked."""
        return self.parameter is self._hooked

    def set_(self, mask: Tensor) -> None:
        """Replace the mask, given whole by all processes, and zero weight and gradient off the new one."""
        part(self.mask).copy_(part(cut_as(mask, self.parameter)))
        self.zero_()

    def zero_(self) -> None:
        """Zero this process's part of weight and gradient off the mask."""
        off = ~part(self.mask)
        with torch.no_grad():
            part(self.parameter).masked_fill_(off, 0)
            if self.parameter.grad is not None:
                part(self.parameter.grad).masked_fill_(off, 0)

    def settle_(self, *, written: bool = False) -> None:
        """Zero the weight off the mask after a step and before a state dict.

        An edit of a part by hand is not seen at the next pass: the weight was gathered before any hook could look.
        """
        if written:
            with torch.no_grad():
                part(self.parameter).masked_fill_(~part(self.mask), 0)

    def mask_input_weight_(self) -> None:
        """Do nothing: what was gathered, or the DTensor itself, is masked."""

    def leaks(self) -> bool:
        """Tell whether a weight off the mask is not zero in this process's part."""
        return bool(part(self.parameter)[~part(self.mask)].count_nonzero())

    def _hook(self, parameter: nn.Parameter) -> None:
        self._hooked, self._replaced = parameter, []
        _BY_PARAMETER[id(parameter)] = self
        # fully_shard sets the gradients of its parts outside autograd, and runs these hooks by hand.
        trains = parameter.requires_grad
        tensor = cast("Any", parameter.requires_grad_(True))
        self._handle = tensor.register_post_accumulate_grad_hook(self._after_accumulation)
        parameter.requires_grad_(trains)

    @torch.no_grad()
    def _after_accumulation(self, parameter: Tensor) -> None:
        grad = cast("Any", parameter.grad)
        if grad.placements != cast("Any", parameter).placements:
            grad = parameter.grad = grad.redistribute(placements=cast("Any", parameter).placements)
        off = ~part(self.mask)
        if self.keep:
            # Of earlier passes the gradient has the live places only; the others were noted here.
            before = 0 if self.dense is None else part(self.dense).masked_fill(~off, 0)
            total = grad.detach().clone()
            part(total).add_(before)
            self.dense = total
        part(grad).masked_fill_(off, 0)


def shard_gate_(gate: Gate) -> None:
    """Cut a gate's mask as its module's weight is cut by now, and mask the parts from here on."""
    parameter = cast("nn.Parameter", gate.module._parameters[gate.local])
    mask = whole(gate.mask).to(parameter.device)  # tensor parallelism has made buffers DTensors that are not cut
    gate._handle.remove()
    _BY_PARAMETER.pop(id(gate._hooked), None)
    gate.module._buffers[gate.local + SUFFIX] = cut_as(mask, parameter)
    gate.__class__ = ShardedGate
    gate._hook(parameter)
