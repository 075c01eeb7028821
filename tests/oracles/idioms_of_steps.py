"""Loops of steps, as people write them around a model whose training is distributed."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor
from torch.distributed import get_rank, get_world_size

from oracles.idiom_ranks import ADAMW, STEPS, Answers, Make, Net, curved, net, rows
from sparing.sharding import Clip


def plain(make: Make) -> Answers:
    return make(net()).train()


def adamw(make: Make) -> Answers:
    return make(net(), ADAMW).train(3)


def accumulated(make: Make) -> Answers:
    side = make(net(), accumulate=3)
    for step in range(STEPS):
        for micro in range(3):
            side.backward(curved(side.call(rows(step, micro))))
        side.step()
    return side.state()


def clipped(make: Make) -> Answers:
    return make(net(), clip=0.1).train()


def clipped_to_largest(make: Make) -> Answers:
    return make(net(), clip=Clip(0.02, math.inf)).train()


def clipped_to_sum(make: Make) -> Answers:
    return make(net(), clip=Clip(0.1, 1)).train()


def clipped_one_by_one(make: Make) -> Answers:
    return make(net(tied=True), ADAMW, clip=Clip(0.02, each=True)).train()


def reclipped(make: Make) -> Answers:
    """Another limit in each step: by hand, or in the settings of an engine."""
    side = make(net(), ADAMW)
    for step, limit in enumerate((0.1, 0.02, 5.0)):
        side.backward(curved(side.call(rows(step))))
        if side.engine is None:
            torch.nn.utils.clip_grad_norm_(side.net.parameters(), limit)
        else:
            side.engine.settings = replace(side.engine.settings, clip=limit)
        side.step()
    return side.state()


def ended_early(make: Make) -> Answers:
    """The last step of an epoch has two micro-batches, not three."""
    side = make(net(), accumulate=3)
    for micro in range(2):
        side.backward(curved(side.call(rows(0, micro))))
    side.step()
    return side.state()


def said_to_end(make: Make) -> Answers:
    """Steps of three micro-batches, of two and of one."""
    side = make(net(), ADAMW, accumulate=3, clip=0.1)
    for step, count in enumerate((3, 2, 1)):
        for micro in range(count):
            loss = curved(side.call(rows(step, micro)))
            if side.engine is None:
                side.backward(loss * 3 / count)
            else:
                side.engine.backward(loss, last=micro == count - 1)
        side.step()
    return side.state()


def filled_up(make: Make) -> Answers:
    """The same with a third whose loss is nothing, and a mean over two."""
    side = make(net(), accumulate=3)
    for step, count in enumerate((3, 2)):
        if side.engine is None:
            for micro in range(count):
                side.backward(curved(side.call(rows(step, micro))) * 3 / count)
            side.step()
            continue
        for micro in range(3):
            side.backward(curved(side.call(rows(step, micro))) * (micro < count))
        side.engine.step(divisor=get_world_size() * count)
    return side.state()


def clipped_by_largest(make: Make) -> Answers:
    """By the largest entry."""
    return _looked_at(make, lambda ps: torch.nn.utils.clip_grad_norm_(ps, 0.1, norm_type=float("inf")))


def clipped_apart(make: Make) -> Answers:
    """Each parameter by a norm of its own."""
    return _looked_at(make, lambda ps: [torch.nn.utils.clip_grad_norm_([p], 0.1) for p in ps])


def clipped_by_value(make: Make) -> Answers:
    return _looked_at(make, lambda ps: torch.nn.utils.clip_grad_value_(ps, 0.1))


def _looked_at(make: Make, clip: Callable[[list[Tensor]], object]) -> Answers:
    side = make(net())
    for step in range(STEPS):
        side.backward(curved(side.call(rows(step))))
        clip(list(side.net.parameters()))
        side.step()
    return side.state()


def tied(make: Make) -> Answers:
    return make(net(tied=True)).train()


def frozen(make: Make) -> Answers:
    model = net()
    model.blocks[1].requires_grad_(False)
    model.embed.bias.requires_grad_(False)
    return make(model).train()


def grouped(make: Make) -> Answers:
    model = net()
    groups = [
        {"params": [p for p in model.parameters() if p.ndim > 1], "weight_decay": 0.3},
        {"params": [p for p in model.parameters() if p.ndim < 2], "lr": 0.02},
    ]
    return make(model, groups=groups).train()


def unused(make: Make) -> Answers:
    """The spare layers never run: weight decay must leave them alone."""
    return make(net(spare=True), ADAMW).train(3)


def sometimes(make: Make) -> Answers:
    """The spare layers run in every other step: their count of steps lags behind."""
    model = net(spare=True)
    side = make(model, ADAMW)
    for step in range(4):
        model.use_spare = step % 2 == 1
        side.backward(curved(side.call(rows(step))))
        side.step()
    return side.state()


def on_one_rank(make: Make) -> Answers:
    model = net(spare=True)
    model.use_spare = get_rank() == 2
    return make(model, ADAMW).train()


def evaluated(make: Make) -> Answers:
    """Validation between the backward pass and the step, and between the forward and the backward pass."""
    model = net()
    side = make(model)
    for step in range(STEPS):
        loss = curved(side.call(rows(step)))
        with torch.no_grad():
            model(rows(9))
        side.backward(loss)
        with torch.no_grad():
            model(rows(8))
        side.step()
    return side.state()


def nothing_on_one_rank(make: Make) -> Answers:
    side = make(net())
    for step in range(STEPS):
        side.backward(curved(side.call(rows(step))) * (get_rank() != 3))
        side.step()
    return side.state()


def not_a_number(make: Make) -> Answers:
    """One rank's loss is NaN: so are all weights that it reached, and no others."""
    model = net()
    side = make(model)
    side.backward(curved(side.call(rows(0))) * (float("nan") if get_rank() == 1 else 1.0))
    side.step()
    return side.state()


