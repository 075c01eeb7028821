"""What a rank with local steps is asked of checkpoints, and what is left when a group dies."""

from __future__ import annotations

import os
import signal
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from oracles import local_ranks, sharded
from oracles.local_groups import Groups
from oracles.local_ranks import apart, buckets_of, engine_of, steps_
from oracles.sharded import Case
from sparing import sharding as sh
from sparing.errors import RunError
from sparing.sharding import checkpoint

CASE = Case(plan="NII", exact=False, optimizer="adamw")
LOCAL = sh.LocalSteps(every=3, wire=sh.LowBit(bits=8, block=4))


def snapshot(engine: Any) -> dict[str, Tensor]:
    """Everything that decides what comes next, of this rank."""
    found = {}
    for bucket in engine.buckets:
        found[f"{bucket.name} params"] = bucket.store.clone()
        if bucket in engine.masters:
            found[f"{bucket.name} master"] = engine.masters.values(bucket).clone()
            found |= {f"{bucket.name} {key}": value.clone() for key, value in engine.masters.state(bucket).items()}
    found |= {f"{name} owed": residual.value.clone() for name, residual in engine.residuals.items()}
    found |= {f"{name} momentum": value.clone() for name, value in engine.outer.momenta.items()}
    # right after an outer step the next interval starts where the weights are
    found |= {f"{name} anchor": value.clone() for name, value in engine.outer.anchors.items() if engine.outer.inner}
    return found | {"inner": torch.tensor(engine.outer.inner), "steps": torch.tensor(engine.steps)}


def differing(a: dict[str, Tensor], b: dict[str, Tensor]) -> list[str]:
    return sorted(a.keys() ^ b.keys()) or [name for name in a if not torch.equal(a[name], b[name])]


def own(engine: Any) -> dict[str, Tensor]:
    """The weights of my group."""
    with engine.gathered() as model:
        return {name: value.detach().clone() for name, value in model.state_dict().items()}


def saved(mesh: Any, folder: Path, others: Sequence[str]) -> dict[str, Any]:
    """Saved in mid-interval; a new engine goes on to the same bits, and under other plans has the same weights."""
    engine = engine_of(mesh, CASE, LOCAL)
    steps_(engine, CASE, range(4))
    checkpoint.save(engine, folder / "mid", extra={"at": 4})
    before, weights = snapshot(engine), own(engine)
    steps_(engine, CASE, range(4, 7))
    after = snapshot(engine)
    engine.outer_step()
    ends = engine.full_state_dict()
    engine.close()
    fresh = engine_of(mesh, CASE, LOCAL)
    steps_(fresh, CASE, range(10, 12))
    found: dict[str, Any] = {"extra": checkpoint.load_(fresh, folder / "mid") == {"at": 4}}
    found["loaded"] = differing(before, snapshot(fresh))
    steps_(fresh, CASE, range(4, 7))
    found["bits"] = differing(after, snapshot(fresh))
    fresh.outer_step()
    fresh.close()
    for plan in others:
        other = engine_of(mesh, replace(CASE, plan=plan), LOCAL)
        checkpoint.load_(other, folder / "mid")
        found[f"{plan} weights"] = differing(weights, own(other))
        steps_(other, CASE, range(4, 7))
        other.outer_step()
        found[f"{plan} apart"] = apart(other.full_state_dict(), ends)
        other.close()
    anchor = checkpoint.weights_in(folder / "mid")
    found["anchor"] = anchor["embed.weight"]
    return found


def counting(mesh: Any, folder: Path) -> list[list[float]]:
    """Buffers of a group, saved and loaded in mid-interval."""
    sgd, found = partial(torch.optim.SGD, lr=0.1), []
    for train in (True, False):
        torch.manual_seed(0)
        engine = sh.shard_(local_ranks.Counting(), "NNN", mesh, optimizer=sgd, local=sh.LocalSteps(every=2))
        if train:
            engine.backward(engine.model(torch.full((2, 3), float(mesh.rank + 1))))
            engine.step()
            checkpoint.save(engine, folder / "counting")
        else:
            checkpoint.load_(engine, folder / "counting")
        found.append(engine.model.seen.tolist())
        engine.outer_step()
        engine.close()
    return found


