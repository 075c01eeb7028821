"""Display of a plan for a cluster: best of each method on the terminal; bytes, seconds and maps on the page."""

from __future__ import annotations

import math
import sys
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

from sparing.jobs.plan.crossover import crossover_figure, nearest
from sparing.jobs.plan.shards import RULE
from sparing.memory import CATEGORIES
from sparing.report import Figure, Page, Record, Section, Table, format_number, plots, print_table
from sparing.sharding.config import Topology

# Columns of the best of each method, before the links' own.
HEAD: Final = ("method", "split", "trainable", "peak", "seconds")

ROWS: Final = ("plan", "known_as", "peak", "seconds")  # columns of the plans of one method, before the links' own


LARGEST: Final = 4  # peaks above so many times the memory are named, not drawn


def title(record: Record) -> str:
    """Model, parameters, batch and cluster in a line."""
    (about,) = record.table("about")
    return (
        f"{about['model']} ({format_number(about['parameters'])} parameters), {about['accumulate']} × "
        f"{about['batch']} × {about['length']} tokens a GPU and step, {about['cluster']}, {about['device']} each"
    )


def axes_of(record: Record) -> list[str]:
    """Names of the links that carry anything."""
    return [str(row["link"]) for row in record.table("links") if int(row["ranks"] or 0) > 1]


def heads_of(record: Record) -> list[dict[str, Any]]:
    """Best of each method, with plan and checkpointing in one word."""
    return [
        row | {"split": f"{row['plan']}, checkpointing" if row["checkpointing"] else row["plan"]}
        for row in record.table("best")
    ]


def plans_of(record: Record, row: dict[str, Any]) -> list[dict[str, Any]]:
    """All plans of the method of a row, with checkpointing as it has it; those that fit first, the fastest first."""
    same = [
        other
        for other in record.table("plan")
        if (other["method"], other["checkpointing"]) == (row["method"], row["checkpointing"])
    ]
    return sorted(same, key=lambda other: (not other["best"], not other["fits"], other["seconds"]))


def show(record: Record) -> None:
    """Print the best of each method, the plans of the first, the pick, and where the page is."""
    (about,) = record.table("about")
    best, links = heads_of(record), axes_of(record)
    sent = [f"sent_{axis}" for axis in links]
    print_table(best, title=title(record), units=record.units, columns=[*HEAD, *sent, "verdict"])
    sys.stdout.write("\n")
    busy = [f"busy_{axis}" for axis in links]
    named = f"{best[0]['method']}{', checkpointing' if best[0]['checkpointing'] else ''}: every plan"
    print_table(plans_of(record, best[0]), title=named, units=record.units, columns=[*ROWS, *busy, "verdict"])
    notes = [f"note: {row['note']}" for row in record.table("advice")]
    sys.stdout.write("\n".join([f"pick: {about['pick']}", *notes, f"report: {about['page']}"]) + "\n")


def answer(record: Record) -> str:
    """One sentence with its number."""
    (about,) = record.table("about")
    best = record.table("best")
    if not best[0]["picked"]:
        least = min(record.table("plan"), key=lambda row: row["peak"])
        held = format_number(least["peak"], "B")
        return f"Nothing fits {about['device']}; the least is {least['method']}, {least['plan']}, at **{held}** a GPU."
    first = best[0]
    again = " with checkpointing" if first["checkpointing"] else ""
    held, seconds = format_number(first["peak"], "B"), format_number(first["seconds"], "s")
    time = f"a step takes **{seconds}**" if about["timed"] else f"the links take **{seconds}** a step"
    return f"**{first['method']}** under **{first['plan']}**{again}: **{held}** of {about['device']}, and {time}."


def bytes_figure(record: Record) -> Figure:
    """Bytes at the peak by category, plan by plan, against the memory."""
    (about,) = record.table("about")
    rows = plans_of(record, record.table("best")[0])
    memory: Any = about["memory"]
    drawn = [row for row in _by(rows, "peak") if row["fits"] or row["peak"] <= LARGEST * memory] or rows
    left = [f"{row['plan']} at {format_number(row['peak'], 'B')}" for row in rows if row not in drawn]
    stacks = [plots.Stack(_named(row), {part: row[part] for part in CATEGORIES}) for row in drawn]
    fitting = sum(bool(row["fits"]) for row in rows)
    more = f" Off the picture: {', '.join(left)}." if left else ""
    return plots.stacked_bars(
        stacks, value=plots.Axis("peak of a rank", unit="B"), mark=(memory, str(about["device"])),
        title=f"{rows[0]['method']}: {fitting} of {len(rows)} plans fit",
        caption=f"{_kept(rows[0])} Transient: gathered blocks and full gradients on their way.{more}",
    )  # fmt: skip


