"""Models whose loss reads more of a block than what the block returns, or less; and gradients of unusual make."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from oracles.idiom_ranks import STEPS, Answers, Make, Net, curved, rows


@dataclass
class Out:
    """What torch does not know as a container."""

    h: Tensor
    logits: Tensor


class Block(nn.Module):
    """Keeps what its exit says; ``how`` makes what it returns."""

    def __init__(self, how: Callable[[Block, Tensor], Any]) -> None:
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4))
        self.exit = nn.Linear(4, 3)
        self.how = how
        self.logits = torch.zeros(())

    def forward(self, h: Any, spare: bool = False) -> Any:
        del spare
        return self.how(self, h)


def _exit(block: Block, h: Tensor) -> Tensor:
    h = h + block.inner(h)
    block.logits = block.exit(h)
    return h


def _exit_without_module(block: Block, h: Tensor) -> Tensor:
    h = h + block.inner(h)
    block.logits = nn.functional.linear(h, block.exit.weight, block.exit.bias)
    return h


def _dataclass(block: Block, given: Any) -> Out:
    h = given.h if isinstance(given, Out) else given
    h = h + block.inner(h)
    return Out(h, block.exit(h))


def _steepest(block: Block, h: Tensor) -> Tensor:
    """Goes down an energy, whose gradient is taken on the way: once for itself, once to be differentiated again."""
    at = h.detach().requires_grad_()
    (slope,) = torch.autograd.grad(block.exit(block.inner(at)).square().sum(), at)
    at = h + 0
    (down,) = torch.autograd.grad(block.exit(at).sin().sum(), at, create_graph=True)
    return h - 0.1 * slope - 0.1 * down + 0.1 * block.inner(h)


def _net(how: Callable[[Block, Tensor], Any], *, depth: int = 3) -> Net:
    generator = torch.Generator().manual_seed(7)
    made = Net(depth=depth)
    made.blocks = nn.ModuleList(Block(how) for _ in range(depth))
    for p in made.parameters():
        p.data = torch.randn(p.shape, generator=generator, dtype=torch.float64) / 2
    return made.double()


def _train(make: Make, model: Net, loss_of: Callable[[Net, Tensor], Tensor]) -> Answers:
    side = make(model, accumulate=2)
    for step in range(STEPS):
        for micro in range(2):
            side.backward(loss_of(model, side.call(rows(step, micro))))
        side.step()
    return side.state()


def _every(model: Net, out: Tensor) -> Tensor:
    return curved(out) + sum(block.logits.square().mean() for block in model.blocks)


def exits(make: Make) -> Answers:
    return _train(make, _net(_exit), _every)


def exits_alone(make: Make) -> Answers:
    """The loss is that of one exit; blocks above it get no gradient."""
    return _train(make, _net(_exit), lambda model, out: curved(model.blocks[1].logits) + 0 * out.detach().sum())


def exits_frozen(make: Make) -> Answers:
    model = _net(_exit)
    model.blocks.requires_grad_(False)
    return _train(make, model, _every)


def exits_checkpointed(make: Make) -> Answers:
    model = _net(_exit)

    def through(model: Net, h: Tensor) -> Tensor:
        for block in model.blocks:
            h = checkpoint(block, h, use_reentrant=False)
        return h

    model.through = through
    return _train(make, model, _every)


def exits_without_module(make: Make) -> Answers:
    return _train(make, _net(_exit_without_module), _every)


def exits_without_module_frozen(make: Make) -> Answers:
    model = _net(_exit_without_module)
    model.blocks.requires_grad_(False)
    return _train(make, model, _every)


def dataclasses(make: Make) -> Answers:
    model, seen = _net(_dataclass), list[Tensor]()

    def through(model: Net, h: Any) -> Tensor:
        seen.clear()
        for block in model.blocks:
            h = block(h)
            seen.append(h.logits)
        return h.h  # type: ignore[no-any-return]

    model.through = through
    return _train(make, model, lambda model, out: curved(out) + sum(logits.square().mean() for logits in seen))


def caught(make: Make) -> Answers:
    """The loss reads what a hook caught inside a block, and nothing else."""
    model, seen = _net(_exit), list[Tensor]()
    model.blocks[1].inner[0].register_forward_hook(lambda module, inputs, output: seen.append(output))

    def loss_of(model: Net, out: Tensor) -> Tensor:
        del model, out
        return curved(seen.pop())

    return _train(make, model, loss_of)


def steepest(make: Make) -> Answers:
    return _train(make, _net(_steepest), lambda model, out: curved(out))


class Words(nn.Module):
    """Looks rows up, and gives gradients of these rows alone."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(6, 4, sparse=True)

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.table((x * 10).long().abs().sum(1) % 6)
        return found


def sparse(make: Make) -> Answers:
    model = _net(_exit)
    model.embed = Words().double()
    with torch.no_grad():
        model.embed.table.weight.copy_(torch.linspace(-1, 1, 24, dtype=torch.float64).view(6, 4))
    return _train(partial(make, optimizer=partial(torch.optim.SGD, lr=0.05)), model, _every)
