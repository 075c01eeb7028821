"""The table of both engines is made of rows that were measured in turns, in one go."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from benchmarks.network import engines
from benchmarks.network.arms import ARMS, FSDP2, PLANS
from benchmarks.network.cells import REFERENCE
from benchmarks.network.sweep import SETS


def row(arm: str, rounds: str, run: int = 1) -> dict[str, Any]:
    return {"table": "arms", **REFERENCE.plain(), "arm": arm, "rounds": rounds, "run": run}


def test_rounds_are_paired_and_rows_of_other_runs_left_out() -> None:
    rows = [
        row("IIG", "1.0 2.0 1.0"), row("IIG" + FSDP2, "1.1 2.4 1.5"), row("NIG", "1.0"), row("NIG" + FSDP2, "2.0", 2),
        row("ddp", "1.0"), {"table": "links"},
    ]  # fmt: skip
    (pair,) = engines.pairs(rows)
    assert (pair.plan, pair.ours, pair.theirs, pair.ratio) == ("IIG", 1.0, 1.5, 1.2)
    assert pair.faster == "sparing"
    assert "| 2×2, 100 / 2500 Mbit/s | 4 | IIG | 1.000 | 1.500 | 1.20 [1.10, 1.50] | sparing |" in (
        engines.table([pair])
    )
    even = replace(pair, plan="NIG", ratio=1.0, low=0.9)
    assert "| 2×2, 100 / 2500 Mbit/s | 4 | 2 | 1.10 [1.00, 1.20] | 1 | 0 | 1 |" in engines.summary([pair, even])


def test_a_sweep_has_every_plan_on_both_engines_side_by_side() -> None:
    arms = SETS["engines"]
    assert len(arms) == 2 * len(PLANS)
    assert [arm.removesuffix(FSDP2) for arm in arms[1::2]] == list(arms[::2]) == list(PLANS)
    assert set(arms) <= set(ARMS)
