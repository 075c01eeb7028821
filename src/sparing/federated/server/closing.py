"""When a round closes: enough clients have answered, or nobody is left that is worth waiting for."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field

import torch

from sparing.seeds import stream

Delays = Callable[[int, int], float]
"""Client and round (0 is the first) -> seconds until its update is with the server; infinite if it never is."""


@dataclass(slots=True)
class OpenRound:
    """A round that waits for answers.

    A client for which some round's patience ran out is absent until it answers a round in time: it is asked as others
    are, but nobody waits for it. Where all that were asked are absent, they are waited for.
    """

    asked: tuple[int, ...]
    needed: int  # updates that close the round
    absent: frozenset[int] = frozenset()
    answered: set[int] = field(default_factory=set)  # with an update, or with an error
    updates: int = 0

    @property
    def hopeful(self) -> frozenset[int]:
        """Clients worth waiting for."""
        return frozenset(self.asked) - self.absent or frozenset(self.asked)

    @property
    def enough(self) -> bool:
        """Whether there are as many updates as the round needs."""
        return self.updates >= self.needed

    @property
    def closed(self) -> bool:
        """Whether nothing is waited for."""
        return self.enough or self.hopeful <= self.answered

    def take(self, client: int, *, update: bool) -> None:
        """Note an answer."""
        self.answered.add(client)
        self.updates += update

    @property
    def absent_after(self) -> frozenset[int]:
        """Absent clients when the round is over: patience ran out on those that it still hoped for."""
        gone = frozenset() if self.enough else self.hopeful - self.answered
        return (self.absent | gone) - self.answered

    @property
    def unneeded(self) -> tuple[int, ...]:
        """Clients that were asked, and may have answered after the round had closed."""
        left = set(self.asked) - self.answered - self.absent
        return tuple(sorted(left)) if self.enough else ()


def arrivals(
    times: Mapping[int, float], absent: Collection[int], patience: float, rank: Mapping[int, int]
) -> tuple[list[int], float]:
    """Return who answers while a round waits that never has enough, in order, and when it ends (seconds)."""
    hopeful = [client for client in times if client not in absent] or list(times)
    end = min(max((times[client] for client in hopeful), default=0.0), patience)
    came = [client for client in times if times[client] <= end]
    return sorted(came, key=lambda client: (times[client], rank[client])), end


def ranks(clients: Collection[int], number: int, seed: int) -> dict[int, int]:
    """Return who counts as first of clients whose answers come together, by a draw of the round (0 is the first)."""
    order = torch.randperm(len(clients), generator=stream(seed, "federated", "ranks", number)).tolist()
    return dict(zip(sorted(clients), order, strict=True))
