"""What cannot be sharded, said before anything is changed."""

from __future__ import annotations

import functools
import platform
import zlib
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from sparing.blocks import Block
from sparing.errors import UserError, require
from sparing.sharding.engine.masters import OptimizerFactory
from sparing.sharding.levels import Plan, letters
from sparing.sharding.local.config import LocalSteps
from sparing.sharding.network.mesh import Mesh

# distribute a model themselves
WRAPPERS = ("DistributedDataParallel", "FullyShardedDataParallel", "DataParallel", "DeepSpeedEngine")


@functools.cache
def code_version() -> dict[str, str]:
    """What must be equal on every rank: versions, and a checksum of this package's sources."""
    sources = sorted(Path(__file__).parents[2].rglob("*.py"))
    digest = 0
    for source in sources:
        digest = zlib.crc32(source.read_bytes(), digest)
    return {"python": platform.python_version(), "torch": torch.__version__, "sparing's sources": f"{digest:08x}"}


def check_model(model: nn.Module, blocks: Sequence[Block], world: int, *, meta: bool = False) -> None:
    """Refuse models that another library distributes, that hold no values, or with too few parameters for the ranks."""
    kind = type(model).__name__
    require(kind not in WRAPPERS, "model", kind, "it distributes the model itself", "pass the module inside it")
    _check_lookups(model, world)
    _check_apart(model)
    for block in blocks:
        for name, parameter in block.params.items():
            kind_ = parameter.dtype
            why, do = (
                "it holds no values yet",
                "give it values first, such as model.to_empty(device=…) and a checkpoint",
            )
            require(meta or not parameter.is_meta, name, "a parameter on the meta device", why, do)
            why, do = "sums over ranks need real numbers", "cast it, or make it a buffer"
            require(kind_.is_floating_point, name, str(kind_), why, do)
    largest = max((sum(p.numel() for p in block.params.values()) for block in blocks), default=0)
    why = "every rank must have a part of the largest block"
    require(
        largest >= world, "model", f"{largest} parameters in its largest block", why, f"use at most {largest} ranks"
    )


def _check_lookups(model: nn.Module, world: int) -> None:
    """Refuse embeddings that scale rows of their weight in the forward pass, each rank those that it looks up."""
    for name, module in model.named_modules() if world > 1 else ():
        norm = module.max_norm if isinstance(module, nn.Embedding | nn.EmbeddingBag) else None
        why = "its forward pass writes into its weight, on each rank other rows"
        do = "scale rows inside engine.gathered()"
        require(norm is None, name, f"max_norm={norm}", why, do)


def _check_apart(model: nn.Module) -> None:
    """Refuse parameters that share elements and are not one parameter: they would train apart."""
    held = []
    for name, p in model.named_parameters():
        plain = type(p.data) is torch.Tensor and p.layout is torch.strided
        if plain and not p.is_meta and p.numel():
            reach = sum((size - 1) * stride for size, stride in zip(p.shape, p.stride(), strict=True))
            held.append((p.data_ptr(), p.data_ptr() + (reach + 1) * p.itemsize, name, p))
    open_: list[tuple[int, int, str, nn.Parameter]] = []  # those whose memory may reach here
    for one in sorted(held, key=lambda each: each[:2]):
        begin, _, name, p = one
        open_ = [other for other in open_ if other[1] > begin]
        for *_, other, q in open_:
            shared = (p.requires_grad or q.requires_grad) and _meet(p, q)
            why, do = f"it shares memory with {other}, and would train apart", "let both names be one nn.Parameter"
            require(not shared, name, "values of another parameter", why, do)
        open_.append(one)


