"""What ``scaling_speed`` was asked for, from its rows: where sparse layers are even with dense ones, and each goal."""

from __future__ import annotations

import math
import statistics
from itertools import pairwise
from typing import Any

from sparing.report import Record


def crossovers(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Per arm and width the sparsity from which it is as fast as masked dense, log ratio over log density interpolated.

    An arm that is as fast at the least sparsity measured has that one, an upper limit; one that never is has none.
    """
    found = []
    for arm, d in sorted({(row["arm"], row["d"]) for row in rows if row["arm"] in {"panels", "csr", "sparselab"}}):
        line = sorted((row["sparsity"], row["faster"]) for row in rows if (row["arm"], row["d"]) == (arm, d))
        points = [(math.log(1 - sparsity), math.log(faster)) for sparsity, faster in line]
        if points[0][1] >= 0:
            found.append({"arm": arm, "d": d, "crossover_sparsity": line[0][0], "at_most": True})
        for (x0, y0), (x1, y1) in pairwise(points):
            if y0 < 0 <= y1:
                at = 1 - math.exp(x0 + (x1 - x0) * -y0 / (y1 - y0))
                found.append({"arm": arm, "d": d, "crossover_sparsity": at, "at_most": False})
    return found


def goals(record: Record) -> list[dict[str, Any]]:
    """What was asked for, beside what was measured."""
    layers = [row for row in record.table("layer") if row["arm"] == "panels"]
    at = {("layer", row["d"], row["sparsity"]): row["faster"] for row in layers}
    at |= {("model", row["d"], row["sparsity"]): row["faster"] for row in record.table("model") if row["arm"] == "auto"}
    wanted = (
        ("layer", 1024, 0.9375, 6.0), ("layer", 1024, 0.984, 14.0), ("layer", 2048, 0.984, 20.0),
        ("model", 512, 0.9375, 2.5), ("model", 512, 0.984, 3.5),
    )  # fmt: skip
    found = [
        {"goal": f"{kind} of {d}, sparsity {s}, over masked dense", "measured": at[kind, d, s], "at_least": least}
        for kind, d, s, least in wanted if (kind, d, s) in at
    ]  # fmt: skip
    over = [row["faster_than_sparselab"] for row in layers if "faster_than_sparselab" in row]
    if over:
        found.append({"goal": f"cells of {len(over)} at least twice as fast as SparseLab", "at_least": len(over)})
        found[-1]["measured"] = sum(ratio >= 2 for ratio in over)
    if ends := [row["crossover_sparsity"] for row in crossovers(layers)]:
        # The goal is a sparsity of at most 70 %, so a density of at least 30 %.
        found.append(
            {"goal": "density at which a layer is even, all widths", "measured": 1 - max(ends), "at_least": 0.3}
        )
    if pairs := [row["faster"] for row in record.table("threads")]:
        found.append(
            {"goal": "two threads over one, median cell", "measured": statistics.median(pairs), "at_least": 1.7}
        )
    return [row | {"met": row["measured"] >= row["at_least"]} for row in found]
