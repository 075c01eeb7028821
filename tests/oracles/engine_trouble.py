"""What a rank of the engine is asked when blocks freeze and thaw, formats differ, or something goes wrong."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from oracles import sharded
from oracles.engine_ranks import Sum, between, counted, deep, held, specs
from oracles.sharded import Case
from sparing import sharding as sh
from sparing.sharding import apply
from sparing.sharding.planner.prediction import live_bytes
from sparing.sharding.planner.traffic import Traffic

BLOCKS = ["embed", "blocks.0", "blocks.1", "blocks.2", "head"]
SETS = [BLOCKS, ["blocks.1", "head"], ["embed", "blocks.0", "blocks.1"], ["blocks.2"], [], BLOCKS]
"""Blocks that train, period by period."""


def moving(mesh: Any, plan: str) -> dict[str, Any]:
    """A moving trainable set against one process that resets the state of what it thaws."""
    case = Case(accumulate=2, exact=False)
    own, net = deep(case), deep(case)
    adam = partial(torch.optim.AdamW, lr=0.01, weight_decay=0.1)
    optimizer = adam(own.parameters())
    engine = sh.shard_(net, plan, mesh, optimizer=adam, accumulate=2)
    bytes_right, held_right, refused = [], [], ""
    for period, blocks in enumerate(SETS):
        engine.freeze([name for name in BLOCKS if name not in blocks])
        engine.thaw(blocks)
        _set_(own, optimizer, blocks)
        if not blocks:
            refused = _refused(lambda: engine.backward(net(sharded.rows(case, 0, 0, mesh.rank)).sum()))
            continue
        for step in (2 * period, 2 * period + 1):
            _plain(own, optimizer, case, step, mesh.world)
            before = counted(engine)
            loaded = _stepped(engine, case, step)
            expected = Traffic.of_step(plan, mesh.sizes, specs(engine), accumulate=2, gather_bytes=8, reduce_bytes=8)
            bytes_right.append(between(before, counted(engine)) == [expected.total, expected.messages])
        live = live_bytes(specs(engine), mesh.sizes, plan, param_bytes=8, grad_bytes=8, master_bytes=8, views=True)
        want = {"params": live.params, "grads": live.grads, "master": 0, "moments": live.moments}
        held_right.append(loaded == want | {"residuals": 0, "published": 0, "anchors": 0})
    found = engine.full_state_dict()
    engine.close()
    apart = {n: ((found[n] - v).abs() / (v.abs() + 1e-3)).max().item() for n, v in own.state_dict().items()}
    return {"apart": max(apart.values()), "bytes": bytes_right, "held": held_right, "refused": refused}


def _stepped(engine: Any, case: Case, step: int) -> dict[str, int]:
    """What is held when the gradients are there and the optimizer's state is."""
    for micro in range(2):
        engine.backward(sharded.loss_of(engine.model, sharded.rows(case, step, micro, engine.mesh.rank), case))
    loaded = held(engine)
    engine.step()
    return loaded


def _set_(net: nn.Module, optimizer: Any, blocks: Sequence[str]) -> None:
    for name, p in net.named_parameters():
        trains = name.startswith(tuple(f"{block}." for block in blocks))
        if not trains:
            optimizer.state.pop(p, None)
        p.requires_grad_(trains)


def _plain(net: nn.Module, optimizer: Any, case: Case, step: int, world: int) -> None:
    for micro in range(2):
        for rank in range(world):
            sharded.loss_of(net, sharded.rows(case, step, micro, rank), case).backward()
    for p in net.parameters():
        if p.grad is not None:
            p.grad /= 2 * world
    optimizer.step()
    optimizer.zero_grad()


# ---- formats


