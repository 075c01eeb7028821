"""Tables of what `make gpu` measured, between the marks of ``docs/results/gpu.md``."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from benchmarks.marks import marked
from benchmarks.memory_tables import GB, table
from sparing.report import Record

RESULTS = Path(__file__).parent / "results"


def rows(part: str) -> list[dict[str, Any]]:
    """What a part measured so far."""
    return Record.read(RESULTS / f"gpu_{part}.jsonl").table(part)


def filled(page: str) -> str:
    """The page with its tables."""
    return marked(page, {"memory": memory(), "agreement": agreement(), "bits": bits(), "first": first()})


def memory() -> str:
    """Bytes predicted from shapes beside those of the allocator, and speed."""
    lines = []
    for row in rows("layers"):
        apart = row["allocated"] / row["predicted"] - 1
        slow, fast = (row["length"] / row[end] for end in ("most", "least"))
        lines.append([
            f"{row['model']}, {row['method']}" + (", checkpointed" if row["checkpointing"] else ""), row["length"],
            f"{row['predicted'] / GB:.2f}", f"{row['allocated'] / GB:.2f}", f"{100 * apart:+.2f} %",
            f"{row['reserved'] / GB:.1f}",
            f"{row['tokens_per_second']:,.0f} [{slow:,.0f}, {fast:,.0f}]",
        ])  # fmt: skip
    head = ["", "tokens", "predicted, GB", "measured, GB", "difference", "taken from the device, GB", "tokens/s"]
    return table(head, lines)


def agreement() -> str:
    """How far the GPU's results are from the CPU's."""
    lines = [
        [row["what"], f"{row['apart']:.0e}" if row["apart"] else "0", f"{row['limit']:.0e}" if row["limit"] else "0"]
        for row in rows("agreement")
    ]
    return table(["command or call", "apart", "limit"], lines)


def bits() -> str:
    """Plans on several ranks of one device."""
    lines = [
        [row["plan"], row["world"], row["why"] if "why" in row else "equal" if row["equal"] else "not equal",
         f"{row['apart']:.0e}" if "apart" in row else "–"]
        for row in rows("sharding") if row["kind"] == "bits"
    ]  # fmt: skip
    return table(["plan", "ranks", "integers, against the CPU", "AdamW in float64, apart"], lines)


def first() -> str:
    """The one cell that each of three parts had time for."""
    hyper, fed, dense = rows("hypergrad")[0], rows("federated")[0], rows("scaling")[0]
    return table(["part", "cell", "found"], [
        ["hypergrad", f"(FG)²U, one direction, T = {hyper['steps']}, three blocks of 128 channels",
         f"{hyper['seconds']:.2f} s [{hyper['least']:.2f}, {hyper['most']:.2f}], {hyper['allocated'] / GB:.2f} GB"],
        ["federated", f"{fed['net']}, {fed['cohort']} clients a round, stacked",
         f"{fed['per_second']:.0f} client updates a second [{fed['least']:.0f}, {fed['most']:.0f}]"],
        ["scaling", f"dense layer 2048 × 2048, {dense['tokens']:,} tokens, bfloat16",
         f"{1e3 * dense['seconds']:.2f} ms a step [{1e3 * dense['least']:.2f}, {1e3 * dense['most']:.2f}]"],
    ])  # fmt: skip
