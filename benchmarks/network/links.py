"""What the links give: plain messages between pairs of ranks, and the library's own measurement of them."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from sparing import sharding as sh
from sparing.sharding.network.probe import measure

Answer = Callable[..., None]


def probe_job(job: dict[str, Any], answer: Answer) -> None:
    """Measure the mesh as ``sparing probe`` does; rank 0 tells the topology."""
    with sh.make_mesh(groups=job["groups"], per_group=job["per_group"]) as mesh:
        found = measure(mesh, seconds=job["seconds"], label="")
    if dist.get_rank() == 0:
        answer("probe", topology=found.to_json())


def p2p_job(job: dict[str, Any], answer: Answer) -> None:
    """Every pair of ranks in turn: seconds of one transfer, and of all ranks of a group sending out at once."""
    rank, per_group, world = dist.get_rank(), job["per_group"], dist.get_world_size()
    for label, pairs in link_patterns(per_group, world).items():
        for size in job["sizes"]:
            buffer = torch.zeros(size // 4)
            for repeat in range(job["repeats"] + 1):
                dist.barrier()
                start = time.perf_counter()
                for source, target in pairs:
                    if rank == source:
                        dist.send(buffer, target)
                    elif rank == target:
                        dist.recv(buffer, source)
                spent = time.perf_counter() - start
                if repeat and rank in {rank for _, rank in pairs}:
                    answer("p2p", pattern=label, size=size, seconds=spent)


def link_patterns(per_group: int, world: int) -> dict[str, list[tuple[int, int]]]:
    """Who sends to whom at once: one pair inside, one pair across, a whole group across."""
    inside = {"intra": [(0, 1)]} if per_group > 1 else {}
    across = {"inter": [(0, per_group)], "inter, all": [(j, per_group + j) for j in range(per_group)]}
    return inside | (across if world > per_group else {})
