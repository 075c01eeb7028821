"""What users do with a model on ``fully_shard``: checkpoints both ways, meta device, compiled blocks, and mistakes."""

from __future__ import annotations

import dataclasses
import tempfile
from collections.abc import Callable
from functools import partial
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

from oracles import sharded
from oracles.sharded import Case
from sparing import sharding as sh
from sparing.errors import UserError
from sparing.layersample import LayerSampling, Reshuffle, Sampler
from sparing.layersample.state import read_state, write_state
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


def cast(plan: str, mesh: Mesh) -> bool:
    """``dtype``: bfloat16 from a float32 model, whose masters are what it was; the bits of our engine."""
    found = []
    for kind in ("sparing", "fsdp2"):
        made = Case(plan=plan, dtype=torch.float32, exact=False, frozen=True)
        engine: Any = sh.shard_(
            sharded.made(made).float(), plan, mesh, optimizer=partial(torch.optim.SGD, lr=2.0**-6),
            dtype=torch.bfloat16, engine=kind,
        )  # fmt: skip
        engine.model.shift.data = engine.model.shift.bfloat16()
        for step in range(3):
            # sums of few bits, so that their order does not matter
            engine.backward(engine.model(sharded.rows(Case(), step, 0, mesh.rank).bfloat16()).sum())
            engine.step()
        found.append(engine.full_state_dict())
        engine.close()
    return all(torch.equal(value, found[1][name]) for name, value in found[0].items())


def frozen_for_a_while(plan: str, mesh: Mesh) -> bool:
    """``freeze`` and ``thaw`` between steps: the bits of our engine, whose momentum starts anew, too."""
    found = []
    for kind in ("sparing", "fsdp2"):
        case = Case(plan=plan, steps=1)
        engine: Any = sh.shard_(
            sharded.made(case), plan, mesh, optimizer=partial(torch.optim.SGD, lr=0.5, momentum=0.5), engine=kind
        )
        sharded.steps_(engine, case, range(1))
        engine.freeze(["blocks.1"])
        sharded.steps_(engine, case, range(1, 2))
        # the first trains already, and keeps its momentum
        engine.thaw(["blocks.0", "blocks.1"])
        engine.freeze(["head"])
        sharded.steps_(engine, case, range(2, 3))
        found.append(engine.full_state_dict())
        engine.close()
    return all(torch.equal(value, found[1][name]) for name, value in found[0].items())


def layers_sampled(plan: str, mesh: Mesh) -> float:
    """LISA: another block trains every two steps; as the same sampler does in one process, on all rows."""
    made = LayerSampling(active=1, period=2, sampler=Reshuffle())
    alone, engine = sharded.made(Case(exact=False)), engine_of(sharded.made(Case(exact=False)), plan, mesh)
    optimizer = sharded.factory(CURVED)(list(alone.parameters()))
    here, there = Sampler(alone, optimizer, made), Sampler(engine.model, engine.optimizer, made)
    for step in range(4):
        for sampler in (here, there):
            sampler.begin_step(step)
        losses = [sharded.loss_of(alone, sharded.rows(CURVED, step, 0, rank), CURVED) for rank in range(mesh.world)]
        torch.stack(losses).mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        sharded.steps_(engine, CURVED, range(step, step + 1))
    return apart(engine.full_state_dict(), alone.state_dict())


def layers_resumed(state: Any, mesh: Mesh) -> dict[str, Any]:
    """A sampler whose blocks alternate goes on, each rank from a file of its own, to the bits of a run in one go."""
    made = LayerSampling(active=1, period=1, sampler=Reshuffle(), state=state)
    case, found = Case(exact=False), {}

    def begun() -> tuple[Any, Sampler]:
        engine = engine_of(sharded.made(case), "GGG", mesh)
        return engine, Sampler(engine.model, engine.optimizer, made)

    def train_(engine: Any, sampler: Sampler, steps: range) -> None:
        for step in steps:
            sampler.begin_step(step)
            sharded.steps_(engine, CURVED, range(step, step + 1))

    whole, (engine, sampler), (other, resumed) = begun(), begun(), begun()
    train_(*whole, range(6))
    train_(engine, sampler, range(3))
    with tempfile.TemporaryDirectory() as folder:
        write_state(f"{folder}/a", sampler.state_dict(optimizer=True))
        saved = read_state(f"{folder}/a")
    found["hosted"] = any(path.startswith("hosted/") for path in saved["tensors"])
    other.load_full_state_dict_(engine.full_state_dict())
    resumed.load_state_dict(saved)
    train_(other, resumed, range(3, 6))
    expected = whole[0].full_state_dict()
    found["same"] = all(torch.equal(value, expected[name]) for name, value in other.full_state_dict().items())
    cut = next(path for path, value in saved["tensors"].items() if value.ndim)
    try:
        resumed.load_state_dict(saved | {"tensors": saved["tensors"] | {cut: torch.zeros(77)}}, force=True)
        resumed.begin_step(6)
        resumed.begin_step(7)
    except UserError as error:
        found["apart"] = str(error)
    return found


