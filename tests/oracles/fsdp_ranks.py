"""What ranks find when a model's plans run on ``fully_shard``."""

from __future__ import annotations

import gc
import threading
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from oracles import engine_ranks, sharded
from oracles.sharded import Case
from sparing import sharding as sh
from sparing.sharding.fsdp.collectives import Gather, Reduce, nested
from sparing.sharding.network.lanes import Handle
from sparing.sharding.network.mesh import Mesh
from sparing.sharding.planner.fsdp import UnitSpec, fsdp_live_bytes, fsdp_passing_bytes, fsdp_traffic

# ---- the experiment: can rings be plugged in?


def plain(level: int, mesh: Mesh) -> tuple[nn.Module, list[Any]]:
    """A net of integers that torch alone shards over the inner axes; its units, the root last."""
    generator = torch.Generator().manual_seed(4)
    net = nn.Sequential(nn.Linear(3, 8), nn.Linear(8, 5), nn.Linear(5, 3)).double()
    for p in net.parameters():
        p.data = torch.randint(-2, 3, p.shape, generator=generator).double()
    over = mesh.device_mesh["intra"] if level == 1 else init_device_mesh("cpu", (mesh.world,))  # type: ignore[index]
    units: list[Any] = [fully_shard(part, mesh=over) for part in net] + [fully_shard(net, mesh=over)]
    for unit in units:
        unit.set_gradient_divide_factor(1.0)
        unit.set_force_sum_reduction_for_comms(True)
    return net, units


def plug_(units: list[Any], mesh: Mesh, level: int) -> list[tuple[Handle[Tensor], Tensor]]:
    """Our rings instead of the library's; what is returned collects reductions and where their sums belong."""
    under_way: list[tuple[Handle[Tensor], Tensor]] = []
    moving = mesh.transitions

    def take(whole: Tensor, out: Tensor) -> None:
        handle = moving.reduce_step(nested(whole, mesh.sizes[:level]), level)
        under_way.append((handle, out))

    for unit in units[:-1]:
        unit.set_custom_all_gather(Gather(moving, level, "unit"))
        unit.set_custom_reduce_scatter(Reduce(take))
    return under_way


def gradients(net: nn.Module, step: int) -> list[Tensor]:
    """Local gradients of a backward pass, after it has returned."""
    generator = torch.Generator().manual_seed(100 * step + dist.get_rank())
    net(torch.randint(-2, 3, (2, 3), generator=generator).double()).sum().backward()
    return [p.grad.to_local() for p in net.parameters()]  # type: ignore[union-attr]


def plugged(level: int) -> dict[str, Any]:
    """Gradients with gloo's collectives and with rings, and what the rings sent."""
    with sh.make_mesh(per_group=2, groups=2) as mesh:
        expected = [grad.clone() for grad in gradients(plain(level, mesh)[0], 0)]
        net, units = plain(level, mesh)
        under_way = plug_(units, mesh, level)
        found = gradients(net, 0)
        for handle, out in under_way:
            out.copy_(handle.wait())
        mesh.drain()
        return {
            "equal": all(torch.equal(a, b) for a, b in zip(found, expected, strict=True)),
            "sent": dict(mesh.counter.sent),
        }


def returns_early() -> dict[str, bool]:
    """Whether backward returns while its last reductions are still on the way."""
    with sh.make_mesh(per_group=2, groups=2) as mesh:
        net, units = plain(1, mesh)
        for unit in units:
            unit.set_reshard_after_forward(False)
        under_way = plug_(units, mesh, 1)
        gate = threading.Event()
        loss = net(torch.ones(2, 3, dtype=torch.float64)).sum()
        mesh.lanes[0].submit(gate.wait)  # nothing that is queued from here can move
        loss.backward()
        early = bool(under_way) and not any(handle.done() for handle, _ in under_way)
        gate.set()
        for handle, out in under_way:
            out.copy_(handle.wait())
        grads = [p.grad.to_local() for p in net.parameters()]  # type: ignore[union-attr]
        return {"early": early, "filled": all(bool(grad.abs().sum() > 0) for grad in grads if grad.numel())}