def mixed(mesh: Any, plan: str, wire: torch.dtype | None, scale: float | None) -> dict[str, Any]:
    """bfloat16 with masters of 32 bits, against one process that does so by hand; all sums are exact."""
    case, lr = Case(accumulate=2, steps=3, dtype=torch.bfloat16), 2.0**-11
    net = sharded.made(Case())
    own = sharded.made(case)
    sgd = partial(torch.optim.SGD, lr=lr, momentum=0.5)
    net.shift.data = net.shift.data.bfloat16()
    engine = sh.shard_(
        net.float(), plan, mesh, optimizer=sgd, accumulate=2, dtype=torch.bfloat16, reduce_dtype=wire, loss_scale=scale
    )
    net.shift.data = net.shift.data.bfloat16()
    masters = {name: nn.Parameter(p.detach().float()) for name, p in own.named_parameters()}
    optimizer = sgd(masters.values())
    for step in range(case.steps):
        _by_hand(own, masters, optimizer, case, step, mesh.world)
    sharded.steps_(engine, case, range(case.steps))
    narrow, wide = engine.full_state_dict(), engine.full_state_dict(masters=True)
    engine.close()
    return {
        "parameters": all(torch.equal(narrow[n], p) for n, p in own.named_parameters()),
        "masters": all(torch.equal(wide[n], p) for n, p in masters.items()),
        "kept": any(not torch.equal(wide[n], narrow[n].float()) for n in masters),
        "formats": {str(narrow[n].dtype) for n in masters} | {str(wide[n].dtype) for n in masters},
    }


def _by_hand(net: nn.Module, masters: dict[str, Any], optimizer: Any, case: Case, step: int, world: int) -> None:
    for master in masters.values():
        master.grad = torch.zeros_like(master)
    for micro in range(case.accumulate):
        for rank in range(world):
            sharded.loss_of(net, sharded.rows(case, step, micro, rank), case).backward()
            for name, p in net.named_parameters():
                masters[name].grad += p.grad.float()
                p.grad = None
    for master in masters.values():
        master.grad /= sharded.divisor_of(case, world)
    optimizer.step()
    for name, p in net.named_parameters():
        p.data.copy_(masters[name])


def wired(mesh: Any, plan: str) -> dict[str, Any]:
    """Gradients of bfloat16 on the wires only: small whole numbers arrive, 257 does not."""
    x, nets, found = sharded.rows(Case(), 0, 0, mesh.rank).float(), [Sum().float(), Sum().float()], []
    x[0] = 1.0
    for net, wire in zip(nets, (None, torch.bfloat16), strict=True):
        engine = sh.shard_(net, plan, mesh, optimizer=partial(torch.optim.SGD, lr=1.0), reduce_dtype=wire)
        for factor in (1.0, 257.0 if mesh.rank == 0 else 0.0):
            engine.backward(net(x)[:1].sum() * factor)
            engine.step(divisor=1.0)
            found.append(engine.full_state_dict()["blocks.0.image.bias"])
        engine.close()
    plain, narrow = found[:2], found[2:]
    return {"small": torch.equal(plain[0], narrow[0]), "step": (narrow[0] - narrow[1]).unique().tolist()}


def without_masters(mesh: Any, plan: str) -> dict[str, Any]:
    """Optimizer and accumulator in 16 bits too."""
    case = Case(accumulate=2, dtype=torch.bfloat16)
    net = sharded.made(case)
    engine = sh.shard_(net, plan, mesh, optimizer=sharded.factory(case), accumulate=2, masters=False)
    sharded.steps_(engine, case, range(1))
    expected, _ = sharded.one_process(Case(accumulate=2, steps=1, dtype=torch.bfloat16), mesh.world)
    found, bytes_held = engine.full_state_dict(), held(engine)
    engine.close()
    return {"equal": all(torch.equal(found[n], v) for n, v in expected.items()), "master": bytes_held["master"]}


