"""Secrets in shares over a prime field: any ``threshold`` of them give the secret, fewer tell nothing.

Source: Shamir, "How to share a secret", Communications of the ACM 22 (1979).
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Mapping, Sequence

PRIME = 2**256 + 297
"""The smallest prime above every secret of 32 bytes."""

SECRET, SHARE = 32, 33
"""Bytes of a secret, and of a share, which may be as large as the prime."""


def split(
    secret: bytes, threshold: int, holders: Sequence[int], below: Callable[[int], int] = secrets.randbelow
) -> dict[int, bytes]:
    """Return a share for each holder (a number ≥ 0): a random polynomial of degree threshold − 1 at holder + 1."""
    assert len(secret) == SECRET
    assert 1 <= threshold <= len(set(holders)) == len(holders)
    coefficients = [int.from_bytes(secret, "big"), *(below(PRIME) for _ in range(threshold - 1))]
    shares = {}
    for holder in holders:
        value = 0
        for coefficient in reversed(coefficients):
            value = (value * (holder + 1) + coefficient) % PRIME
        shares[holder] = value.to_bytes(SHARE, "big")
    return shares


def join(shares: Mapping[int, bytes], threshold: int) -> bytes:
    """Return the secret from the shares of ``threshold`` holders; ``ValueError`` if they are of no secret."""
    if len(shares) < threshold:
        raise ValueError(f"{len(shares)} shares of the {threshold} that it takes")
    points = [(holder + 1, int.from_bytes(shares[holder], "big")) for holder in sorted(shares)[:threshold]]
    value = 0
    for x, y in points:
        # Lagrange's polynomial of the point, at zero.
        above = below = 1
        for other, _ in points:
            if other != x:
                above, below = above * other % PRIME, below * (other - x) % PRIME
        value = (value + y * above * pow(below, -1, PRIME)) % PRIME
    if value >= 1 << 8 * SECRET:
        raise ValueError("the shares are of no secret of 32 bytes")
    return value.to_bytes(SECRET, "big")
