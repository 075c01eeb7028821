"""A whole masked sum in this process, clients that leave between the exchanges and counted bytes included."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from sparing.federated.secure.protocol import NUMBER, SecureClient, SecureServer, Stage, threshold_of
from sparing.federated.secure.ring import Ints, Ring

Leaves = Callable[[Stage, int], bool]
"""Exchange and client -> whether the client is gone before it answers."""


@dataclass(frozen=True, slots=True, eq=False)
class MaskedSum:
    """What a masked sum leaves with the server."""

    total: Ints  # the sum of the survivors' integers
    survivors: tuple[int, ...]  # clients whose vector is in it
    bytes_up: int
    bytes_down: int


def masked_sum(
    ring: Ring,
    threshold: float,
    size: int,
    vectors: Mapping[int, NDArray[np.float64] | None],
    leaves: Leaves = lambda stage, client: False,
) -> MaskedSum:
    """Sum the vectors of the clients that stay; None is a client that has nothing to send when vectors are due."""
    asked = len(vectors)
    need = threshold_of(threshold, asked)
    server = SecureServer(ring, asked, need, size)
    clients = {number: SecureClient(number, need, ring) for number in sorted(vectors)}
    up = down = 0

    def there(stage: Stage, among: Mapping[int, object] | tuple[int, ...]) -> list[int]:
        return [number for number in among if not leaves(stage, number)]

    published = {number: clients[number].publish() for number in there(Stage.KEYS, clients)}
    up += sum(map(len, published.values()))
    keys = server.take_keys(published)
    down += len(keys) * sum(NUMBER + len(key) for key in keys.values())
    shared = {number: clients[number].share(keys) for number in there(Stage.SHARES, keys)}
    up += sum(len(bound) + _listed(sealed) for bound, sealed in shared.values())
    routed = server.take_shares(shared)
    down += sum(_listed(sealed) for sealed in routed.values())
    masked = {}
    for number in there(Stage.VECTORS, routed):
        values = vectors[number]
        if values is not None:
            masked[number] = clients[number].mask(routed[number], ring.encode(values))
    up += sum(map(len, masked.values()))
    survivors = server.take_vectors(masked)
    down += len(survivors) * len(survivors) * NUMBER
    revealed = {number: clients[number].reveal(survivors) for number in there(Stage.UNMASK, survivors)}
    up += sum(_listed(shares) for shares in revealed.values())
    return MaskedSum(server.take_unmasking(revealed), survivors, up, down)


def _listed(texts: Mapping[int, bytes]) -> int:
    """Bytes of a list that names the client of each text."""
    return sum(NUMBER + len(text) for text in texts.values())
