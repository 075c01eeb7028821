"""Two pipeline stages of two ranks each, by torch's schedules; and the whole model in one process, row by row."""

from __future__ import annotations

import contextlib
import dataclasses
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe, ScheduleInterleaved1F1B

from oracles.idiom_ranks import Block, relative
from sparing import sharding as sh
from sparing.sharding import checkpoint
from sparing.sharding.network.mesh import Mesh

WIDTH, ROWS, MICRO, STEPS = 4, 12, 4, 2
OPTIMIZER = partial(torch.optim.AdamW, lr=0.01, weight_decay=0.1)


@dataclass(frozen=True)
class Case:
    """A run in stages."""

    plan: str = "IIG"
    kind: str = "1F1B"
    sizes: tuple[int, ...] = (2, 1)
    names: tuple[str, str] = ("pp", "dp")
    """Dimensions of torch's mesh; ranks of a stage are neighbours, or every second one."""

    total: bool = False
    """Whether gradients are sums over micro-batches."""

    accumulate: int = 1
    clip: float | sh.Clip | None = 0.05
    offload: str | None = None
    rests: bool = False
    """Whether a block of the last stage is frozen by its flags after the first step."""

    @property
    def schedule(self) -> Any:
        return {"GPipe": ScheduleGPipe, "1F1B": Schedule1F1B}[self.kind]


PLANS = ("NNN", "IIG", "GGG", "NIG", "III")
CASES = {
    f"{plan} {kind} {sizes}": Case(plan, kind, sizes)
    for plan in PLANS
    for kind, sizes in (("GPipe", (2, 1)), ("1F1B", (1, 2)))
} | {
    f"{plan} {name}": Case(plan, **more)
    for plan in ("NNN", "NIG", "GGG")
    for name, more in {
        "two schedules a step": {"accumulate": 2},
        "sums": {"total": True, "sizes": (1, 2)},
        "every second rank, not clipped": {"names": ("dp", "pp"), "clip": None},
        "main memory": {"offload": "cpu"},
        "the largest entry": {"clip": sh.Clip(0.01, norm_type=math.inf)},
        "each by its own": {"clip": sh.Clip(0.02, norm_type=1, each=True), "sizes": (1, 2)},
        "a block that rests": {"rests": True},
    }.items()
}  # fmt: skip


class Part(nn.Module):
    """Some blocks, named as in the whole model, with a first or a last layer, or both."""

    def __init__(self, numbers: Sequence[int], *, first: bool, last: bool) -> None:
        super().__init__()
        self.embed = nn.Linear(3, WIDTH) if first else nn.Identity()
        self.blocks = nn.ModuleDict({str(number): Block(WIDTH) for number in numbers})
        self.head = nn.Linear(WIDTH, 3) if last else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        h: Tensor = self.embed(x)
        for block in self.blocks.values():
            h = block(h)
        out: Tensor = self.head(h)
        return out

    @property
    def body(self) -> list[str]:
        return [f"blocks.{number}" for number in self.blocks]


def whole() -> Part:
    """The same weights in every process."""
    made, generator = Part(range(4), first=True, last=True).double(), torch.Generator().manual_seed(3)
    for p in made.parameters():
        p.data = torch.randn(p.shape, generator=generator, dtype=torch.float64) / 2
    return made


def part(stage: int) -> Part:
    """Of the whole one's weights."""
    made = Part((2 * stage, 2 * stage + 1), first=stage == 0, last=stage == 1).double()
    made.load_state_dict({name: value for name, value in whole().state_dict().items() if name in made.state_dict()})
    return made


def rows(step: int, turn: int, place: int) -> tuple[Tensor, Tensor]:
    """Of the ranks at a place of their stages."""
    generator = torch.Generator().manual_seed(100 * step + 10 * turn + place)
    x, y = torch.randn(2, ROWS, 3, generator=generator, dtype=torch.float64)
    return x, y


