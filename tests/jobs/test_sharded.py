"""What a model asks of the planner, and what is chosen for it."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import zoo
from oracles import engine_ranks, fsdp_ranks
from oracles.processes import answers
from sparing.jobs import sharded
from sparing.jobs.settings import Local
from sparing.jobs.sharded import choose_plan, workload_of
from sparing.sharding.levels import Plan, effective
from sparing.sharding.network import step_timing
from sparing.sharding.network.mesh import make_mesh
from sparing.sharding.planner.choose import choose
from sparing.sharding.planner.config import Topology, Workload
from sparing.sharding.planner.fsdp import fsdp_live_bytes
from sparing.sharding.planner.prediction import predict


@dataclass(frozen=True, kw_only=True)
class Settings:
    plan: str = "auto"
    groups: int | None = None
    topology: Path | None = None
    memory: str | None = None
    engine: str | None = None
    device: str = "cpu"
    local: Local = field(default_factory=Local)


def test_a_model_as_the_planner_sees_it():
    model = zoo.gpt2(layers=3, dtype=torch.bfloat16)
    model.transformer.wte.weight.requires_grad_(False)
    work = workload_of(model, accumulate=2, resting=["transformer.h.1"])
    sizes = {name: sum(p.numel() for n, p in model.named_parameters() if name in n) for name in ("wte", ".h.1.")}
    total = sum(p.numel() for p in model.parameters())
    assert work.params == total
    assert work.trainable == total - sum(sizes.values())
    assert (work.blocks, work.accumulate) == (3, 2)
    assert (work.param_bytes, work.grad_bytes, work.state_bytes) == (2, 4, 12)
    assert workload_of(zoo.gpt2(), accumulate=1, moments=1).state_bytes == 8  # float64: no copies, one moment


@pytest.mark.parametrize("frozen", ["all", "some", "one"])
@pytest.mark.parametrize("plan", [plan.name for plan in effective()])
def test_a_model_on_fsdp2_is_priced_by_its_shapes(plan: str, frozen: str):
    """As the formulas that are held to measured bytes do: units and shapes read from the model by other code."""
    net = engine_ranks.deep(engine_ranks.Case(), frozen, torch.bfloat16)
    work = replace(workload_of(net, accumulate=1), engine="fsdp2")
    units = [SimpleNamespace(name=name) for name in ("", *(f"blocks.{at}" for at in range(3)))]
    specs = fsdp_ranks.unit_specs(SimpleNamespace(model=net, units=units))
    live = fsdp_live_bytes(specs, (2, 2), plan)
    assert predict(work, Topology(groups=2, per_group=2), plan).static == live.total


@pytest.mark.parametrize(
    ("device", "asked", "engine"), [("cpu", None, "sparing"), ("cuda", None, "fsdp2"), ("cpu", "fsdp2", "fsdp2")]
)
def test_a_plan_is_chosen_for_the_engine_that_will_run(tmp_path: Path, device: str, asked: str | None, engine: str):
    """NNG holds 4 + 4 + 8 / 2 bytes of each of 1e6 parameters, and on fsdp2 4 / 2 more."""
    links = Topology(groups=2, per_group=1, inter="1Mbps")
    (tmp_path / "links.json").write_text(links.to_json())
    found = lambda letters: letters[None]  # noqa: E731
    mesh: Any = SimpleNamespace(world=2, rank=1, sizes=(1, 2), device=torch.device(device), gather_scalars=found)
    work = Workload(params=1e6, param_bytes=4, grad_bytes=4, wire_bytes=4, state_bytes=8)
    settings = Settings(topology=tmp_path / "links.json", memory="13MB", engine=asked)
    plan, _ = choose_plan(settings, mesh, lambda: work)
    assert plan == choose(replace(work, engine=engine), links, memory="13MB").plan
    assert (plan.name == "NNG") == (engine == "sparing")


def test_alone_there_is_nothing_to_choose():
    with make_mesh() as mesh:
        assert choose_plan(Settings(), mesh, pytest.fail)[0] == Plan("NNN")


ALONE = ("NNN", "NNI", "NII", "INI", "III")
"""Plans under which a group has all that it needs for a step."""
LINE = Topology(groups=2, per_group=1, inter="1Mbps", latency_inter=1e-3)
NEAR, FAR = step_timing.PassTimes(forward=0.001, backward=0.002), step_timing.PassTimes(forward=50.0, backward=100.0)


def stack() -> torch.nn.Sequential:
    """Sixteen blocks, of which the last trains: 266 kB whole."""
    block = [torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.GELU()) for _ in range(16)]
    model = torch.nn.Sequential(*block).requires_grad_(False)
    model[-1].requires_grad_(True)
    return model


def no_room() -> None:
    raise torch.OutOfMemoryError


Found = tuple[str, str, float | None, float | None]


def choosing(
    paces: list[step_timing.PassTimes | None], memory: str | None = None, *, timed: bool = True, every: int = 0
) -> Found:
    """What one of two ranks chooses and is told, if a micro-step takes so long there; None: it has no room."""
    model, asked = stack(), []
    micro = step_timing.MicroStep(model=model, loss=lambda: torch.zeros(()))

    def noted(work: Workload, *rest: Any, **how: Any) -> Any:
        asked.append(work)
        return choose(work, *rest, **how)

    with make_mesh(groups=2) as mesh, pytest.MonkeyPatch.context() as patch:
        patch.setattr(step_timing, "time_micro_step", lambda *_: paces[mesh.rank] or no_room())
        patch.setattr(sharded, "measure", lambda mesh: LINE)
        patch.setattr(sharded, "choose", noted)
        work = partial(workload_of, model, accumulate=2)
        settings = Settings(memory=memory, local=Local(every=every))
        plan, why = choose_plan(settings, mesh, work, (lambda: micro) if timed else None)
    return plan.name, why, asked[0].seconds_forward, asked[0].seconds_backward


def choices() -> list[Found]:
    return [
        choosing([NEAR, FAR]),
        choosing([NEAR, None]),
        choosing([FAR, FAR], "200kB"),
        choosing([FAR, FAR], timed=False),
        choosing([FAR, FAR], timed=False, every=8),
    ]


@pytest.mark.processes
def test_all_ranks_choose_by_the_slowest_of_them() -> None:
    """A rank without room for the whole model and a micro-step times none, and then the wires alone count."""
    work = workload_of(stack(), accumulate=2)
    first, second = answers(2, choices)
    assert first == second
    fastest, wires = "the fastest, by", "by the wires alone"
    assert first == [
        (choose(replace(work, seconds_forward=50.0), LINE).plan.name,
         f"{fastest} 50 s forward and 100 s backward a micro-step", 50.0, 100.0),
        (choose(work, LINE).plan.name, f"the fastest, {wires}", None, None),
        (choose(work, LINE, "200kB").plan.name, f"the fastest that fits, {wires}", None, None),
        (choose(work, LINE).plan.name, f"the fastest, {wires}", None, None),
        (choose(work, LINE, plans=ALONE).plan.name, f"the fastest, {wires}", None, None),
    ]  # fmt: skip
