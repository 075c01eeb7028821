"""Parameters that ``fully_shard`` cuts: their order and owners, my part of one, and what is refused of them."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Placement, Shard

from sparing.errors import require
from sparing.sharding.engine.freed import gradient_taken
from sparing.sharding.engine.hooks import recomputing


class ShardTaken(DTensor):
    """A cut parameter whose gradient the engine has taken and not yet used."""

    __slots__ = ()

    @property
    def grad(self) -> Tensor | None:
        """Refuses: what torch would show here is not the sum. Inside a backward pass it is torch that looks."""
        if recomputing():
            return vars(torch._C.TensorBase)["grad"].__get__(self)  # type: ignore[no-any-return]
        raise gradient_taken()

    @grad.setter
    def grad(self, value: Tensor | None) -> None:
        vars(torch._C.TensorBase)["grad"].__set__(self, value)


def refuse_hooks(name: str, parameter: Any, *, ours: int = 0, before: bool = False) -> None:
    """Refuse a parameter with hooks besides so many of ours; ``before`` it is cut, those on gradients are carried."""
    hooks = len(parameter._post_accumulate_grad_hooks or ()) + len(() if before else parameter._backward_hooks or ())
    why, do = "fully_shard would not call it with the gradient", 'remove it, or pass engine="sparing"'
    require(hooks <= ours, name, "a hook on its gradient", why, do)


def local_of(parameter: Tensor) -> Tensor:
    """This rank's part of a DTensor, detached."""
    held: Any = parameter.detach()
    assert isinstance(held, DTensor)
    return held.to_local()


def part_of(tensor: Tensor) -> Tensor:
    """A tensor, or of a DTensor this rank's part: before ``fully_shard`` that of tensor parallelism."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def whole_of(tensor: Tensor) -> Tensor:
    """All of a DTensor, on the device of its mesh; all ranks call. Others as they are."""
    if not isinstance(tensor, DTensor):
        return tensor
    # with ``offload`` its rows are in main memory, where the ranks of a device cannot send them
    there: Any = tensor.to(tensor.device_mesh.device_type)
    return there.full_tensor()  # type: ignore[no-any-return]


def flattened(module: nn.Module, apart: Collection[nn.Module]) -> Iterator[nn.Parameter]:
    """Parameters in the order in which ``fully_shard`` flattens them: those of children first, units in it left out."""
    for child in module.children():
        if child not in apart:
            yield from flattened(child, apart)
    yield from module.parameters(recurse=False)


def owners_of(model: nn.Module) -> Mapping[int, tuple[nn.Module, str]]:
    """Identity of each parameter -> a module and the attribute of it that holds the parameter."""
    found: dict[int, tuple[nn.Module, str]] = {}
    for module in model.modules():
        for name, parameter in module.named_parameters(recurse=False):
            found.setdefault(id(parameter), (module, name))
    return found


def placements_of(level: int, shard_level: int) -> tuple[Placement, ...]:
    """How the optimizer's rows lie on the mesh of ``rows_mesh``: cut along each of its axes."""
    return (Shard(0),) * (1 if level <= shard_level else 2)
