"""Do plans on ``fully_shard`` do on a GPU what they do on a CPU, and how fast are the kernels of low-bit wires?

Run ``python -m benchmarks.gpu.sharding`` on a machine with a CUDA device until it says that nothing is left; a call
ends after eight minutes and the next goes on. Every cell has processes of its own, and a time limit; one
that fails or is late is a row that says why. Several ranks share one device, which NCCL cannot: they send over gloo,
through main memory. Kinds of cells:

    bits      sums of integers, equal to the CPU's to the bit; AdamW on real numbers in float64, apart by rounding
    memory    bytes that the allocator was asked for between two micro-steps, and what the formula says
    overlap   share of the time of gathers and reductions that lies behind arithmetic, in a profiler's trace; seconds
    kernel    numbers into eight or four bits and back: bytes of float32 a second

Offloaded cells keep parameters, sums and optimizer state in main memory.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch import distributed as dist
from torch.distributed.fsdp import FSDPModule

from benchmarks.gpu.cells import child, fill, resumed, say
from sparing import sharding as sh
from sparing.report import Record, environment
from sparing.seeds import stream
from sparing.sharding.fsdp.engine import FsdpEngine
from sparing.sharding.lowbit.blocks import Blocks
from sparing.sharding.network.mesh import Mesh
from sparing.sharding.planner.fsdp import UnitSpec, fsdp_live_bytes

RESULT = Path(__file__).parents[1] / "results" / "gpu_sharding.jsonl"
MINUTES, LIMIT = 8.0, 150.0  # of a call, and seconds of a cell
BESIDE = {"bits": 4, "memory": 4}  # cells at the same time, of kinds that time nothing
WARM, TIMED = 2, 5  # steps (count)
WORLDS = {1: (1, 1), 2: (1, 2), 4: (2, 2)}  # ranks -> ranks of a group, groups
CORNERS = ("NNN", "NIG", "ING", "III", "IIG", "GGG")


@dataclass(frozen=True, kw_only=True)
class Cell:
    """One row."""

    kind: str
    plan: str = ""
    world: int = 1  # ranks, all on one device
    offload: str | None = None
    bits: int = 0  # of a kernel


def cells() -> Iterator[Cell]:
    """Every cell, those that say whether anything is right first."""
    for offload in (None, "cpu"):
        for world in WORLDS:
            for plan in [p.name for p in sh.effective()] if world > 1 and offload is None else CORNERS:
                yield Cell(kind="bits", plan=plan, world=world, offload=offload)
    for kind, worlds in (("memory", (1, 4)), ("overlap", (1, 2))):
        for offload in (None, "cpu"):
            for world in worlds:
                for plan in CORNERS:
                    yield Cell(kind=kind, plan=plan, world=world, offload=offload)
    for bits in (8, 4):
        yield Cell(kind="kernel", bits=bits)


class Block(nn.Module):
    """Two layers around a curve."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, h: Tensor) -> Tensor:
        """Shape (rows, width) in and out."""
        out: Tensor = h + self.second(self.first(h).relu())
        return out


