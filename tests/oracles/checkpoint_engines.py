"""Checkpoints that go from one engine to the other, and to itself, under other plans and on fewer ranks."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from oracles import sharded
from oracles.checkpoint_ranks import ADAMW, BF16, COUNTING, EXACT, FROZEN, plain, same
from oracles.sharded import Case
from sparing import sharding as sh
from sparing.errors import UserError
from sparing.sharding import checkpoint

CORNERS = ["NNN", "NIG", "ING", "III", "IIG", "IGG", "GIG", "GGG"]
WAYS = {"fsdp2 to sparing": ("fsdp2", "sparing"), "sparing to fsdp2": ("sparing", "fsdp2"), "fsdp2": ("fsdp2", "fsdp2")}
CURVED = {"adamw": ADAMW, "frozen": FROZEN, "bfloat16": BF16, "counting": COUNTING}


def other(case: Case, plan: str, mesh: Any, engine: str) -> Any:
    """An engine whose every value is wrong."""
    net = sharded.made(case)
    with torch.no_grad():
        for value in net.state_dict().values():
            value.add_(3)
    return sh.shard_(
        net, plan, mesh, optimizer=sharded.factory(case), groups=sharded.groups_for(net, case),
        accumulate=case.accumulate, engine=engine,  # type: ignore[call-overload]
    )  # fmt: skip


def weights_after(worlds: tuple[int, ...]) -> dict[str, torch.Tensor]:
    return {name: value for name, value in plain(EXACT, worlds).items() if "momentum" not in name}


def exact(mesh: Any, folder: Path, frm: str, to: str) -> list[str]:
    """Pairs of plans that end in other bits than plain training, before or after a step that needs the momenta."""
    wrong = []
    for plan, then in zip(CORNERS, CORNERS[3:] + CORNERS[:3], strict=True):
        there = folder / f"{frm} {to} {plan}"
        engine, _ = sharded.trained(replace(EXACT, plan=plan), mesh, engine=frm)
        checkpoint.save(engine, there, extra={"plan": plan})
        engine.close()
        again = other(EXACT, then, mesh, to)
        if checkpoint.load_(again, there) != {"plan": plan} or again.steps != 1:
            wrong.append(f"{plan} to {then}: extra or steps")
        if not same(again.full_state_dict(), weights_after((4,))):
            wrong.append(f"{plan} to {then}")
        sharded.steps_(again, EXACT, range(1, 2))
        if not same(again.full_state_dict(), weights_after((4, 4))):
            wrong.append(f"{plan} to {then} and on")
        again.close()
    return wrong


def curved(case: Case, mesh: Any, there: Path, frm: str, to: str) -> float:
    """Weights handed over, and a step later, against the run that went on: the largest relative difference."""
    engine, _ = sharded.trained(replace(case, plan="NIG"), mesh, engine=frm)
    engine.optimizer.param_groups[0]["lr"] = 0.03125
    checkpoint.save(engine, there)
    again = other(case, "IIG", mesh, to)
    checkpoint.load_(again, there)
    if not same(again.full_state_dict(), engine.full_state_dict()):
        return float("inf")
    for one in (engine, again):
        sharded.steps_(one, case, range(case.steps, case.steps + 2))
    ours, theirs = again.full_state_dict(), engine.full_state_dict()
    engine.close()
    again.close()
    return max(float(((ours[n] - v).abs() / (v.abs() + 1e-3)).max()) for n, v in theirs.items())


def rested(mesh: Any, there: Path, to: str) -> dict[str, Any]:
    """A block that was frozen stays so, and thaws with fresh state; one that never ran has none."""
    case = replace(ADAMW, unused=True, groups=False)
    found: dict[str, Any] = {}
    engine, _ = sharded.trained(replace(case, plan="IIG"), mesh, engine="fsdp2")
    engine.freeze(["blocks.1", "head"])
    checkpoint.save(engine, there)
    again = other(case, "NIG", mesh, to)
    checkpoint.load_(again, there)
    for one in (engine, again):
        sharded.steps_(one, case, range(2, 3))
        one.thaw(["blocks.1", "head"])
        sharded.steps_(one, case, range(3, 5))
    ours, theirs = again.full_state_dict(), engine.full_state_dict()
    found["apart"] = max(float(((ours[n] - v).abs() / (v.abs() + 1e-3)).max()) for n, v in theirs.items())
    engine.model.head.weight.requires_grad_(False)
    engine.model(sharded.rows(case, 0, 0, mesh.rank))
    try:
        checkpoint.save(engine, there)
        found["by flag"] = "went through"
    except UserError as error:
        found["by flag"] = str(error)
    return found


def square(folder: Path) -> dict[str, Any]:
    """On two groups of two."""
    found: dict[str, Any] = {}
    with sh.make_mesh(per_group=2, groups=2) as mesh:
        for name, (frm, to) in WAYS.items():
            found[name] = exact(mesh, folder, frm, to)
            for what, case in CURVED.items():
                found[f"{name}, {what}"] = curved(case, mesh, folder / f"{name} {what}", frm, to)
        for to in ("sparing", "fsdp2"):
            found[f"rested {to}"] = rested(mesh, folder / f"rested {to}", to)
    return found


def pair(folder: Path) -> list[str]:
    """On two ranks, what four wrote; those that go wrong."""
    wrong = []
    with sh.make_mesh(per_group=1, groups=2) as mesh:
        for name, (frm, to) in WAYS.items():
            for plan, then in (("IIG", "GGG"), ("NIG", "NNN"), ("GIG", "NNG")):
                again = other(EXACT, then, mesh, to)
                checkpoint.load_(again, folder / f"{frm} {to} {plan}")
                sharded.steps_(again, EXACT, range(1, 2))
                if not same(again.full_state_dict(), weights_after((4, 2))):
                    wrong.append(f"{name}: {plan} to {then}")
                again.close()
    return wrong
