"""All ranks meet at a store before they build anything together; those that do not come are named."""

from __future__ import annotations

import os
import time
from collections.abc import Iterable, Sequence
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed import PrefixStore, Store, TCPStore  # type: ignore[attr-defined]  # not in its list of names

from sparing.errors import RunError, UserError, require

GRACE = 5.0  # how much longer than rank 0 the others wait for its verdict (s)


def rendezvous(
    store: Store, rank: int, world: int, timeout: float, key: str = "meet", numbers: Sequence[int] | None = None
) -> None:
    """Wait until all ranks are there; name those who are not, the same on all ranks, after ``timeout`` seconds.

    Rank 0 waits for each, writes the verdict, and keeps the store alive until the others have read it. ``key`` must
    never be used twice with one store. ``numbers``: by which errors name them; None: 0, 1, ….
    """
    # A verdict by one rank, because ranks that each waited for all could come to different ones.
    keys = [f"{key}/{other}" for other in range(world)]
    store.set(keys[rank], "here")
    try:
        if rank == 0:
            verdict = "all"  # or the numbers of the missing
            try:
                store.wait(keys, timedelta(seconds=timeout))
            except RuntimeError:
                verdict = _missing(store, keys) or "all"
            store.set(f"{key}/verdict", verdict)
        else:
            store.wait([f"{key}/verdict"], timedelta(seconds=timeout + GRACE))
    except RuntimeError as error:  # of the store: no verdict, or no store
        raise RunError(f"meeting of {world} ranks: rank 0 gave no answer within {timeout + GRACE:g} s") from error
    missing = store.get(f"{key}/verdict").decode() if rank else _missing(store, keys)
    if not missing or missing == "all":
        return
    store.set(f"{keys[rank]}/heard", "yes")
    if rank == 0:
        _wait_for_readers(store, [name for name in keys if store.check([name])])
    absent = (int(place) if numbers is None else numbers[int(place)] for place in missing.split(","))
    raise RunError(
        f"meeting of {world} ranks: {name_ranks(absent)} did not come within {timeout:g} s; "
        "see whether it died, or started with another address"
    )


def hear(store: Store, rank: int, world: int, key: str, mine: str) -> list[str]:
    """What each rank has to say, once all have met; rank 0 keeps the store alive until the others have read it."""
    keys = [f"{key}/{other}/said" for other in range(world)]
    store.set(keys[rank], mine)
    said = [text.decode() for text in store.multi_get(keys)]
    store.set(f"{keys[rank]}/heard", "yes")
    if rank == 0:
        _wait_for_readers(store, keys)
    return said


def _wait_for_readers(store: Store, keys: Sequence[str]) -> None:
    until = time.monotonic() + GRACE
    while time.monotonic() < until and not store.check([f"{name}/heard" for name in keys]):
        time.sleep(0.02)


def launched() -> int:
    """Processes of this run (count): of the group that is there, or else as the environment tells."""
    if dist.is_initialized():
        return dist.get_world_size()
    (world,) = _integers("WORLD_SIZE") if "WORLD_SIZE" in os.environ else (1,)
    return world


def _integers(*names: str) -> list[int]:
    try:
        return [int(os.environ[name]) for name in names]
    except ValueError as error:
        raise UserError("environment", got=error, why="ranks and ports are integers", do="use torchrun") from error


def join(timeout: float, backend: str | None = None) -> None:
    """Start the process group that the environment of ``torchrun`` describes, naming ranks that never come.

    ``timeout`` is in seconds; without ``backend`` NCCL where there is CUDA, else gloo.
    """
    wanted = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
    absent = [name for name in wanted if name not in os.environ]
    require(
        not absent, "environment", "no " + ", ".join(absent), "several processes must find each other", "use torchrun"
    )
    rank, world, port = _integers("RANK", "WORLD_SIZE", "MASTER_PORT")
    host, agent = os.environ["MASTER_ADDR"], os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    wait = timedelta(seconds=timeout)
    try:
        store = TCPStore(host, port, world, rank == 0 and not agent, wait, wait_for_workers=False)
    except RuntimeError as error:
        raise RunError(
            f"meeting of {world} ranks: no store at {host}:{port} within {timeout:g} s; is rank 0 up?"
        ) from error
    # After a restart by the agent the store is the same: a prefix keeps old keys apart.
    meeting = PrefixStore(f"sparing/{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}", store)
    rendezvous(meeting, rank, world, timeout, "join")
    chosen = backend or ("nccl" if dist.is_nccl_available() and torch.cuda.is_available() else "gloo")
    dist.init_process_group(chosen, store=meeting, rank=rank, world_size=world)


def _missing(store: Store, keys: list[str]) -> str:
    return ",".join(str(rank) for rank, key in enumerate(keys) if not store.check([key]))


def name_ranks(numbers: Iterable[int]) -> str:
    """``rank 3`` or ``ranks 1, 3``."""
    names = [str(number) for number in numbers]
    return ("rank " if len(names) == 1 else "ranks ") + ", ".join(names)
