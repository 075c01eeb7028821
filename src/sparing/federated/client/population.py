"""Clients that are made when they are drawn, so that a million of them cost no memory.

everyone = Population(make=lambda client: Client(x[first(client):][:8], y[first(client):][:8]), sizes=sizes)
simulate(make_model, everyone, SCAFFOLD(), schedule)
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import overload

from torch import Tensor

from sparing.errors import require
from sparing.federated.client.train import Client, require_tensors


@dataclass(frozen=True, slots=True, eq=False)
class Population(Sequence[Client]):
    """A sequence of clients whose rows are asked for in the rounds that draw them, and kept no longer.

    Example:
        >>> import torch
        >>> rows = torch.arange(6.0).view(3, 2, 1)
        >>> everyone = Population(lambda client: Client(rows[client], torch.tensor([0, 1])), torch.tensor([2, 2, 2]))
        >>> len(everyone), everyone[1].inputs.flatten().tolist()
        (3, [2.0, 3.0])
    """

    make: Callable[[int], Client]
    """Number of a client -> its rows, the same at every call."""

    sizes: Tensor
    """Rows of each client (count), shape (clients,), int64, >= 1: known before any client is made."""

    def __post_init__(self) -> None:
        fine = self.sizes.ndim == 1 and not self.sizes.is_floating_point() and not self.sizes.is_complex()
        got = f"{self.sizes.dtype} of shape {tuple(self.sizes.shape)}"
        require(fine, "Population.sizes", got, "it counts the rows of each client", "pass integers, shape (clients,)")
        least = int(self.sizes.min()) if len(self.sizes) else 1
        require(least >= 1, "Population.sizes", least, "a client needs rows", "leave clients without rows out")

    def __len__(self) -> int:
        return len(self.sizes)

    @overload
    def __getitem__(self, client: int) -> Client: ...
    @overload
    def __getitem__(self, client: slice) -> list[Client]: ...
    def __getitem__(self, client: int | slice) -> Client | list[Client]:
        if isinstance(client, slice):
            return [self[one] for one in range(*client.indices(len(self)))]
        if not -len(self) <= client < len(self):
            raise IndexError(client)
        made, rows = self.make(client % len(self)), int(self.sizes[client])
        require_tensors(made, f"client {client}")
        do = "return as many rows as sizes says"
        require(len(made) == rows, f"client {client}", f"{len(made)} rows", f"its size is {rows}", do)
        return made


def sizes_of(clients: Sequence[Client]) -> list[int]:
    """Rows of each client (count), without making those that are made when drawn."""
    return clients.sizes.tolist() if isinstance(clients, Population) else list(map(len, clients))


def at_hand(clients: Sequence[Client]) -> Sequence[Client]:
    """Clients that can be looked at before the first round: all, or the first of those that are made when drawn."""
    return clients[:1] if isinstance(clients, Population) else clients
