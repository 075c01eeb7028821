"""Ranks that must hold the same thing say what they hold; those that differ are named."""

from __future__ import annotations

import ctypes
import hashlib
import itertools
import zlib
from collections import Counter
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import Tensor

from sparing.errors import RunError, UserError, require
from sparing.sharding.network.rendezvous import name_ranks

if TYPE_CHECKING:
    from sparing.sharding.network.mesh import Mesh

SHOWN_CHARACTERS = 80  # characters of a fact that an error shows


def check_same(
    mesh: Mesh,
    fact: object,
    what: str,
    why: str = "all ranks must have the same",
    do: str = "start every rank with the same code and settings",
) -> None:
    """Check that a fact (one value, or name -> value), compared by ``repr``, is the same on all ranks; all call it.

    Ranks exchange its hash, and the text only if those differ; a ``UserError`` then names who differs.
    """
    texts = (
        {str(name): repr(value) for name, value in fact.items()} if isinstance(fact, Mapping) else {what: repr(fact)}
    )
    # 32 bytes for each rank in the common case, whatever the facts
    digest = hashlib.sha256(repr(sorted(texts.items())).encode()).digest()
    rows = mesh.gather_scalars(torch.frombuffer(bytearray(digest), dtype=torch.uint8))
    if bool((rows == rows[0]).all()):
        return
    texts_by_rank: list[dict[str, str]] = [{}] * mesh.world
    dist.all_gather_object(texts_by_rank, texts, group=mesh.control)
    names = sorted({name for texts in texts_by_rank for name in texts})
    differing = [name for name in names if len({texts.get(name) for texts in texts_by_rank}) > 1]
    found = "; ".join(
        by_rank(name, [texts.get(name, "nothing") for texts in texts_by_rank], mesh.ranks) for name in differing[:3]
    )
    raise UserError(what, got=found, why=why, do=do)


def check_apart(mesh: Mesh | None, texts: Iterable[str], what: str, why: str, do: str) -> None:
    """Refuse what two ranks have alike, such as stages; all call it."""
    if mesh is None or mesh.world == 1:
        return
    held: list[list[str]] = [[]] * mesh.world
    dist.all_gather_object(held, sorted(texts), group=mesh.control)
    twice = sorted(text for text, count in Counter(itertools.chain.from_iterable(held)).items() if count > 1)
    require(not twice, what, f"{twice[:1]} in two stages", why, do)


def checksum(tensor: Tensor) -> int:
    """A 64-bit checksum of the bits of a tensor of any shape, type and device."""
    mine = tensor.detach()
    # of a DTensor, which tensor parallelism has
    whole = getattr(mine, "to_local", lambda: mine)().cpu().contiguous()
    # not by numpy(), after which torch lets nobody resize the storage, as engines do that free parameters
    data = (ctypes.c_ubyte * whole.nbytes).from_address(whole.data_ptr())
    return zlib.crc32(data) << 31 | zlib.adler32(data) >> 1


def check_replicas(mesh: Mesh, tensors: Mapping[str, tuple[Tensor, int]]) -> None:
    """Raise ``RunError`` where ranks that should hold the same slice differ; all ranks call it, between steps."""
    if not tensors or mesh.world == 1:
        return
    rows = mesh.gather_scalars(torch.tensor([checksum(tensor) for tensor, _ in tensors.values()]))
    broken = []
    for column, (name, (_, level)) in zip(rows.T.tolist(), tensors.items(), strict=True):
        inside = mesh.inside(level)
        for first in range(inside):
            outliers = _outliers({rank: column[rank] for rank in range(first, mesh.world, inside)})
            if outliers:
                broken.append(f"{name} on {name_ranks(mesh.ranks[rank] for rank in outliers)}")
    if broken:
        raise RunError(
            f"replicas differ: {'; '.join(broken[:5])}{'; …' if len(broken) > 5 else ''}: these ranks have left the "
            "others; resume from the last checkpoint, and check that nothing changes parameters on some ranks only"
        )


def by_rank(name: str, values: list[str], numbers: Iterable[int]) -> str:
    """Each value with its ranks, most common first: ``plan IIG on ranks 0, 1, NNN on rank 2``."""
    ranks: dict[str, list[int]] = {}
    for rank, value in zip(numbers, values, strict=True):
        ranks.setdefault(value, []).append(rank)
    groups = sorted(ranks.items(), key=lambda pair: (-len(pair[1]), pair[1]))
    return f"{name} " + ", ".join(f"{_short(value)} on {name_ranks(held)}" for value, held in groups)


def _short(text: str) -> str:
    return text if len(text) <= SHOWN_CHARACTERS else text[: SHOWN_CHARACTERS - 1] + "…"


def _outliers(values: dict[int, int]) -> list[int]:
    """Ranks whose value is not the most common one."""
    usual = Counter(values.values()).most_common(1)[0][0]
    return [rank for rank, value in values.items() if value != usual]