def loss_of(out: Tensor, target: Tensor) -> Tensor:
    return (out - target).square().mean() + out.sin().mean()


def alone(case: Case) -> dict[str, Tensor]:
    """One process: losses of every rank's micro-batches, their mean over ranks, and mean or sum over micro-batches."""
    model, norms = whole(), []
    optimizer = OPTIMIZER(model.parameters())
    for step in range(STEPS):
        losses = [
            loss_of(model(x), y)
            for turn in range(case.accumulate)
            for place in range(2)
            for x, y in zip(*(t.chunk(MICRO) for t in rows(step, turn, place)), strict=True)
        ]
        mean = torch.stack(losses).mean()
        (mean * MICRO if case.total else mean).backward()  # type: ignore[no-untyped-call]
        norms.append(clipped(model, case.clip))
        optimizer.step()
        optimizer.zero_grad()
        model.blocks["2"].requires_grad_(not case.rests)
    return {**model.state_dict(), "norms": torch.tensor(norms, dtype=torch.float64)}


def clipped(model: nn.Module, clip: float | sh.Clip | None) -> float:
    """Clip as torch does; the norm of the whole gradient before."""
    given = clip if isinstance(clip, sh.Clip) else sh.Clip(clip or 1e9)
    whole = float(nn.utils.get_total_norm([p.grad for p in model.parameters() if p.grad is not None], given.norm_type))
    for held in [[p] for p in model.parameters()] if given.each else [list(model.parameters())]:
        nn.utils.clip_grad_norm_(held, given.max_norm, given.norm_type)
    return whole


@contextlib.contextmanager
def meshes(case: Case) -> Iterator[tuple[DeviceMesh, Mesh]]:
    """Of torch, and ours of my stage."""
    both = init_device_mesh("cpu", (2, 2), mesh_dim_names=case.names)
    with sh.make_mesh(within=both["dp"], stages=both["pp"], sizes=case.sizes) as mesh:
        yield both, mesh


def stage_of(both: DeviceMesh) -> int:
    return int(both["pp"].get_local_rank())


def started(case: Case, both: DeviceMesh, mesh: Mesh, *, engine: Any = "fsdp2", **more: Any) -> tuple[Any, Any]:
    """An engine of my stage, and a schedule."""
    stage = stage_of(both)
    model = part(stage)
    settings: dict[str, Any] = {"optimizer": OPTIMIZER, "clip": case.clip, "accumulate": case.accumulate} | more
    settings |= {} if case.offload is None else {"offload": case.offload}
    made = sh.shard_(model, case.plan, mesh, engine=engine, body=model.body, **settings)
    there = PipelineStage(model, stage, 2, torch.device("cpu"), group=both["pp"].get_group())
    return made, case.schedule(there, MICRO, loss_fn=loss_of, scale_grads=not case.total)


def run(schedule: Any, both: DeviceMesh, mesh: Mesh, step: int, turn: int = 0) -> None:
    """Let a schedule take the rows of a micro-step."""
    x, y = rows(step, turn, mesh.rank)
    if stage_of(both):
        schedule.step(target=y)
    else:
        schedule.step(x)


def apart(engine: Any, norms: Sequence[float], expected: dict[str, Tensor]) -> float:
    """Largest difference of a stage's weights, and of the norms."""
    far = [relative(value, expected[name]) for name, value in engine.full_state_dict().items()]
    return max(*far, relative(torch.tensor(norms, dtype=torch.float64), expected["norms"]))


def trained(case: Case, both: DeviceMesh, mesh: Mesh) -> float:
    """Difference to one process."""
    engine, schedule = started(case, both, mesh)
    norms = []
    for step in range(STEPS):
        for turn in range(case.accumulate):
            with engine.pipeline(schedule):
                run(schedule, both, mesh, step, turn)
        norms.append(engine.step())
        if case.rests and stage_of(both) == 1:
            engine.model.blocks["2"].requires_grad_(False)
    engine.check()
    far = apart(engine, norms, alone(case))
    engine.close()
    return far


