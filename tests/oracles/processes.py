"""Real processes over gloo for tests: forked from ``oracles.server``, which has imported all: many are cheap."""

from __future__ import annotations

import faulthandler
import multiprocessing
import os
import tempfile
import traceback
from collections.abc import Callable, Collection
from datetime import timedelta
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any

import torch
from torch import distributed as dist

from patience import PATIENCE


def answers(world: int, work: Callable[..., Any], *args: Any, lost: Collection[int] = ()) -> list[Any]:
    """Run a function in so many processes of one group.

    Args:
        world: How many.
        work: Called with ``args`` in each; importable by name.
        args: Whatever pickle takes.
        lost: Ranks that die in the work.

    Returns:
        What each returned (through ``torch.save``), by rank; None of those that died.

    Raises:
        AssertionError: With the first traceback of a process that failed, or when time was up.
    """
    context = multiprocessing.get_context("forkserver")
    with tempfile.TemporaryDirectory() as folder:
        there = Path(folder)
        each = ((rank, world, there, work, args) for rank in range(world))
        ranks = [context.Process(target=_rank, args=own, daemon=True) for own in each]
        for process in ranks:
            process.start()
        _join(ranks, there, lost)
        left = [None if rank in lost else there / f"{rank}.pt" for rank in range(world)]
        return [path and torch.load(path, weights_only=False) for path in left]


def _join(ranks: list[Any], there: Path, lost: Collection[int] = ()) -> None:
    """Wait for all; the first failure, or the end of the time, ends everybody."""
    left = list(ranks)
    try:
        while left:
            ready = wait([process.sentinel for process in left], timeout=PATIENCE)
            assert ready, f"{len(left)} of {len(ranks)} processes still ran after {PATIENCE:g} s"
            left = [process for process in left if process.sentinel not in ready]
            due = [process for rank, process in enumerate(ranks) if rank not in lost]
            failed = [process for process in due if process.exitcode not in (None, 0)]
            assert not failed, _told(there, ranks, failed)
    finally:
        for process in left:
            process.kill()
            process.join()


def _told(there: Path, ranks: list[Any], failed: list[Any]) -> str:
    words = [text for path in sorted(there.glob("*.error")) if (text := path.read_text())]
    ends = ", ".join(f"process {ranks.index(process)} ended with {process.exitcode}" for process in failed)
    return "\n".join([f"{ends}:", *words])


def _rank(rank: int, world: int, there: Path, work: Callable[..., Any], args: tuple[Any, ...]) -> None:
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(world), "LOCAL_RANK": str(rank)}
    torch.set_num_threads(1)
    error = (there / f"{rank}.error").open("w")
    faulthandler.enable(error)  # for those that a signal ends
    try:
        dist.init_process_group(
            "gloo",
            init_method=f"file://{there}/store",
            rank=rank,
            world_size=world,
            timeout=timedelta(seconds=PATIENCE),
        )
        found = work(*args)
        torch.save(found, there / f"{rank}.pt")
        dist.destroy_process_group()
    except BaseException:  # noqa: BLE001  # told by the parent
        error.write(f"rank {rank}:\n{traceback.format_exc()}")
        error.flush()
        os._exit(1)
    os._exit(0)  # lanes of a closed mesh may still hold threads