def dropped_on_ranks(make: Make) -> Answers:
    """Stochastic depth: ranks leave out blocks, each another one, so that none is left out by all."""
    model = net(depth=3)

    def through(model: Net, h: Tensor) -> Tensor:
        for number, block in enumerate(model.blocks):
            h = h if number == get_rank() else block(h)
        return h

    model.through = through
    return make(model).train()


def dropped_alike(make: Make) -> Answers:
    """Another block is left out in each step, on all ranks."""
    model = net(depth=3)
    side = make(model, ADAMW)
    for step in range(3):
        model.through = partial(_without, step)
        side.backward(curved(side.call(rows(step))))
        side.step()
    return side.state()


def _without(left: int, model: Net, h: Tensor) -> Tensor:
    for number, block in enumerate(model.blocks):
        h = h if number == left else block(h)
    return h


def twice(make: Make) -> Answers:
    """A block runs again after others."""
    model = net()
    model.through = lambda model, h: model.blocks[0](model.blocks[1](model.blocks[0](h)))
    return make(model).train()


def looked_inside(make: Make) -> Answers:
    """A part of the loss reads a hidden state; a module's own backward hook changes what passes."""
    model = net()
    model.blocks[1].register_full_backward_hook(lambda module, inner, outer: (inner[0] * 0.5, *inner[1:]))
    side = make(model)
    seen: list[Tensor] = []
    model.blocks[0].register_forward_hook(lambda module, inputs, output: seen.append(output))
    for step in range(STEPS):
        seen.clear()
        loss = curved(side.call(rows(step)))
        side.backward(loss + seen[0].square().mean())
        side.step()
    return side.state()


def inferred(make: Make) -> Answers:
    """Validation under inference_mode between steps, of which the next step knows nothing."""
    model = net()
    side = make(model)
    found = {}
    for step in range(STEPS):
        side.backward(curved(side.call(rows(step))))
        side.step()
        with torch.inference_mode():
            found[f"out {step}"] = model(rows(0) * 0 + 1).clone()
    return {**side.state(), **found}
