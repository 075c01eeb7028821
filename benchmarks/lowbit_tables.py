"""Tables of frozen blocks in 4 and 8 bits, for ``docs/results/memory.md``."""

from __future__ import annotations

import json
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

from benchmarks.marks import marked
from benchmarks.memory_tables import GB, table

RESULTS = Path(__file__).parent / "results"


def _read(name: str) -> dict[str, Any]:
    return dict(json.loads((RESULTS / f"{name}.json").read_text(encoding="utf-8")))


def memory() -> str:
    """Peak of a step by category; GB are 1e9 bytes."""
    names = ("params", "grads", "optimizer", "activations", "transient", "total")
    lines = [
        [f"{row['method']}, {row['frozen weights']}{', checkpointing' * row['checkpointing']}",
         *(f"{row[name] / GB:.2f}" for name in names)]
        for row in _read("lowbit_memory")["rows"].values()
    ]  # fmt: skip
    return table(["Llama-3-8B, GB", "weights", "gradients", "optimizer", "activations", "transient", "peak"], lines)


def steps() -> str:
    """Peaks of steps of `finetune`, by copies and moments."""
    found: dict[tuple[int, bool, bool], dict[str, float]] = {}
    for row in _read("lowbit_memory")["steps"]:
        found.setdefault((row["blocks"], row["head"], row["copies"]), {})[row["moments"]] = row["total"] / GB
    lines = [
        [str(blocks), "trains" if head else "frozen", "32-bit" if copies else "none",
         f"{totals['adamw']:.2f}", f"{totals['adamw-8bit']:.2f}"]
        for (blocks, head, copies), totals in found.items()
    ]  # fmt: skip
    return table(["blocks that train", "head", "copies", "AdamW, GB", "AdamW with 8-bit moments, GB"], lines)


def quality() -> str:
    """Held-out loss by arm, and what quantisation changes, in pairs."""
    found = _read("lowbit_quality")
    lines = []
    for arm in dict.fromkeys(row["arm"] for row in found["runs"].values()):
        rows = [row for row in found["runs"].values() if row["arm"] == arm]
        losses = [row["loss"] for row in rows]
        spread = f" ± {stdev(losses):.3f}" if len(losses) > 1 else ""
        gap = found["difference"].get(arm, {})
        beside = f"{gap['mean']:+.4f} ± {gap['half']:.4f}" if "mean" in gap else "–"
        lines.append([arm, f"{rows[0]['rate']:g}", len(rows), f"{fmean(losses):.3f}{spread}", beside])
    plain = found["untrained"]["None"]["loss"]
    for form, name in (("None", "as they are"), ("nf4", "NF4"), ("int8", "int8")):
        loss = found["untrained"][form]["loss"]
        lines.append(
            [f"no training, blocks {name}", "–", 1, f"{loss:.3f}", "–" if form == "None" else f"{loss - plain:+.4f}"]
        )
    head = ["SmolLM2-135M", "rate", "seeds", "held-out loss, nat (± deviation)", "against 16 bits (95 % interval)"]
    return table(head, lines)


def filled(page: str) -> str:
    """The page of memory with its tables made anew."""
    return marked(page, {"lowbit-memory": memory(), "lowbit-steps": steps(), "lowbit-quality": quality()})
