"""What each of two processes does in ``composition/test_hypergrad_sharding.py``, and the same in one."""

from __future__ import annotations

from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from torch import distributed as dist
from torch.distributed import FileStore, Store, TCPStore

from oracles.problems import dropout
from patience import PATIENCE
from sparing import hypergrad as hg

WORLD = 2
METHODS: dict[str, dict[str, Any]] = {
    "plain": {"directions": 5},
    "chunked": {"directions": 5, "chunk": 2},
    "hadamard": {"directions": 8, "law": hg.Hadamard()},
    "guided": {"directions": 5, "guides": (hg.HessianFree(),)},
    "control": {"directions": 4, "control": {"weight": torch.ones(6, dtype=torch.float64)}},
    "tail": {"directions": 3, "tail": 2},
    "fewer than ranks": {"directions": 1},
}


def told(settings: dict[str, Any], spread: hg.Spread | None = None) -> dict[str, Any]:
    case = dropout()
    found = hg.hypergradient(case.problem, case.phi, hg.ForwardGradient(**settings, spread=spread), seed=7)
    report = found.report
    return {
        "grad": found.grad["weight"].tolist(),
        "control": found.control["weight"].tolist() if found.control else None,
        "weights": report.weights.tolist(),
        "masked": report.masked,
        "norm_squared": report.norm_squared,
    }


class Counted(Store):
    """A store that counts the bytes left in it."""

    def __init__(self, store: Store) -> None:
        super().__init__()
        self.inner, self.sent = store, 0

    def set(self, key: str, value: str) -> None:
        self.sent += len(value)
        self.inner.set(key, value)

    def get(self, key: str) -> bytes:
        return self.inner.get(key)

    def wait(self, keys: list[str], timeout: timedelta) -> None:
        self.inner.wait(keys, timeout)


def tcp(rank: int, meeting: FileStore) -> TCPStore:
    if rank == 0:
        store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        meeting.set("port", str(store.port))
        return store
    return TCPStore("127.0.0.1", int(meeting.get("port")), is_master=False)


def work(folder: Path) -> dict[str, Any]:
    """Every scenario in one of the processes."""
    rank = dist.get_rank()
    files = FileStore(str(folder / "store"), WORLD)
    wire = tcp(rank, files)
    answer: dict[str, Any] = {}
    for name, settings in METHODS.items():
        for label, store in (("file", files), ("tcp", wire)):
            key = f"{label} {name}"
            answer[key] = told(settings, hg.Spread(store=store, rank=rank, size=WORLD, key=key, timeout=PATIENCE))
    dist.barrier()  # so that five seconds are enough for who does come
    # a third rank that never comes
    spread = hg.Spread(store=wire, rank=rank, size=WORLD + 1, key="lost", timeout=5)
    answer["lost"] = warned(METHODS["plain"], spread)
    counted = Counted(files)
    told(METHODS["plain"], hg.Spread(store=counted, rank=rank, size=WORLD, key="counted", timeout=PATIENCE))
    answer["sent"] = counted.sent
    dist.barrier()  # rank 0 holds the TCP store
    return answer


def warned(settings: dict[str, Any], spread: hg.Spread) -> dict[str, Any]:
    import warnings

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        answer = told(settings, spread)
    return answer | {"warned": [str(one.message) for one in caught if one.category is RuntimeWarning]}