def on_two(state: str) -> dict[str, Any]:
    with sh.make_mesh(groups=1) as mesh:
        return layers_resumed(state, mesh)


def scaled(plan: str, mesh: Mesh) -> dict[str, Any]:
    """A loss scale changes no bit; a step in which one rank overflows is skipped by all."""
    engine = engine_of(sharded.made(CURVED), plan, mesh, loss_scale=2.0**10, clip=0.05)
    case = dataclasses.replace(CURVED, clip=0.05)
    sharded.steps_(engine, case, range(case.steps))
    found = {"apart": apart(engine.full_state_dict(), sharded.one_process(case, mesh.world)[0])}
    before = engine.full_state_dict()
    x = sharded.rows(CURVED, 0, 0, mesh.rank)
    engine.backward(engine.model(x).sum() * (float("inf") if mesh.rank == 1 else 1.0))
    engine.step()
    return found | {"skipped": engine.skipped, "moved": apart(engine.full_state_dict(), before)}


def abandoned(plan: str, mesh: Mesh) -> float:
    """Gradients of an abandoned step are in none that follows."""
    case = dataclasses.replace(CURVED, accumulate=2)
    engine = engine_of(sharded.made(case), plan, mesh, accumulate=2)
    engine.backward(engine.model(sharded.rows(case, 7, 0, mesh.rank)).square().sum())
    engine.abandon()
    sharded.steps_(engine, case, range(case.steps))
    return apart(engine.full_state_dict(), sharded.one_process(case, mesh.world)[0])


def fetched_ahead(plan: str, mesh: Mesh) -> float:
    """What was gathered ahead for a block that did not run is not what runs after other weights came."""
    net: Any = sharded.made(CURVED)
    engine = engine_of(net, plan, mesh)
    whole = net.forward
    net.forward = lambda x: net.blocks[0](net.embed(x))
    with torch.no_grad():
        net(sharded.rows(CURVED, 0, 0, mesh.rank))
    net.forward = whole
    given = {name: value + 0.5 for name, value in sharded.made(CURVED).state_dict().items()}
    engine.load_full_state_dict_(given)
    alone = sharded.made(CURVED)
    alone.load_state_dict(given)
    x = sharded.rows(CURVED, 0, 0, mesh.rank)
    with torch.no_grad():
        return float((net(x) - alone(x)).abs().max())


def refused(mesh: Mesh) -> dict[str, str]:
    """Mistakes that only show in a loop."""
    found = {}

    def note(name: str, act: Callable[[], Any]) -> None:
        try:
            act()
            found[name] = "went through"
        except UserError as error:
            found[name] = str(error)

    x = sharded.rows(CURVED, 0, 0, mesh.rank)
    engine = engine_of(sharded.made(CURVED), "NNG", mesh, accumulate=2)
    engine.backward(engine.model(x).sum())
    note("clip_grad_norm_ of whole ones", lambda: nn.utils.clip_grad_norm_(engine.model.parameters(), 1.0))
    engine.abandon()
    engine = engine_of(sharded.made(Case(dtype=torch.bfloat16)), "NIG", mesh, accumulate=2)
    engine.set_plan("NNG")
    engine.backward(engine.model(x.bfloat16()).sum())
    note("abandoned in 16 bits", engine.abandon)
    engine = engine_of(sharded.made(CURVED), "III", mesh)
    penalty = sum(p.full_tensor().square().sum() for p in engine.model.parameters() if p.requires_grad)
    note("a penalty on cut parameters", lambda: engine.backward(engine.model(x).sum() + penalty))
    engine.abandon()
    engine = engine_of(sharded.made(CURVED), "IIG", mesh)
    seen: list[Tensor] = []
    engine.model.blocks[0].second.register_forward_pre_hook(lambda _, inputs: seen.append(inputs[0]))
    engine.model(x)
    note("an exit below all outputs", lambda: engine.backward(seen[0].sum()))
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
        found |= {f"compiled {plan}": compiled(plan, mesh) for plan in ("NNN", "NIG", "ING", "IIG", "GGG")}
        found |= {f"narrow {plan}": narrow(plan, mesh) for plan in ("NNN", "NIG", "ING", "IIG", "GIG")}
        found |= {f"cast {plan}": cast(plan, mesh) for plan in ("NNI", "IIG", "GGG")}
        found |= {f"frozen {plan}": frozen_for_a_while(plan, mesh) for plan in ("NNG", "IIG", "GIG")}
        found |= {f"sampled {plan}": layers_sampled(plan, mesh) for plan in ("NIG", "III")}
        found |= {f"scaled {plan}": scaled(plan, mesh) for plan in ("NNG", "IIG")}
        found |= {f"abandoned {plan}": abandoned(plan, mesh) for plan in ("NNN", "ING", "GGG")}
        found |= {f"ahead {plan}": fetched_ahead(plan, mesh) for plan in ("IIG", "NII")}
        questions = {"before a step": saved_before_a_step, "edited": edited, "refused": refused}
        return found | {name: question(mesh) for name, question in questions.items()}
