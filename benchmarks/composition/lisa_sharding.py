"""Layer sampling under every plan on a shaped network: bytes, step time, the best plan, and what a switch costs.

The network, the ranks and the rows are those of ``benchmarks.network``; the model has sixteen blocks, so that one of
them is the 1/16 of the sharding paper. The arms of a cell are built once in the same processes and take turns.
"""

from __future__ import annotations

import argparse
import signal
import statistics
import sys
from collections import defaultdict
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from benchmarks.composition.lisa_arms import NO_PLAN, Arm
from benchmarks.composition.lisa_prices import bytes_of, picks, seconds_of
from benchmarks.network.cells import REFERENCE, Cell
from benchmarks.network.namespaces import Network
from benchmarks.network.predictions import nominal
from benchmarks.network.rows import UNITS, Answers, Book, arm_rows, spread
from benchmarks.network.runs import Ranks
from sparing.report import Progress, Record, environment
from sparing.sharding.planner.config import Topology

RESULT = Path(__file__).parents[1] / "results" / "composition_lisa_sharding.jsonl"
QUESTION = "What do drawn blocks change in the bytes, the step time and the best plan of training over ranks?"
CELL = replace(REFERENCE, blocks=16, width=256)
SHARES = (0, 1, 2)
"""Blocks drawn of sixteen; 0: all train."""

MORE_UNITS = {"switch": "s", "switch_inter": "B", "switch_intra": "B", "switch_payload": "B", "predicted": "s",
              "predicted_nominal": "s", "formula_inter": "B", "formula_intra": "B", "best_seconds": "s",
              "chosen_seconds": "s", "chosen_wires_seconds": "s"}  # fmt: skip


class Rooms(Network):
    """A network in which ranks run our arms in the place of those of ``benchmarks.network``."""

    def command(self, group: int, words: list[str]) -> list[str]:
        """The same command line with another module."""
        ours = [word.replace("benchmarks.network.workers", "benchmarks.composition.lisa_arms") for word in words]
        return super().command(group, ours)


@contextmanager
def ranks(options: argparse.Namespace) -> Iterator[Ranks]:
    """Four ranks on links held to the rates of the cell."""
    with Rooms(groups=CELL.groups) as network:
        if options.links == "shaped":
            network.shape(inter=CELL.inter, intra=CELL.intra)
        with Ranks(groups=CELL.groups, per_group=CELL.per_group, network=network, log=options.log) as found:
            yield found


def measure(crew: Ranks, cell: Cell, arms: list[Arm], options: argparse.Namespace) -> list[dict[str, Any]]:
    """Rows of one cell."""
    probing = crew.do(kind="probe", groups=cell.groups, per_group=cell.per_group, seconds=options.probe)
    probe = next(found["topology"] for found in list(probing) if found["kind"] == "probe")
    job = {"rounds": options.rounds, "steps": options.steps, "seconds": options.seconds}
    answers = []
    with Progress(f"s = {cell.accumulate}", total=len(arms) * (options.rounds + 1), unit="turn") as bar:
        for found in crew.do(kind="sampled", cell=cell.plain(), arms=[arm.name for arm in arms], **job):
            answers.append(found)
            if found["kind"] == "round" and found["rank"] == 0:
                bar.advance(seconds=found["seconds"])
    rows = rows_of(cell, answers, {"predicted": Topology.from_json(probe), "predicted_nominal": nominal(cell)})
    probed = {"table": "probes", **cell.plain(), "topology": probe}
    return [row | {"versions": crew.versions} for row in (probed, *rows)]


def rows_of(cell: Cell, answers: Answers, places: dict[str, Topology]) -> list[dict[str, Any]]:
    """A row for every arm, and one for the best plan of every share."""
    by_arm: dict[Arm, Answers] = defaultdict(list)
    for found in answers:
        if found["kind"] == "round":
            by_arm[Arm.of(found["arm"])].append(found)
    rows = []
    for active in dict.fromkeys(arm.active for arm in by_arm):
        share = {arm: found for arm, found in by_arm.items() if arm.active == active}
        rounds = rounds_of(share[Arm(NO_PLAN, active)])
        timed = {row["arm"]: row for row in arm_rows(cell, [one for found in share.values() for one in found])}
        for arm, found in share.items():
            row = timed[arm.name] | {"active": active} | costs_of(cell, found)
            if arm.plan != NO_PLAN:
                row |= priced(cell, arm.plan, found, rounds, places)
            rows.append(row)
        rows.append(best_of(cell, active, rows, picks(cell, rounds[0], places["predicted"])))
    return rows


