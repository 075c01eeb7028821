"""Runs over several processes: the settings of every command that takes ``--plan``, and how the processes meet.

with meet_ranks(settings) as ranks:            # of one process: nothing is met and nothing is sent
    plan, why = choose_plan(settings, ranks.mesh, ...)
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from typing import TYPE_CHECKING

import torch
from torch import distributed as dist
from torch._C._distributed_c10d import HashStore

from sparing.errors import RunError, require
from sparing.jobs.interrupts import defer_signals
from sparing.jobs.rank_monitor import RankMonitor
from sparing.jobs.ranks import Ranks
from sparing.jobs.torch_state import device_for
from sparing.memory.sizes import parse_bytes
from sparing.sharding.levels import Plan
from sparing.sharding.network.mesh import make_mesh
from sparing.sharding.network.rendezvous import join, launched
from sparing.sharding.planner.config import Topology

if TYPE_CHECKING:
    from sparing.jobs.settings import Parallel

NO_PLAN, AUTO = "none", "auto"  # plans that are none: one process without an engine, and the one that is chosen

PARALLEL = ("plan", "groups", "topology", "memory", "engine")  # settings that may differ when a run is resumed


def check_parallel(settings: Parallel) -> None:
    """Refuse settings of a run over several processes that cannot work."""
    given = [name for name in PARALLEL[1:] if getattr(settings, name) is not None]
    if settings.plan == NO_PLAN:
        why, do = "nothing is cut without a plan", "pass --plan auto, or omit it"
        require(not given, given[0] if given else "", getattr(settings, given[0]) if given else "", why, do)
        every, why, do = settings.local.every, "one process has no groups that meet", "pass --plan NNN, or omit it"
        require(not every, "local.every", every, why, do)
        return
    both = settings.groups is not None and settings.topology is not None
    require(not both, "groups", settings.groups, "the topology file has them", "pass one of the two")
    if settings.plan != AUTO:
        whole = "G" not in Plan(settings.plan).name or not settings.local.every
        why = "what is at G is cut over all groups, so none could take a step alone"
        require(whole, "plan", f"{settings.plan} with --local.every", why, "write I or N for G, or pass auto")
        do = "pass --plan auto, or omit it"
        require(settings.memory is None, "memory", settings.memory, "it is for the choice of a plan", do)
    if settings.memory is not None:
        parse_bytes(settings.memory)


@contextlib.contextmanager
def meet_ranks(settings: Parallel) -> Iterator[Ranks]:
    """Meet all processes, and part in order; if one is lost meanwhile, the others end with a line that names it."""
    world = launched()
    why = f"each of {world} processes would train and write the same"
    require(settings.plan != NO_PLAN or world == 1, "plan", NO_PLAN, why, "pass --plan auto, or start one process")
    met = dist.is_initialized()
    started = world > 1 and not met
    topology = None if settings.topology is None else Topology.read(settings.topology)
    if started:
        if settings.device != "cpu" and torch.cuda.is_available():
            # modulo, because CUDA_VISIBLE_DEVICES may show each process one GPU while LOCAL_RANK counts on
            torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")) % torch.cuda.device_count())
        join(30.0, backend="gloo" if settings.device == "cpu" else None)
    shape = {"groups": settings.groups} if topology is None else {"sizes": topology.sizes}
    # of several ranks the library that joined them says where tensors live
    mesh = make_mesh(**shape, device=device_for(settings.device) if world == 1 else None)
    monitor = RankMonitor(mesh)
    try:
        yield Ranks(mesh)
    except BaseException as error:
        # torchrun ends everybody as soon as one is gone, but it waits half a minute
        with defer_signals(always=True):
            monitor.report_failure(error)
            lost = monitor.lost(error)
        if lost:
            raise RunError(lost) from error
        raise
    finally:
        monitor.end()
        mesh.close()
        # in any case: an interpreter that ends with live groups hangs
        if dist.is_initialized() and not met:
            dist.destroy_process_group()


def join_alone() -> None:
    """Make the process group that `fully_shard` asks for, of this process alone, unless there is one."""
    if not dist.is_initialized():
        backend = "cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo"
        dist.init_process_group(backend, store=HashStore(), rank=0, world_size=1)
