"""A slower network without privileges: messages of a ring are held back as a link of a given rate would hold them."""

from __future__ import annotations

import time
from dataclasses import dataclass

from sparing.errors import require


@dataclass(frozen=True, kw_only=True)
class RateLimit:
    """One direction of a link.

    Example:
        >>> RateLimit(rate=12.5e6, latency=1e-4, sharing=2).seconds(12_500_000)
        2.0001
    """

    rate: float  # payload that the link carries (B/s)
    latency: float = 0.0  # added to each message, the α of the cost model (s)
    sharing: int = 1  # ranks that send over the link at once, κ: each gets an equal part of the rate

    def __post_init__(self) -> None:
        require(self.rate > 0, "rate", self.rate, "nothing would arrive", "pass bytes per second above 0")
        require(self.latency >= 0, "latency", self.latency, "it is a time", "pass seconds >= 0")
        require(self.sharing >= 1, "sharing", self.sharing, "the sender is one of them", "pass a count >= 1")

    def seconds(self, nbytes: int) -> float:
        """Time of one message (s)."""
        return self.latency + nbytes * self.sharing / self.rate


class Throttle:
    """Holds each message of one rank until its last byte would have arrived."""

    def __init__(self, limit: RateLimit) -> None:
        self._limit = limit
        self._free = 0.0

    def hold(self, nbytes: int) -> None:
        """Sleep until a message that starts now, or when the link is free, would have arrived (B)."""
        self._free = max(time.perf_counter(), self._free) + self._limit.seconds(nbytes)
        while (left := self._free - time.perf_counter()) > 0:
            time.sleep(left)
