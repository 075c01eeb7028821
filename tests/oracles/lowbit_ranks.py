"""What a rank with low-bit wires is asked in tests; gradients that know no weight, so that their sums are known."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from oracles.engine_ranks import Question
from sparing import sharding as sh
from sparing.errors import UserError
from sparing.sharding import checkpoint
from sparing.sharding.engine.weights import spread

PLANS = [plan.name for plan in sh.effective() if plan.params != "G"]
"""Those that changes of parameters can follow."""
LR = 0.5


def asked(sizes: tuple[int, int], slow: sh.LowBit, questions: Mapping[str, Question]) -> dict[str, Any]:
    """Answers of one rank."""
    with sh.make_mesh(per_group=sizes[0], groups=sizes[1], wires=sh.Wires(slow=slow)) as mesh:
        return {name: question(mesh, *more) for name, (question, more) in questions.items()}


class Part(nn.Module):
    """Adds a linear image of the first three columns to the others."""

    def __init__(self) -> None:
        super().__init__()
        self.image, self.extra = nn.Linear(3, 5), nn.Linear(3, 5, bias=False)
        self.rests = False

    def forward(self, h: Tensor) -> Tensor:
        image = self.image(h[:, :3])
        return torch.cat([h[:, :3], h[:, 3:] + (image if self.rests else image + self.extra(h[:, :3]))], 1)


class Net(nn.Module):
    """Its loss is the sum of its output times what comes with the row, so that a gradient is a sum over rows."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Linear(3, 8)
        self.blocks = nn.ModuleList(Part() for _ in range(3))
        for p in self.parameters():
            p.data = torch.arange(p.numel(), dtype=torch.float64).sub(7).view(p.shape)
        self.embed.requires_grad_(False)
        self.embed.weight.data[:3], self.embed.bias.data[:3] = torch.eye(3), 0

    def forward(self, x: Tensor) -> Tensor:
        h = self.embed(x)
        for block in self.blocks:
            h = block(h)
        return (h * torch.linspace(-1, 1, 8, dtype=h.dtype)).sum()


def row(step: int, micro: int, rank: int, *, exact: bool) -> Tensor:
    generator = torch.Generator().manual_seed(1000 * step + 50 * micro + rank)
    if exact:
        return torch.randint(-1, 2, (1, 3), generator=generator).double()
    return torch.randn(1, 3, generator=generator, dtype=torch.float64)


class Even(Net):
    """The same, with integers for gradients: at most one for each row."""

    def forward(self, x: Tensor) -> Tensor:
        h = self.embed(x)
        for block in self.blocks:
            h = block(h)
        return h.sum()


def shard(net: nn.Module, plan: str, mesh: Any, **more: Any) -> Any:
    return sh.shard_(net, plan, mesh, **({"optimizer": partial(torch.optim.SGD, lr=LR)} | more))


def never(step: int) -> bool:
    del step
    return False


def train(
    engine: Any, steps: range, *, exact: bool = False, resting: Callable[[int], bool] = never, count: int = 0
) -> None:
    """``count``: micro-steps of each step, where they are fewer than the engine expects."""
    for step in steps:
        engine.model.blocks[1].rests = resting(step)
        for micro in range(count or engine.settings.accumulate):
            loss = engine.model(row(step, micro, engine.mesh.rank, exact=exact))
            engine.backward(loss, last=micro == count - 1)
        engine.step(divisor=1.0)
        engine.check()


def given(steps: range, accumulate: int, world: int, resting: Callable[[int], bool] = never) -> Any:
    """Sums of all gradients, of one process."""
    net = Net()
    for step in steps:
        net.blocks[1].rests = resting(step)
        for micro in range(accumulate):
            for rank in range(world):
                net(row(step, micro, rank, exact=False)).backward()
    return {name: p.grad for name, p in net.named_parameters() if p.grad is not None}


def owed(engine: Any) -> dict[str, Tensor]:
    """What all ranks together owe, by parameter."""
    found: dict[str, Tensor] = {}
    for bucket in engine.buckets:
        if bucket.name in engine.residuals:
            tiers = engine.mesh.tiers
            part = engine.residuals[bucket.name].value.clone()
            total = engine.mesh.transitions.sync(part, tiers - 1, tiers).wait()
            found |= {name: value.clone() for name, value in bucket.unflatten(spread(bucket, total, tiers, 0))}
    return found


