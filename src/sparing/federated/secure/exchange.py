"""A whole masked sum in this process, clients that leave between the exchanges and counted bytes included."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from sparing.federated.secure.protocol import SecureClient, SecureServer, Stage, threshold_of
from sparing.federated.secure.ring import Ints, Ring
from sparing.federated.secure.signing import new_signers

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
    *,
    signed: bool = False,
) -> MaskedSum:
    """Sum the vectors of the clients that stay; None is a client that has nothing to send when vectors are due."""
    asked = len(vectors)
    need = threshold_of(threshold, asked)
    server = SecureServer(ring, asked, need, size, signed=signed)
    signers = new_signers(max(vectors) + 1) if signed else {}
    clients = {number: SecureClient(number, need, ring, signer=signers.get(number)) for number in sorted(vectors)}

    def there(stage: Stage, among: Mapping[int, object] | tuple[int, ...]) -> list[int]:
        return [number for number in among if not leaves(stage, number)]

    published = {number: clients[number].publish() for number in there(Stage.KEYS, clients)}
    keys = server.take_keys(published)
    shared = {number: clients[number].share(keys) for number in there(Stage.SHARES, keys)}
    routed = server.take_shares(shared)
    masked = {}
    for number in there(Stage.VECTORS, routed):
        values = vectors[number]
        if values is not None:
            masked[number] = clients[number].mask(routed[number], ring.encode(values))
    survivors = server.take_vectors(masked)
    proofs: dict[int, bytes] | None = None
    if signed:
        proofs = server.take_signatures(
            {number: clients[number].sign(survivors) for number in there(Stage.SIGNATURES, survivors)}
        )
    left = there(Stage.UNMASK, survivors if proofs is None else proofs)
    revealed = {number: clients[number].reveal(survivors, proofs) for number in left}
    total = server.take_unmasking(revealed)
    return MaskedSum(total, survivors, server.bytes_up, server.bytes_down)