def turned(mesh: Any, folder: Path) -> float:
    """Ordinary training, saved, goes on with groups that meet in every step as it would have."""
    case = Case(plan="NNG", exact=False)
    engine = engine_of(mesh, case, None)
    sharded.steps_(engine, case, range(2))
    checkpoint.save(engine, folder / "ordinary")
    for step in range(2, 4):
        engine.backward(sharded.loss_of(engine.model, sharded.rows(case, step, 0, mesh.rank), case))
        engine.step()
    expected = engine.full_state_dict()
    engine.close()
    case = Case(plan="III", exact=False)
    engine = engine_of(mesh, case, sh.LocalSteps(every=1, rate=1.0, momentum=0.0))
    checkpoint.load_(engine, folder / "ordinary")
    steps_(engine, case, range(2, 4))
    found = engine.full_state_dict()
    engine.close()
    return apart(found, expected)


def refusals(mesh: Any, folder: Path) -> dict[str, str]:
    """Checkpoints of local steps where they do not fit."""
    told = {}
    for name, local in (("none", None), ("exact", sh.LocalSteps(every=3)), ("wire", LOCAL)):
        engine = engine_of(mesh, CASE, local)
        told[name] = local_ranks.refused(partial(checkpoint.load_, engine, folder / "mid"))
        if local is not None:
            engine.outer_step()
        engine.close()
    return told


def square(folder: Path) -> dict[str, Any]:
    """Of four ranks in two groups, and in four."""
    with sh.make_mesh(sizes=(2, 2)) as mesh:
        found = {
            "saved": saved(mesh, folder, ["NNN", "III"]), "counting": counting(mesh, folder),
            "turned": turned(mesh, folder), "refused": refusals(mesh, folder),
        }  # fmt: skip
    with sh.make_mesh(sizes=(1, 4)) as mesh:
        return found | {"refused by four": refusals(mesh, folder)["wire"]}


# ---- a group that dies


def killed(folder: Path) -> str:
    """Two groups meet and save; then one dies in mid-interval. What the other is told."""
    mesh = sh.make_mesh(sizes=(2, 2))
    engine = engine_of(mesh, CASE, LOCAL)
    steps_(engine, CASE, range(3))
    checkpoint.save(engine, folder / "three")
    steps_(engine, CASE, [3])
    if mesh.coords[-1] == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    try:
        steps_(engine, CASE, [4, 5])
    except RunError as error:
        return f"after {engine.steps} steps: {error}"
    return "nothing"


def again(folder: Path, frm: str, to: str, sizes: tuple[int, int], steps: range) -> dict[str, Tensor]:
    """The run goes on with the groups that are there, and saves."""
    with sh.make_mesh(sizes=sizes) as mesh:
        engine = engine_of(mesh, CASE, LOCAL)
        checkpoint.load_(engine, folder / frm)
        assert engine.steps == steps[0]
        steps_(engine, CASE, steps)
        checkpoint.save(engine, folder / to)
        found = engine.full_state_dict()
        engine.close()
    return found


def expected(groups: Sequence[tuple[int, int]]) -> list[dict[str, Tensor]]:
    """Weights after each interval, whose groups and ranks in each are given; of groups that know of no engine."""
    with sh.make_mesh(groups=1) as mesh:
        engine = engine_of(mesh, CASE, None)
        buckets = buckets_of(engine)
        engine.close()
    run, found = Groups(CASE, *groups[0][::-1], LOCAL, buckets), []
    for at, (count, inside) in enumerate(groups):
        run.become(count, inside)
        for step in range(3 * at, 3 * at + 3):
            run.step(step)
        found.append({name: value.clone() for name, value in run.net.state_dict().items()})
    return found
