"""A masked sum in four exchanges, five if clients sign: both halves as state machines that take and return bytes.

    keys       every client publishes two public keys
    shares     of its mask key and of the seed of its own mask, one for each other client, sealed, by way of the server
    vectors    its integers, plus its own mask, plus or minus a mask with every client that sent shares
    signatures where clients sign: of all keys, of who shared them, and of who sent a vector, as each was told
    unmask     of who sent a vector the shares of the seed, of who did not those of the mask key; never both

A client may leave between any two of them. Without a ``Signer`` the server is taken to follow the protocol: it could
put keys of its own in place of the clients', or tell them different lists. With one, clients tell shares only if more
than half of those asked signed the same keys and lists.

Source: Bonawitz et al. 2017, "Practical secure aggregation for privacy-preserving machine learning", CCS, Figure 4;
what is signed here also has the keys of the round and who shared them, which binds it to the round.
"""

from __future__ import annotations

import enum
import hashlib
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

import numpy as np

from sparing.errors import RunError
from sparing.federated.secure.keys import (
    PUBLIC,
    SEALED,
    SIGNATURE,
    agree,
    mask_bytes,
    new_private,
    public_of,
    seal,
    unseal,
)
from sparing.federated.secure.ring import Ints, Ring
from sparing.federated.secure.shamir import SECRET, SHARE, join, split
from sparing.federated.secure.signing import Signer, keys_text, round_text

Message = TypeVar("Message")

NUMBER = 4
"""Bytes of a client's number."""

KEYS, SEALED_SHARES, COMMITMENT = 2 * PUBLIC, 2 * SHARE + SEALED, 32
"""Bytes of a client's keys, of its shares for another, and of what binds it to its seed."""


class Stage(enum.Enum):
    """What the server waits for."""

    KEYS = "keys"
    SHARES = "shares"
    VECTORS = "masked vectors"
    SIGNATURES = "signatures"
    UNMASK = "shares to unmask"
    DONE = "nothing"


@dataclass(slots=True)
class SecureClient:
    """A client's half of one round; its secrets are fresh in every round and leave it as shares only."""

    number: int
    threshold: int  # shares that it takes to unmask (count)
    ring: Ring
    mask_key: bytes = field(default_factory=new_private, repr=False)
    seal_key: bytes = field(default_factory=new_private, repr=False)
    seed: bytes = field(default_factory=lambda: os.urandom(SECRET), repr=False)  # of its own mask
    keys: dict[int, bytes] = field(default_factory=dict)  # of the clients that published some
    held: dict[int, bytes] = field(default_factory=dict, repr=False)  # client -> shares of its key and seed
    signer: Signer | None = None
    told: tuple[int, ...] = ()  # who sent a vector, as it signed

    def publish(self) -> bytes:
        """Return both public keys, signed where it signs."""
        keys = public_of(self.mask_key) + public_of(self.seal_key)
        return keys if self.signer is None else keys + self.signer.sign(keys_text(self.number, keys))

    def share(self, keys: Mapping[int, bytes]) -> tuple[bytes, dict[int, bytes]]:
        """Return the hash of the seed, and sealed shares for every other client whose keys came."""
        self._once(not self.keys, "shares")
        self._need(len(keys), "published keys")
        own = keys.get(self.number) == self.publish()
        if self.signer is not None:
            for client, signed in keys.items():
                text = keys_text(client, signed[:KEYS])
                self.signer.check(client, signed[KEYS:], text, "the keys that came as its own")
            keys = {client: signed[:KEYS] for client, signed in keys.items()}
        parts = [part for both in keys.values() for part in (both[:PUBLIC], both[PUBLIC:])]
        if not own or len(set(parts)) != len(parts):
            raise RunError(f"client {self.number}: the keys that came are not its own and different ones of others")
        self.keys = dict(keys)
        holders = sorted(keys)
        of_key, of_seed = (split(secret, self.threshold, holders) for secret in (self.mask_key, self.seed))
        texts = {holder: of_key[holder] + of_seed[holder] for holder in holders}
        self.held = {self.number: texts.pop(self.number)}
        sealed = {to: seal(self._sealing(self.number, to), text, b"") for to, text in texts.items()}
        return hashlib.sha256(self.seed).digest(), sealed

    def mask(self, sealed: Mapping[int, bytes], values: Ints) -> bytes:
        """Return the integers under all masks; ``sealed`` has the shares that others made for this client."""
        self._once(len(self.held) == 1, "its vector")
        self._need(len(sealed) + 1, "shared their keys")
        for sender, text in sealed.items():
            self.held[sender] = unseal(self._sealing(sender, self.number), text, b"")
        total = self.ring.add(values, mask_of(self.ring, self.seed, len(values)))
        for other in sorted(sealed):
            key = pair_key(self.mask_key, self.keys[other][:PUBLIC])
            total = self.ring.add(total, mask_of(self.ring, key, len(values)), 1 if self.number > other else -1)
        return self.ring.pack(total)

    def sign(self, survivors: Sequence[int]) -> bytes:
        """Sign what it knows of the round and who sent a vector, as it was told; only once."""
        assert self.signer is not None
        self._once(len(self.held) > 1 and not self.told, "a signature")
        self._need(len(set(survivors) & self.held.keys()), "sent a vector")
        self.told = tuple(sorted(survivors))
        return self.signer.sign(round_text(self.keys, self.held, self.told))

    def reveal(self, survivors: Sequence[int], signatures: Mapping[int, bytes] | None = None) -> dict[int, bytes]:
        """Return a share for every client that shared: of the seed of those that sent a vector, else of the key.

        A client that signs wants as many signatures as it takes to unmask, all of what it signed itself.
        """
        self._once(len(self.held) > 1, "what unmasks")
        if self.signer is not None:
            self._check(survivors, signatures or {}, self.signer)
        self._need(len(set(survivors) & self.held.keys()), "sent a vector")
        held, self.held = self.held, {}
        # One of the two and never both: with both the server could take every mask off one vector.
        return {who: text[SHARE:] if who in survivors else text[:SHARE] for who, text in sorted(held.items())}

    def _check(self, survivors: Sequence[int], signatures: Mapping[int, bytes], signer: Signer) -> None:
        """Refuse a server that told other clients something else, or tells this one something else now."""
        if tuple(sorted(survivors)) != self.told:
            raise RunError(f"client {self.number}: secure sum: it signed another list of who sent a vector")
        self._need(len(signatures.keys() & set(self.told)), "signed who sent one")
        text = round_text(self.keys, self.held, self.told)
        for client in sorted(signatures):
            signer.check(client, signatures[client], text, "the keys and lists that came here")

    def _once(self, first: bool, what: str) -> None:
        if not first:
            # Two answers of one exchange would have a key in common, or tell both shares.
            raise RunError(
                f"client {self.number}: secure sum: it is asked for {what} twice or too early; nothing is sent"
            )

    def _need(self, count: int, what: str) -> None:
        if count < self.threshold:
            text = f"{count} clients {what}, and it takes {self.threshold}; nothing is sent"
            raise RunError(f"client {self.number}: secure sum: {text}")

    def _sealing(self, sender: int, to: int) -> bytes:
        other = to if sender == self.number else sender
        # A key for each direction: both ends seal with the nonce zero.
        return agree(self.seal_key, self.keys[other][PUBLIC:], b"seal %d %d" % (sender, to))


