"""Which candidate to take, and why each other lost: a stated rule, not a taste."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from sparing.jobs.plan.candidates import Candidate
from sparing.jobs.plan.price import Price
from sparing.layersample.predict import Full
from sparing.memory import format_bytes

# The rule, in words, for the page.
RULE = (
    "Full fine-tuning if it fits: it is what the others stand in for. If it does not, nothing measured here says which "
    "of the others learns best, so cost decides: one that does not compute activations again, then the fewest "
    "operations, then the fewest bytes."
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Verdict:
    """A candidate, its price, and what came of it."""

    candidate: Candidate
    price: Price
    fits: bool  # whether its peak is within the memory
    picked: bool
    why: str


def judge(prices: Mapping[Candidate, Price], memory: int) -> list[Verdict]:
    """Apply the rule, in the given order; none is picked if none fits in ``memory`` (bytes)."""
    fitting = [c for c, price in prices.items() if price.bytes is not None and price.bytes.total <= memory]
    best = max(fitting, key=lambda c: _rank(c, prices[c]), default=None)
    return [
        Verdict(
            candidate=candidate, price=price, fits=candidate in fitting, picked=candidate is best,
            why=_why(candidate, best, prices, memory),
        )
        for candidate, price in prices.items()
    ]  # fmt: skip


def _rank(candidate: Candidate, price: Price) -> tuple[bool, bool, float, int]:
    """Larger is better, lexicographically."""
    assert price.bytes is not None
    full = isinstance(candidate.method, Full)
    return full, not candidate.checkpointing, price.speed or 0.0, -price.bytes.total


def _why(candidate: Candidate, best: Candidate | None, prices: Mapping[Candidate, Price], memory: int) -> str:
    price = prices[candidate]
    if price.bytes is None:
        return price.why
    over = price.bytes.total - memory
    if over > 0:
        return f"{format_bytes(over)} too much"
    assert best is not None
    if candidate is best:
        return f"the pick: {_reason(best, prices[best])}; {format_bytes(-over)} to spare"
    if candidate.label == best.label:
        return "fits without, which is faster"
    return _beside(candidate, price, best, prices[best])


def _reason(best: Candidate, price: Price) -> str:
    """Why the pick is the pick."""
    if isinstance(best.method, Full):
        return "the reference, and it fits"
    return f"fewest {'bytes' if price.speed is None else 'operations'} of those that fit, as full does not"


def _beside(candidate: Candidate, price: Price, best: Candidate, won: Price) -> str:
    """What another method that fits has against it."""
    if isinstance(best.method, Full):
        return "full fits, and is what this stands in for"
    if candidate.checkpointing and not best.checkpointing:
        return "computes activations again"
    if price.speed and won.speed and price.speed < won.speed:
        return f"{won.speed / price.speed:.2f}× the operations"
    return "more bytes"


def picked(verdicts: Sequence[Verdict]) -> Verdict | None:
    """The pick, or None if nothing fits."""
    return next((verdict for verdict in verdicts if verdict.picked), None)