def experiment() -> dict[str, Any]:
    questions: dict[str, Callable[[], Any]] = {
        "intra": lambda: plugged(1), "world": lambda: plugged(2), "early": returns_early,
    }  # fmt: skip
    return {name: question() for name, question in questions.items()}


# ---- plans on FSDP2 against our engine and one process


def compared(case: Case, mesh: Mesh) -> dict[str, Any]:
    """Whether a rank ends where our engine does, to the bit where sums are exact; how far from one process."""
    expected, expected_norms = sharded.one_process(case, mesh.world)
    bits = None
    if case.exact:
        ours, _ = sharded.trained(case, mesh)
        bits = ours.full_state_dict()
        ours.close()
    engine, norms = sharded.trained(case, mesh, engine="fsdp2")
    found = engine.full_state_dict()
    first = sharded.made(case).state_dict()
    engine.check()
    engine.close()
    return {
        "names": list(found) == list(expected),
        "bits of ours": bits and all(torch.equal(found[name], value) for name, value in bits.items()),
        "equal": all(torch.equal(found[name], value) for name, value in expected.items()),
        "apart": max(((found[n] - v).abs() / (v.abs() + 1e-3)).max().item() for n, v in expected.items()),
        "norms": max(abs(a / b - 1) for a, b in zip(norms, expected_norms, strict=True)),
        "moved": any(not torch.equal(value, first[name]) for name, value in expected.items()),
    }


def matrix(cases: Mapping[str, Case], sizes: tuple[int, int]) -> dict[str, Any]:
    """What one rank finds in every case."""
    with sh.make_mesh(per_group=sizes[0], groups=sizes[1]) as mesh:
        return {name: compared(case, mesh) for name, case in cases.items()}


# ---- bytes on the wires and in memory


def unit_specs(engine: Any) -> list[UnitSpec]:
    """The units as the formulas want them."""
    net, found = engine.model, []
    blocks = [f"blocks.{at}" for at in range(len(net.blocks))]
    first = sharded_names(net)
    for unit in engine.units:
        root = unit.name not in blocks
        inside = [n for n in first if (not n.startswith("blocks.") if root else n.startswith(unit.name + "."))]
        trains = tuple(net.get_parameter(n).requires_grad for n in inside)
        early = any(t for n, t in zip(inside, trains, strict=True) if n.startswith("embed"))
        place = (-1 if early else len(blocks)) if root else blocks.index(unit.name)
        shapes = tuple(tuple(net.get_parameter(n).shape) for n in inside)
        found.append(UnitSpec(shapes=shapes, trains=trains, root=root, block=place))
    return found


def sharded_names(net: nn.Module) -> list[str]:
    return [name for name, _ in net.named_parameters()]


def traffic(mesh: Mesh, plan: str, frozen: str, checkpointing: bool) -> dict[str, Any]:
    """Bytes and messages of one step per axis, counted and by the formulas."""
    case = Case(plan=plan, accumulate=2, exact=False, checkpointing=checkpointing)
    engine = sh.shard_(
        engine_ranks.deep(case, frozen), plan, mesh, optimizer=partial(torch.optim.SGD, lr=0.01), accumulate=2,
        engine="fsdp2",
    )  # fmt: skip
    engine_ranks.one_step(engine, case, 0)
    before = counted(mesh)
    engine_ranks.one_step(engine, case, 1)
    found = engine_ranks.between(before, counted(mesh))
    expected = fsdp_traffic(unit_specs(engine), mesh.sizes, plan, accumulate=2, gather_bytes=8, reduce_bytes=8)
    return {"found": found, "expected": [expected.total, expected.messages]}


def counted(mesh: Mesh) -> tuple[tuple[int, ...], tuple[int, ...]]:
    mesh.drain()
    names = [axis.name for axis in mesh.axes]
    return tuple(mesh.counter.sent[n] for n in names), tuple(mesh.counter.messages[n] for n in names)


