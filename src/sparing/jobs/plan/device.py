"""A plan for one device: which candidate to take, by a stated rule, why each other lost, and how it is shown."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from sparing.jobs.folder import print_page_path
from sparing.jobs.plan.candidates import ADAPTERS, REFERENCE, ROUNDED, STAND_IN, Candidate
from sparing.jobs.plan.price import Price
from sparing.memory import CATEGORIES, format_bytes
from sparing.report import Figure, Record, format_number, plots
from sparing.report.declared import Chapter, Rows, RunPage

# The rule, in words, for the page.
RULE = (
    "Full fine-tuning with AdamW if it fits, then with its moments in 8 bits: the others stand in for it. If neither "
    "fits, LoRA: on SmolLM2, the one well-trained model that was measured, it led layer sampling (on a small model of "
    "our own layer sampling led). Among equals cost decides: the shortest step, or where no speed is known one that "
    "does not compute activations again and has the fewest operations, then the fewest bytes. Frozen weights in 4 or 8 "
    "bits come last: rounding them costs some of the model."
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
    best = min(fitting, key=lambda c: _rank(c, prices[c]), default=None)
    return [
        Verdict(
            candidate=candidate, price=price, fits=candidate in fitting, picked=candidate is best,
            why=_why(candidate, best, prices, memory),
        )
        for candidate, price in prices.items()
    ]  # fmt: skip


def _rank(candidate: Candidate, price: Price) -> tuple[int, float, bool, int, int]:
    """Smaller is better, lexicographically."""
    assert price.bytes is not None
    return candidate.tier, price.seconds or 0.0, candidate.checkpointing, price.flops or 0, price.bytes.total


def _why(candidate: Candidate, best: Candidate | None, prices: Mapping[Candidate, Price], memory: int) -> str:
    price = prices[candidate]
    if price.bytes is None:
        return price.why
    over = price.bytes.total - memory
    if over > 0:
        return f"{format_bytes(over)} too much"
    assert best is not None
    won = prices[best]
    if candidate is best:
        least = f"{'shortest step' if won.seconds else 'fewest operations'} of those that fit"
        reasons = {
            REFERENCE: "the reference, and it fits", STAND_IN: "full fine-tuning, with 8-bit moments",
            ADAPTERS: "LoRA, ahead of layers where both were measured",
        }  # fmt: skip
        return f"the pick: {reasons.get(best.tier, least)}; {format_bytes(-over)} to spare"
    if candidate.label == best.label:
        return "fits without, which is faster"
    if candidate.tier > best.tier:
        if best.tier <= STAND_IN:
            return f"{best.label} fits, and is what this stands in for"
        return "rounds frozen weights" if candidate.tier == ROUNDED else "LoRA fits, and led where both were measured"
    if price.seconds and won.seconds and price.seconds > won.seconds:
        return f"{price.seconds / won.seconds:.2f}× the time"
    if candidate.checkpointing and not best.checkpointing:
        return "computes activations again"
    if price.flops and won.flops and price.flops > won.flops:
        return f"{price.flops / won.flops:.2f}× the operations"
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
    dearest = (
        "LISA is priced at its dearest draw: the lowest blocks, or the highest, whose gradients come first, or the "
        "largest where they differ. The longest row of a method is that with checkpointing."
    )
    (about,) = record.table("about")
    speed = [f"Seconds and tokens per second are a roofline: {about['speed']}."] if about["speed"] else []
    return [*(row["note"] for row in record.table("advice")), dearest, *speed]


def reach(record: Record) -> Figure | None:
    """The longest row of each method that fits."""
    rows = [row for row in record.table("plan") if row["peak"] is not None and row["longest"]]
    if not rows:
        return None
    best = max(rows, key=lambda row: row["longest"])
    return plots.bars(
        [plots.Bar(str(row["way"]), row["longest"]) for row in rows],
        value=plots.Axis("longest row that fits", unit="tokens"),
        title=f"{best['way']} reaches {format_number(best['longest'])} tokens",
        caption="With activation checkpointing; batch and micro-batches as given.",
    )


COLUMNS: Final = ("way", "trainable", "peak", "longest", "seconds", "tokens_per_second", "verdict")

PAGE: Final = RunPage(
    "What fits",
    answer,
    Chapter(
        "By method",
        "",
        peaks,
        reach,
        Rows("ladder", title, COLUMNS, RULE),
        Rows("plan", "With and without checkpointing", COLUMNS, terminal=False),
        Rows("plan", "At the peak of a step", ("way", *CATEGORIES, "host", "operations", "coverage"), terminal=False),
        Rows("commands", "What to type", ("way", "command"), terminal=False),
    ),
    caveats=caveats,
)


def show(record: Record) -> None:
    """Print the table, the pick and where the page is."""
    (about,) = record.table("about")
    PAGE.print_tables(record)
    notes = [f"note: {row['note']}" for row in record.table("advice")]
    why = [str(about["why"])] if about["why"] else []
    run = [f"run: {row['command']}" for row in record.table("commands") if row["way"] == about["pick"]]
    sys.stdout.write("\n".join([f"pick: {about['pick']}", *why, *run, *notes]) + "\n")
    print_page_path(record)