def seconds_figure(record: Record) -> Figure:
    """Time that each kind of link is busy, plan by plan."""
    rows, links = plans_of(record, record.table("best")[0]), axes_of(record)
    stacks = [plots.Stack(_named(row), {axis: row[f"busy_{axis}"] for axis in links}) for row in _by(rows, "seconds")]
    slowest = max(rows, key=lambda row: row["seconds"])
    quickest = next((row for row in rows if row["best"]), rows[0])
    ratio = slowest["seconds"] / quickest["seconds"] if quickest["seconds"] else math.nan
    finding = f"{quickest['plan']} keeps the links busy least of those that fit"
    if ratio > 1.05:
        finding = (
            f"A step under {slowest['plan']} takes {format_number(ratio, '×')} as long as under {quickest['plan']}"
        )
    return plots.stacked_bars(
        stacks, value=plots.Axis("links busy in a step", unit="s"), title=finding,
        caption="Simulated. Kinds of links work side by side, so a step may take less than the sum. From the quickest "
        "plan to the slowest, whether it fits or not.",
    )  # fmt: skip


def map_figures(record: Record, cluster: Topology) -> list[Figure]:
    """Maps of the best plan on other networks, where they were asked for."""
    rows = record.table("crossover")
    if not rows:
        return []
    (about,) = record.table("about")
    caption = "Framed: nearest to this cluster and this work. A dash: nothing fits."
    values: dict[str, Any] = {"accumulate": about["accumulate"], "trainable": about["share"], "memory": 1.0}
    return [
        crossover_figure(
            rows, kind, here=nearest(cluster, float(value), kind), title=_finding(rows, kind), caption=caption
        )
        for kind, value in values.items()
    ]  # fmt: skip


def _finding(rows: Sequence[dict[str, Any]], kind: str) -> str:
    mine = [row["plan"] for row in rows if row["map"] == kind and row["plan"]]
    what = {
        "accumulate": "networks and micro-steps", "trainable": "networks and trainable shares",
        "memory": "networks and sizes of memory",
    }[kind]  # fmt: skip
    if not mine:
        return f"Over {what}, nothing fits"
    (name, count), *others = Counter(mine).most_common()
    if not others:
        return f"{name} is best over all {what} drawn here"
    return f"Over {what}: {name} is best in {count} of {len(mine)} cells, {others[0][0]} in {others[0][1]}"


def _named(row: dict[str, Any]) -> str:
    return f"{row['plan']} ({row['known_as']})" if row["known_as"] else str(row["plan"])


def _kept(row: dict[str, Any]) -> str:
    return f"{row['method']}, {'with' if row['checkpointing'] else 'without'} checkpointing, predicted from shapes."


def _by(rows: Sequence[dict[str, Any]], column: str) -> list[dict[str, Any]]:
    return sorted(rows, key=lambda row: row[column])


def write_page(record: Record, path: Path, cluster: Topology) -> None:
    """Write the page."""
    units, links, best = record.units, axes_of(record), heads_of(record)
    each = [f"{kind}_{axis}" for kind in ("sent", "busy") for axis in links]
    head = Table(best, title=title(record), units=units, columns=[*HEAD, "verdict"], note=RULE)
    plans = plans_of(record, best[0])
    why = Table(plans, title=f"{best[0]['method']}: every plan", units=units, columns=[*ROWS, "verdict"])
    wires = Table(plans, title="What a rank sends in a step", units=units, columns=["plan", *each, "guideline"], note=(
        "busy: time a rank sends over this kind of link; guideline: the paper's formula, bandwidth only."
    ))  # fmt: skip
    parts = Table(plans, title="At the peak of a step", units=units, columns=["plan", *CATEGORIES, "peak", "fits"])
    every = Table(
        record.table("plan"), title="Every method, plan and choice of checkpointing", units=units, folded=True,
        columns=["method", "plan", "checkpointing", "trainable", "peak", "seconds", "fits", "verdict"],
    )  # fmt: skip
    machine = Table(record.table("links"), title="The cluster", units=units)
    sections = [
        Section("Best of each method", tables=[head]),
        Section("Bytes and seconds by plan", _letters(), [bytes_figure(record), seconds_figure(record)],
                [why, wires, parts, machine]),
        Section("Other networks, other work", figures=map_figures(record, cluster), tables=[every]),
    ]  # fmt: skip
    page = Page(
        title="What fits, and how to split it", question=record.question, answer=answer(record), record=record,
        sections=sections, caveats=_caveats(record),
    )  # fmt: skip
    page.write(path)


def _letters() -> str:
    return (
        "A plan is three letters: how parameters, gradients and optimizer state are split. **N**: not at all, every "
        "GPU has them whole. **I**: over the GPUs of a group, with a copy in every group. **G**: over all GPUs, one "
        "copy in the world. Names in brackets are those under which other systems run the same plan."
    )


def _caveats(record: Record) -> list[str]:
    notes = [str(row["note"]) for row in record.table("advice")]
    return [
        *(note[0].upper() + note[1:] + "." for note in notes),
        "Predicted, not measured: allocator slack, kernel workspaces and the device's context come on top.",
        "LISA is priced at its dearest draw: the lowest blocks.",
    ]
