"""``sparing probe``: measure the links of this cluster under torchrun, and write the topology that ``plan`` reads."""

from __future__ import annotations

import math
import os
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import torch.distributed as dist

from sparing.errors import UserError
from sparing.jobs.disk import refusing_to_write
from sparing.jobs.limits import Budget, Count
from sparing.jobs.run import Run
from sparing.jobs.settings import Output
from sparing.report import Figure, Record, format_number, plots
from sparing.report.atomic import write_whole
from sparing.report.declared import Chapter, Rows, RunPage
from sparing.sharding import make_mesh
from sparing.sharding.network.probe import measure
from sparing.sharding.planner.config import Link, Topology

UNITS: Final = {"rate": "Gbit/s", "latency": "s", "sharing": "×", "work": "s"}
TOPOLOGY: Final = "topology.json"
COLUMNS: Final = ("link", "ranks", "rate", "latency", "sharing", "work")
NOTE: Final = (
    "rate and latency: least squares over messages of several sizes, one line of ranks alone; sharing: how many "
    "times slower when all lines send at once; work: what a message takes of a processor, where there is no GPU."
)


@dataclass(frozen=True, kw_only=True)
class Settings(Output):
    """Measure the links between all processes, as rings use them.

    Start it on all machines as a training run is started, one process per GPU, for instance
    `torchrun --nproc-per-node 8 --nnodes 4 --rdzv-endpoint HOST:29500 -m sparing probe`. Groups are found from the
    speeds of all pairs unless they are given.
    """

    groups: Count | None = None
    """Groups of ranks that a slow network joins (count); none: found."""

    per_group: Count | None = None
    """Ranks of a group (count): processes; none: found."""

    seconds: Budget = 20.0
    """Time budget (s): for the links, about; finding groups comes on top."""

    out: Path = Path("runs/probe")


def run(settings: Settings) -> Record:
    """Measure, and write the topology; every process calls it, the first writes. Tables: "links" and "about"."""
    ours = not dist.is_initialized()
    if ours and int(os.environ.get("WORLD_SIZE", "1")) < 2:
        raise UserError(
            "probe", got="one process", why="there is no network in it",
            do="start several: torchrun --nproc-per-node 2 -m sparing probe",
        )  # fmt: skip
    try:
        with Run(settings, writes=(TOPOLOGY,), resumes=False) as run:
            if settings.groups is None and settings.per_group is None:
                topology = measure(seconds=settings.seconds)
            else:
                with make_mesh(groups=settings.groups, per_group=settings.per_group) as mesh:
                    topology = measure(mesh, seconds=settings.seconds)
            record = _record(settings, topology)
            if dist.get_rank() == 0:
                run.resume(record)
                run.claim()
                with refusing_to_write("saving", settings.out):
                    write_whole(settings.out / TOPOLOGY, topology.to_json() + "\n")
                run.finish(write_page)
    finally:
        if ours and dist.is_initialized():
            dist.destroy_process_group()
    return record


def _record(settings: Settings, topology: Topology) -> Record:
    record = Record(question="How fast are the links of this cluster?", settings=settings, seed=0, units=dict(UNITS))
    for axis in topology.axes:
        record.add("links", **link_row(axis))
    file = settings.out / TOPOLOGY
    record.add(
        "about", cluster=cluster_title(topology), ranks=topology.world, topology=str(file),
        crowding=topology.crowding, backend=str(dist.get_backend()), page=str(settings.out / "report.html"),
    )  # fmt: skip
    return record


def link_row(link: Link) -> dict[str, Any]:
    """A kind of link as a row of the table "links"."""
    known = link.size > 1 and math.isfinite(link.rate)
    return {
        # links are in bytes a second, networks are sold in bits
        "link": link.name, "ranks": link.size, "rate": 8 * link.rate / 1e9 if known else None,
        "latency": link.latency if known else None, "sharing": float(link.sharing) if known else None,
        "work": link.work if known and link.work else None,
    }  # fmt: skip


def cluster_title(cluster: Topology) -> str:
    """Ranks of a machine, and the speed of every kind of link, in a few words."""
    inner, outer = cluster.axes[0], cluster.axes[-1]
    speeds = ", ".join(
        f"{axis.name} {format_number(8 * axis.rate / 1e9)} Gbit/s"
        for axis in cluster.axes
        if axis.size > 1 and math.isfinite(axis.rate)
    )
    groups = "group" if outer.size == 1 else "groups"
    return f"{cluster.world} GPUs, {cluster.world // inner.size} {groups} of {inner.size} ({speeds})"


def show(record: Record) -> None:
    """Print the table and where the files are."""
    (about,) = record.table("about")
    PAGE.print_tables(record)
    lines = (f"topology: {about['topology']}", f"plan with: {_command(record)}", f"report: {about['page']}")
    sys.stdout.write("\n".join(lines) + "\n")


def _command(record: Record) -> str:
    return f"sparing plan MODEL_DIR --topology {record.table('about')[0]['topology']} --memory 80GB"


def _known(record: Record) -> list[dict[str, Any]]:
    return [row for row in record.table("links") if row["rate"] is not None]


def finding(record: Record) -> str:
    """How much faster the fastest links are than the slowest."""
    rows = sorted(_known(record), key=lambda row: row["rate"])
    if len(rows) == 1:
        return "All processes are one group: no slow network parts them"
    slowest, fastest = rows[0], rows[-1]
    return f"{fastest['link']} links are {fastest['rate'] / slowest['rate']:.3g}× as fast as {slowest['link']} ones"


def speeds(record: Record) -> Figure:
    """Speed of one link by kind."""
    bars = [plots.Bar(str(row["link"]), row["rate"]) for row in _known(record)]
    return plots.bars(bars, title=finding(record), value=plots.Axis("speed of one link", unit="Gbit/s"))


PAGE: Final = RunPage(
    "The links of this cluster",
    lambda record: f"**{finding(record)}**: {record.table('about')[0]['cluster']}.",
    Chapter("Links", "", speeds, Rows("links", lambda record: record.table("about")[0]["cluster"], COLUMNS, NOTE)),
    caveats=("Measured with what else was running on these machines at the time.",),
    facts=lambda record: {"use it": _command(record)},
)

write_page = PAGE.write
