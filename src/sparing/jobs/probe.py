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
from sparing.jobs.limits import at_least, positive
from sparing.jobs.run import Run
from sparing.report import Page, Record, Section, Table, format_number, plots, print_table
from sparing.report.atomic import write_whole
from sparing.sharding import make_mesh
from sparing.sharding.config import Link, Topology
from sparing.sharding.probe import measure

UNITS: Final = {"rate": "Gbit/s", "latency": "s", "sharing": "×", "work": "s"}
TOPOLOGY: Final = "topology.json"
COLUMNS: Final = ("link", "ranks", "rate", "latency", "sharing", "work")


@dataclass(frozen=True, kw_only=True, slots=True)
class Settings:
    """Measure the links between all processes, as rings use them.

    Start it on all machines as a training run is started, one process per GPU, for instance
    `torchrun --nproc-per-node 8 --nnodes 4 --rdzv-endpoint HOST:29500 -m sparing probe`. Groups are found from the
    speeds of all pairs unless they are given.
    """

    groups: int | None = None
    """Groups that the slow network joins (count); none to find them."""

    per_group: int | None = None
    """Processes of a group (count); none to find them."""

    seconds: float = 20.0
    """Time to spend on the links, about (s); finding groups comes on top."""

    out: Path = Path("runs/probe")
    """Folder of topology.json, record and page."""

    overwrite: bool = False
    """Whether a probe that `out` already holds may be deleted (yes or no)."""

    def __post_init__(self) -> None:
        """Refuse counts and times that are none.

        Raises:
            UserError: If a setting is out of range.
        """
        at_least(1, self, "groups", "per_group")
        positive(self, "seconds")


def run(settings: Settings) -> Record:
    """Measure, and write the topology; every process calls it, the first writes.

    Args:
        settings: Groups, time, folder.

    Returns:
        Tables "links" (a row per kind of link) and "about".

    Raises:
        UserError: If there is one process only, the groups do not fit, or `out` holds another run.
    """
    ours = not dist.is_initialized()
    if ours and int(os.environ.get("WORLD_SIZE", "1")) < 2:
        raise UserError(
            "probe", got="one process", why="there is no network in it",
            do="start several: torchrun --nproc-per-node 2 -m sparing probe",
        )  # fmt: skip
    try:
        with Run(settings, writes=(TOPOLOGY,), resumes=False) as run:
            topology = _measured(settings)
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


def _measured(settings: Settings) -> Topology:
    if settings.groups is None and settings.per_group is None:
        return measure(seconds=settings.seconds)
    with make_mesh(groups=settings.groups, per_group=settings.per_group) as mesh:
        return measure(mesh, seconds=settings.seconds)


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
    """A kind of link, by column.

    Args:
        link: One axis of a machine.

    Returns:
        A row of the table "links".
    """
    known = link.size > 1 and math.isfinite(link.rate)
    return {
        "link": link.name, "ranks": link.size, "rate": 8 * link.rate / 1e9 if known else None,
        "latency": link.latency if known else None, "sharing": float(link.sharing) if known else None,
        "work": link.work if known and link.work else None,
    }  # fmt: skip


def cluster_title(cluster: Topology) -> str:
    """The machine in a few words.

    Args:
        cluster: The machine.

    Returns:
        Ranks, and the speed of every kind of link.
    """
    inner, outer = cluster.axes[0], cluster.axes[-1]
    speeds = ", ".join(
        f"{axis.name} {format_number(8 * axis.rate / 1e9)} Gbit/s"
        for axis in cluster.axes
        if axis.size > 1 and math.isfinite(axis.rate)
    )
    groups = "group" if outer.size == 1 else "groups"
    return f"{cluster.world} GPUs, {cluster.world // inner.size} {groups} of {inner.size} ({speeds})"


def show(record: Record) -> None:
    """Print the table and where the files are.

    Args:
        record: What ``run`` returned.
    """
    (about,) = record.table("about")
    print_table(record.table("links"), title=str(about["cluster"]), units=record.units, columns=list(COLUMNS))
    lines = (f"topology: {about['topology']}", f"plan with: {_command(record)}", f"report: {about['page']}")
    sys.stdout.write("\n".join(lines) + "\n")


def _command(record: Record) -> str:
    return f"sparing plan MODEL_DIR --topology {record.table('about')[0]['topology']} --memory 80GB"


def write_page(record: Record, path: Path) -> None:
    """Write the page.

    Args:
        record: A finished measurement.
        path: File of the page.
    """
    (about,), rows = record.table("about"), record.table("links")
    known = [row for row in rows if row["rate"] is not None]
    fastest, slowest = max(known, key=_rate), min(known, key=_rate)
    ratio = _rate(fastest) / _rate(slowest)
    finding = f"{fastest['link']} links are {ratio:.3g}× as fast as {slowest['link']} ones"
    if len(known) == 1:
        finding = "All processes are one group: no slow network parts them"
    bars = [plots.Bar(str(row["link"]), _rate(row)) for row in known]
    picture = plots.bars(bars, title=finding, value=plots.Axis("speed of one link", unit="Gbit/s"))
    note = (
        "rate and latency: least squares over messages of several sizes, one line of ranks alone; sharing: how many "
        "times slower when all lines send at once; work: what a message takes of a processor, where there is no GPU."
    )
    table = Table(rows, title=str(about["cluster"]), units=record.units, columns=list(COLUMNS), note=note)
    page = Page(
        title="The links of this cluster", question=record.question, answer=f"**{finding}**: {about['cluster']}.",
        sections=[Section("Links", figures=[picture], tables=[table])], record=record,
        reproduce={"use it": _command(record)},
        caveats=["Measured with what else was running on these machines at the time."],
    )  # fmt: skip
    page.write(path)


def _rate(row: dict[str, object]) -> float:
    return float(str(row["rate"]))