def by_hand(case: Case, both: DeviceMesh, mesh: Mesh, engine: str) -> float:
    """Difference of who sends activations and their gradients, and calls ``engine.backward``, on either engine."""
    made, _ = started(case, both, mesh, engine=engine, accumulate=MICRO)
    norms, stage, pipe = [], stage_of(both), both["pp"].get_group()
    for step in range(STEPS):
        for x, y in zip(*(t.chunk(MICRO) for t in rows(step, 0, mesh.rank)), strict=True):
            if stage == 0:
                h = made.model(x)
                dist.send(h.detach(), group=pipe, group_dst=1)
                dist.recv(grad := torch.empty_like(h), group=pipe, group_src=1)
                made.backward((h * grad).sum())
            else:
                dist.recv(h := x.new_empty(len(x), WIDTH), group=pipe, group_src=0)
                made.backward(loss_of(made.model(h.requires_grad_()), y))
                assert h.grad is not None
                dist.send(h.grad, group=pipe, group_dst=0)
        norms.append(made.step())
    made.check()
    far = apart(made, norms, alone(case))
    made.close()
    return far


def resumed(case: Case, both: DeviceMesh, mesh: Mesh, folder: Path) -> dict[str, Any]:
    """Differences after a step, a checkpoint, and a step of a new engine; and what is said of one folder for both."""
    found: dict[str, Any] = {}
    engine, schedule = started(case, both, mesh)
    with engine.pipeline(schedule):
        run(schedule, both, mesh, 0)
    norms = [engine.step()]
    found["one folder"] = refusal(lambda: checkpoint.save(engine, folder / "one"))
    checkpoint.save(engine, folder / f"stage{stage_of(both)}")
    # all ranks write one, by the names of the whole model
    dcp.save(engine.state_dict(), checkpoint_id=folder / "dcp")
    for way in ("own", "dcp"):
        other, again = started(case, both, mesh)
        with torch.no_grad():
            for p in other.model.parameters():
                p.add_(1)
        if way == "own":
            checkpoint.load_(other, folder / f"stage{stage_of(both)}")
        else:
            dcp.load(state := other.state_dict(), checkpoint_id=folder / "dcp")
            other.load_state_dict_(state)
        with other.pipeline(again):
            run(again, both, mesh, 1)
        found[way] = apart(other, [*norms, other.step()], alone(case))
    return found


def refusal(work: Any) -> str:
    """What is said."""
    try:
        work()
    except (ValueError, RuntimeError) as error:
        # torch wraps what a backward pass of its schedule raises
        inner = error.__cause__ or error
        return f"{type(inner).__name__}: {inner}"
    return "went through"


