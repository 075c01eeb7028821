"""``sparing probe``: measure what ``plan`` asks, arithmetic of a device and, under torchrun, links of a cluster."""

from __future__ import annotations

import math
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import torch
import torch.distributed as dist

from sparing.errors import require
from sparing.jobs.arithmetic import MEASURED, STEP, Speed, speeds
from sparing.jobs.disk import refusing_to_write
from sparing.jobs.folder import print_page_path
from sparing.jobs.limits import Budget, Count
from sparing.jobs.run import Run
from sparing.jobs.settings import OnDevice, Output
from sparing.jobs.torch_state import device_for
from sparing.report import Figure, Progress, Record, format_number, plots
from sparing.report.atomic import write_whole
from sparing.report.declared import Chapter, Rows, RunPage
from sparing.sharding import make_mesh
from sparing.sharding.network.mesh import Mesh
from sparing.sharding.network.probe import measure
from sparing.sharding.network.rendezvous import launched
from sparing.sharding.planner.config import Link, Topology

UNITS: Final = {
    "rate": "Gbit/s", "latency": "s", "overhead": "s", "sharing": "×", "work": "s", "speed": "FLOP/s", "moves": "B/s",
    "spread": "%", "per_pass": "s", "per_step": "s",
}  # fmt: skip
TOPOLOGY: Final = "topology.json"
ARITHMETIC: Final = ("what", "dtype", "speed", "moves", "spread", "rounds")
DONE: Final = (
    "Passes of a Transformer block, forward and backward, with the operations of its matrix products and attention; "
    "and what a fused step of AdamW reads and writes. Medians; spread: largest less smallest. Of several processes, "
    "which measure at once, the slowest counts."
)
WIDE: Final = 50.0
"""Spread (%) from which a median says little: on a quiet machine it is a few."""
COLUMNS: Final = ("link", "ranks", "rate", "latency", "overhead", "sharing", "work")
ENGINE: Final = ("per_pass", "per_step")
ADDED: Final = (
    "What the sharded engine adds to a forward or backward pass of one block, and to a step: nets of tiny blocks, "
    "beside plain torch and beside their simulation on these links."
)
NOTE: Final = (
    "rate and latency: least squares over messages of several sizes, one line of ranks alone; overhead: what a message "
    "of a collective takes beyond that; sharing: how many "
    "times slower when all lines send at once; work: what a message takes of a processor, where there is no GPU."
)


@dataclass(frozen=True, kw_only=True)
class Settings(Output, OnDevice):
    """Measure the arithmetic of a device, and the links between processes, as rings use them.

    Alone it measures the device. Started on all machines as a training run is, one process per GPU, it measures the
    links too, for instance `torchrun --nproc-per-node 8 --nnodes 4 --rdzv-endpoint HOST:29500 -m sparing probe`. Groups
    are found from the speeds of all pairs unless they are given.
    """

    timed_width: Count | None = None
    """Width of the Transformer block whose passes are timed (count); none: 4096 on CUDA, 1024 on the processor."""

    timed_tokens: Count | None = None
    """Tokens of the row that it takes (count); none: 4096 on CUDA, 512 on the processor."""

    groups: Count | None = None
    """Groups of ranks that a slow network joins (count); none: found."""

    per_group: Count | None = None
    """Ranks of a group (count): processes; none: found. With `domains`, those of a domain."""

    domains: Count | None = None
    """Domains of a group (count), which links of a middle speed join, as a rack joins NVLink domains; none: found, or
    none if groups are given."""

    seconds: Budget = 20.0
    """Time budget (s): for the links, about; finding groups comes on top."""

    out: Path = Path("runs/probe")


def run(settings: Settings) -> Record:
    """Measure; every process calls it, the first writes. Tables: "arithmetic", "about" and, of several, "links"."""
    device, alone = device_for(settings.device), not dist.is_initialized() and launched() == 1
    ours = not dist.is_initialized() and not alone
    given = [name for name in ("groups", "per_group", "domains") if getattr(settings, name) is not None]
    require(not (alone and given), next(iter(given), ""), "one process", "it has no groups", "start it with torchrun")
    try:
        with Run(settings, writes=() if alone else (TOPOLOGY,), resumes=False) as run:
            topology = None if alone else _links(settings)
            found = _speeds(settings, device)
            record = _record(settings, found if alone else _slowest(found), topology, device)
            if alone or dist.get_rank() == 0:
                run.resume(record)
                run.claim()
                if topology is not None:
                    with refusing_to_write("saving", settings.out):
                        write_whole(settings.out / TOPOLOGY, topology.to_json() + "\n")
                run.finish(write_page)
    finally:
        if ours and dist.is_initialized():
            dist.destroy_process_group()
    return record


def _links(settings: Settings) -> Topology:
    if settings.groups is None and settings.per_group is None and settings.domains is None:
        return measure(seconds=settings.seconds)
    with _mesh(settings) as mesh:
        return measure(mesh, seconds=settings.seconds)


def _mesh(settings: Settings) -> Mesh:
    """The groups that were given."""
    if settings.domains is None:
        return make_mesh(groups=settings.groups, per_group=settings.per_group)
    world, inside = launched(), settings.domains * (settings.per_group or 0)
    per_group = settings.per_group or world // max(settings.domains * (settings.groups or 1), 1)
    groups = settings.groups or world // max(inside, 1)
    return make_mesh(sizes=(per_group, settings.domains, groups))