class Net(nn.Module):
    """Blocks between two roots."""

    def __init__(self, width: int, depth: int) -> None:
        super().__init__()
        self.embed = nn.Linear(width, width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(depth))
        self.head = nn.Linear(width, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Shape (rows, width) in and out."""
        h = self.embed(x)
        for block in self.blocks:
            h = block(h)
        out: Tensor = self.head(h)
        return out


def net(width: int, depth: int, *, integers: bool, dtype: torch.dtype) -> Net:
    """The same weights in every process."""
    made, draw = Net(width, depth), stream(0, "gpu sharding")
    for p in made.parameters():
        whole = torch.randint(-1, 2, p.shape, generator=draw).double()
        p.data = (whole if integers else torch.randn(p.shape, generator=draw, dtype=torch.float64) / width**0.5).to(
            dtype
        )
    return made


def rows(step: int, micro: int, rank: int, width: int, *, integers: bool, dtype: torch.dtype) -> Tensor:
    """Of a rank in a micro-step."""
    draw = stream(0, "gpu sharding rows", step, micro, rank)
    if integers:
        return torch.randint(-1, 2, (2, width), generator=draw).to(dtype)
    return torch.randn(2, width, generator=draw, dtype=torch.float64).to(dtype)


def sharded(cell: Cell, mesh: Mesh, model: Net, *, integers: bool, accumulate: int) -> FsdpEngine:
    """On the device of the mesh."""
    sgd, adamw = partial(torch.optim.SGD, lr=0.5, momentum=0.5), partial(torch.optim.AdamW, lr=1e-3)
    return sh.shard_(
        model, cell.plan, mesh, optimizer=sgd if integers else adamw, accumulate=accumulate, engine="fsdp2",
        offload=cell.offload,  # type: ignore[arg-type]
    )  # fmt: skip


def trained(cell: Cell, device: torch.device, *, integers: bool) -> dict[str, Tensor]:
    """Whole weights after steps on a device, on the CPU."""
    per_group, groups = WORLDS[cell.world]
    with sh.make_mesh(per_group=per_group, groups=groups, device=device) as mesh:
        model = net(8, 3, integers=integers, dtype=torch.float64).to(device)
        engine = sharded(cell, mesh, model, integers=integers, accumulate=2)
        # of integers one step: in the next, products of eight layers need more digits than float64 has
        for step in range(1 if integers else 2):
            for micro in range(2):
                x = rows(step, micro, mesh.rank, 8, integers=integers, dtype=torch.float64).to(device)
                engine.backward(model(x).sum() if integers else model(x).square().mean())
            # a power of two, so that integers stay exact
            engine.step(divisor=8.0)
        found = {name: value.cpu() for name, value in engine.full_state_dict().items()}
        engine.check()
        engine.close()
        return found


def bits_of(cell: Cell, device: torch.device) -> dict[str, Any]:
    """Whether integers end in the same bits as on the CPU, and how far real numbers are apart."""
    answer: dict[str, Any] = {}
    for integers in (True, False):
        here, there = trained(cell, device, integers=integers), trained(cell, torch.device("cpu"), integers=integers)
        if integers:
            answer["equal"] = all(torch.equal(here[name], value) for name, value in there.items())
        else:
            far = [((here[name] - value).abs() / (1 + value.abs())).max().item() for name, value in there.items()]
            answer["apart"] = max(far)
    return answer


def specs(model: Net, engine: FsdpEngine) -> list[UnitSpec]:
    """The units as the formulas want them."""
    named, found = dict(model.named_parameters()), []
    for unit in engine.units:
        body = unit.name.startswith("blocks.")
        inside = [n for n in named if (n.startswith(unit.name + ".") if body else not n.startswith("blocks."))]
        shapes = tuple(tuple(named[name].shape) for name in inside)
        place = int(unit.name.split(".")[1]) if body else -1
        found.append(UnitSpec(shapes=shapes, trains=(True,) * len(shapes), root=not body, block=place))
    return found


def memory(cell: Cell, device: torch.device, *, small: bool) -> dict[str, Any]:
    """Bytes that the allocator was asked for, between the micro-steps of the second step."""
    width, depth = (8, 3) if small else (1024, 6)
    per_group, groups = WORLDS[cell.world]
    with sh.make_mesh(per_group=per_group, groups=groups, device=device) as mesh:
        before = asked(device)
        model = net(width, depth, integers=False, dtype=torch.float32).to(device)
        engine = sharded(cell, mesh, model, integers=False, accumulate=2)
        draw = partial(rows, width=width, integers=False, dtype=torch.float32)
        for step, micro in ((0, 0), (0, 1), (1, 0)):
            loss = model(draw(step, micro, mesh.rank).to(device)).square().mean()
            engine.backward(loss)
            del loss
            if micro:
                engine.step()
        mesh.drain()
        held = None if before is None else asked(device) - before  # type: ignore[operator]
        live = fsdp_live_bytes(specs(model, engine), mesh.sizes, cell.plan, param_bytes=4, grad_bytes=4, master_bytes=4)
        engine.abandon()
        # what is whole between micro-steps stays on the device, whatever is offloaded
        params, grads = (
            size * (letter == "N") for size, letter in zip((live.params, live.grads), cell.plan, strict=False)
        )
        return {"held": held, "formula": live.total if cell.offload is None else params + grads}


def asked(device: torch.device) -> int | None:
    """Bytes of live tensors, without what the allocator adds; None where no allocator tells."""
    if device.type != "cuda":
        return None
    torch.cuda.synchronize()
    return int(torch.cuda.memory_stats()["requested_bytes.all.current"])


def overlap(cell: Cell, device: torch.device, *, small: bool) -> dict[str, Any]:
    """What a trace of steps shows, and seconds of a step without it."""
    width, depth = (8, 3) if small else (2048, 8)
    per_group, groups = WORLDS[cell.world]
    wait = torch.cuda.synchronize if device.type == "cuda" else lambda: None
    with sh.make_mesh(per_group=per_group, groups=groups, device=device) as mesh:
        model = net(width, depth, integers=False, dtype=torch.float32).to(device)
        engine = sharded(cell, mesh, model, integers=False, accumulate=2)
        x = torch.randn(4 if small else 8192, width, generator=stream(0, "overlap")).to(device)

        def step() -> float:
            begin = time.perf_counter()
            for _ in range(2):
                engine.backward(model(x).square().mean())
            engine.step()
            wait()
            return time.perf_counter() - begin

        for _ in range(WARM):
            step()
        seconds = [step() for _ in range(TIMED)]
        with torch.profiler.profile() as profile:
            step()
        with tempfile.TemporaryDirectory() as folder:
            profile.export_chrome_trace(f"{folder}/trace.json")
            events = json.loads(Path(f"{folder}/trace.json").read_text())["traceEvents"]
        engine.close()
    return {"seconds": statistics.median(seconds), **behind(events)}


def behind(events: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Time of the stream that works most, of all others, and the share of the latter while the former works.

    Example:
        >>> kernel = {"cat": "kernel", "args": {"stream": 7}, "ts": 0.0, "dur": 4.0}
        >>> behind([kernel, kernel | {"args": {"stream": 9}, "ts": 3.0, "dur": 2.0}])["share behind"]
        0.5
    """
    spans: dict[int, list[tuple[float, float]]] = {}
    for event in events:
        if event.get("cat") in {"kernel", "gpu_memcpy", "gpu_memset"}:
            begin = float(event["ts"])
            spans.setdefault(event["args"]["stream"], []).append((begin, begin + float(event["dur"])))
    if len(spans) < 2:
        return {"streams": len(spans), "arithmetic": None, "others": None, "share behind": None}
    total = {key: sum(end - begin for begin, end in held) for key, held in spans.items()}
    most = max(total, key=lambda key: total[key])
    others = [span for key, held in spans.items() if key != most for span in held]
    spent = sum(end - begin for begin, end in others)
    covered = sum(max(0.0, min(b, d) - max(a, c)) for a, b in others for c, d in spans[most])
    return {
        "streams": len(spans), "arithmetic": total[most] / 1e6, "others": spent / 1e6, "share behind": covered / spent,
    }  # fmt: skip


def kernel(cell: Cell, device: torch.device, *, small: bool) -> dict[str, Any]:
    """Bytes of float32 a second into codes and back, and the largest error in steps, which is at most half."""
    count, form = (1 << 12 if small else 1 << 26), Blocks(bits=cell.bits, block=128)
    wait = torch.cuda.synchronize if device.type == "cuda" else lambda: None
    x = torch.randn(count, generator=stream(0, "kernel")).to(device)
    payload = torch.empty(form.nbytes(count), dtype=torch.uint8, device=device)
    times: dict[str, list[float]] = {"encode": [], "decode": []}
    found = x
    for _ in range(WARM + TIMED):
        given = x.clone()
        wait()
        begin = time.perf_counter()
        form.encode_(given, payload)
        wait()
        middle = time.perf_counter()
        with torch.device(device):
            found = form.decoded(payload, count)
        wait()
        times["encode"].append(middle - begin)
        times["decode"].append(time.perf_counter() - middle)
    rates = {name: 4 * count / statistics.median(spent[WARM:]) for name, spent in times.items()}
    largest = x.view(-1, 128).abs().amax(1, keepdim=True)
    error = ((found - x).view(-1, 128).abs() / largest).max().item()
    return {**rates, "error": error, "bound": 2.0 ** (1 - cell.bits)}


def run(cell: Cell, *, small: bool) -> dict[str, Any]:
    """Measure one cell, in the processes of its ranks."""
    for name in ("set_reduce_scatter_unused_params", "reset_iter_state"):
        # `shard_` refuses a torch before 2.13, for what no cell does: here all ranks use all parameters and none fails
        if not hasattr(FSDPModule, name):
            setattr(FSDPModule, name, lambda *_, **__: None)
    cuda = torch.cuda.is_available()
    device = torch.device("cuda", 0) if cuda else torch.device("cpu")
    if cell.kind == "kernel":
        return kernel(cell, device, small=small)
    if cuda:
        torch.cuda.set_device(device)
        # or a device mesh would take LOCAL_RANK for the number of a device
        torch.zeros(1, device=device)
    if not dist.is_initialized():
        # of one rank, which has the device for itself, over NCCL
        dist.init_process_group("cpu:gloo,cuda:nccl" if cuda and cell.world == 1 else "gloo")
    if cell.kind == "bits":
        return bits_of(cell, device)
    return (memory if cell.kind == "memory" else overlap)(cell, device, small=small)


def main() -> None:
    """Run what is left for so many minutes."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=MINUTES)
    parser.add_argument("--try", action="store_true", dest="small", help="tiny shapes, on the CPU too")
    parser.add_argument("--kinds", nargs="+", default=["bits", "memory", "overlap", "kernel"])
    parser.add_argument("--out", type=Path, default=RESULT)
    parser.add_argument("--cell")
    options = parser.parse_args()
    if options.cell:
        found = run(Cell(**json.loads(options.cell)), small=options.small)
        if not dist.is_initialized() or dist.get_rank() == 0:
            sys.stdout.write(json.dumps(found) + "\n")
        if dist.is_initialized():
            dist.destroy_process_group()
        return
    if not (options.small or torch.cuda.is_available()):
        parser.exit(2, "no CUDA device is here: pass --try for tiny shapes on the CPU\n")
    units = dict.fromkeys(["held", "formula"], "B") | dict.fromkeys(["encode", "decode"], "B/s")
    units |= dict.fromkeys(["seconds", "arithmetic", "others"], "s")
    record = Record(
        question="Do plans on fully_shard do on a GPU what they do on a CPU?",
        settings={"warm": WARM, "timed": TIMED, "small": options.small}, seed=0, environment=environment(), units=units,
    )  # fmt: skip
    say(
        fill(
            resumed(record, options.out), options.out, "sharding", [c for c in cells() if c.kind in options.kinds],
            lambda cell, seconds: child(
                "sharding", cell, seconds=seconds, options=["--try"] * options.small, ranks=cell.world
            ),
            minutes=options.minutes, limit=lambda _: LIMIT, beside=lambda cell: BESIDE.get(cell.kind, 1),
            sort=lambda cell: (cell.kind, cell.world > 1),
        )
    )  # fmt: skip


if __name__ == "__main__":
    main()
