"""What real gloo processes do in the wire tests: they start once, run all cases and leave what they got in a folder."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from oracles import wire_threads as wt
from oracles.scripts import forked
from patience import PATIENCE
from sparing.errors import RunError, UserError
from sparing.sharding.network import probe
from sparing.sharding.network.consistency import check_replicas, check_same
from sparing.sharding.network.mesh import make_mesh
from sparing.sharding.network.probe import measure
from sparing.sharding.network.rendezvous import join
from sparing.sharding.network.rings import PART_BYTES, RateLimit, Ring
from sparing.sharding.network.wires import Wires

WORLD = 6
DTYPES = [torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.int64, torch.uint8]
LENGTHS = {
    "even": [4] * WORLD,
    "uneven": [3, 0, 5, 1, 0, 2],
    "one": [0, 0, 0, 1, 0, 0],
    "empty": [0] * WORLD,
    "long": [PART_BYTES // 8 + 5, 2, PART_BYTES // 4, 0, PART_BYTES // 8, 1],
}
SHAPES = [(2, 3), (3, 2), (6, 1), (1, 6), (1, 3, 2)]
WIRES = {
    "ring": Wires(),
    "overlapped": Wires(gather="overlapped"),
    "flat": Wires(gather="flat"),
    "builtin": Wires(kind="builtin"),
    "builtin flat": Wires(kind="builtin", gather="flat"),
}


def chunks(rank: int, lengths: list[int], dtype: torch.dtype) -> list[torch.Tensor]:
    """Chunks c of rank r, all different."""
    return [wt.value(rank + 2 * c, length, dtype) for c, length in enumerate(lengths)]


def rings(rank: int) -> dict[str, Any]:
    """All ring collectives over the whole world, for each type and set of lengths."""
    found: dict[str, Any] = {}
    with make_mesh(sizes=(WORLD,)) as mesh:
        ring = Ring(mesh.axes[0], mesh.counter)
        for dtype in DTYPES:
            for name, lengths in LENGTHS.items():
                if name == "long" and dtype is not torch.float64:
                    continue
                for operation in ("all_gather_", "reduce_scatter_", "all_reduce_"):
                    mesh.counter.reset()
                    data = chunks(rank, lengths, dtype)
                    value = getattr(ring, operation)(data)
                    sent = (mesh.counter.sent["global"], mesh.counter.messages["global"])
                    key = f"{operation} {str(dtype).removeprefix('torch.')} {name}"
                    found[key] = (data[rank] if operation == "reduce_scatter_" else data, sent)
                    assert value is None or value is data[rank]
    return found


def moves(rank: int) -> dict[str, Any]:
    """Every move between levels, on every shape and wire."""
    del rank
    found: dict[str, Any] = {}
    for sizes in SHAPES:
        for name, wires in WIRES.items():
            with make_mesh(sizes=sizes, wires=wires) as mesh:
                for move in wt.every(len(sizes)):
                    mesh.counter.reset()
                    result = wt.do(mesh, 2 * WORLD, move)
                    found[f"{sizes} {name} {move}"] = result, [mesh.counter.sent[axis.name] for axis in mesh.axes]
    return found


def queued(rank: int) -> dict[str, Any]:
    """Hundreds of reductions and gathers on both lanes before anything is waited for."""
    with make_mesh(groups=3, per_group=2) as mesh:
        folded = [mesh.transitions.reduce_step(wt.value(rank + k, 60), 1 + k % 2) for k in range(60)]
        wholes = [torch.zeros(60, dtype=torch.float64) for _ in range(60)]
        filled = []
        for k, whole in enumerate(wholes):
            mesh.transitions.slice(whole, 0, 2).copy_(wt.part_of(wt.value(k, 60), 2, mesh.coords, mesh.sizes))
            filled.append(mesh.transitions.gather_(whole, 2, 0))
        # in the other order than they were queued
        gathers = [handle.wait() for handle in reversed(filled)][::-1]
        return {"reduced": [handle.wait() for handle in folded], "gathered": gathers}


def told(work: Callable[[], object]) -> str:
    try:
        work()
    except (UserError, RunError) as error:
        return f"{type(error).__name__}: {error}"
    return "nothing"


def facts(rank: int) -> dict[str, Any]:
    """What ranks say about equal and unequal facts, and what a mesh knows of its ranks."""
    found: dict[str, Any] = {}
    with make_mesh(groups=3, per_group=2) as mesh:
        same = torch.arange(5.0)
        found["equal"] = told(lambda: check_same(mesh, {"seed": 3, "plan": "IIG"}, "start"))
        found["plan"] = told(lambda: check_same(mesh, {"seed": 3, "plan": "NNG" if rank == 4 else "IIG"}, "start"))
        found["one value"] = told(lambda: check_same(mesh, rank % 2, "seed"))
        found["missing"] = told(lambda: check_same(mesh, {"a": 1, **({"b": 2} if rank else {})}, "facts"))
        found["after"] = told(lambda: check_same(mesh, "still in step", "start"))
        # replicas of level I are ranks 0, 2, 4 and 1, 3, 5; those of level N are all; level G has none
        found["replicas"] = told(lambda: check_replicas(mesh, {"w": (same + rank % 2, 1), "z": (same + rank, 2)}))
        odd = same.clone()
        odd[3] += 1e-6 * (rank == 5)
        found["odd"] = told(lambda: check_replicas(mesh, {"w": (same, 0), "v": (odd, 1), "u": (odd, 2)}))
        found["rows"] = mesh.gather_scalars(torch.tensor([rank, rank * 10.0]))
        found["broadcast"] = mesh.broadcast_(torch.full((3,), float(rank)), src=2)
        found["place"] = (mesh.coords, mesh.holders(1), mesh.replicas(1), [axis.ranks for axis in mesh.axes])
        found["device mesh"] = [mesh.device_mesh.get_local_rank(axis.name) for axis in mesh.axes]  # type: ignore[union-attr]
        found["refused"] = told(lambda: make_mesh(groups=4, per_group=2))
    return found


def measured(rank: int) -> dict[str, Any]:
    """A throttled mesh, and the machine as it is."""
    del rank
    paces = {"intra": RateLimit(rate=4e7, latency=4e-3), "inter": RateLimit(rate=1e7, latency=8e-3)}
    with make_mesh(groups=3, per_group=2, wires=Wires(rate=paces)) as mesh:
        paced = measure(mesh, sizes=[1 << 12, 1 << 20], seconds=3, label="")
    free = probe.rates(make_mesh(sizes=(WORLD,)))
    return {"paced": paced, "rates": free}


def lost(rank: int) -> dict[str, Any]:
    """Rank 5 dies in the middle of a run; its neighbours hear of it, and of what else is queued."""
    mesh = make_mesh(groups=3, per_group=2, patience=20)
    x = torch.ones(12)
    mesh.transitions.sync(x, 0, 2).wait()
    if rank == 5:
        os._exit(9)
    start = time.monotonic()
    handles = [mesh.transitions.sync(x, 0, 2) for _ in range(2)]
    found = {"errors": [told(handle.wait) for handle in handles], "seconds": time.monotonic() - start}
    mesh.close()
    return found


def main(rank: int, folder: Path) -> None:
    torch.set_num_threads(1)
    wait = timedelta(seconds=PATIENCE)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=WORLD, timeout=wait)
    answer = {work.__name__: work(rank) for work in (rings, moves, queued, facts, measured, lost)}
    torch.save(answer, folder / f"{rank}.pt")
    os._exit(0)  # the process group would wait for the dead rank


def absent(rank: int, folder: Path) -> None:
    """Two ranks of three, started as torchrun would; the last never comes."""
    os.environ.update(RANK=str(rank), WORLD_SIZE="3", MASTER_ADDR="127.0.0.1")
    start = time.monotonic()
    answer = told(lambda: join(3.0, "gloo"))
    torch.save({"error": answer, "seconds": time.monotonic() - start}, folder / f"absent-{rank}.pt")


def start(work: Callable[[int, Path], None], count: int, folder: Path) -> None:
    """Fork, so that torch is imported once; nothing has run in this process that a fork would break."""
    processes = [mp.get_context("fork").Process(target=work, args=(rank, folder)) for rank in range(count)]
    for process in processes:
        process.start()
    for process in processes:
        process.join()


def answers(folder: Path) -> list[dict[str, Any]]:
    """Start the processes, and what each got; rank 5 leaves nothing."""
    done = forked(Path(__file__), str(folder), folder=folder)
    try:
        return [torch.load(folder / f"{rank}.pt", weights_only=False) for rank in range(WORLD - 1)]
    except FileNotFoundError as error:
        raise AssertionError(done.err[-4000:]) from error


def free_port() -> int:
    import socket

    with socket.socket() as made:
        made.bind(("127.0.0.1", 0))
        return int(made.getsockname()[1])


if __name__ == "__main__":
    os.environ["MASTER_PORT"] = str(free_port())
    start(main, WORLD, Path(sys.argv[1]))
    start(absent, 2, Path(sys.argv[1]))