def _meet(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether two tensors whose ranges of memory overlap have an element in common: columns of one matrix have none."""
    if one.is_contiguous() and other.is_contiguous():
        return True
    places = []
    for p in (one, other):
        here = torch.zeros((), dtype=torch.int64)
        for size, stride in zip(p.shape, p.stride(), strict=True):
            here = here.unsqueeze(-1) + stride * torch.arange(size)
        places.append((here * p.itemsize + p.data_ptr()).flatten())
    return bool(torch.isin(*places).any())


def check_low_bit(mesh: Mesh, buckets: Iterable[tuple[str, Plan, torch.dtype]]) -> None:
    """Refuse buckets that train where low-bit wires cannot carry them; each by its name, plan and accumulator."""
    slow = mesh.wires.slow
    for name, plan, accumulator in buckets if slow is not None else ():
        why, do = "sums in 16 bits lose what low-bit wires owe", "leave masters=True"
        require(accumulator.itemsize >= 4, f"slow wires of {name}", f"an accumulator of {accumulator}", why, do)
        whole = slow is None or slow.changes is None or plan.levels(mesh.tiers)[0] < mesh.tiers
        why = "parameters at G are gathered anew in each pass, and no rank keeps what a change would be added to"
        do = "write I or N for the first letter, or pass LowBit(params=32)"
        require(whole, f"slow wires of {name}", f"plan {plan}", why, do)


def check_local(local: LocalSteps | None, mesh: Mesh, buckets: Iterable[tuple[str, Plan, torch.dtype | None]]) -> None:
    """Refuse buckets that groups cannot have alone; each by its name, plan and, where it trains, accumulator."""
    for name, plan, accumulator in buckets if local is not None else ():
        finest = letters(mesh.tiers)[-1]
        why = f"what is at {finest} is cut over all groups, so none could take a step alone"
        do = f"write {' or '.join(letters(mesh.tiers)[:-1])} for {finest}"
        require(finest not in plan.name, f"local steps of {name}", f"plan {plan}", why, do)
        why, do = "differences of weights vanish in 16 bits", "leave masters=True"
        wide = accumulator is None or accumulator.itemsize >= 4
        require(wide, f"local steps of {name}", f"masters of {accumulator}", why, do)


def check_elementwise(factory: OptimizerFactory, groups: Iterable[Mapping[str, Any]] = ()) -> str:
    """Refuse optimizers whose step on a slice is not the slice of their step; return the name of the class.

    By the factory's own options and by those of each parameter group.

    Tried on a matrix and a vector: one optimizer for both, and one for each slice of a few numbers. Gradients keep
    their direction, then turn, grow, shrink and vanish, so that a state that all parameters share has to move.
    """
    for options in {repr(dict(options)): options for options in ({}, *groups)}.values():
        name = _check_elementwise(factory, options)
    return name


def _check_elementwise(factory: OptimizerFactory, options: Mapping[str, Any]) -> str:
    generator = torch.Generator().manual_seed(0)
    values = torch.randn(9, generator=generator, dtype=torch.float64)
    grads = [values * scale for scale in (1e-3, 0.1, 1.0, 1.0)]
    grads += [scale * torch.randn(9, generator=generator, dtype=torch.float64) for scale in (1.0, 1e4, 1e-6)]
    grads += [0 * values, values.sign()]
    together, name = _stepped(factory, options, values, grads, [(0, 6), (6, 9)])
    parts = [(values[i:j], [grad[i:j] for grad in grads], [(0, j - i)]) for i, j in SLICES]
    apart = torch.cat([_stepped(factory, options, *part)[0] for part in parts], 1)
    moves, far = (together - values).abs(), (together - apart).abs()
    # rounding of a dozen steps in float64; what shows is relative to the move, which may be small
    close = far <= 1e-13 + 1e-7 * moves.nan_to_num(0.0, posinf=0.0).amax(1, keepdim=True)
    same = bool((close | (together == apart) | (together.isnan() & apart.isnan())).all())
    why = "its step on a slice is not the slice of its step (norms, matrices, or a state that parameters share)"
    require(same, "optimizer", name, why, "use an elementwise one, such as AdamW, SGD or Adagrad")
    return name


# Of the nine numbers, as ranks might hold them.
SLICES = ((0, 4), (4, 7), (7, 9))


def _stepped(
    factory: OptimizerFactory,
    options: Mapping[str, Any],
    values: torch.Tensor,
    grads: Sequence[torch.Tensor],
    cuts: Sequence[tuple[int, int]],
) -> tuple[torch.Tensor, str]:
    """The values after each gradient's step, a row each; a part of six is a matrix."""
    rows = []
    shapes = [(2, 3) if j - i == 6 else (j - i,) for i, j in cuts]
    params = [nn.Parameter(values[i:j].reshape(shape).clone()) for (i, j), shape in zip(cuts, shapes, strict=True)]
    try:
        optimizer = factory([{"params": params, **options}])
        for grad in grads:
            for parameter, (i, j) in zip(params, cuts, strict=True):
                parameter.grad = grad[i:j].reshape(parameter.shape).clone()
            optimizer.step()
            rows.append(torch.cat([p.detach().reshape(-1) for p in params]))
    except (TypeError, ValueError, RuntimeError) as error:
        do = "pass a function of parameter groups, such as partial(torch.optim.AdamW, lr=3e-4)"
        inner = getattr(factory, "func", factory)
        name = getattr(inner, "__name__", type(inner).__name__)
        raise UserError("optimizer", got=name, why=str(error).splitlines()[0][:160], do=do) from None
    name, why = type(optimizer).__name__, "its evaluation mode would move slices alone, and no parameters"
    do = "use one without two sequences of weights, such as AdamW"
    require(not callable(getattr(optimizer, "eval", None)), "optimizer", name, why, do)
    return torch.stack(rows), name
