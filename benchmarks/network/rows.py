"""Answers of the ranks as rows, and the record they are kept in."""

from __future__ import annotations

import os
import statistics
import sys
import time
from collections import defaultdict
from collections.abc import Iterable, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from benchmarks.network.arms import SYSTEMS
from benchmarks.network.cells import Cell
from sparing.report import Record, environment, print_table
from sparing.report.environment import command, commit

UNITS = {
    "seconds": "s", "cpu": "s", "inter": "bit/s", "intra": "bit/s", "sent_inter": "B", "sent_intra": "B",
    "payload_inter": "B", "payload_intra": "B", "rate": "bit/s", "forward": "s", "backward": "s", "update": "s",
    "model": "s",
}  # fmt: skip
QUESTION = "How long is a step of every plan and rival on links of given rates, and what leaves each group?"
Answers = list[dict[str, Any]]


def arm_rows(cell: Cell, answers: Answers) -> list[dict[str, Any]]:
    """One row per arm, and one per link that was measured."""
    rounds: dict[str, Answers] = defaultdict(list)
    for found in answers:
        if found["kind"] == "round":
            rounds[found["arm"]].append(found)
    losses = {arm: losses_of(found) for arm, found in rounds.items()}
    rows = [arm_row(cell, arm, found) | gap(arm, losses) for arm, found in rounds.items()]
    probed = [
        {"table": "probes", **cell.plain(), "topology": found["topology"]}
        for found in answers
        if found["kind"] == "probe"
    ]
    return [*link_rows(cell, answers), *probed, *rows]


def arm_row(cell: Cell, arm: str, found: Answers) -> dict[str, Any]:
    """Median and ends over the rounds that count."""
    turns: dict[int, Answers] = defaultdict(list)
    for answer in found:
        if answer["turn"]:
            turns[answer["turn"]].append(answer)
    seconds = [max(one["seconds"] for one in ranks) for ranks in turns.values()]
    cpu = [sum(one["cpu"] for one in ranks) for ranks in turns.values()]
    row: dict[str, Any] = {
        "table": "arms", **cell.plain(), "arm": arm, "plan": SYSTEMS.get(arm, arm.split()[0]), "n": len(seconds),
        "steps": found[-1]["steps"], **spread("seconds", seconds), **spread("cpu", cpu),
        "rounds": " ".join(f"{value:.4f}" for value in seconds),
        "rounds_cpu": " ".join(f"{value:.4f}" for value in cpu),
    }  # fmt: skip
    counted = [one for ranks in turns.values() for one in ranks]
    leaders = [one for one in counted if one["rank"] % cell.per_group == 0]  # one speaks for the interfaces of a group
    for name, speakers in (("sent", leaders), ("payload", counted)):
        for axis in speakers[0][name]:
            row[f"{name}_{axis}"] = statistics.mean(one[name][axis] for one in speakers)
    for part in counted[0]["parts"]:
        row[part] = statistics.median(one["parts"][part] for one in counted)
    return row


def spread(label: str, values: list[float]) -> dict[str, float]:
    """Median, least and most, by the naming of records."""
    return {label: statistics.median(values), f"{label}_low": min(values), f"{label}_high": max(values)}


def losses_of(found: Answers) -> list[float]:
    """Mean loss over ranks of every step an arm took, in order."""
    by_rank: dict[int, list[float]] = defaultdict(list)
    for answer in found:
        by_rank[answer["rank"]] += answer["losses"]
    return [statistics.mean(step) for step in zip(*by_rank.values(), strict=True)]


def gap(arm: str, losses: dict[str, list[float]]) -> dict[str, float]:
    """Loss after the last step, and how far the curve is from the middle of all arms' curves, relative."""
    mine = losses[arm]
    worst = 0.0
    for step, value in enumerate(mine):
        others = [curve[step] for name, curve in losses.items() if len(curve) > step and name != "alone"]
        middle = statistics.median(others) if others else value
        worst = max(worst, abs(value - middle) / abs(middle))
    return {"loss": mine[-1], "steps_taken": len(mine), "loss_gap": worst}