def memory(mesh: Mesh, plan: str, frozen: str, dtype: torch.dtype) -> dict[str, Any]:
    """Bytes held between two micro-steps of the second step, and what the formula says."""
    case = Case(plan=plan, accumulate=2, exact=False)
    wide = torch.float32 if dtype.itemsize < 4 else dtype
    gc.freeze()
    net = engine_ranks.deep(case, frozen, dtype)
    engine = sh.shard_(net, plan, mesh, optimizer=partial(torch.optim.AdamW, lr=1e-3), accumulate=2, engine="fsdp2")
    engine_ranks.one_step(engine, case, 0, dtype)
    engine.backward(sharded.loss_of(net, sharded.rows(case, 1, 0, mesh.rank).to(dtype), case))
    mesh.drain()
    live = fsdp_live_bytes(
        unit_specs(engine), mesh.sizes, plan, param_bytes=dtype.itemsize, grad_bytes=wide.itemsize,
        master_bytes=wide.itemsize,
    )  # fmt: skip
    alive = engine_ranks.everything()
    gc.unfreeze()
    # besides: the model's buffer, and AdamW's count of steps for each parameter
    steps = sum(state["step"].nbytes for state in engine.optimizer.state.values())
    return {"found": sum(alive.values()) - net.shift.nbytes - steps, "expected": live.total}


def passing(mesh: Mesh, plan: str, frozen: str, dtype: torch.dtype) -> dict[str, Any]:
    """Bytes held when the backward pass of each block ends, in the second of three micro-steps, and the formulas."""
    case = Case(plan=plan, accumulate=3, exact=False)
    wide = torch.float32 if dtype.itemsize < 4 else dtype
    gc.freeze()
    net: Any = engine_ranks.deep(case, frozen, dtype)
    engine = sh.shard_(net, plan, mesh, optimizer=partial(torch.optim.SGD, lr=0.1), accumulate=3, engine="fsdp2")
    seen: dict[int, int] = {}

    def look(block: int, grad: Tensor) -> None:
        del grad
        mesh.drain()
        seen[block] = sum(engine_ranks.everything().values()) - net.shift.nbytes

    for at, block in enumerate(net.blocks):
        block.register_forward_pre_hook(
            lambda _, inputs, at=at: inputs[0].requires_grad and inputs[0].register_hook(partial(look, at)) and None
        )
    for _ in range(2):
        # of no rows, so that there are no bytes of activations
        engine.backward(net(torch.empty(0, 3, dtype=dtype)).sum())
    specs, widths = unit_specs(engine), {"param_bytes": dtype.itemsize, "grad_bytes": wide.itemsize}
    live = fsdp_live_bytes(specs, mesh.sizes, plan, **widths, master_bytes=wide.itemsize, moments=0)
    expected = fsdp_passing_bytes(specs, mesh.sizes, plan, **widths)
    gc.unfreeze()
    # besides: the loss and its gradient, and the gradient of the head, which is there first and leaves last
    made = engine.plan.grads != "N" or wide != dtype
    more = live.total + (2 + 15 * made) * dtype.itemsize
    return {"found": [seen[k] for k in sorted(seen)], "expected": [more + expected[k] for k in sorted(seen)]}


def bytes_of(plans: list[str]) -> dict[str, Any]:
    with sh.make_mesh(per_group=2, groups=2) as mesh:
        found: dict[str, Any] = {}
        for plan in plans:
            for frozen in engine_ranks.FROZEN:
                found[f"{plan} sends, {frozen} trains"] = traffic(mesh, plan, frozen, frozen == "one")
            for frozen, dtype in (("all", torch.float64), ("some", torch.bfloat16)):
                found[f"{plan} holds, {frozen} trains"] = memory(mesh, plan, frozen, dtype)
                if frozen == "all" or plan in ("NNG", "ING", "IIG", "GIG"):
                    found[f"{plan} passes, {frozen} trains"] = passing(mesh, plan, frozen, dtype)
        return found