class SecureServer:
    """The server's half of one round; it sees masked vectors, and ends with their sum or with nothing."""

    def __init__(self, ring: Ring, asked: int, threshold: int, size: int, *, signed: bool = False) -> None:
        """Begin with how many were asked, how many shares unmask, how many elements, and whether clients sign."""
        ring.check(asked)
        self.ring, self.asked, self.threshold, self.size, self.signed = ring, asked, threshold, size, signed
        self.stage = Stage.KEYS
        self.faults: dict[int, str] = {}  # client -> what was wrong with its message
        self.survivors: tuple[int, ...] = ()
        self.bytes_up = self.bytes_down = 0  # so far; a client's number counts as four
        self._keys: dict[int, bytes] = {}
        self._commitments: dict[int, bytes] = {}
        self._vectors: dict[int, bytes] = {}

    def take_keys(self, messages: Mapping[int, bytes]) -> dict[int, bytes]:
        """Take the keys that came; return all of them, which go to each of their senders."""
        self._enter(Stage.KEYS)
        self.bytes_up += sum(map(len, messages.values()))
        length = KEYS + self.signed * SIGNATURE
        taken = self._leave(self._whole(messages, lambda message, _: len(message) == length), Stage.SHARES)
        self._keys = {client: message[:KEYS] for client, message in taken.items()}
        self.bytes_down += len(taken) * _listed(taken)
        return taken

    def take_shares(self, messages: Mapping[int, tuple[bytes, Mapping[int, bytes]]]) -> dict[int, dict[int, bytes]]:
        """Take sealed shares; return those for each client that sent some, by who made them."""
        self._enter(Stage.SHARES)

        def whole(message: tuple[bytes, Mapping[int, bytes]], sender: int) -> bool:
            others = self._keys.keys() - {sender}
            lengths = [len(text) == SEALED_SHARES for text in message[1].values()]
            return (
                sender in self._keys and message[1].keys() == others and len(message[0]) == COMMITMENT and all(lengths)
            )

        self.bytes_up += sum(len(bound) + _listed(sealed) for bound, sealed in messages.values())
        taken = self._leave(self._whole(messages, whole), Stage.VECTORS)
        self._commitments = {sender: message[0] for sender, message in taken.items()}
        routed = {to: {who: taken[who][1][to] for who in sorted(taken) if who != to} for to in sorted(taken)}
        self.bytes_down += sum(map(_listed, routed.values()))
        return routed

    def take_vectors(self, messages: Mapping[int, bytes]) -> tuple[int, ...]:
        """Take masked vectors; return who sent one, which goes to each of them."""
        self._enter(Stage.VECTORS)
        self.bytes_up += sum(map(len, messages.values()))
        length = self.size * self.ring.bits // 8
        taken = self._whole(messages, lambda message, who: who in self._commitments and len(message) == length)
        self._vectors = self._leave(taken, Stage.SIGNATURES if self.signed else Stage.UNMASK)
        self.survivors = tuple(sorted(self._vectors))
        self.bytes_down += NUMBER * len(self.survivors) ** 2
        return self.survivors

    def take_signatures(self, messages: Mapping[int, bytes]) -> dict[int, bytes]:
        """Take signatures of who sent a vector; return all of them, which go to each of their senders."""
        self._enter(Stage.SIGNATURES)
        self.bytes_up += sum(map(len, messages.values()))
        whole = self._whole(messages, lambda message, who: who in self._vectors and len(message) == SIGNATURE)
        taken = self._leave(whole, Stage.UNMASK)
        self.bytes_down += len(taken) * _listed(taken)
        return taken

    def take_unmasking(self, messages: Mapping[int, Mapping[int, bytes]]) -> Ints:
        """Take shares and return the sum of the vectors of all that sent one, also of those that left since."""
        self._enter(Stage.UNMASK)

        def whole(message: Mapping[int, bytes], sender: int) -> bool:
            lengths = all(len(share) == SHARE for share in message.values())
            return sender in self._vectors and message.keys() == self._commitments.keys() and lengths

        self.bytes_up += sum(map(_listed, messages.values()))
        taken = self._leave(self._whole(messages, whole), Stage.DONE)
        total = np.zeros(self.size, np.uint64)
        for vector in self._vectors.values():
            total = self.ring.add(total, self.ring.unpack(vector))
        for client, commitment in sorted(self._commitments.items()):
            secret = self._secret(client, {holder: message[client] for holder, message in taken.items()})
            if client in self._vectors:
                self._require(hashlib.sha256(secret).digest() == commitment, client)
                total = self.ring.add(total, mask_of(self.ring, secret, self.size), -1)
                continue
            self._require(public_of(secret) == self._keys[client][:PUBLIC], client)
            for other in self.survivors:
                mask = mask_of(self.ring, pair_key(secret, self._keys[other][:PUBLIC]), self.size)
                # As the survivor added it, turned round.
                total = self.ring.add(total, mask, -1 if other > client else 1)
        return total

    def _whole(self, messages: Mapping[int, Message], fits: Callable[[Message, int], bool]) -> dict[int, Message]:
        """Messages of the right form; a client that sent another counts as gone."""
        taken = {}
        for sender in sorted(messages):
            if fits(messages[sender], sender):
                taken[sender] = messages[sender]
            else:
                self.faults[sender] = f"its {self.stage.value} are not of this round"
        return taken

    def _enter(self, stage: Stage) -> None:
        assert self.stage is stage, f"the server waits for {self.stage.value}"

    def _leave(self, taken: dict[int, Message], after: Stage) -> dict[int, Message]:
        """Go on, or end the round where too few are left."""
        if len(taken) < self.threshold:
            text = f"{len(taken)} of {self.asked} clients sent {self.stage.value}, and it takes {self.threshold}"
            self.stage = Stage.DONE
            self._vectors = {}
            raise RunError(f"secure sum: {text}; nothing was revealed")
        self.stage = after
        return taken

    def _secret(self, client: int, shares: Mapping[int, bytes]) -> bytes:
        try:
            return join(shares, self.threshold)
        except ValueError:
            return self._require(False, client)

    def _require(self, holds: bool, client: int) -> bytes:
        if not holds:
            raise RunError(f"secure sum: the shares of client {client}'s secret are wrong; somebody sent another's")
        return b""


def _listed(texts: Mapping[int, bytes]) -> int:
    """Bytes of a list that names the client of each text."""
    return sum(NUMBER + len(text) for text in texts.values())


def threshold_of(share: float, clients: int) -> int:
    """Return how many shares unmask: more than this share of the clients asked, at least two."""
    # 0.3 · 10 is 3, not 3 − 4e-16.
    return max(int(share * clients + 1e-9) + 1, 2)


def pair_key(private: bytes, public: bytes) -> bytes:
    """Return the key of the mask of two clients."""
    return agree(private, public, b"mask")


def mask_of(ring: Ring, key: bytes, size: int) -> Ints:
    """Return uniform integers modulo 2^bits, the same for all that hold the key."""
    return ring.unpack(mask_bytes(key, size * ring.bits // 8))
