"""A small net with every nuisance, what one process makes of it, and what a rank makes of its share."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from oracles.optimizers import Counting
from sparing import sharding as sh


@dataclasses.dataclass(frozen=True, kw_only=True)
class Case:
    """One way to train the net for a few steps."""

    plan: str = "IIG"
    accumulate: int = 1
    steps: int = 2
    optimizer: str = "sgd"
    exact: bool = True
    """Integer weights and data and a divisor that is a power of two: every sum is exact in any order."""
    tied: bool = False
    frozen: bool = False
    unused: bool = False
    checkpointing: bool = False
    clip: float | sh.Clip | None = None
    dtype: torch.dtype = torch.float64
    groups: bool = False
    prefetch: int = 1
    plans: Mapping[str, str] | None = None
    twice: bool = False
    """Whether the net runs twice before the backward pass."""
    uneven: bool = False
    """Whether odd ranks have one row less in the last micro-step."""
    early: bool = False
    """Whether the engine expects one micro-step more, and is told that each step ends before it."""


class Block(nn.Module):
    def __init__(self, width: int, unused: bool, checkpointing: bool):
        super().__init__()
        self.first, self.second = nn.Linear(width, width + 2), nn.Linear(width + 2, width)
        self.spare = nn.Linear(2, 3) if unused else None
        self.checkpointing = checkpointing

    def _inner(self, x: Tensor) -> Tensor:
        return x + self.second(self.first(x).relu())

    def forward(self, x: Tensor) -> Tensor:
        return self._inner(x)


class Net(nn.Module):
    def __init__(self, case: Case, width: int = 5, depth: int = 2):
        super().__init__()
        self.embed = nn.Linear(3, width)
        self.blocks = nn.ModuleList(Block(width, case.unused, case.checkpointing) for _ in range(depth))
        self.register_buffer("shift", torch.ones(width))
        self.head = nn.Linear(width, 3, bias=False)
        self.again = nn.Linear(3, width) if case.tied else None
        if self.again is not None:
            self.again.weight = self.embed.weight
        self.checkpointing = case.checkpointing

    def forward(self, x: Tensor) -> Tensor:
        h = self.embed(x) + self.shift
        for block in self.blocks:
            h = checkpoint(block, h, use_reentrant=False) if self.checkpointing else block(h)
        h = self.head(h)
        return h if self.again is None else self.again(h)


def made(case: Case) -> Net:
    """The net with its first weights; the same in every process."""
    generator = torch.Generator().manual_seed(3)
    net = Net(case)
    for p in net.parameters():
        integers = torch.randint(-1, 2, p.shape, generator=generator).double()
        p.data = (integers if case.exact else torch.randn(p.shape, generator=generator).double() / 2).to(case.dtype)
    net.shift.data = net.shift.data.to(case.dtype)
    if case.frozen:
        net.blocks[0].first.weight.requires_grad_(False)
        net.blocks[0].second.requires_grad_(False)
        net.embed.bias.requires_grad_(False)
    return net


def rows(case: Case, step: int, micro: int, rank: int) -> Tensor:
    """The rows of a rank in a micro-step."""
    generator = torch.Generator().manual_seed(1000 * step + 50 * micro + rank)
    count = 1 if case.uneven and micro == case.accumulate - 1 and rank % 2 else 2
    if case.exact:
        return torch.randint(-1, 2, (count, 3), generator=generator).to(case.dtype)
    return torch.randn(count, 3, generator=generator, dtype=torch.float64).to(case.dtype)


def loss_of(net: nn.Module, x: Tensor, case: Case) -> Tensor:
    """Linear in the output where sums must be exact, else curved."""
    out = net(x)
    if case.twice:
        out = out + net(-x)
    return out.sum() if case.exact else out.square().mean() + out.sin().sum()


def factory(case: Case) -> Any:
    if case.optimizer == "sgd":
        return partial(torch.optim.SGD, lr=0.5, momentum=0.5)
    if case.optimizer == "counting":
        return Counting
    return partial(torch.optim.AdamW, lr=1e-2, weight_decay=0.1)


def groups_for(net: nn.Module, case: Case) -> list[dict[str, Any]] | None:
    """Two groups that cut across every block: vectors at another rate."""
    if not case.groups:
        return None
    trained = [p for p in net.parameters() if p.requires_grad]
    return [
        {"params": [p for p in trained if p.ndim > 1]},
        {"params": [p for p in trained if p.ndim < 2], "lr": 0.25},
    ]


def divisor_of(case: Case, world: int) -> float:
    return 8.0 if case.exact else float(world * case.accumulate)


def one_process(case: Case, world: int) -> tuple[dict[str, Tensor], list[float]]:
    """Weights and norms of plain training on the rows of all ranks, which knows of no plan."""
    return _one_process(dataclasses.replace(case, plan="", plans=None, prefetch=1), world)


@functools.cache
def _one_process(case: Case, world: int) -> tuple[dict[str, Tensor], list[float]]:
    net = made(case)
    trained = [p for p in net.parameters() if p.requires_grad]
    groups = groups_for(net, case)
    optimizer = factory(case)(groups or trained)
    norms = []
    for step in range(case.steps):
        for micro in range(case.accumulate):
            for rank in range(world):
                loss_of(net, rows(case, step, micro, rank), case).backward()
        for p in trained:
            p.grad = torch.zeros_like(p) if p.grad is None else p.grad / divisor_of(case, world)
        norms.append(clip_(trained, case.clip))
        optimizer.step()
        optimizer.zero_grad()
    return {name: value.detach().clone() for name, value in net.state_dict().items()}, norms


def clip_(trained: list[nn.Parameter], clip: float | sh.Clip | None) -> float:
    """By torch's own function, parameter by parameter where each has its norm; the norm of all before."""
    full = clip if isinstance(clip, sh.Clip) else sh.Clip(1e300 if clip is None else clip)
    parts = [[p] for p in trained] if full.each else [trained]
    norm = torch.nn.utils.get_total_norm([p.grad for p in trained if p.grad is not None], full.norm_type)
    for part in parts:
        torch.nn.utils.clip_grad_norm_(part, full.max_norm, full.norm_type)
    return norm.item()


