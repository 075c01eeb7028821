"""What a rank reads, what a model asks of the planner, and what settings over several ranks cannot be."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import zoo
from oracles.processes import answers
from sparing.errors import UserError
from sparing.jobs import sharded
from sparing.jobs.folder import CHECKPOINTS, Folder
from sparing.jobs.sharded import check_spread as check
from sparing.jobs.sharded import chosen, micro_steps, newest, ranks, refuse_cut, share, summed, workload_of
from sparing.sharding import step_timing
from sparing.sharding.config import Topology, Workload
from sparing.sharding.levels import Plan
from sparing.sharding.mesh import make_mesh
from sparing.sharding.planner import choose


@dataclass(frozen=True, kw_only=True)
class Settings:
    plan: str = "auto"
    groups: int | None = None
    topology: Path | None = None
    memory: str | None = None
    device: str = "cpu"


@given(st.integers(1, 9), st.integers(1, 5), st.integers(1, 7))
def test_every_row_is_read_once_and_no_rank_holds_more_than_one_process_would(accumulate: int, batch: int, world: int):
    rows = torch.arange(accumulate * batch).view(accumulate, batch)
    parts = [share(rows, rank, world) for rank in range(world)]
    assert sorted(row for part in parts for micro in part for row in micro.tolist()) == rows.flatten().tolist()
    assert {len(part) for part in parts} == {micro_steps(accumulate, world)}
    assert max(len(micro) for part in parts for micro in part) <= batch


def test_one_process_reads_the_rows_as_they_are():
    rows = torch.arange(6).view(3, 2)
    assert [micro.tolist() for micro in share(rows, 0, 1)] == rows.tolist()


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


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        ({"plan": "none", "memory": "8GB"}, "memory: got 8GB; nothing is cut without a plan"),
        ({"groups": 0}, "groups: got 0"),
        ({"groups": 2, "topology": Path("a.json")}, "the topology file has them"),
        ({"plan": "NGI"}, "NGI"),
        ({"plan": "III", "memory": "8GB"}, "for the choice of a plan"),
        ({"memory": "much"}, "much"),
    ],
    ids=str,
)
def test_settings_that_cannot_work(wrong: dict[str, object], words: str):
    with pytest.raises(UserError, match=words):
        check(replace(Settings(), **wrong))  # type: ignore[arg-type]


def test_several_processes_need_a_plan(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(UserError, match="each of 2 processes would train"), ranks(Settings(plan="none")):
        pass


def test_alone_there_is_nothing_to_choose():
    with make_mesh() as mesh:
        assert chosen(Settings(), mesh, pytest.fail)[0] == Plan("NNN")
        assert summed(mesh, 1.5, 2.0) == [1.5, 2.0]


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


def choosing(paces: list[step_timing.PassTimes | None], memory: str | None = None, *, timed: bool = True) -> Found:
    """What one of two ranks chooses and is told, if a micro-step takes so long there; None: it has no room."""
    model, asked = stack(), []
    micro = step_timing.MicroStep(model=model, loss=lambda: torch.zeros(()))

    def noted(work: Workload, *rest: Any) -> Any:
        asked.append(work)
        return choose(work, *rest)

    with make_mesh(groups=2) as mesh, pytest.MonkeyPatch.context() as patch:
        patch.setattr(step_timing, "time_micro_step", lambda *_: paces[mesh.rank] or no_room())
        patch.setattr(sharded, "measure", lambda mesh: LINE)
        patch.setattr(sharded, "choose", noted)
        work = partial(workload_of, model, accumulate=2)
        plan, why = chosen(replace(Settings(), memory=memory), mesh, work, (lambda: micro) if timed else None)
    return plan.name, why, asked[0].seconds_forward, asked[0].seconds_backward


def choices() -> list[Found]:
    return [
        choosing([NEAR, FAR]),
        choosing([NEAR, None]),
        choosing([FAR, FAR], "200kB"),
        choosing([FAR, FAR], timed=False),
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
    ]  # fmt: skip


@pytest.mark.parametrize(("names", "cut"), [(["manifest.json", "tree.json"], False), (["manifest.json"], True)])
def test_checkpoints_of_the_other_kind_are_refused(tmp_path: Path, names: list[str], cut: bool):
    place = tmp_path / CHECKPOINTS / "step-00000003"
    place.mkdir(parents=True)
    for name in names:
        (place / name).write_text("{}")
    folder = Folder(tmp_path, resume=True)
    if cut:
        assert newest(folder) == place
        with pytest.raises(UserError, match="--plan NNN"):
            refuse_cut(folder)
    else:
        refuse_cut(folder)
        with pytest.raises(UserError, match="without a plan"):
            newest(folder)
    assert newest(replace(folder, resume=False)) is None
