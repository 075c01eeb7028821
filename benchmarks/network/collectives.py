"""Flat ring, two-level and overlapped (PaRO-CC) all-gather, reduce-scatter and all-reduce, beside gloo's own.

    python -m benchmarks.network.collectives --rounds 15                           # 2 × 2 ranks, shaped links
    python -m benchmarks.network.collectives --links throttled --sharing 1         # a link for every rank, no root

On shaped links the ranks of a group share the one that leaves it; the throttle can also give every rank its own.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections import defaultdict
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from benchmarks.network.cells import REFERENCE, Cell
from sparing import sharding as sh
from sparing.report import Progress
from sparing.sharding.network.rings import RateLimit
from sparing.sharding.network.wires import Wires
from sparing.sharding.planner.config import Topology
from sparing.sharding.planner.cost import collective_seconds

RESULT = Path(__file__).parents[1] / "results" / "network_collectives.jsonl"
WAYS = ("flat", "two-level", "overlapped")
KINDS = ("all-gather", "reduce-scatter", "all-reduce")


def meshes(cell: Cell, sharing: int | None) -> dict[str, sh.Mesh]:
    """A mesh for every way, throttled where ``sharing`` says how many ranks share the outer link; gloo's own beside."""
    rate = {}
    if sharing is not None:
        rate = {
            "intra": RateLimit(rate=cell.intra / 8, sharing=cell.per_group if sharing > 1 else 1),
            "inter": RateLimit(rate=cell.inter / 8, sharing=sharing),
        }
    ways = {way: Wires(gather=way, rate=rate) for way in WAYS}  # type: ignore[arg-type]
    if sharing is None:
        ways["gloo, flat"] = Wires(kind="builtin", gather="flat")
    return {way: sh.make_mesh(groups=cell.groups, per_group=cell.per_group, wires=wires) for way, wires in ways.items()}


def operations(mesh: sh.Mesh, whole: Tensor) -> dict[str, Callable[[], Tensor]]:
    """The three collectives over all ranks."""
    move, tiers = mesh.transitions, mesh.tiers
    return {
        "all-gather": lambda: move.gather_(whole, tiers, 0).wait(),
        "reduce-scatter": lambda: move.reduce_step(whole, tiers).wait(),
        "all-reduce": lambda: move.sync(whole, 0, 0).wait(),
    }


def collectives_job(job: dict[str, Any], answer: Callable[..., None]) -> None:
    """Every collective in every way in turn, round after round; the first round does not count."""
    made = meshes(Cell(**job["cell"]), job["sharing"])
    whole = torch.zeros(job["size"] // 4)
    try:
        for turn in range(job["rounds"] + 1):
            for way, mesh in made.items():
                for kind, run in operations(mesh, whole).items():
                    answer("at", arm=way, doing=kind)
                    dist.barrier()
                    start = time.perf_counter()
                    run()
                    if turn:
                        answer("collective", way=way, op=kind, turn=turn, seconds=time.perf_counter() - start)
    finally:
        for mesh in made.values():
            mesh.close()


def rows_of(cell: Cell, size: int, answers: list[dict[str, Any]], sharing: int) -> list[dict[str, Any]]:
    """Median and ends over the rounds, of the slowest rank; beside it the model of bytes alone."""
    from benchmarks.network.rows import spread

    taken: dict[tuple[str, str], dict[int, float]] = defaultdict(lambda: defaultdict(float))
    for found in answers:
        if found["kind"] == "collective":
            turns = taken[found["op"], found["way"]]
            turns[found["turn"]] = max(turns[found["turn"]], found["seconds"])
    place = Topology(
        groups=cell.groups, per_group=cell.per_group, inter=cell.inter / 8, intra=cell.intra / 8,
        sharing=sharing, sharing_intra=cell.per_group if sharing > 1 else 1,
    )  # fmt: skip
    rows = []
    for (kind, way), turns in taken.items():
        seconds = [turns[turn] for turn in sorted(turns)]
        two_level = [taken[kind, "flat"][turn] for turn in sorted(turns)]
        against = [1 - mine / flat for mine, flat in zip(seconds, two_level, strict=True)]
        model = collective_seconds(size, place, way) if way in WAYS else None  # type: ignore[arg-type]
        rows.append({
            "table": "collectives", "groups": cell.groups, "per_group": cell.per_group, "inter": cell.inter,
            "intra": cell.intra, "sharing": sharing, "size": size, "pattern": kind, "arm": way, "n": len(seconds),
            **spread("seconds", seconds), "saved": statistics.median(against),
            "model": model and (2 if kind == "all-reduce" else 1) * model,
            "rounds": " ".join(f"{value:.4f}" for value in seconds),
        })  # fmt: skip
    return rows


def main() -> None:
    """Measure one shape."""
    from benchmarks.network.rows import Book
    from benchmarks.network.sweep import lab, shape_of

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", type=shape_of, default=(2, 2))
    parser.add_argument("--inter", type=float, default=REFERENCE.inter, help="bits per second")
    parser.add_argument("--intra", type=float, default=REFERENCE.intra, help="bits per second")
    parser.add_argument("--size", type=int, default=1 << 22, help="bytes of the whole tensor")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--links", choices=["shaped", "throttled"], default="shaped")
    parser.add_argument(
        "--sharing", type=int, help="ranks that share a link; throttled links only; else all of a group"
    )
    parser.add_argument("--out", type=Path, default=RESULT)
    options = parser.parse_args()
    groups, per_group = options.shape
    cell = replace(REFERENCE, groups=groups, per_group=per_group, inter=options.inter, intra=options.intra)
    throttled, sharing = options.links == "throttled", options.sharing or per_group
    book = Book(options.out, links=options.links)
    with lab(links=options.links, python=sys.executable, patience=300.0, log=None) as place:
        ranks = place.ready(cell)
        job = {"cell": cell.plain(), "size": options.size, "rounds": options.rounds}
        with Progress("collectives", total=options.rounds, unit="round") as bar:
            answers = []
            for found in ranks.do(kind="collectives", sharing=sharing if throttled else None, **job):
                answers.append(found)
                last = found["kind"] == "collective" and found["op"] == KINDS[-1] and found["way"] == WAYS[-1]
                if last and found["rank"] == 0:
                    bar.advance()
    book.add(rows_of(cell, options.size, answers, sharing))
    book.print("collectives", ("pattern", "arm", "seconds", "seconds_low", "seconds_high", "model", "saved"))


if __name__ == "__main__":
    main()
