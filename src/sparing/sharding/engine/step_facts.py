"""What a step must know of all ranks: which parameters had a gradient on any of them, and which buffers differ."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from sparing.errors import require
from sparing.sharding.network.consistency import by_rank, check_same, checksum
from sparing.sharding.network.mesh import Mesh


@dataclass(frozen=True, slots=True)
class StepFacts:
    """The same on every rank."""

    # By bucket, places of the parameters that had a gradient in this step on some rank.
    used: Mapping[str, frozenset[int]]
    differing: Sequence[str]  # names of buffers that are not the same everywhere


def exchange_facts(
    mesh: Mesh,
    micro_steps: int,
    used: Mapping[str, tuple[Collection[int], int]],
    buffers: Mapping[str, Tensor],
    clip: object,
) -> Callable[[], StepFacts]:
    """Send what this rank knows; every rank calls, in a step. What it returns waits for the others.

    ``used``: by bucket, places of parameters that had a gradient here, and how many parameters there are. What it
    returns raises ``UserError`` on all ranks if they are not at the same place.
    """
    # ranks that clip by other limits would go apart
    mesh.transitions.log.mark(f"clip {clip}")
    # One gather for three questions; the collectives of all ranks must agree up to here, or sums would be mixed.
    place = (micro_steps, mesh.transitions.log.length, mesh.transitions.log.digest)
    places = [(name, index) for name, (_, count) in used.items() for index in range(count)]
    had_grad = [int(index in used[name][0]) for name, index in places]
    arriving = mesh.gather_scalars_async(
        torch.tensor([*place, *had_grad, *map(checksum, buffers.values())], dtype=torch.int64)
    )

    def facts() -> StepFacts:
        places_of, rows = arriving().tensor_split([len(place)], dim=1)
        at = [tuple(row) for row in places_of.tolist()]
        got = by_rank("backward passes, collectives and their order", [str(row) for row in at], mesh.ranks)
        do = "run the same blocks, as often, on every rank; restart from a checkpoint"
        require(len(set(at)) == 1, "step", got, "ranks must send the same in the same order", do)
        for other in mesh.beside:
            # other limits would scale one gradient by several factors
            check_same(other, {"clip": clip, "backward passes": micro_steps}, "step of the whole model")
        somewhere = rows[:, : len(places)].any(0).tolist()
        apart = (rows[:, len(places) :] != rows[0, len(places) :]).any(0).tolist()
        found: dict[str, set[int]] = {name: set() for name in used}
        for (name, index), one in zip(places, somewhere, strict=True):
            if one:
                found[name].add(index)
        return StepFacts(
            {name: frozenset(some) for name, some in found.items()},
            [name for name, differs in zip(buffers, apart, strict=True) if differs],
        )

    return facts


def sync_buffers_(mesh: Mesh, model: nn.Module, names: Sequence[str]) -> None:
    """Give every rank rank 0's values of these buffers, as DistributedDataParallel does before a forward pass."""
    held = dict(model.named_buffers())
    for name in names:
        whole = held[name].detach().contiguous()
        mesh.broadcast_(whole.view(-1).view(torch.uint8))
        held[name].detach().copy_(whole)
