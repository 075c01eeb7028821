"""What users do with a model on ``fully_shard``: checkpoints both ways, meta device, compiled blocks, and mistakes."""

from __future__ import annotations

import dataclasses
import tempfile
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import (
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.fsdp import fully_shard
from torch.utils.checkpoint import checkpoint

from oracles import sharded
from oracles.sharded import Case
from sparing import sharding as sh
from sparing.errors import UserError
from sparing.sharding.network.mesh import Mesh

CURVED = Case(exact=False, optimizer="adamw", frozen=True, steps=4)
PLANS = ["NNN", "NIG", "IIG", "GGG"]


def engine_of(net: nn.Module, plan: str, mesh: Mesh, **more: Any) -> Any:
    return sh.shard_(net, plan, mesh, optimizer=sharded.factory(CURVED), engine="fsdp2", **more)


def apart(found: dict[str, Tensor], expected: dict[str, Tensor]) -> float:
    assert list(found) == list(expected)
    return max(float(((found[n] - v).abs() / (v.abs() + 1e-3)).max()) for n, v in expected.items())


class Theirs:
    """A program of torch alone, on the whole world."""

    def __init__(self, net: nn.Module) -> None:
        for block in net.blocks:  # type: ignore[union-attr]
            fully_shard(block)
        self.net: Any = fully_shard(net)
        self.optimizer = sharded.factory(CURVED)([p for p in net.parameters() if p.requires_grad])

    def train(self, steps: range) -> None:
        for step in steps:
            sharded.loss_of(self.net, sharded.rows(CURVED, step, 0, dist.get_rank()), CURVED).backward()
            self.optimizer.step()
            self.optimizer.zero_grad()

    def state(self) -> dict[str, Any]:
        return {
            "model": get_model_state_dict(self.net), "optimizer": get_optimizer_state_dict(self.net, self.optimizer)
        }  # fmt: skip

    def load(self, state: dict[str, Any]) -> None:
        set_model_state_dict(self.net, state["model"])
        set_optimizer_state_dict(self.net, self.optimizer, state["optimizer"])

    def weights(self) -> dict[str, Tensor]:
        found = self.net.state_dict()
        return {n: v.full_tensor() if hasattr(v, "full_tensor") else v for n, v in found.items()}


def folder() -> str:
    """The same on all ranks."""
    held = [tempfile.mkdtemp() if dist.get_rank() == 0 else ""]
    dist.broadcast_object_list(held, 0)
    return held[0]


def different() -> nn.Module:
    """The net with other weights, on no device."""
    with torch.device("meta"):
        net = sharded.Net(CURVED)
    first = sharded.made(CURVED)
    for name, p in net.named_parameters():
        module, _, last = name.rpartition(".")
        trains = first.get_parameter(name).requires_grad
        meta = nn.Parameter(torch.empty_like(p, dtype=CURVED.dtype), requires_grad=trains)
        setattr(net.get_submodule(module), last, meta)
    net.shift = torch.ones(5, dtype=CURVED.dtype)
    return net


def both_ways(plan: str, mesh: Mesh) -> dict[str, Any]:
    """Train here, go on there, and come back; against one process that did it all."""
    there = folder()
    ours = engine_of(sharded.made(CURVED), plan, mesh)
    sharded.steps_(ours, CURVED, range(1))
    dcp.save(ours.state_dict(), checkpoint_id=f"{there}/ours")
    theirs = Theirs(sharded.made(Case(exact=False, frozen=True, plan=plan)))
    dcp.load(state := theirs.state(), checkpoint_id=f"{there}/ours")
    theirs.load(state)
    handed = apart(theirs.weights(), ours.full_state_dict())
    theirs.train(range(1, 2))
    dcp.save(theirs.state(), checkpoint_id=f"{there}/theirs")
    again = engine_of(different(), plan, mesh)
    dcp.load(state := again.state_dict(), checkpoint_id=f"{there}/theirs")
    again.load_state_dict_(state)
    handed = max(handed, apart(again.full_state_dict(), theirs.weights()))
    sharded.steps_(again, CURVED, range(2, 4))
    expected, _ = sharded.one_process(CURVED, mesh.world)
    return {"handed": handed, "apart": apart(again.full_state_dict(), expected)}


def saved_before_a_step(mesh: Mesh) -> float:
    """A checkpoint from before the first step counts no step."""
    there = folder()
    dcp.save(engine_of(sharded.made(CURVED), "IIG", mesh).state_dict(), checkpoint_id=there)
    again = engine_of(different(), "NII", mesh)
    dcp.load(state := again.state_dict(), checkpoint_id=there)
    again.load_state_dict_(state)
    sharded.steps_(again, CURVED, range(CURVED.steps))
    return apart(again.full_state_dict(), sharded.one_process(CURVED, mesh.world)[0])


def from_nothing(plan: str, mesh: Mesh) -> float:
    """A model on the meta device that takes an ordinary state dict."""
    engine = engine_of(different(), plan, mesh)
    engine.load_full_state_dict_(sharded.made(CURVED).state_dict())
    sharded.steps_(engine, CURVED, range(CURVED.steps))
    return apart(engine.full_state_dict(), sharded.one_process(CURVED, mesh.world)[0])


def compiled(plan: str, mesh: Mesh) -> dict[str, Any]:
    """Every block through torch.compile."""
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    net: Any = sharded.made(CURVED)
    for block in net.blocks:
        block.compile(backend="aot_eager")
    case = dataclasses.replace(CURVED, accumulate=2)
    engine = engine_of(net, plan, mesh, accumulate=2)
    sharded.steps_(engine, case, range(case.steps))
    counted = torch._dynamo.utils.counters["stats"]["unique_graphs"]
    return {"apart": apart(engine.full_state_dict(), sharded.one_process(case, mesh.world)[0]), "graphs": counted}


def segments(plan: str, mesh: Mesh) -> float:
    """One activation checkpoint around several blocks."""
    net: Any = sharded.made(CURVED)
    engine = engine_of(net, plan, mesh)

    def through(x: Tensor) -> Tensor:
        for block in net.blocks:
            x = block(x)
        return x

    whole = net.forward
    net.forward = lambda x: net.head(checkpoint(through, net.embed(x) + net.shift, use_reentrant=False))
    sharded.steps_(engine, CURVED, range(CURVED.steps))
    net.forward = whole
    return apart(engine.full_state_dict(), sharded.one_process(CURVED, mesh.world)[0])


def narrow(plan: str, mesh: Mesh) -> bool:
    """bfloat16 with 32-bit masters: the bits of our engine."""
    case = Case(plan=plan, dtype=torch.bfloat16, accumulate=2)
    ours, _ = sharded.trained(case, mesh)
    bits = ours.full_state_dict()
    ours.close()
    found = sharded.trained(case, mesh, engine="fsdp2")[0].full_state_dict()
    return all(torch.equal(found[name], value) and value.dtype == found[name].dtype for name, value in bits.items())


def edited(mesh: Mesh) -> bool:
    """What the user writes between steps is what the next step starts from."""
    engine = engine_of(sharded.made(CURVED), "IIG", mesh)
    sharded.steps_(engine, CURVED, range(2))
    with torch.no_grad():
        for p in engine.model.parameters():
            p.fill_(0.5)
    engine.optimizer.param_groups[0].update(lr=0.0)
    sharded.steps_(engine, CURVED, range(1))
    return all(bool((v == 0.5).all()) for n, v in engine.full_state_dict().items() if n != "shift")


def refused(mesh: Mesh) -> dict[str, str]:
    """Mistakes that only show in a loop."""
    found = {}

    def note(name: str, act: Callable[[], Any]) -> None:
        try:
            act()
            found[name] = "went through"
        except UserError as error:
            found[name] = str(error)

    engine = engine_of(sharded.made(CURVED), "IIG", mesh)
    x = sharded.rows(CURVED, 0, 0, mesh.rank)
    note("loss.backward()", lambda: engine.model(x).sum().backward())
    engine = engine_of(sharded.made(CURVED), "III", mesh, accumulate=2)
    engine.backward(engine.model(x).sum())
    note("clip_grad_norm_", lambda: nn.utils.clip_grad_norm_(engine.model.parameters(), 1.0))
    note("optimizer.step()", engine.optimizer.step)
    note("zero_grad", engine.model.zero_grad)
    engine.abandon()
    engine = engine_of(sharded.made(CURVED), "NNG", mesh, accumulate=2)
    engine.backward(engine.model(x).sum())
    note("clip_grad_norm_ of whole ones", lambda: nn.utils.clip_grad_norm_(engine.model.parameters(), 1.0))
    engine.backward(engine.model(x).sum())
    engine.step()
    engine.model.to(torch.float32)
    note("model.to", lambda: engine.model(x.float()))
    engine = engine_of(sharded.made(CURVED), "IIG", mesh)
    engine.model.head.weight.register_hook(lambda grad: grad)
    note("a hook", lambda: engine.backward(engine.model(x).sum()))
    engine = engine_of(sharded.made(CURVED), "IIG", mesh)
    seen: list[Tensor] = []
    engine.model.blocks[0].second.register_forward_pre_hook(lambda _, inputs: seen.append(inputs[0]))
    engine.model(x)
    note("an early exit", lambda: engine.backward(seen[0].sum()))
    engine.abandon()
    engine = engine_of(sharded.made(CURVED), "NIG", mesh)
    note("step first", engine.step)
    engine.backward(engine.model(x).sum())
    note("backward twice", lambda: engine.backward(engine.model(x).sum()))
    engine.step()
    engine.model.embed.bias.requires_grad_(True)
    note("thawed later", lambda: engine.backward(engine.model(x).sum()))
    note("meta", lambda: engine_of(different(), "NIG", mesh).model(x))
    lost: Any = different()
    lost.register_buffer("angles", torch.empty(3, device="meta"), persistent=False)
    note("buffer", lambda: engine_of(lost, "NIG", mesh).load_full_state_dict_({}))
    return found


def everything() -> dict[str, Any]:
    with sh.make_mesh(per_group=2, groups=2) as mesh:
        found: dict[str, Any] = {f"both ways {plan}": both_ways(plan, mesh) for plan in PLANS}
        found |= {f"meta {plan}": from_nothing(plan, mesh) for plan in ("IIG", "NNG")}
        found |= {f"compiled {plan}": compiled(plan, mesh) for plan in ("IIG", "NIG")}
        found |= {f"segments {plan}": segments(plan, mesh) for plan in ("III", "GIG", "NIG")}
        found |= {f"narrow {plan}": narrow(plan, mesh) for plan in ("NNN", "NIG", "ING", "IIG", "GIG")}
        questions = {"before a step": saved_before_a_step, "edited": edited, "refused": refused}
        return found | {name: question(mesh) for name, question in questions.items()}
