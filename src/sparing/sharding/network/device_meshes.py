"""Dimensions of torch's ``DeviceMesh``, of which a mesh of ours is one."""

from __future__ import annotations

import collections
import os
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from sparing.errors import require

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh


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


def check_beside(others: Mapping[str, DeviceMesh | None], ranks: Sequence[int], me: int) -> None:
    """Refuse dimensions that share more than me with the mesh."""
    why, do = "its ranks have other parts of the model", 'pass dimensions of one device mesh, such as within=mesh["dp"]'
    for name, other in others.items():
        apart = other is None or set(ranks_of(other, me)) & set(ranks) == {me}
        got = f"ranks {None if other is None else other.mesh.tolist()} beside ranks {list(ranks)}"
        require(apart, name, got, why, do)