def _speeds(settings: Settings, device: torch.device) -> list[Speed]:
    found = []
    with Progress("measure", total=MEASURED, unit="speed") as bar:
        for one in speeds(device, width=settings.timed_width, tokens=settings.timed_tokens):
            found.append(one)
            bar.advance(what=one.what)
    return found


def _slowest(found: list[Speed]) -> list[Speed]:
    """Of each measurement that of the slowest process."""
    every: list[list[Speed]] = [[] for _ in range(dist.get_world_size())]
    dist.all_gather_object(every, found)
    return [min(same, key=lambda speed: speed.rate) for same in zip(*every, strict=True)]


def _record(settings: Settings, found: list[Speed], topology: Topology | None, device: torch.device) -> Record:
    record = Record(question="How fast is this hardware?", settings=settings, seed=0, units=dict(UNITS))
    for one in found:
        done = {"moves": one.rate} if one.what == STEP else {"speed": one.rate}
        record.add("arithmetic", what=one.what, dtype=one.dtype, **done, spread=100 * one.spread, rounds=one.rounds)
    about: dict[str, Any] = {"device": str(device)}
    if device.type == "cuda":
        about["memory"] = torch.cuda.get_device_properties(device).total_memory
    if topology is not None:
        for axis in topology.axes:
            record.add("links", **link_row(axis))
        about |= {
            "cluster": cluster_title(topology), "ranks": topology.world, "topology": TOPOLOGY,
            "crowding": topology.crowding, "backend": str(dist.get_backend()),
        }  # fmt: skip
        record.add("engine", per_pass=topology.per_pass, per_step=topology.per_step)
    record.add("about", **about)
    return record


def link_row(link: Link) -> dict[str, Any]:
    """A kind of link as a row of the table "links"."""
    known = link.size > 1 and math.isfinite(link.rate)
    return {
        # links are in bytes a second, networks are sold in bits
        "link": link.name, "ranks": link.size, "rate": 8 * link.rate / 1e9 if known else None,
        "latency": link.latency if known else None, "overhead": link.overhead if known and link.overhead else None,
        "sharing": float(link.sharing) if known else None,
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
    """Print the tables and where the files are."""
    (about,) = record.table("about")
    PAGE.print_tables(record)
    if doubt := _doubt(record):
        sys.stderr.write(f"{doubt}\n")
    # whole paths belong on this terminal, not in files that are passed on
    out = Path(record.settings["out"])
    topology = [f"topology: {out / about['topology']}"] if "topology" in about else []
    sys.stdout.write("\n".join((*topology, f"plan with: {_command(record, out)}")) + "\n")
    print_page_path(record)


def _doubt(record: Record) -> str:
    """Whether what was measured can be relied on, in a sentence; nothing if it can."""
    widest = max(row["spread"] for row in record.table("arithmetic"))
    said = f"Repetitions differ by {widest:.0f} %: something else was running; measure again when it is done."
    return said if widest >= WIDE else ""


def _command(record: Record, folder: Path = Path()) -> str:
    (about,), (moves,) = record.table("about"), (row for row in record.table("arithmetic") if row.get("moves"))
    links = f" --topology {folder / about['topology']}" if "topology" in about else ""
    tflops = f"--tflops {_fastest(record)['speed'] / 1e12:.3g} --bandwidth {moves['moves'] / 1e9:.5g}"
    memory = f" --memory {about['memory'] / 1e9:.0f}GB" if "memory" in about else ""
    return f"sparing plan MODEL_DIR{links}{memory} --dtype {_fastest(record)['dtype']} {tflops}"


def _fastest(record: Record) -> dict[str, Any]:
    return max((row for row in record.table("arithmetic") if row.get("speed")), key=lambda row: row["speed"])


def _known(record: Record) -> list[dict[str, Any]]:
    return [row for row in record.table("links") if row["rate"] is not None]


def finding(record: Record) -> str:
    """How fast passes are, and on a cluster how much faster the fastest links are than the slowest."""
    rows = sorted(_known(record), key=lambda row: row["rate"])
    if not rows:
        best = _fastest(record)
        return f"Passes of a block reach {format_number(best['speed'], 'FLOP/s')} in {best['dtype']}"
    if len(rows) == 1:
        return "All processes are one group: no slow network parts them"
    slowest, fastest = rows[0], rows[-1]
    return f"{fastest['link']} links are {fastest['rate'] / slowest['rate']:.3g}× as fast as {slowest['link']} ones"


def link_speeds(record: Record) -> Figure | None:
    """Speed of one link by kind."""
    bars = [plots.Bar(str(row["link"]), row["rate"]) for row in _known(record)]
    title = finding(record)
    return plots.bars(bars, title=title, value=plots.Axis("speed of one link", unit="Gbit/s")) if bars else None


def _where(record: Record) -> str:
    (about,) = record.table("about")
    return str(about.get("cluster", about["device"]))


PAGE: Final = RunPage(
    "The speed of this hardware",
    lambda record: f"**{finding(record)}**: {_where(record)}.",
    Chapter(
        "Links", "", link_speeds, Rows("links", _where, COLUMNS, NOTE), Rows("engine", "The engine", ENGINE, ADDED)
    ),
    Chapter("Arithmetic", "", Rows("arithmetic", lambda record: record.table("about")[0]["device"], ARITHMETIC, DONE)),
    caveats=lambda record: [_doubt(record) or "Measured with what else was running at the time."],
    facts=lambda record: {"use it": _command(record)},
)

write_page = PAGE.write