def unbalanced(engine: Any, expected: Mapping[str, Tensor], start: Mapping[str, Tensor], unit: float = 1.0) -> float:
    """How far what the weights have moved by, and what is owed, are from all that was given."""
    rest, masters = owed(engine), engine.full_state_dict(masters=True)
    moved = {name: (start[name] - masters[name]) / LR for name in expected}
    return max((moved[n] + rest[n] / unit - value).abs().max().item() for n, value in expected.items())


def largest_owed(engine: Any) -> float:
    return max(value.abs().max().item() for value in owed(engine).values())


# ---- questions


def exact(mesh: Any, plan: str, accumulate: int) -> dict[str, bool]:
    """Integers on the grid: the bits of one process, which knows of no wires."""
    net, own = Even(), Even()
    optimizer = torch.optim.SGD([p for p in own.parameters() if p.requires_grad], lr=LR)
    engine = shard(net, plan, mesh, accumulate=accumulate)
    train(engine, range(3), exact=True)
    for step in range(3):
        optimizer.zero_grad()
        for micro in range(accumulate):
            for rank in range(mesh.world):
                own(row(step, micro, rank, exact=True)).backward()
        optimizer.step()
    found, masters = engine.full_state_dict(), engine.full_state_dict(masters=True)
    engine.close()
    return {
        "weights": all(torch.equal(found[name], value) for name, value in own.state_dict().items()),
        "masters": all(torch.equal(masters[name], value) for name, value in own.state_dict().items()),
        "moved": not torch.equal(found["blocks.0.image.weight"], Even().blocks[0].image.weight),
    }


def conserved(mesh: Any, plan: str, accumulate: int = 2) -> dict[str, float]:
    """All that was given is in the weights or owed; what a parameter that rests for two steps is owed is kept."""
    resting = lambda step: step in (2, 3)  # noqa: E731
    net = Net()
    start = {name: value.clone() for name, value in net.state_dict().items()}
    engine = shard(net, plan, mesh, accumulate=accumulate + 1)
    train(engine, range(2), count=accumulate)
    before, weights = owed(engine)["blocks.1.extra.weight"], engine.full_state_dict(masters=True)
    train(engine, range(2, 4), resting=resting, count=accumulate)
    after, later = owed(engine)["blocks.1.extra.weight"], engine.full_state_dict(masters=True)
    train(engine, range(4, 5), count=accumulate)
    expected = given(range(5), accumulate, mesh.world, resting)
    found = {
        "apart": unbalanced(engine, expected, start),
        "owed": largest_owed(engine),
        "kept": (after - before).abs().max().item(),
        "rested": (later["blocks.1.extra.weight"] - weights["blocks.1.extra.weight"]).abs().max().item(),
        "lag": lag(engine),
    }
    engine.close()
    return found


def lag(engine: Any) -> float:
    """How far parameters are behind masters."""
    params, masters = engine.full_state_dict(), engine.full_state_dict(masters=True)
    return max((params[name].double() - value.double()).abs().max().item() for name, value in masters.items())


def skipped(mesh: Any, plan: str) -> dict[str, Any]:
    """A step with infinite gradients on one rank changes neither weights nor what is owed, nor does one abandoned."""
    net = Net()
    start = {name: value.clone() for name, value in net.state_dict().items()}
    engine = shard(net, plan, mesh, loss_scale=8.0, accumulate=2)
    train(engine, range(1))
    before, weights = {k: r.value.clone() for k, r in engine.residuals.items()}, engine.full_state_dict(masters=True)
    for micro in range(2):
        bad = float("inf") if mesh.rank == 1 and micro else 1.0
        engine.backward(net(row(7, micro, mesh.rank, exact=False)) * bad)
    engine.step()
    same = all(torch.equal(before[k], r.value) for k, r in engine.residuals.items())
    for micro in range(2):
        engine.backward(net(row(8, micro, mesh.rank, exact=False)))
    engine.abandon()
    again = all(torch.equal(before[k], r.value) for k, r in engine.residuals.items())
    unmoved = all(torch.equal(weights[k], v) for k, v in engine.full_state_dict(masters=True).items())
    train(engine, range(1, 3))
    found = {
        "skipped": engine.skipped, "residuals": same, "abandoned": again, "weights": unmoved,
        "apart": unbalanced(engine, given(range(3), 2, mesh.world), start, unit=8.0),
    }  # fmt: skip
    engine.close()
    return found


