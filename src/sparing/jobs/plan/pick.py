"""Which candidate to take, and why each other lost: a stated rule, not a taste."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from sparing.jobs.plan.candidates import Candidate
from sparing.jobs.plan.price import Price
from sparing.memory import format_bytes

RULE = (
    "Of those that fit, the one that trains the most parameters at once; among equals the one with fewer operations, "
    "then with fewer bytes."
)
"""The rule, in words, for the page."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Verdict:
    """A candidate, its price, and what came of it."""

    candidate: Candidate
    """The way to fine-tune."""
    price: Price
    """What it costs."""
    fits: bool
    """Whether its peak is within the memory."""
    picked: bool
    """Whether it is the one to take."""
    why: str
    """One clause."""


def judge(prices: Mapping[Candidate, Price], memory: int) -> list[Verdict]:
    """Apply the rule.

    Args:
        prices: Price by candidate.
        memory: Bytes of the device.

    Returns:
        A verdict for each, in the given order; none is picked if none fits.
    """
    fitting = [c for c, price in prices.items() if price.bytes.total <= memory]
    best = max(fitting, key=lambda c: _rank(c, prices[c]), default=None)
    return [
        Verdict(
            candidate=candidate, price=price, fits=candidate in fitting, picked=candidate is best,
            why=_why(candidate, best, prices, memory),
        )
        for candidate, price in prices.items()
    ]  # fmt: skip


def _rank(candidate: Candidate, price: Price) -> tuple[int, bool, float, int]:
    """Larger is better, lexicographically."""
    return price.trainable, not candidate.checkpointing, price.speed or 0.0, -price.bytes.total


def _why(candidate: Candidate, best: Candidate | None, prices: Mapping[Candidate, Price], memory: int) -> str:
    price = prices[candidate]
    over = price.bytes.total - memory
    if over > 0:
        return f"{format_bytes(over)} too much"
    assert best is not None
    won = prices[best]
    if candidate is best:
        return f"the pick; {format_bytes(-over)} to spare"
    if price.trainable < won.trainable:
        return f"trains {won.trainable / price.trainable:.1f}× fewer at once"
    return "fits without, which is faster" if candidate.checkpointing else "more bytes for the same"


def picked(verdicts: Sequence[Verdict]) -> Verdict | None:
    """The one to take.

    Args:
        verdicts: All of them.

    Returns:
        The pick, or None if nothing fits.
    """
    return next((verdict for verdict in verdicts if verdict.picked), None)