def overflowing(mesh: Any, plan: str) -> dict[str, Any]:
    """An infinite gradient of one element on the last rank alone, then an ordinary step."""
    case = Case(accumulate=2, exact=False)
    net = sharded.made(Case(exact=False)).float()
    engine = sh.shard_(net, plan, mesh, optimizer=sharded.factory(case), accumulate=2, loss_scale=1024.0)
    first = engine.full_state_dict()
    norms, weights = [], []
    for bad in (True, False):
        for micro in range(2):
            loss = net(sharded.rows(case, 0, micro, mesh.rank).float()).sum()
            if bad and micro == 0 and mesh.rank == mesh.world - 1:
                loss = loss + net.head.weight[0, 0] * float("inf")
            engine.backward(loss)
        norms.append(engine.step())
        weights.append(engine.full_state_dict())
    state = any(engine.optimizer.state[p] for g in engine.optimizer.param_groups for p in g["params"])
    engine.close()
    return {
        "unchanged": all(torch.equal(weights[0][n], v) for n, v in first.items()),
        "finite": all(x.isfinite().all() for x in weights[1].values()),
        "then moved": not torch.equal(weights[1]["head.weight"], first["head.weight"]),
        "skipped": engine.skipped, "norms": [repr(norm) for norm in norms], "state": state,
    }  # fmt: skip


# ---- trouble


def _refused(attempt: Callable[[], Any]) -> str:
    """The words of the error; empty if there was none."""
    try:
        attempt()
    except (ValueError, RuntimeError) as error:
        return f"{type(error).__name__}: {error}"
    return ""


def engine_of(mesh: Any, plan: str = "IIG", case: Case | None = None, **more: Any) -> Any:
    case = case or Case(exact=False)
    return sh.shard_(deep(case), plan, mesh, optimizer=partial(torch.optim.SGD, lr=0.1, momentum=0.5), **more)


def disagreeing(mesh: Any) -> dict[str, str]:
    """Rank 1 has other weights, another plan, another learning rate, other code, other blocks to freeze."""
    odd = mesh.rank == 1
    sgd = partial(torch.optim.SGD, lr=0.1)
    net = deep(Case())
    with torch.no_grad():
        net.head.weight.mul_(2 if odd else 1)
    found = {
        "seeds": _refused(lambda: sh.shard_(net, "IIG", mesh, optimizer=sgd)),
        "plan": _refused(lambda: sh.shard_(deep(Case()), "IIG" if odd else "IGG", mesh, optimizer=sgd)),
        "rate": _refused(lambda: sh.shard_(deep(Case()), "IIG", mesh, optimizer=partial(sgd, lr=0.1 + odd))),
    }
    was = apply.code_version
    apply.code_version = lambda: was() | ({"torch": "1.0"} if odd else {})
    found["code"] = _refused(lambda: engine_of(mesh))
    apply.code_version = was
    engine = engine_of(mesh)
    found["freeze"] = _refused(lambda: engine.freeze(["blocks.1"] if odd else ["blocks.0"]))
    found["set_plan"] = _refused(lambda: engine.set_plan(sh.Plan("NNN" if odd else "GGG")))
    engine.close()
    return found


def corrupted(mesh: Any, plan: str, what: str) -> dict[str, str]:
    """Bits of rank 3 change behind the engine's back."""
    case = Case(exact=False)
    engine = engine_of(mesh, plan, check_every=1)
    x = sharded.rows(case, 0, 0, mesh.rank)
    engine.backward(net_loss(engine, x))
    engine.step()
    if mesh.rank == 3:
        bucket = engine.buckets[-1]
        if what == "log":
            mesh.transitions.log.add("gather", 1, 1, 0)
        else:
            values = bucket.store if what == "store" else engine.masters.values(bucket)
            values.view(-1)[0] += 2.0**-40
    if what == "store":  # before the next step gathers it again
        told = _refused(engine.check)
    else:
        engine.backward(net_loss(engine, x))
        told = _refused(engine.step)
    _forget(mesh)
    engine.close()
    return {"told": told}


def _forget(mesh: Any) -> None:
    mesh.transitions.log.length = mesh.transitions.log.digest = 0


def net_loss(engine: Any, x: Tensor) -> Tensor:
    return engine.model(x).square().mean()


