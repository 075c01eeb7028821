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
    made = {"memory": memory(), "agreement": agreement(), "bits": bits(), "hypergrad": hypergrad()}
    return marked(page, made | {"federated": federated(), "first": first()})


def memory() -> str:
    """Bytes predicted from shapes beside those of the allocator, and speed."""
    lines = []
    for row in sorted(rows("layers"), key=lambda row: row["length"]):
        apart = row["allocated"] / row["predicted"] - 1
        slow, fast = (row["length"] / row[end] for end in ("most", "least"))
        lines.append([
            f"{row['model']}, {row['method']}" + (", checkpointed" if row["checkpointing"] else ""), row["length"],
            f"{row['predicted'] / GB:.2f}", f"{row['allocated'] / GB:.2f}", f"{100 * apart:+.2f} %",
            f"{row['dearest'] / GB:.2f}", f"{row['reserved'] / GB:.1f}",
            f"{row['tokens_per_second']:,.0f} [{slow:,.0f}, {fast:,.0f}]",
        ])  # fmt: skip
    bytes_ = ["predicted, GB", "measured, GB", "difference", "dearest draw, GB", "taken from the device, GB"]
    head = ["", "tokens", *bytes_, "tokens/s"]
    return table(head, lines)


def agreement() -> str:
    """How far the GPU's results are from the CPU's."""
    lines = [
        [row["what"], f"{row['apart']:.0e}" if row["apart"] else "0", f"{row['limit']:.0e}" if row["limit"] else "0"]
        for row in rows("agreement") if "why" not in row
    ]  # fmt: skip
    lines += [[row["what"], "did not run", row["why"].partition("sparing: ")[2]] for row in rows("agreement")
              if "why" in row]  # fmt: skip
    return table(["command or call", "apart", "limit"], lines)


def bits() -> str:
    """Plans on several ranks of one device."""
    lines = [
        [row["plan"], row["world"], row["why"] if "why" in row else "equal" if row["equal"] else "not equal",
         f"{row['apart']:.0e}" if "apart" in row else "–"]
        for row in rows("sharding") if row["kind"] == "bits"
    ]  # fmt: skip
    return table(["plan", "ranks", "integers, against the CPU", "AdamW in float64, apart"], lines)


def hypergrad() -> str:
    """Seconds and bytes of one hypergradient at the paper's size."""
    lines = []
    for row in rows("hypergrad"):
        name = row["method"] if row["kind"] == "memory" else f"{row['method']}, tangents at once: {row['at_once']}"
        rate = f"{row['directions_a_second']:.2f}" if "directions_a_second" in row else "–"
        seconds = f"{row['seconds']:.2f} [{row['least']:.2f}, {row['most']:.2f}]"
        lines.append([name, seconds, f"{row['allocated'] / GB:.2f}", rate])
    return table(["one hypergradient", "seconds", "GB", "directions a second"], lines)


def federated() -> str:
    """Client updates a second."""
    lines = []
    for row in rows("federated"):
        if "per_second" not in row:
            continue
        spread = f"{row['per_second']:.0f} [{row['least']:.0f}, {row['most']:.0f}]"
        apart = f"{row['error']:.0e}" if "error" in row else "–"
        lines.append([row["net"], row["arm"], row["cohort"], spread, f"{row['allocated'] / GB:.2f}", apart])
    return table(["net", "clients", "a round", "updates a second", "GB", "apart from one after another"], lines)


def first() -> str:
    """The cells that the part on sparse steps had time for."""
    lines = []
    for row in rows("scaling"):
        one = f"layer {row['shape']}" if row["kind"] == "linear" else "two blocks of a Llama of 1B"
        spread = f"{1e3 * row['seconds']:.2f} [{1e3 * row['least']:.2f}, {1e3 * row['most']:.2f}]"
        lines.append([f"{one}, {row['arm']}", f"{row['tokens']:,}", spread])
    return table(["step", "tokens", "ms"], lines)
