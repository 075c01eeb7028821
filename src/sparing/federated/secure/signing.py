"""Clients that know each other without the server: signatures on keys, and on who took part as each was told."""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field

from sparing.errors import RunError, require
from sparing.federated.secure.keys import identity_of, is_signed, new_identity, sign


@dataclass(frozen=True, slots=True)
class Signer:
    """A client's long-lived Ed25519 key, and the public keys of all clients, handed out by another way than the server.

    Example:
        >>> signers = new_signers(3)
        >>> signers[1].known == signers[2].known
        True
    """

    number: int
    private: bytes = field(repr=False)  # 32 bytes, this client's alone
    known: Mapping[int, bytes] = field(repr=False)  # client -> public key, 32 bytes, of all clients of the run

    def __post_init__(self) -> None:
        own = self.known.get(self.number) == identity_of(self.private)
        why, do = "its public key is not that of its private one", "pass the key pair of this client"
        require(own, "Signer", f"client {self.number}", why, do)

    def sign(self, text: bytes) -> bytes:
        """Return the signature of a text, 64 bytes."""
        return sign(self.private, text)

    def check(self, client: int, signature: bytes, text: bytes, what: str) -> None:
        """Refuse what a client did not sign."""
        key = self.known.get(client)
        if key is None or not is_signed(key, signature, text):
            raise RunError(f"client {self.number}: secure sum: client {client} did not sign {what}; nothing is sent")


def new_signers(clients: int) -> dict[int, Signer]:
    """Return fresh keys for so many clients, as a simulation has them."""
    private = {number: new_identity() for number in range(clients)}
    known = {number: identity_of(key) for number, key in private.items()}
    return {number: Signer(number, key, known) for number, key in private.items()}


def keys_text(client: int, keys: bytes) -> bytes:
    """What a client signs with its keys."""
    return b"sparing secure sum, keys %d " % client + keys


def round_text(keys: Mapping[int, bytes], shared: Collection[int], survivors: Iterable[int]) -> bytes:
    """What a client signs before it tells a share: all keys of the round, who shared, and who sent a vector."""
    parts = [b"%d %s" % (client, key.hex().encode()) for client, key in sorted(keys.items())]
    lists = [b" ".join(b"%d" % client for client in sorted(some)) for some in (shared, survivors)]
    return b"sparing secure sum, round " + hashlib.sha256(b"\n".join([*parts, b"", lists[0], b"", lists[1]])).digest()