def misused(mesh: Any, plan: str) -> dict[str, str]:
    """Calls at wrong times; after each the engine still trains as if nothing had been."""
    case = Case(exact=False)
    engine = engine_of(mesh, plan, accumulate=2)
    x = [sharded.rows(case, 0, micro, mesh.rank) for micro in range(2)]
    found = {"step without any": _refused(engine.step)}
    engine.backward(net_loss(engine, x[0]))
    found["step too early"] = _refused(engine.step)
    found["set_plan inside"] = _refused(lambda: engine.set_plan(sh.Plan("NNN")))
    found["freeze inside"] = _refused(lambda: engine.freeze(["head"]))
    found["gathered inside"] = _refused(lambda: engine.gathered().__enter__())
    engine.backward(net_loss(engine, x[1]))
    found["backward too often"] = _refused(lambda: engine.backward(net_loss(engine, x[0])))
    engine.step()
    found["unknown block"] = _refused(lambda: engine.freeze(["blocks.9"]))
    found["unknown plan block"] = _refused(lambda: engine.set_plan({"blocks.9": sh.Plan("NNN")}))
    with engine.gathered():
        engine.model(x[0])
        whole = all(p.isfinite().all() for p in engine.model.parameters())
        found["backward while gathered"] = _refused(lambda: engine.backward(net_loss(engine, x[0])))
    found["sharded twice"] = _refused(lambda: sh.shard_(engine.model, plan, mesh, optimizer=torch.optim.SGD))
    same = engine_of(mesh, plan, accumulate=2)
    for one in (engine, same):
        for _ in range(1 if one is engine else 2):
            for micro in range(2):
                one.backward(net_loss(one, x[micro]))
            one.step()
    first, second = engine.full_state_dict(), same.full_state_dict()
    engine.model.spare = nn.Linear(2, 2)
    for micro in range(2):
        engine.backward(net_loss(engine, x[micro]))
    found["added"] = _refused(engine.step)
    engine.close()
    same.close()
    found["closed"] = _refused(lambda: engine.backward(net_loss(engine, x[0])))
    found["unharmed"] = str(whole and all(torch.equal(first[name], second[name]) for name in second))
    return found


class Trip:
    """Raises in the forward pass of a block, once."""

    def __init__(self, module: nn.Module) -> None:
        self.handle = module.register_forward_hook(self)

    def __call__(self, module: nn.Module, inputs: Any, output: Any) -> None:
        self.handle.remove()
        raise ArithmeticError("tripped")


def raising(mesh: Any, plan: str) -> dict[str, Any]:
    """The forward pass of a block raises on all ranks, with and without telling the engine; then on one rank alone."""
    case = Case(exact=False)
    engine, calm = engine_of(mesh, plan, accumulate=2), engine_of(mesh, plan, accumulate=2)
    x = [sharded.rows(case, 0, micro, mesh.rank) for micro in range(2)]
    engine.backward(net_loss(engine, x[0]))
    Trip(engine.model.blocks[1])
    tripped = _tripped(engine, x[1])
    again = _refused(lambda: net_loss(engine, x[1]))
    engine.abandon()
    for one in (engine, calm):
        for micro in range(2):
            one.backward(net_loss(one, x[micro]))
        one.step()
    first, second = engine.full_state_dict(), calm.full_state_dict()
    equal = all(torch.equal(first[name], value) for name, value in second.items())
    calm.close()
    if mesh.rank == 1:  # leaves the step at another place
        mesh.transitions.log.add("gather", 1, 1, 0)
    alone = _refused(engine.abandon)
    _forget(mesh)
    engine.close()
    return {"tripped": tripped, "again": again, "equal": equal, "alone": alone}


def _tripped(engine: Any, x: Tensor) -> bool:
    try:
        engine.backward(net_loss(engine, x))
    except ArithmeticError:
        return True
    return False


def retried(mesh: Any, plan: str) -> bool:
    """Where whole parameters need no collectives, one rank may fail and try again without harm."""
    case = Case(exact=False)
    engine, calm = engine_of(mesh, plan), engine_of(mesh, plan)
    x = sharded.rows(case, 0, 0, mesh.rank)
    if mesh.rank == 1:
        Trip(engine.model.blocks[1])
        _tripped(engine, x)
    for one in (engine, calm):
        one.backward(net_loss(one, x))
        one.step()
    first, second = engine.full_state_dict(), calm.full_state_dict()
    engine.close()
    calm.close()
    return all(torch.equal(first[name], value) for name, value in second.items())