def rested(mesh: Any, plan: str) -> dict[str, Any]:
    """A block that is frozen for a step: its weights are its masters, and what it is owed waits."""
    net = Net()
    start = {name: value.clone() for name, value in net.state_dict().items()}
    engine = shard(net, plan, mesh)
    train(engine, range(2))
    name = "blocks.1/trainable"
    before, masters = engine.residuals[name].value.clone(), engine.full_state_dict(masters=True)
    engine.freeze(["blocks.1"])
    frozen = engine.full_state_dict()
    exact = all(torch.equal(frozen[n], v) for n, v in masters.items() if n.startswith("blocks.1"))
    train(engine, range(2, 3))
    kept = torch.equal(before, engine.residuals[name].value)
    engine.thaw(["blocks.1"])
    train(engine, range(3, 4))
    expected = given(range(4), 1, mesh.world)
    other = given(range(2, 3), 1, mesh.world)
    expected = {n: v - other[n] if n.startswith("blocks.1") else v for n, v in expected.items()}
    found = {"exact": exact, "kept": kept, "apart": unbalanced(engine, expected, start)}
    engine.close()
    return found


def chained(mesh: Any, plans: list[str]) -> dict[str, Any]:
    """A step under each plan; what is owed goes along, and parameters that no longer lag are their masters."""
    net = Net()
    start = {name: value.clone() for name, value in net.state_dict().items()}
    engine = shard(net, plans[0], mesh)
    wrong = []
    for step, plan in enumerate(plans):
        engine.set_plan(plan)
        engine.flush()
        if not any(engine.lags(bucket) for bucket in engine.buckets) and lag(engine):
            wrong.append(plan)
        train(engine, range(step, step + 1))
    found = {"wrong": wrong, "apart": unbalanced(engine, given(range(len(plans)), 1, mesh.world), start)}
    engine.close()
    return found


def edited(mesh: Any, plan: str) -> dict[str, bool]:
    """What the user writes into parameters counts, element by element; what lags elsewhere stays."""
    engine = shard(net := Net(), plan, mesh)
    train(engine, range(2))
    masters = engine.full_state_dict(masters=True)
    with engine.gathered(), torch.no_grad():
        net.blocks[0].image.weight[0] = 64.0
    wanted = masters | {"blocks.0.image.weight": masters["blocks.0.image.weight"].clone()}
    wanted["blocks.0.image.weight"][0] = 64.0
    engine.set_plan({"blocks.0": "NNN"})
    found = engine.full_state_dict(masters=True)
    taken = all(torch.equal(found[name], value) for name, value in wanted.items())
    engine.load_full_state_dict_({name: value + 1 for name, value in wanted.items()})
    train(engine, range(2, 3))
    engine.close()
    other = shard(net := Net(), plan, mesh)
    other.load_full_state_dict_({name: value + 1 for name, value in wanted.items()})
    loaded = other.full_state_dict(masters=True)
    other.close()
    return {"taken": taken, "loaded": all(torch.equal(loaded[name], value + 1) for name, value in wanted.items())}


def narrow(mesh: Any, plan: str) -> dict[str, Any]:
    """16-bit parameters with 32-bit masters, AdamW, clipping, groups."""
    net = Net().float()
    groups = [
        {"params": [p for p in net.parameters() if p.requires_grad and p.ndim > 1]},
        {"params": [p for p in net.parameters() if p.requires_grad and p.ndim < 2], "lr": 1e-2},
    ]
    engine = shard(
        net, plan, mesh, optimizer=partial(torch.optim.AdamW, lr=1e-3), groups=groups, clip=0.1, accumulate=2,
        dtype=torch.bfloat16, check_every=1,
    )  # fmt: skip
    for step in range(4):
        for micro in range(2):
            engine.backward(net(row(step, micro, mesh.rank, exact=False).bfloat16()))
        engine.step()
    masters, params = engine.full_state_dict(masters=True), engine.full_state_dict()
    # a unit in the last place of bfloat16, and half a step of the last changes, all below 1e-2
    near = all(torch.allclose(params[n].float(), v.float(), rtol=2**-7, atol=2e-2) for n, v in masters.items())
    engine.close()
    return {"near": near, "moved": not torch.equal(masters["blocks.0.image.bias"].float(), torch.arange(5.0) - 7)}


# ---- checkpoints


def snapshot(engine: Any) -> dict[str, Tensor]:
    """Everything that decides what comes next, of this rank."""
    found = {f"{n} params": v for n, v in engine.full_state_dict().items()}
    found |= {f"{n} master": v for n, v in engine.full_state_dict(masters=True).items()}
    return found | {f"{n} owed": r.value.clone() for n, r in engine.residuals.items()}


