"""What cannot be sharded, said before anything is changed."""

from __future__ import annotations

import functools
import platform
import zlib
from collections.abc import Iterable, Sequence
from pathlib import Path

import torch
from torch import nn

from sparing.blocks import Block
from sparing.errors import UserError, require
from sparing.sharding.masters import OptimizerFactory

WRAPPERS = ("DistributedDataParallel", "FullyShardedDataParallel", "DataParallel", "DeepSpeedEngine")
"""Classes that distribute a model themselves."""


@functools.cache
def code() -> dict[str, str]:
    """What every rank must run alike.

    Returns:
        Versions, and a checksum of this package's sources.
    """
    sources = sorted(Path(__file__).parent.parent.rglob("*.py"))
    digest = 0
    for source in sources:
        digest = zlib.crc32(source.read_bytes(), digest)
    return {"python": platform.python_version(), "torch": torch.__version__, "sparing's sources": f"{digest:08x}"}


def check_model(model: nn.Module, blocks: Sequence[Block], world: int) -> None:
    """Refuse models that somebody else distributes, that hold no values, or that are smaller than the ranks are many.

    Args:
        model: The live model.
        blocks: Its blocks.
        world: Ranks (count).

    Raises:
        UserError: If the model cannot be sharded.
    """
    kind = type(model).__name__
    require(kind not in WRAPPERS, "model", kind, "it distributes the model itself", "pass the module inside it")
    for block in blocks:
        for name, parameter in block.params.items():
            _check_parameter(name, parameter)
    largest = max((sum(p.numel() for p in block.params.values()) for block in blocks), default=0)
    why = "every rank must have a part of the largest block"
    require(
        largest >= world, "model", f"{largest} parameters in its largest block", why, f"use at most {largest} ranks"
    )


def _check_parameter(name: str, parameter: nn.Parameter) -> None:
    sharded = hasattr(parameter, "placements")
    require(not sharded, name, "a DTensor", "fully_shard has cut it already", "pass the model before fully_shard")
    why, do = "it holds no values yet", "give it values first, such as model.to_empty(device=…) and a checkpoint"
    require(not parameter.is_meta, name, "a parameter on the meta device", why, do)
    real = parameter.dtype.is_floating_point
    require(real, name, str(parameter.dtype), "sums over ranks need real numbers", "cast it, or make it a buffer")


def check_elementwise(factory: OptimizerFactory) -> str:
    """Refuse optimizers whose step on a slice is not the slice of their step.

    Tried out: two steps on a matrix of six numbers, and on the same numbers as flat slices of four and two.

    Args:
        factory: Makes the optimizer from parameter groups.

    Returns:
        Name of the optimizer's class.

    Raises:
        UserError: If it looks at more than one element at a time, or cannot be made.
    """
    values = torch.tensor([[0.9, -0.3, 2.0], [-1.1, 0.4, 0.05]], dtype=torch.float64)
    grads = torch.tensor([[0.2, 1.5, -0.7], [3.0, -0.1, 0.6]], dtype=torch.float64)
    whole, name = _stepped(factory, [values], [grads])
    flat, flat_grads = values.reshape(-1), grads.reshape(-1)
    parts, _ = _stepped(factory, [flat[:4], flat[4:]], [flat_grads[:4], flat_grads[4:]])
    same = torch.allclose(whole, parts, rtol=1e-9, atol=1e-12)  # rounding of a dozen float64 operations
    why = "its step on a slice is not the slice of its step (norms, matrices or factored moments)"
    require(same, "optimizer", name, why, "use an elementwise one, such as AdamW, SGD or Adagrad")
    return name


def _stepped(
    factory: OptimizerFactory, values: Iterable[torch.Tensor], grads: Sequence[torch.Tensor]
) -> tuple[torch.Tensor, str]:
    params = [nn.Parameter(value.clone()) for value in values]
    try:
        optimizer = factory([{"params": params}])
        for factor in (1.0, -0.5):
            for parameter, grad in zip(params, grads, strict=True):
                parameter.grad = factor * grad
            optimizer.step()
    except (TypeError, ValueError, RuntimeError) as error:
        do = "pass a function of parameter groups, such as partial(torch.optim.AdamW, lr=3e-4)"
        raise UserError("optimizer", got=_name(factory), why=str(error).splitlines()[0][:160], do=do) from None
    return torch.cat([p.detach().reshape(-1) for p in params]), type(optimizer).__name__


def _name(factory: object) -> str:
    inner = getattr(factory, "func", factory)
    return getattr(inner, "__name__", type(inner).__name__)