def link_rows(cell: Cell, answers: Answers) -> list[dict[str, Any]]:
    """What plain messages get: seconds and rate by pattern and size."""
    taken: dict[tuple[str, int], list[float]] = defaultdict(list)
    for found in answers:
        if found["kind"] == "p2p":
            taken[found["pattern"], found["size"]].append(found["seconds"])
    rows = []
    for (pattern, size), seconds in taken.items():
        at_once = cell.per_group if pattern.endswith("all") else 1
        rate = 8 * size * at_once / statistics.median(seconds)
        rows.append({
            "table": "links", "groups": cell.groups, "per_group": cell.per_group, "inter": cell.inter,
            "intra": cell.intra, "pattern": pattern, "size": size, **spread("seconds", seconds), "rate": rate,
        })  # fmt: skip
    return rows


def busy() -> float:
    """Seconds that the cores have worked so far, for whomever."""
    fields = [int(text) for text in Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:9]]
    return (sum(fields) - fields[3] - fields[4]) / os.sysconf("SC_CLK_TCK")


def short(value: Any) -> Any:
    """Nine digits of a number with a fraction: more is noise, and the file is read by people."""
    return float(f"{value:.9g}") if isinstance(value, float) and not value.is_integer() else value


class Book:
    """The record of a file, rewritten whole after every cell."""

    def __init__(self, path: Path, *, links: str) -> None:
        """Read what is there, or begin.

        Args:
            path: The record.
            links: How links are held to their rates; part of every row.
        """
        self.path, self.links = path, links
        self.record = (
            Record.read(path)
            if path.exists()
            else Record(question=QUESTION, settings={}, seed=0, environment=environment(), units=dict(UNITS))
        )
        self.begin()

    def begin(self) -> None:
        """Note load and work of the machine before a cell."""
        self.load, self.busy, self.clock = os.getloadavg()[0], busy(), time.perf_counter()

    def has(self, cell: Cell, arm: str) -> bool:
        """Whether a row for this arm of this cell is there."""
        wanted = cell.plain() | {"arm": arm, "links": self.links}
        return any(all(row.get(key) == value for key, value in wanted.items()) for row in self.record.table("arms"))

    def add(self, rows: Iterable[dict[str, Any]]) -> None:
        """Keep the rows of a cell, in place of older ones, and in ``runs`` how and when they were measured."""
        found, spent = list(rows), time.perf_counter() - self.clock
        about = {
            "table": "runs", "run": 1 + max((row["run"] for row in self.record.table("runs")), default=0),
            "load_before": self.load, "load_after": os.getloadavg()[0],
            "cores_busy": (busy() - self.busy) / spent, "minutes": spent / 60,
            "measured": datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC"), "commit": commit(),
            "command": command(sys.argv), "versions": next((row["versions"] for row in found if "versions" in row), ""),
        }  # fmt: skip
        for row in [about, *found]:
            own = {name: short(value) for name, value in row.items() if row is about or name != "versions"}
            self._replace(own | {"links": self.links, "run": about["run"]})
        used = {row["run"] for row in self.record.rows if row["table"] != "runs"}
        self.record.rows[:] = [row for row in self.record.rows if row["run"] in used]
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self.record.write(self.path)

    def _replace(self, row: dict[str, Any]) -> None:
        """Put a row into the record; an older one of the same arm and cell goes."""
        free = {"table", "arm", "links", "pattern", "size", "sharing", *Cell().plain()}
        free |= {"run"} if row["table"] == "runs" else set()
        key = {name: value for name, value in row.items() if name in free}
        kept = [old for old in self.record.rows if any(old.get(name) != value for name, value in key.items())]
        self.record.rows[:] = kept
        self.record.add(row["table"], **{name: value for name, value in row.items() if name != "table"})

    def show(self, cell: Cell) -> None:
        """Print the arms of a cell, fastest first."""
        wanted = cell.plain() | {"links": self.links}
        rows = [row for row in self.record.table("arms") if all(row[k] == v for k, v in wanted.items())]
        columns = (
            "arm",
            "plan",
            "seconds",
            "seconds_low",
            "seconds_high",
            "cpu",
            "sent_inter",
            "sent_intra",
            "loss_gap",
        )
        ranked = sorted(rows, key=lambda row: row["seconds"])
        print_table([{name: row.get(name) for name in columns} for row in ranked], title=str(cell), units=UNITS)

    def print(self, table: str, columns: Sequence[str]) -> None:
        """Print some columns of a table."""
        rows = [{name: row.get(name) for name in columns} for row in self.record.table(table)]
        print_table(rows, title=table, units=UNITS)