def refused(both: DeviceMesh, mesh: Mesh) -> dict[str, str]:
    """By what is done, on a rank of each stage."""
    found: dict[str, str] = {}
    stage = stage_of(both)

    def after(case: Case, *works: Any, **more: Any) -> str:
        engine, schedule = started(case, both, mesh, **more)
        for work in works[:-1]:
            work(engine, schedule)
        said = refusal(lambda: works[-1](engine, schedule))
        engine.abandon()
        engine.close()
        return said

    def entered(engine: Any, schedule: Any, steps: int = 0) -> None:
        with engine.pipeline(schedule):
            for step in range(steps):
                run(schedule, both, mesh, step)

    def changed(engine: Any, schedule: Any) -> None:
        entered(engine, schedule, steps=1)
        engine.settings = dataclasses.replace(engine.settings, clip=1.0 + stage)
        engine.step()

    def backward(engine: Any, schedule: Any) -> None:
        del schedule
        h = torch.ones(2, WIDTH if stage else 3, dtype=torch.float64)
        engine.backward(engine.model(h).sum())

    def interleaved(engine: Any, schedule: Any) -> None:
        del schedule
        pipe, here = both["pp"].get_group(), torch.device("cpu")
        pair = [PipelineStage(engine.model, stage + 2 * k, 4, here, group=pipe) for k in range(2)]
        entered(engine, ScheduleInterleaved1F1B(pair, MICRO, loss_fn=loss_of))

    def of_another(engine: Any, schedule: Any) -> None:
        del schedule
        entered(engine, started(Case(), both, mesh)[1])

    found["no schedule inside"] = after(Case(), entered)
    found["two schedules inside"] = after(Case(), partial(entered, steps=2))
    found["a limit that one stage has changed"] = after(Case(), changed)
    found["one too many"] = after(Case(), partial(entered, steps=1), entered)
    found["engine.backward before it"] = after(Case("NNN", accumulate=2), backward, entered)
    found["several stages a rank"] = after(Case(), interleaved)
    found["a stage of another model"] = after(Case(), of_another)
    found["engine.pipeline of our own engine"] = after(Case(), entered, engine="sparing")
    found["a loss scale"] = refusal(lambda: started(Case(), both, mesh, loss_scale=8.0))
    found["another limit in each stage"] = refusal(lambda: started(Case(clip=1.0 + stage), both, mesh))
    alike = Part((0, 1), first=False, last=False).double()
    for p in alike.parameters():
        p.data.fill_(1.0)
    engine = sh.shard_(alike, "GGG", mesh, optimizer=OPTIMIZER, engine="fsdp2", body=alike.body)
    found["one name"] = refusal(engine.state_dict)
    return found


def outside() -> dict[str, str]:
    """A schedule of one stage, so that no rank waits for one that refuses, with nobody told."""
    found: dict[str, str] = {}
    both = init_device_mesh("cpu", (1, 4), mesh_dim_names=("pp", "dp"))
    with sh.make_mesh(within=both["dp"], per_group=2) as mesh:
        for plan in ("NNN", "IIG", "GGG"):
            for engine in ("sparing", "fsdp2"):
                model = whole()
                settings: dict[str, Any] = {"optimizer": OPTIMIZER, "engine": engine, "body": model.body}
                made = sh.shard_(model, plan, mesh, **settings)
                there = PipelineStage(model, 0, 1, torch.device("cpu"), group=both["pp"].get_group())
                schedule = ScheduleGPipe(there, MICRO, loss_fn=loss_of)
                x, y = rows(0, 0, mesh.rank)
                found[f"{plan} {engine}"] = refusal(lambda schedule=schedule, x=x, y=y: schedule.step(x, target=y))
                made.abandon()
                made.close()
        with sh.make_mesh(within=both["dp"], per_group=2) as other:
            model = part(0)
            engine = sh.shard_(model, "IIG", other, optimizer=OPTIMIZER, engine="fsdp2", body=model.body)
            fake = PipelineStage(model, 0, 2, torch.device("cpu"), group=both["pp"].get_group())
            found["stages unknown"] = refusal(lambda: engine.pipeline(ScheduleGPipe(fake, MICRO)).__enter__())
    found["a mesh of two dimensions"] = refusal(lambda: sh.make_mesh(within=both))
    found["stages among the ranks"] = refusal(lambda: sh.make_mesh(within=both["dp"], stages=both["dp"]))
    return found


def everything(folder: Path) -> dict[str, Any]:
    """All cells on four ranks."""
    found: dict[str, Any] = {}
    for sizes, names in dict.fromkeys((case.sizes, case.names) for case in CASES.values()):
        with meshes(Case(sizes=sizes, names=names)) as (both, mesh):
            for name, case in CASES.items():
                if (case.sizes, case.names) == (sizes, names):
                    found[name] = trained(case, both, mesh)
    with meshes(Case()) as (both, mesh):
        for plan in ("NNG", "III"):
            for engine in ("sparing", "fsdp2"):
                found[f"by hand {plan} {engine}"] = by_hand(Case(plan), both, mesh, engine)
        found |= resumed(Case("IIG"), both, mesh, folder)
        found |= refused(both, mesh)
    return found | outside()