def differing(a: Mapping[str, Tensor], b: Mapping[str, Tensor]) -> list[str]:
    return sorted(a.keys() ^ b.keys()) or [name for name in a if not torch.equal(a[name], b[name])]


def saved(mesh: Any, folder: Path, plan: str, others: list[str]) -> dict[str, list[str]]:
    """Saved after two steps; a new engine goes on to the same bits, and under other plans owes and lacks the same."""
    engine = shard(Net(), plan, mesh, accumulate=2)
    train(engine, range(2))
    engine.freeze(["blocks.2"])
    checkpoint.save(engine, folder / plan)
    before = snapshot(engine)
    torch.save(owed(engine), folder / f"{plan}-{mesh.rank}.owed")
    train(engine, range(2, 3))
    after = snapshot(engine)
    engine.close()
    found = {}
    for other in [plan, *others]:
        fresh = shard(Net(), other, mesh, accumulate=2)
        train(fresh, range(5, 6))
        checkpoint.load_(fresh, folder / plan)
        wrong = differing(before, snapshot(fresh))
        if other[0] == other[2]:  # nothing lags there
            wrong = [name for name in wrong if not name.endswith("params")] + (["lags"] if lag(fresh) else [])
        train(fresh, range(2, 3))
        found[f"{plan} to {other}"] = wrong + (differing(after, snapshot(fresh)) if other == plan else [])
        fresh.close()
    return found


def loaded_elsewhere(mesh: Any, folder: Path, plan: str, to: str) -> dict[str, Any]:
    """By other ranks: all owe together what all owed before, and it leaves with the next step."""
    engine = shard(Net(), to, mesh, accumulate=2)
    train(engine, range(5, 6))
    checkpoint.load_(engine, folder / plan)
    before = torch.load(folder / f"{plan}-0.owed", weights_only=True)
    found = owed(engine)
    apart = max((found[name] - value).abs().max().item() for name, value in before.items())
    start, held = engine.full_state_dict(masters=True), max(value.abs().max().item() for value in before.values())
    train(engine, range(2, 3))
    fresh = given(range(2, 3), 2, mesh.world)
    expected = {n: fresh[n] + v for n, v in before.items() if not n.startswith("blocks.2")}
    answer = {"apart": apart, "held": held, "balance": unbalanced(engine, expected, start)}
    engine.close()
    return answer


def elsewhere(folder: Path, sizes: tuple[int, int], slow: sh.LowBit, pairs: list[tuple[str, str]]) -> dict[str, Any]:
    return asked(sizes, slow, {f"{a} to {b}": (loaded_elsewhere, (folder, a, b)) for a, b in pairs})


def told(work: Callable[[], Any]) -> str:
    try:
        work()
    except UserError as error:
        return str(error)
    return "nothing"


def exactly_loaded(folder: Path, plan: str) -> dict[str, Any]:
    """Without low-bit wires: refused, unless what is owed may be forgotten."""
    with sh.make_mesh(groups=1) as mesh:
        engine = shard(Net(), "NNN", mesh, accumulate=2)
        refused = told(lambda: checkpoint.load_(engine, folder / plan))
        checkpoint.load_(engine, folder / plan, residuals=False)
        found = {"refused": refused, "lag": lag(engine), "residuals": len(engine.residuals)}
        engine.close()
        return found


# ---- refusals


def refusals(mesh: Any) -> dict[str, str]:
    """What cannot be, said before the model is changed."""
    nets = [Net() for _ in range(5)]
    answers = {
        "G": told(lambda: shard(nets[0], "GGG", mesh)),
        "G for one": told(lambda: shard(nets[1], "IIG", mesh, plans={"blocks.1": "GIG"})),
        "reduce_dtype": told(lambda: shard(nets[2], "IIG", mesh, reduce_dtype=torch.bfloat16)),
        "16 bits": told(lambda: shard(nets[3], "IIG", mesh, dtype=torch.bfloat16, masters=False)),
        "fsdp2": told(lambda: shard(nets[4], "IIG", mesh, engine="fsdp2")),
    }
    whole = all(torch.equal(a, b) for net in nets for a, b in zip(net.parameters(), Net().parameters(), strict=True))
    engine = shard(nets[0], "IIG", mesh, plans={"frozen": "GGG"})
    answers["set_plan"] = told(lambda: engine.set_plan("IIG" if mesh.world == 1 else "GGG"))
    train(engine, range(1))
    engine.close()
    return answers | {"unharmed": str(whole)}
