"""Display of a plan for a cluster: best of each method on the terminal; bytes, seconds and maps on the page."""

from __future__ import annotations

import math
import sys
from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial
from operator import itemgetter
from pathlib import Path
from typing import Any, Final

from sparing.jobs.folder import print_page_path
from sparing.jobs.plan.cluster import RULE
from sparing.jobs.plan.crossover import crossover_figure, nearest
from sparing.memory import CATEGORIES
from sparing.report import Figure, Record, format_number, plots
from sparing.report.declared import Chapter, Rows, RunPage, print_tables
from sparing.sharding.planner.config import Topology

LARGEST: Final = 4  # peaks above so many times the memory are named, not drawn


def title(record: Record) -> str:
    """Model, parameters, batch and cluster in a line."""
    (about,) = record.table("about")
    room = f"{about['device']} each" + (f", as {about['engine']} fills it" if about.get("engine") else "")
    return (
        f"{about['model']} ({format_number(about['parameters'])} parameters), {about['accumulate']} × "
        f"{about['batch']} × {about['length']} tokens a GPU and step, {about['cluster']}, {room}"
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


def plans_of(record: Record) -> list[dict[str, Any]]:
    """All plans of the best method, with checkpointing as it has it; those that fit first, the fastest first."""
    first = record.table("best")[0]
    same = record.table("plan", method=first["method"], checkpointing=first["checkpointing"])
    return sorted(same, key=lambda row: (not row["best"], not row["fits"], row["seconds"]))


def columns_of(*names: str) -> Callable[[Record], list[str]]:
    """Columns by name; "sent" and "busy" stand for one of each link that carries anything."""
    return lambda record: [
        column
        for name in names
        for column in ([f"{name}_{axis}" for axis in axes_of(record)] if name in {"sent", "busy"} else [name])
    ]


def answer(record: Record) -> str:
    """One sentence with its number."""
    (about,), first = record.table("about"), record.table("best")[0]
    if not first["picked"]:
        least = min(record.table("plan"), key=itemgetter("peak"))
        held = format_number(least["peak"], "B")
        return f"Nothing fits {about['device']}; the least is {least['method']}, {least['plan']}, at **{held}** a GPU."
    again = " with checkpointing" if first["checkpointing"] else ""
    held, seconds = format_number(first["peak"], "B"), format_number(first["seconds"], "s")
    time = f"a step takes **{seconds}**" if about["timed"] else f"the links take **{seconds}** a step"
    return f"**{first['method']}** under **{first['plan']}**{again}: **{held}** of {about['device']}, and {time}."


def bytes_figure(record: Record) -> Figure:
    """Bytes at the peak by category, plan by plan, against the memory."""
    (about,), rows = record.table("about"), sorted(plans_of(record), key=itemgetter("peak"))
    drawn = [row for row in rows if row["fits"] or row["peak"] <= LARGEST * about["memory"]] or plans_of(record)
    left = [f"{row['plan']} at {format_number(row['peak'], 'B')}" for row in plans_of(record) if row not in drawn]
    more = f" Off the picture: {', '.join(left)}." if left else ""
    return plots.stacked_bars(
        [plots.Stack(_named(row), {part: row[part] for part in CATEGORIES}) for row in drawn],
        value=plots.Axis("peak of a rank", unit="B"), mark=(about["memory"], str(about["device"])),
        title=f"{rows[0]['method']}: {sum(bool(row['fits']) for row in rows)} of {len(rows)} plans fit",
        caption=f"{_kept(rows[0])}, predicted from shapes. Transient: gathered blocks and full gradients on their way."
        f"{more}",
    )  # fmt: skip


def seconds_figure(record: Record) -> Figure:
    """Time that each kind of link is busy, plan by plan."""
    rows = plans_of(record)
    in_order = sorted(rows, key=itemgetter("seconds"))
    slowest = max(rows, key=itemgetter("seconds"))
    quickest = next((row for row in rows if row["best"]), rows[0])
    ratio = slowest["seconds"] / quickest["seconds"] if quickest["seconds"] else math.nan
    title = f"{quickest['plan']} keeps the links busy least of those that fit"
    if ratio > 1.05:
        title = f"A step under {slowest['plan']} takes {format_number(ratio, '×')} as long as under {quickest['plan']}"
    return plots.stacked_bars(
        [plots.Stack(_named(row), {axis: row[f"busy_{axis}"] for axis in axes_of(record)}) for row in in_order],
        value=plots.Axis("links busy in a step", unit="s"), title=title,
        caption="Simulated. Kinds of links work side by side, so a step may take less than the sum. From the quickest "
        "plan to the slowest, whether it fits or not.",
    )  # fmt: skip


def map_figures(record: Record, cluster: Topology) -> list[Figure]:
    """Maps of the best plan on other networks, where they were asked for."""
    rows, (about,) = record.table("crossover"), record.table("about")
    caption = "Framed: nearest to this cluster and this work. A dash: nothing fits."
    values = {"accumulate": about["accumulate"], "trainable": about["share"], "memory": 1.0}
    if cluster.tiers == 3:
        values["middle"] = cluster.axes[0].rate / cluster.axes[1].rate
    return [
        crossover_figure(rows, kind, here=nearest(cluster, value, kind), title=_finding(rows, kind), caption=caption)
        for kind, value in values.items()
        if rows
    ]


def _finding(rows: Sequence[dict[str, Any]], kind: str) -> str:
    mine = [row["plan"] for row in rows if row["map"] == kind and row["plan"]]
    what = {
        "accumulate": "networks and micro-steps", "trainable": "networks and trainable shares",
        "memory": "networks and sizes of memory", "middle": "speeds of three kinds of links",
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
    return f"{row['method']}, {'with' if row['checkpointing'] else 'without'} checkpointing"


HELD: Final = {
    "fsdp2": "Memory is that of PyTorch's `fully_shard` (`fsdp2`), the engine on GPUs: a shard that it keeps beside "
    "whole parameters is counted with them (all in NNN, 1/m in NNI and NII, 1/n in NNG, NIG and NGG); `--engine "
    "sparing` counts this library's own engine, which runs on processors.",
    "sparing": "Memory is that of this library's own engine, which runs on processors; on GPUs `--engine fsdp2` counts "
    "what PyTorch's `fully_shard` keeps beside it.",
}  # fmt: skip


def caveats(record: Record) -> list[str]:
    """Advice, and what is not known before a run."""
    notes = [str(row["note"]) for row in record.table("advice")]
    return [
        *(note[0].upper() + note[1:] + "." for note in notes),
        *(HELD[about["engine"]] for about in record.table("about") if about.get("engine")),
        "Predicted, not measured: allocator slack, kernel workspaces and the device's context come on top.",
        "LISA is priced for the lowest blocks, whose backward pass is the longest.",
    ]


LETTERS: Final = (
    "A plan is three letters: how parameters, gradients and optimizer state are split. **N**: not at all, every "
    "GPU has them whole. **I**: over the GPUs of a group, with a copy in every group. **G**: over all GPUs, one "
    "copy in the world. Where groups consist of domains, **I** is a domain and **M** its group. Names in brackets are "
    "those under which other systems run the same plan."
)
WIRES: Final = (
    "busy: time a rank sends over this kind of link; guideline: the paper's formula, reconstructed, bandwidth only."
)
WAYS: Final = (
    "Each with the plan that is fastest on it and fits. Two levels: rings over one kind of link after another, exact. "
    "Flat ring: one over all GPUs where all take part, exact, for links that are equally fast. int8, int4: few bits "
    "between groups, with error feedback, and sums in float32; `--slow-bits` plans so. Local steps: groups train alone "
    "and meet once in so many (DiLoCo; `pretrain --local.every`); what that costs in loss no price says. Few bits and "
    "local steps run on this library's engine, on processors: theirs is its peak. Leaving: what a group sends out in a "
    "step."
)
EVERY: Final = ("method", "plan", "checkpointing", "trainable", "peak", "seconds", "fits", "verdict")

BEST: Final = Rows(
    heads_of, title, columns_of("method", "split", "trainable", "peak", "seconds", "sent", "verdict"), RULE
)
WIRES_OF_BEST: Final = Rows(
    "wires",
    lambda record: f"{_kept(plans_of(record)[0])}: ways to use the same links",
    ("wires", "plan", "seconds", "leaving", "peak", "verdict"),
    WAYS,
)
CUTS: Final = Rows(
    "arrangements",
    lambda record: "Groups of unequal size, cut into equal ones",
    ("groups", "per_group", "left_out", "plan", "seconds", "rows_per_second"),
    "Planned above: the first, which uses most GPUs. `make_mesh(per_group=…)` makes any of them, of adjacent ranks.",
)
PLANS: Final = Rows(
    plans_of,
    lambda record: f"{_kept(plans_of(record)[0])}: every plan",
    columns_of("plan", "known_as", "peak", "seconds", "busy", "verdict"),
)


def page_of(cluster: Topology) -> RunPage:
    """The page of a plan for a cluster, which its maps frame."""
    return RunPage(
        "What fits, and how to split it",
        answer,
        Chapter("Best of each method", "", BEST),
        Chapter(
            "Bytes and seconds by plan",
            LETTERS,
            bytes_figure,
            seconds_figure,
            PLANS,
            WIRES_OF_BEST,
            CUTS,
            Rows(plans_of, "What a rank sends in a step", columns_of("plan", "sent", "busy", "guideline"), WIRES),
            Rows(plans_of, "At the peak of a step", ("plan", *CATEGORIES, "peak", "fits")),
            Rows("links", "The cluster"),
        ),
        Chapter(
            "Other networks, other work",
            "",
            partial(map_figures, cluster=cluster),
            Rows("plan", "Every method, plan and choice of checkpointing", EVERY, folded=True),
        ),
        caveats=caveats,
    )


def write_page(record: Record, path: Path, cluster: Topology) -> Path:
    """Write the page."""
    return page_of(cluster).write(record, path)


def show(record: Record) -> None:
    """Print the best of each method, the plans of the first, the pick, and where the page is."""
    (about,) = record.table("about")
    print_tables(record, BEST, PLANS, WIRES_OF_BEST, *([CUTS] if record.table("arrangements") else []))
    notes = [f"note: {row['note']}" for row in record.table("advice")]
    sys.stdout.write("\n".join([f"pick: {about['pick']}", *notes]) + "\n")
    print_page_path(record)
