"""Dimensions of torch's ``DeviceMesh``, of which a mesh of ours is one."""

from __future__ import annotations

import collections
import os
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import torch.distributed as dist

from sparing.errors import require
from sparing.sharding.network.consistency import by_rank
from sparing.sharding.network.rendezvous import hear, rendezvous

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

DERIVED = " of its machine"  # behind sizes that nobody passed


def ranks_of(within: DeviceMesh, me: int) -> list[int]:
    """Ranks of a dimension in its order, me among them."""
    found: list[int] = within.mesh.flatten().tolist()
    flat = within.ndim == 1 and me in found and found == sorted(set(found))
    why, do = "a mesh has one list of ranks, in rising order, with this one in it", 'pass one dimension, mesh["dp"]'
    require(flat, "within", f"a device mesh {within.mesh.tolist()} on rank {me}", why, do)
    return found


def per_machine(ranks: Sequence[int]) -> int:
    """How many of them a machine has, of those that ``torchrun`` starts on each."""
    if "LOCAL_WORLD_SIZE" not in os.environ:
        return len(ranks)
    counts = set(collections.Counter(rank // int(os.environ["LOCAL_WORLD_SIZE"]) for rank in ranks).values())
    # on unequal machines the sizes are the user's to say, and one group is no error
    return counts.pop() if len(counts) == 1 else len(ranks)


def meet(
    shape: tuple[int, ...], rank: int, ranks: Sequence[int], timeout: float, key: str, *, derived: bool
) -> tuple[int, ...]:
    """Wait for all ranks of a mesh; its sizes, for groups of several shapes would wait for one another.

    ``derived`` from the number of ranks that a machine has, which on unequal machines leads to one group.
    """
    store = dist.distributed_c10d._get_default_store()
    rendezvous(store, rank, len(ranks), timeout, key, ranks)
    said = hear(store, rank, len(ranks), key, f"{list(shape)}{DERIVED if derived else ''}")
    if len({text.removesuffix(DERIVED) for text in said}) == 1:
        return shape
    do = "pass the same groups, per_group or sizes on every rank"
    everywhere = all(text.endswith(DERIVED) for text in said)
    require(everywhere, "mesh", by_rank("sizes", said, ranks), "all ranks make one mesh together", do)
    return len(ranks), 1


def check_beside(others: Mapping[str, DeviceMesh | None], ranks: Sequence[int], me: int) -> None:
    """Refuse dimensions that share more than me with the mesh."""
    why, do = "its ranks have other parts of the model", 'pass dimensions of one device mesh, such as within=mesh["dp"]'
    for name, other in others.items():
        apart = other is None or set(ranks_of(other, me)) & set(ranks) == {me}
        got = f"ranks {None if other is None else other.mesh.tolist()} beside ranks {list(ranks)}"
        require(apart, name, got, why, do)
