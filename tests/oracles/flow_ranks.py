"""Unusual forward passes under the engine, each against one process."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from oracles import sharded
from oracles.engine_ranks import deep
from oracles.sharded import Case
from sparing import sharding as sh
from sparing.errors import UserError

CASE = Case(exact=False)
SGD = partial(torch.optim.SGD, lr=0.1)


class Handing(nn.Module):
    """Hands a learned bias on from block to block beside the hidden state, as T5 does."""

    def __init__(self, first: bool) -> None:
        super().__init__()
        self.mix = nn.Linear(3, 3)
        self.bias = nn.Parameter(torch.ones(3)) if first else None

    def forward(self, h: Tensor, bias: Tensor | None = None) -> tuple[Tensor, Tensor]:
        bias = self.bias * 2 if self.bias is not None else bias
        return (self.mix(h) * bias).tanh(), bias


class Chain(nn.Module):
    """Two Handing blocks; wrapped so that a forward pass may begin inside."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Handing(first) for first in (True, False, False))

    def forward(self, h: Tensor) -> Tensor:
        bias = None
        for block in self.blocks:
            h, bias = block(h, bias=bias)
        return h * bias


class Outer(nn.Module):
    """A head after the chain."""

    def __init__(self) -> None:
        super().__init__()
        self.chain, self.head = Chain(), nn.Linear(3, 2)
        generator = torch.Generator().manual_seed(4)
        for p in self.parameters():
            p.data = torch.randn(p.shape, generator=generator, dtype=torch.float64)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.chain(x))


def handed_on(net: nn.Module, x: Tensor) -> Tensor:
    return net(x).square().mean()


def inside(net: nn.Module, x: Tensor) -> Tensor:
    """Begins at a module inside, whose parent is never called."""
    return net.chain(x).square().mean()


def looked_at(net: nn.Module, x: Tensor) -> Tensor:
    """Somebody evaluates between the forward and the backward pass."""
    loss = net(x).square().mean()
    with torch.no_grad():
        net(-x)
    return loss


def thrown_away(net: nn.Module, x: Tensor) -> Tensor:
    """A forward pass whose graph is never used."""
    net(-x)
    return net(x).square().mean()


def replayed(net: nn.Module, x: Tensor) -> Tensor:
    """Every block twice in a row, under a reentrant checkpoint: parameters get two gradients in one backward pass."""
    h = net.embed(x) + net.shift
    for block in (block for block in net.blocks for _ in range(2)):
        h = checkpoint(block, h, use_reentrant=True)
    return net.head(h).square().mean()


class Replaying(sharded.Net):
    """``replayed`` as a model of its own."""

    def forward(self, x: Tensor) -> Tensor:
        return replayed(self, x)


def replaying() -> nn.Module:
    net = Replaying(CASE)
    net.load_state_dict(sharded.made(CASE).state_dict())
    return net.double()


def whole_twice(net: nn.Module, x: Tensor) -> Tensor:
    """The model twice under a reentrant checkpoint, whose first passes look like evaluations."""
    return sum(checkpoint(net, sign * x.requires_grad_(), use_reentrant=True).square().mean() for sign in (1, -1))


WAYS: dict[str, tuple[Callable[[], nn.Module], Callable[[nn.Module, Tensor], Tensor]]] = {
    "handed on": (Outer, handed_on),
    "inside": (Outer, inside),
    "looked at": (lambda: deep(CASE), looked_at),
    "thrown away": (lambda: deep(CASE), thrown_away),
    "replayed": (replaying, lambda net, x: net(x)),
    "whole, twice": (lambda: deep(CASE), whole_twice),
}


def trained(mesh: Any, way: str, plan: str) -> float:
    """Two steps of two micro-steps: the largest relative distance to one process."""
    make, loss_of = WAYS[way]
    own, net = make(), make()
    optimizer = SGD(own.parameters())
    engine = sh.shard_(net, plan, mesh, optimizer=SGD, accumulate=2)
    for step in range(2):
        for micro in range(2):
            for rank in range(mesh.world):
                (loss_of(own, sharded.rows(CASE, step, micro, rank)) / (2 * mesh.world)).backward()
            engine.backward(loss_of(net, sharded.rows(CASE, step, micro, mesh.rank)))
        optimizer.step()
        optimizer.zero_grad()
        engine.step()
    found = engine.full_state_dict()
    engine.close()
    return max(((found[n] - v).abs() / (v.abs() + 1e-3)).max().item() for n, v in own.state_dict().items())


def unreadable(parameter: Tensor) -> bool:
    """Whether it says that it is away."""
    try:
        parameter.sum()
    except UserError as error:
        return error.what == "weights"
    return False


