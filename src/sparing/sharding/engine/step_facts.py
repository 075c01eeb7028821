"""What a step must know of all ranks: which parameters had a gradient on any of them, and which buffers differ."""

from __future__ import annotations

import math
import zlib
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from sparing.blocks.names import named_buffers
from sparing.errors import UserError, require
from sparing.sharding.engine.state import Settings
from sparing.sharding.network.consistency import by_rank, check_same, checksum
from sparing.sharding.network.mesh import Mesh


@dataclass(frozen=True, slots=True)
class StepFacts:
    """The same on every rank."""

    # By bucket, places of the parameters that had a gradient in this step on some rank.
    used: Mapping[str, frozenset[int]]
    differing: Sequence[str]  # names of buffers that are not the same everywhere
    divisor: float  # of this rank: on others it may be no number


def exchange_facts(
    mesh: Mesh,
    settings: Settings,
    micro_steps: int,
    divisor: float | None,
    used: Mapping[str, tuple[Collection[int], int]],
    buffers: Mapping[str, Tensor | None],
    groups: Sequence[Mapping[str, Any]],
) -> Callable[[], StepFacts]:
    """Send what this rank knows; every rank calls, in a step. What it returns waits for the others.

    ``used``: by bucket, places of parameters that had a gradient here, and how many parameters there are. ``groups``
    are the optimizer's. What it returns raises ``UserError`` on all ranks if they are not at the same place.
    """
    clip = settings.clipping
    # ranks that clip by other limits would go apart
    mesh.transitions.log.mark(f"clip {clip}, loss scale {settings.loss_scale}")
    # One gather for all questions; the collectives of all ranks must agree up to here, or sums would be mixed.
    place = (micro_steps, mesh.transitions.log.length, mesh.transitions.log.digest)
    options = _numbers_in(groups)
    places = [(name, index) for name, (_, count) in used.items() for index in range(count)]
    had_grad = [int(index in used[name][0]) for name, index in places]
    # a step without a backward pass is refused later
    by = mesh.world * max(micro_steps, 1) if divisor is None else divisor
    bits = torch.tensor([by], dtype=torch.float64).view(torch.int64)
    row = torch.tensor([zlib.crc32(repr(options).encode()), *place, *had_grad, *seen(buffers)], dtype=torch.int64)
    arriving = mesh.gather_scalars_async(torch.cat([bits, row]))

    def facts() -> StepFacts:
        sent, rates, at, rows = arriving().tensor_split([1, 2, 2 + len(place)], dim=1)
        divisors = sent.contiguous().view(torch.float64)
        apart = (rows[:, len(places) :] != rows[0, len(places) :]).any(0).tolist()
        same_options = len(set(rates.flatten().tolist())) == 1
        differ = _agreed(mesh, settings, at, divisors, None if same_options else options, buffers, apart)
        _check_beside(mesh, {"clip": clip, "backward passes": micro_steps}, divisors, differ)
        if isinstance(differ, UserError):
            raise differ
        found: dict[str, set[int]] = {name: set() for name in used}
        for (name, index), one in zip(places, rows[:, : len(places)].any(0).tolist(), strict=True):
            if one:
                found[name].add(index)
        return StepFacts({name: frozenset(some) for name, some in found.items()}, differ, by)

    return facts


def _check_beside(mesh: Mesh, fact: Mapping[str, object], divisors: Tensor, differ: object) -> None:
    """Refuse a step in which other parts of the model, such as stages, would do something else."""
    # other limits would scale one gradient by several factors, and no stage waits for one that refuses
    refusal = str(differ) if isinstance(differ, UserError) else None
    number = min(_numbers(divisors), default=math.nan) if refusal is None else math.nan
    for other in mesh.beside:
        known = _numbers(other.gather_scalars(torch.tensor([number], dtype=torch.float64)))
        # one that is no number makes the parts that have one skip the step too
        apart = number if len(known) > 1 else None
        check_same(other, {**fact, "refusal": refusal, "divisor": apart}, "step of the whole model")
        number = min(known, default=math.nan)


