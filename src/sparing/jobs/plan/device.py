"""A plan for one device: which candidate to take, by a stated rule, why each other lost, and how it is shown."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from sparing.jobs.plan.price import Candidate, Price
from sparing.layersample.price.predict import Full
from sparing.memory import CATEGORIES, format_bytes
from sparing.report import Figure, Record, format_number, plots
from sparing.report.declared import Chapter, Rows, RunPage

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
    won, full = prices[best], isinstance(best.method, Full)
    if candidate is best:
        fewest = f"fewest {'bytes' if won.speed is None else 'operations'} of those that fit, as full does not"
        return f"the pick: {'the reference, and it fits' if full else fewest}; {format_bytes(-over)} to spare"
    if candidate.label == best.label:
        return "fits without, which is faster"
    if full:
        return "full fits, and is what this stands in for"
    if candidate.checkpointing and not best.checkpointing:
        return "computes activations again"
    if price.speed and won.speed and price.speed < won.speed:
        return f"{won.speed / price.speed:.2f}× the operations"
    return "more bytes"


def title(record: Record) -> str:
    """Model, parameters and memory in a line."""
    (about,) = record.table("about")
    return (
        f"{about['model']} ({format_number(about['parameters'])} parameters), "
        f"batch {about['batch']} × {about['length']} tokens, {about['device']}"
    )


def answer(record: Record) -> str:
    """One sentence with its number."""
    (about,) = record.table("about")
    chosen = next((row for row in record.table("plan") if row["picked"]), None)
    if chosen is None:
        rows = [row for row in record.table("plan") if row["peak"] is not None]
        if not rows:
            return "No way to fine-tune this model could be priced; the table says why."
        least = min(rows, key=lambda row: float(row["peak"] or 0))
        held = format_number(least["peak"], "B")
        return f"Nothing fits {about['device']}; the least is {least['way']} at **{held}**."
    held = format_number(chosen["peak"], "B")
    return f"**{chosen['way']}**: **{held}** of {about['device']}; {about['why']}."


def peaks(record: Record) -> Figure | None:
    """Bytes at the peak by category, without checkpointing, against the memory; nothing if nothing was priced."""
    (about,) = record.table("about")
    rows = [row for row in record.table("plan") if row["peak"] is not None and not row["checkpointing"]]
    if not rows:
        return None
    return plots.stacked_bars(
        [plots.Stack(row["method"], {part: row[part] for part in CATEGORIES}) for row in rows],
        value=plots.Axis("peak of a step", unit="B"),
        title=f"{sum(bool(row['fits']) for row in rows)} of {len(rows)} fit without checkpointing",
        mark=(about["memory"], str(about["device"])),
        caption="Predicted from shapes; allocator rounding, kernel workspaces and the device's context come on top.",
    )


def caveats(record: Record) -> list[str]:
    """Advice, and what is priced at its dearest."""
    dearest = "LISA is priced at its dearest draw: with a frozen embedding, the lowest blocks."
    return [*(row["note"] for row in record.table("advice")), dearest]


PAGE: Final = RunPage(
    "What fits",
    answer,
    Chapter(
        "By method",
        "",
        peaks,
        Rows("plan", title, ("way", "trainable", "peak", "speed", "verdict"), RULE),
        Rows("plan", "At the peak of a step", ("way", *CATEGORIES, "coverage"), terminal=False),
    ),
    caveats=caveats,
)


def show(record: Record) -> None:
    """Print the table, the pick and where the page is."""
    (about,) = record.table("about")
    PAGE.print_tables(record)
    notes = [f"note: {row['note']}" for row in record.table("advice")]
    why = [str(about["why"])] if about["why"] else []
    sys.stdout.write("\n".join([f"pick: {about['pick']}", *why, *notes, f"report: {about['page']}"]) + "\n")