def carried(mesh: Any, plan: str) -> dict[str, bool]:
    """Weights out of one engine and into another of another plan; whole parameters inside ``gathered``."""
    engine = sh.shard_(deep(CASE), plan, mesh, optimizer=SGD)
    engine.backward(handed_on(engine.model, sharded.rows(CASE, 0, 0, mesh.rank)))
    engine.step()
    given = engine.full_state_dict()
    with engine.gathered() as model:
        engine.model(sharded.rows(CASE, 0, 0, 0))
        same = all(torch.equal(p, given[name]) for name, p in model.named_parameters())
    holes = plan[0] == "N" or all(unreadable(p) for p in engine.model.parameters())
    engine.close()
    there = {}
    for other, dtype in (("GGG", None), ("NIG", torch.bfloat16), ("IIG", torch.float32)):
        second = sh.shard_(deep(CASE).float(), other, mesh, optimizer=SGD, dtype=dtype)
        second.load_full_state_dict_({n: x + 0.0 for n, x in given.items()})
        found = second.full_state_dict()
        wide = second.full_state_dict(masters=True)
        there[f"into {other}"] = all(torch.equal(found[n], x.to(found[n].dtype)) for n, x in given.items())
        there[f"masters of {other}"] = all(torch.equal(wide[n], x.to(wide[n].dtype)) for n, x in given.items())
        second.close()
    return {"gathered": same, "freed after": holes} | there


class Dropping(sharded.Net):
    """Runs some of its blocks alone."""

    kept: tuple[int, ...] = (0, 1, 2)

    def forward(self, x: Tensor) -> Tensor:
        h = self.embed(x) + self.shift
        for number in self.kept:
            h = self.blocks[number](h)
        return self.head(h)


def dropping() -> Any:
    net = Dropping(CASE, depth=3)
    generator = torch.Generator().manual_seed(5)
    for p in net.parameters():
        p.data = torch.randn(p.shape, generator=generator)
    return net.double()


def looked_at_in_full(mesh: Any, plan: str, who: str) -> float:
    """Stochastic depth, with all blocks in evaluations of all ranks or of the first alone: distance to one process."""
    own, net = dropping(), dropping()
    optimizer = SGD(own.parameters())
    engine = sh.shard_(net, plan, mesh, optimizer=SGD, accumulate=2)

    def look() -> None:
        net.kept = (0, 1, 2)
        if who == "all" or mesh.rank == 0:
            with torch.no_grad():
                net(sharded.rows(CASE, 9, 0, 0))

    def kept(rank: int) -> tuple[int, ...]:
        return tuple(number for number in range(3) if number != rank) if who == "all" else (0, 1, 2)

    for step in range(2):
        for micro in range(2):
            for rank in range(mesh.world):
                own.kept = kept(rank)
                (handed_on(own, sharded.rows(CASE, step, micro, rank)) / (2 * mesh.world)).backward()
            look()
            net.kept = kept(mesh.rank)
            loss = handed_on(net, sharded.rows(CASE, step, micro, mesh.rank))
            look()
            engine.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        look()
        engine.step()
    found = engine.full_state_dict()
    engine.close()
    return max(((found[n] - v).abs() / (v.abs() + 1e-3)).max().item() for n, v in own.state_dict().items())


def told(attempt: Callable[[], Any]) -> str:
    """The words of torch's own complaint."""
    try:
        attempt()
    except RuntimeError as error:
        return str(error)
    return ""


def stale(mesh: Any, plan: str) -> dict[str, Any]:
    """Losses of before the last step, and of before other weights were loaded."""
    net, calm = dropping(), dropping()
    engine, other = (sh.shard_(one, plan, mesh, optimizer=SGD) for one in (net, calm))
    x = sharded.rows(CASE, 0, 0, mesh.rank)
    old, new = handed_on(net, x), handed_on(net, -x)
    engine.backward(new)
    engine.step()
    found: dict[str, Any] = {"step": told(lambda: engine.backward(old))}
    engine.abandon()
    other.backward(handed_on(calm, -x))
    other.step()
    for one, model in ((engine, net), (other, calm)):
        one.backward(handed_on(model, x))
        one.step()
    first, second = engine.full_state_dict(), other.full_state_dict()
    found["and on"] = all(torch.equal(first[name], value) for name, value in second.items())
    old = handed_on(net, x)
    engine.load_full_state_dict_(second)
    found["load"] = told(lambda: engine.backward(old))
    engine.abandon()
    engine.close()
    other.close()
    return found


def stale_elsewhere(mesh: Any, plan: str) -> float:
    """A loss of before a step that changed none of the weights that it saved: the distance to one process."""
    own, net = dropping(), dropping()
    optimizer = SGD(own.parameters())
    engine = sh.shard_(net, plan, mesh, optimizer=SGD)

    def losses(model: Any, rank: int) -> list[Tensor]:
        found = []
        for number in (0, 2):
            model.kept = (number,)
            model.head, head = nn.Identity(), model.head
            found.append(handed_on(model, sharded.rows(CASE, 0, 0, rank)))
            model.head = head
        return found

    plain = [losses(own, rank) for rank in range(mesh.world)]
    mine = losses(net, mesh.rank)
    for turn in range(2):
        for each in plain:
            (each[turn] / mesh.world).backward()
        optimizer.step()
        optimizer.zero_grad()
        engine.backward(mine[turn])
        engine.step()
    found = engine.full_state_dict()
    engine.close()
    return max(((found[n] - v).abs() / (v.abs() + 1e-3)).max().item() for n, v in own.state_dict().items())