def _agreed(
    mesh: Mesh,
    settings: Settings,
    at: Tensor,
    divisors: Tensor,
    options: Mapping[str, object] | None,
    buffers: Mapping[str, Tensor | None],
    apart: Sequence[bool],
) -> list[str] | UserError:
    """Names of buffers that differ, or why there can be no step; the same on every rank.

    ``options``: numbers of parameter groups that are not the same everywhere.
    """
    try:
        _check_places(mesh, at)
        _check_divisors(mesh, settings, divisors)
        if options is not None:
            check_same(mesh, options, "step", "replicas would go apart", "let a scheduler see the same on every rank")
        return differing(mesh, buffers, apart)
    except UserError as error:
        return error


def _check_places(mesh: Mesh, rows: Tensor) -> None:
    """Refuse a step of ranks that have not done the same."""
    at = [str(tuple(row)) for row in rows.tolist()]
    got = by_rank("backward passes, collectives and their order", at, mesh.ranks)
    do = "run the same blocks, as often, on every rank; restart from a checkpoint"
    require(len(set(at)) == 1, "step", got, "ranks must send the same in the same order", do)


def _numbers_in(groups: Sequence[Mapping[str, Any]]) -> dict[str, list[float]]:
    """The numbers among the options of parameter groups, such as learning rates."""
    found = {}
    for index, group in enumerate(groups):
        for name, option in group.items():
            if name == "params":
                continue
            each = option if isinstance(option, list | tuple) else [option]
            # a rate that is a tensor counts by its value
            numbers = [x.item() if isinstance(x, Tensor) and x.numel() == 1 else x for x in each]
            if all(isinstance(x, int | float) for x in numbers):
                found[f"{name} of group {index}"] = [float(x) for x in numbers]
    return found


def _check_divisors(mesh: Mesh, settings: Settings, rows: Tensor) -> None:
    """Refuse numbers by which ranks would scale their parts of the gradient apart, or not up."""
    divisors = rows.flatten().tolist()
    # one that is not a number makes all ranks skip the step, and a rank may be alone in having met the reason
    numbers = _numbers(rows)
    skips = settings.loss_scale is not None or not any(map(math.isnan, divisors))
    why, do = "only loss_scale skips such a step", "pass loss_scale=1.0, or a number"
    require(skips, "divisor", "nan", why, do)
    got = by_rank("divisor", [str(divisor) for divisor in divisors], mesh.ranks)
    why, do = "replicas would go apart", "sum up over all ranks what it counts (all_reduce) first"
    require(len(numbers) <= 1, "step", got, why, do)
    why, do = "it divides the sum of all losses' gradients", "pass a positive number, or None"
    require(all(divisor > 0 for divisor in numbers), "divisor", min(numbers, default=None), why, do)


def _numbers(rows: Tensor) -> set[float]:
    """Those that are one."""
    return {divisor for divisor in rows.flatten().tolist() if not math.isnan(divisor)}


def buffers_of(model: nn.Module, names: Iterable[str]) -> dict[str, Tensor | None]:
    """What the model has now under the names that its buffers had when it was sharded."""
    held = named_buffers(model)
    return {name: held.get(name) for name in names}


def seen(buffers: Mapping[str, Tensor | None]) -> list[int]:
    """Checksums of the kind and of the bits of each buffer."""
    return [one for held in buffers.values() for one in (zlib.crc32(_kind(held).encode()), _bits(held))]


def _kind(buffer: Tensor | None) -> str:
    return "nothing" if buffer is None else f"{tuple(buffer.shape)} {buffer.dtype}"


def _bits(buffer: Tensor | None) -> int:
    return 0 if buffer is None else checksum(buffer)


def differing(mesh: Mesh, buffers: Mapping[str, Tensor | None], apart: Sequence[bool]) -> list[str]:
    """Names of buffers whose bits differ, given which of ``seen`` do; refuses those of several shapes. All call."""
    kinds = {f"buffer {name}": _kind(buffers[name]) for name, other in zip(buffers, apart[::2], strict=True) if other}
    if kinds:
        check_same(mesh, kinds, "step", "rank 0's values would be taken for it", "make it of one size before shard_")
    return [name for name, other in zip(buffers, apart[1::2], strict=True) if other]


def sync_buffers_(mesh: Mesh, model: nn.Module, names: Sequence[str]) -> None:
    """Give every rank rank 0's values of these buffers, as DistributedDataParallel does before a forward pass."""
    held = named_buffers(model)
    for name in names:
        whole = held[name].detach().contiguous()
        mesh.broadcast_(whole.view(-1).view(torch.uint8))
        held[name].detach().copy_(whole)
