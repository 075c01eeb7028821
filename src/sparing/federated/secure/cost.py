"""Bytes of a masked sum, from counts alone."""

from __future__ import annotations

from dataclasses import dataclass

from sparing.federated.secure.keys import SIGNATURE
from sparing.federated.secure.protocol import COMMITMENT, KEYS, NUMBER, SEALED_SHARES
from sparing.federated.secure.shamir import SHARE


@dataclass(frozen=True, slots=True)
class Answers:
    """How many clients answered each exchange."""

    keys: int
    shares: int
    vectors: int
    unmask: int
    signatures: int = 0  # 0 where clients do not sign


def bytes_up(answers: Answers, size: int, bits: int) -> int:
    """Return what clients send: keys, shares for each other, ``size`` masked integers, signatures, shares to unmask.

    Every share and every list names a client, by four bytes.
    """
    shares = answers.shares * (COMMITMENT + (answers.keys - 1) * (NUMBER + SEALED_SHARES))
    vectors = answers.vectors * size * bits // 8
    keys = answers.keys * (KEYS + SIGNATURE * bool(answers.signatures)) + answers.signatures * SIGNATURE
    return keys + shares + vectors + answers.unmask * answers.shares * (NUMBER + SHARE)


def bytes_down(answers: Answers) -> int:
    """Return what the server sends beside the model: all keys, the shares for each, who sent a vector, signatures."""
    keys = answers.keys * answers.keys * (NUMBER + KEYS + SIGNATURE * bool(answers.signatures))
    keys += answers.signatures * answers.signatures * (NUMBER + SIGNATURE)
    shares = answers.shares * (answers.shares - 1) * (NUMBER + SEALED_SHARES)
    return keys + shares + answers.vectors * answers.vectors * NUMBER