def rounds_of(found: Answers) -> list[tuple[tuple[int, ...], dict[str, float]]]:
    """Blocks and seconds of the arithmetic of every round, the first, which does not count, included."""
    turns: dict[int, Answers] = defaultdict(list)
    for one in found:
        turns[one["turn"]].append(one)
    return [
        (tuple(turns[at][0]["drawn"]),
         {part: statistics.median(one["parts"][part] for one in turns[at]) for part in turns[at][0]["parts"]})
        for at in sorted(turns)
    ]  # fmt: skip


def costs_of(cell: Cell, found: Answers) -> dict[str, Any]:
    """What switching cost in the rounds that count: seconds of the slowest rank, and bytes."""
    turns: dict[int, Answers] = defaultdict(list)
    for one in found:
        if one["turn"]:
            turns[one["turn"]].append(one)
    slowest = [max(one["switch"]["seconds"] for one in each) for each in turns.values()]
    leaders = [one for each in turns.values() for one in each if one["rank"] % cell.per_group == 0]
    drawn = " ".join("+".join(map(str, each[0]["drawn"])) for each in turns.values()).strip()
    return {
        **spread("switch", slowest),
        "switch_inter": statistics.median(one["switch"]["sent"]["inter"] for one in leaders),
        "switch_intra": statistics.median(one["switch"]["sent"]["intra"] for one in leaders),
        "switch_payload": max(one["switch"]["payload"] for one in found),
        "drawn": drawn,
    }


def priced(
    cell: Cell,
    plan: str,
    found: Answers,
    rounds: list[tuple[tuple[int, ...], dict[str, float]]],
    places: dict[str, Topology],
) -> dict[str, Any]:
    """Formula and simulator beside the measurement, for the very blocks of every round."""
    counted = [one for one in found if one["turn"]]
    formulas = {one["turn"]: bytes_of(cell, plan, one["drawn"]) for one in counted}
    exact = all(one["payload"] == formulas[one["turn"]] for one in counted)
    means = {
        f"formula_{axis}": statistics.mean(each[axis] for each in formulas.values()) for axis in ("inter", "intra")
    }
    times = {name: seconds_of(cell, plan, rounds[1:], place) for name, place in places.items()}
    return {"bytes_as_formula": exact, **means, **times}


def best_of(cell: Cell, active: int, rows: list[dict[str, Any]], chosen: dict[str, str]) -> dict[str, Any]:
    """The fastest plan of a share, as measured, and the seconds of the plan that ``choose`` names."""
    seconds = {row["plan"]: row["seconds"] for row in rows if row.get("active") == active and row["plan"] != NO_PLAN}
    best = min(seconds, key=lambda plan: seconds[plan])
    # one row per cell and share: the record keys rows by arm
    row = {"table": "choices", **cell.plain(), "arm": f"lisa-{active}" if active else "all", "share": active,
           "plans": len(seconds), "best": best, "best_seconds": seconds[best]}  # fmt: skip
    return row | chosen | {f"{name}_seconds": seconds.get(plan) for name, plan in chosen.items()}


class Kept(Book):
    """A book whose rows name the command as one types it."""

    def add(self, rows: Iterable[dict[str, Any]]) -> None:
        """Keep the rows of a cell."""
        super().add(rows)
        for row in self.record.rows:
            row["command"] = named(row["command"])
        self.record.write(self.path)


def named(command: str) -> str:
    """The command with the whole name of the package."""
    return command.replace("python -m composition", "python -m benchmarks.composition")


def begun(path: Path) -> Book:
    """The record of this study, as it is or new."""
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        settings = CELL.plain() | {"shares": list(SHARES)}
        about = environment()
        about["command"] = named(about["command"])
        Record(question=QUESTION, settings=settings, seed=CELL.seed, environment=about, units=UNITS | MORE_UNITS).write(
            path
        )
    return Kept(path, links="shaped")


def run(options: argparse.Namespace) -> None:
    """Measure what the record does not have yet."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("ended from outside"))  # so that the namespaces go
    book = begun(options.out or RESULT)
    book.links = options.links
    cells = [replace(CELL, accumulate=micros) for micros in options.accumulate]
    wanted = [Arm(plan, active) for active in SHARES for plan in (NO_PLAN, *options.plans)]
    left = [cell for cell in cells if not all(book.has(cell, arm.name) for arm in wanted)]
    if not left:
        return
    with ranks(options) as crew:
        for cell in left:
            book.begin()
            book.add(measure(crew, cell, wanted, options))
            book.show(cell)