def trained(case: Case, mesh: Any, **engine: Any) -> tuple[Any, list[float]]:
    """The engine after the steps of a case, and the norms."""
    net = made(case)
    made_engine = sh.shard_(
        net, case.plan, mesh, optimizer=factory(case), groups=groups_for(net, case),
        accumulate=case.accumulate + case.early, clip=case.clip, prefetch=case.prefetch, plans=case.plans, **engine,
    )  # fmt: skip
    return made_engine, steps_(made_engine, case, range(case.steps))


def steps_(engine: Any, case: Case, steps: range) -> list[float]:
    """Train on."""
    norms = []
    for step in steps:
        for micro in range(case.accumulate):
            loss = loss_of(engine.model, rows(case, step, micro, engine.mesh.rank), case)
            engine.backward(loss, last=case.early and micro == case.accumulate - 1)
        norms.append(engine.step(divisor=divisor_of(case, engine.mesh.world)))
    return norms


def compared(case: Case, mesh: Any) -> dict[str, Any]:
    """Whether a rank ends where one process does: to the bit, and the largest relative difference."""
    expected, expected_norms = one_process(case, mesh.world)
    engine, norms = trained(case, mesh)
    found = engine.full_state_dict()
    engine.close()
    closed = {name: value.detach() for name, value in engine.model.state_dict().items()}
    moved = any(not torch.equal(value, made(case).state_dict()[name]) for name, value in expected.items())
    return {
        "names": list(found) == list(expected),
        "equal": all(torch.equal(found[name], value) for name, value in expected.items()),
        "closed": all(torch.equal(closed[name], found[name]) for name in found),
        "apart": max(((found[n] - v).abs() / (v.abs() + 1e-3)).max().item() for n, v in expected.items()),
        "norms": max(abs(a / b - 1) for a, b in zip(norms, expected_norms, strict=True)),
        "moved": moved,
    }


def matrix(cases: Mapping[str, Case], sizes: tuple[int, int]) -> dict[str, Any]:
    """What one rank finds in every case."""
    with sh.make_mesh(per_group=sizes[0], groups=sizes[1]) as mesh:
        return {name: compared(case, mesh) for name, case in cases.items()}
