"""Bytes of a masked sum, from counts alone."""

from __future__ import annotations

from dataclasses import dataclass

from sparing.federated.secure.protocol import COMMITMENT, KEYS, NUMBER, SEALED_SHARES
from sparing.federated.secure.shamir import SHARE


@dataclass(frozen=True, slots=True)
class Answers:
    """How many clients answered each exchange."""

    keys: int
    shares: int
    vectors: int
    unmask: int


def bytes_up(answers: Answers, size: int, bits: int) -> int:
    """Return what all clients send together: keys, shares for each other, ``size`` masked integers, shares to unmask.

    Every share and every list names a client, by four bytes.
    """
    shares = answers.shares * (COMMITMENT + (answers.keys - 1) * (NUMBER + SEALED_SHARES))
    vectors = answers.vectors * size * bits // 8
    return answers.keys * KEYS + shares + vectors + answers.unmask * answers.shares * (NUMBER + SHARE)


def bytes_down(answers: Answers) -> int:
    """Return what the server sends beside the model: all keys, the shares made for each, and who sent a vector."""
    keys = answers.keys * answers.keys * (NUMBER + KEYS)
    shares = answers.shares * (answers.shares - 1) * (NUMBER + SEALED_SHARES)
    return keys + shares + answers.vectors * answers.vectors * NUMBER
