"""Groups of unequal size: the meshes of equal groups that fit into them, and what each leaves out.

Slices nest only where all groups have as many ranks. ``per_group`` ranks at a time, every group is cut into as many
whole groups as it holds; the rest of it is left out.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from sparing.errors import UserError, require
from sparing.sharding.planner.config import Topology


@dataclass(frozen=True, slots=True, kw_only=True)
class Arrangement:
    """Equal groups inside unequal ones, with neighbours in the order of ranks."""

    topology: Topology
    left_out: int  # ranks that do not take part (count)

    @property
    def ranks(self) -> int:
        """Those that do (count)."""
        return self.topology.world


def arrangements(sizes: Sequence[int], links: Topology) -> tuple[Arrangement, ...]:
    """Ways to cut groups of unequal size into equal ones, the one that uses most ranks first.

    Of ways that use as many ranks only the one with the largest groups is there, and none that a larger group beats in
    ranks as well: groups of one size give one way, which is those groups. A ring between groups leaves each machine
    once, so no more ranks share the wire that leaves it than a group has; hops inside a machine are taken to be no
    slower.

    Args:
        sizes: Ranks of each group (counts).
        links: Two axes, whose speeds hold for all groups; their sizes are replaced.

    Returns:
        At least one way.

    Raises:
        UserError: If a group is empty, or there are other than two kinds of links.
    """
    held = list(sizes)
    require(bool(held) and min(held) >= 1, "groups", held, "a group has a rank", "pass the ranks of each group")
    if links.tiers != 2:
        why, do = "domains inside groups of unequal size have no common mesh", "describe two kinds of links"
        raise UserError("groups", got=f"{held} on {links.tiers} kinds of links", why=why, do=do)
    found: list[Arrangement] = []
    for size in range(max(held), 0, -1):
        count = sum(group // size for group in held)
        if count and all(size * count > other.ranks for other in found):
            found.append(Arrangement(topology=_of(links, size, count), left_out=sum(held) - size * count))
    return tuple(reversed(found))


def _of(links: Topology, size: int, count: int) -> Topology:
    intra, inter = (replace(axis, sharing=min(axis.sharing, size)) for axis in links.axes)
    return replace(links, axes=(replace(intra, size=size), replace(inter, size=count)))
