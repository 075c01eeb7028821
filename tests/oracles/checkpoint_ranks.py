"""What ranks do in the tests of checkpoints, and the same runs in one process on plain tensors."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from oracles import sharded
from oracles.sharded import Case
from sparing import sharding as sh
from sparing.errors import UserError
from sparing.sharding import checkpoint
from sparing.sharding.engine.weights import spread

PLANS = [plan.name for plan in sh.effective()]
EXACT = Case(steps=1)
"""One step before the checkpoint; SGD with momentum, so that a second step needs its state."""
ADAMW = Case(optimizer="adamw", exact=False, steps=2, groups=True)
FROZEN = replace(ADAMW, frozen=True, tied=True)
COUNTING = Case(optimizer="counting", exact=False, steps=2, unused=True)
BF16 = replace(ADAMW, dtype=torch.bfloat16, groups=False)


def plain(case: Case, worlds: Sequence[int]) -> dict[str, Tensor]:
    """Weights and momenta of plain training whose step k sees the rows of ``worlds[k]`` ranks."""
    net = sharded.made(case)
    trained = [p for p in net.parameters() if p.requires_grad]
    optimizer = sharded.factory(case)(trained)
    for step, world in enumerate(worlds):
        optimizer.zero_grad()
        for micro in range(case.accumulate):
            for rank in range(world):
                sharded.loss_of(net, sharded.rows(case, step, micro, rank), case).backward()
        for p in trained:
            p.grad = p.grad / sharded.divisor_of(case, world)
        optimizer.step()
    weights = {name: value.detach().clone() for name, value in net.state_dict().items()}
    momenta = {f"{name} momentum": optimizer.state[p]["momentum_buffer"] for name, p in net.named_parameters()}
    return weights | momenta


def whole(engine: Any) -> dict[str, Tensor]:
    """Weights and momenta of an engine."""
    found = engine.full_state_dict()
    for bucket in engine.buckets:
        part, level = engine.masters.state(bucket)["momentum_buffer"], engine.levels(bucket)[2]
        found |= {f"{name} momentum": value for name, value in bucket.unflatten(spread(bucket, part, level, 0))}
    return found


def fresh(case: Case, plan: str, mesh: Any, **more: Any) -> Any:
    """An engine whose every value is wrong."""
    net = sharded.made(case)
    with torch.no_grad():
        for value in net.state_dict().values():
            value.add_(3)
    return sh.shard_(
        net, plan, mesh, optimizer=sharded.factory(case), groups=sharded.groups_for(net, case),
        accumulate=case.accumulate, **more,
    )  # fmt: skip


def same(a: dict[str, Tensor], b: dict[str, Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


def save_under(case: Case, plan: str, mesh: Any, folder: Path) -> Any:
    """Train, save, and return the engine."""
    engine, _ = sharded.trained(replace(case, plan=plan), mesh)
    checkpoint.save(engine, folder, extra={"plan": plan})
    return engine


def pairs(mesh: Any, folder: Path, saved: Sequence[str], plans: Sequence[str], worlds: Sequence[int]) -> list[str]:
    """Load checkpoints of EXACT under plans, train on after some; the pairs that end in other bits.

    Of many, a third: each letter of a plan still meets each letter in its place, and every plan is loaded.
    """
    first, second, wrong = plain(EXACT, worlds[:1]), plain(EXACT, worlds), []
    for i, to in enumerate(plans):
        engine = fresh(EXACT, to, mesh)
        for k, frm in enumerate(saved):
            if len(plans) > 7 and (i + 2 * k) % 3:
                continue
            extra = checkpoint.load_(engine, folder / frm)
            if extra != {"plan": frm} or engine.steps != 1 or not same(whole(engine), first):
                wrong.append(f"{frm} to {to}")
            if (i + k) % 7 == 0 or len(plans) < 7:
                sharded.steps_(engine, EXACT, range(1, 2))
                wrong += [] if same(whole(engine), second) else [f"{frm} to {to} and on"]
        engine.close()
    return wrong


def square(folder: Path, six: Path) -> dict[str, Any]:
    """Everything on 2×2."""
    found: dict[str, Any] = {}
    with sh.make_mesh(per_group=2, groups=2) as mesh:
        for plan in PLANS:
            save_under(EXACT, plan, mesh, folder / plan).close()
        found["pairs"] = pairs(mesh, folder, PLANS, PLANS, (4, 4))
        found["from six"] = pairs(mesh, six, ["IIG", "GGG", "NNI"], ["NNN", "III", "GIG"], (6, 4))
        for name, case in {"adamw": ADAMW, "frozen": FROZEN, "bfloat16": BF16}.items():
            chosen = list(zip(PLANS, PLANS[3:] + PLANS[:3], strict=True))[:: 2 if name == "adamw" else 5]
            texts = [_switched(case, frm, to, mesh, folder / f"{name} {frm}") for frm, to in chosen]
            found[name] = [text for some in texts for text in some]
        found["resting"] = _resting(mesh, folder / "resting")
        found["refused"] = _refused(mesh, folder)
    return found


def _switched(case: Case, frm: str, to: str, mesh: Any, folder: Path) -> list[str]:
    """Loading under another plan must be what changing the plan of the live run is."""
    engine = save_under(case, frm, mesh, folder)
    rates = [group["lr"] for group in engine.optimizer.param_groups]
    before, rounded = engine.full_state_dict(masters=True), engine.full_state_dict()
    engine.set_plan(sh.Plan(to))
    sharded.steps_(engine, case, range(2, 3))
    after = engine.full_state_dict(masters=True)
    engine.close()
    other = fresh(case, to, mesh)
    for group in other.optimizer.param_groups:
        group["lr"] = 7.0
    checkpoint.load_(other, folder)
    wrong = [] if rates == [group["lr"] for group in other.optimizer.param_groups] else ["rates"]
    wrong += [] if same(other.full_state_dict(masters=True), before) else ["masters"]
    wrong += [] if same(other.full_state_dict(), rounded) else ["weights"]
    wrong += [] if case.dtype != torch.bfloat16 or _finer(before, rounded) else ["nothing finer than bfloat16"]
    sharded.steps_(other, case, range(2, 3))
    wrong += [] if same(other.full_state_dict(masters=True), after) else ["training on"]
    other.close()
    return [f"{what}, {frm} to {to}" for what in wrong]


def _finer(masters: dict[str, Tensor], rounded: dict[str, Tensor]) -> bool:
    return any(not torch.equal(value, rounded[name].to(value.dtype)) for name, value in masters.items())


def _resting(mesh: Any, folder: Path) -> dict[str, bool]:
    """A block that was frozen mid-run rests after loading, and one that trained trains, whatever the engine was at."""
    engine, _ = sharded.trained(replace(ADAMW, plan="IIG"), mesh)
    engine.freeze(["blocks.1"])
    checkpoint.save(engine, folder)
    sharded.steps_(engine, ADAMW, range(2, 3))
    after = engine.full_state_dict()
    engine.close()
    other = fresh(ADAMW, "IGG", mesh)
    other.freeze(["blocks.0"])
    checkpoint.load_(other, folder)
    rests = sorted(bucket.block for bucket in other.buckets if not bucket.trainable)
    other.set_plan(sh.Plan("IIG"))  # the order of sums is that of the plan
    sharded.steps_(other, ADAMW, range(2, 3))
    equal = same(other.full_state_dict(), after)
    other.thaw(["blocks.1"])
    sharded.steps_(other, ADAMW, range(3, 4))
    other.close()
    return {"rests": rests == ["blocks.1"], "equal": equal}


def _refused(mesh: Any, folder: Path) -> dict[str, str]:
    """What every rank is told."""
    told = {}
    broken = {"missing": "GGG", "flipped": "III", "torn": "IIG"}
    if mesh.rank == 0:
        for kind, plan in broken.items():
            damage(folder / plan / "shard-00003-model-00001-of-00001.safetensors", kind)
    engine = fresh(EXACT, "IIG", mesh)
    before = engine.full_state_dict()
    mesh.gather_scalars(torch.zeros(1))  # the damage is done
    for kind, plan in broken.items():
        told[kind] = _error(engine, folder / plan)
    told["unchanged"] = str(same(engine.full_state_dict(), before))
    engine.close()
    engine = fresh(replace(EXACT, tied=True), "IIG", mesh)
    told["other model"] = _error(engine, folder / "NNN")
    engine.close()
    return told


def _error(engine: Any, folder: Path) -> str:
    try:
        checkpoint.load_(engine, folder)
    except UserError as error:
        return str(error)
    return ""


def damage(path: Path, kind: str) -> None:
    data = path.read_bytes()
    if kind == "missing":
        path.unlink()
    elif kind == "torn":
        path.write_bytes(data[: len(data) // 2])
    else:
        path.write_bytes(data[:-1] + bytes([data[-1] ^ 1]))


def saving(folder: Path, sizes: tuple[int, int], plans: Sequence[str]) -> None:
    """Save EXACT under some plans."""
    with sh.make_mesh(per_group=sizes[0], groups=sizes[1]) as mesh:
        for plan in plans:
            save_under(EXACT, plan, mesh, folder / plan).close()


def loading(
    folder: Path, sizes: tuple[int, int], saved: Sequence[str], plans: Sequence[str], worlds: tuple[int, ...]
) -> list[str]:
    """Load EXACT on other ranks."""
    with sh.make_mesh(per_group=sizes[0], groups=sizes[1]) as mesh:
        return pairs(mesh, folder, saved, plans, worlds)


def killed(folder: Path, old: Path) -> None:
    """Rank 0 dies when all is written and nothing renamed; then it would have replaced ``folder``."""
    with sh.make_mesh(per_group=2, groups=2) as mesh:
        engine = fresh(EXACT, "GGG", mesh)
        checkpoint.load_(engine, old)
        sharded.steps_(engine, EXACT, range(1, 2))
        if mesh.rank == 0:
            Path.rename = lambda *_: os._exit(7)  # type: ignore[method-assign,assignment]
        checkpoint.save(engine, folder)
