"""Loops that save, resume, or send gradients through a distributed model in ways of their own."""

from __future__ import annotations

import tempfile
from functools import partial
from pathlib import Path

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed import all_reduce, barrier, broadcast_object_list
from torch.utils.checkpoint import checkpoint

from oracles.idiom_ranks import ADAMW, STEPS, Answers, Make, Net, Side, curved, net, rows
from sparing.sharding import checkpoint as checkpoint_files
from sparing.sharding.fsdp.engine import FsdpEngine


def _resumed(side: Side, make: Make) -> Side:
    """The same run in a new engine, by way of a checkpoint; DistributedDataParallel's just goes on."""
    if side.engine is None:
        return side
    second = make(net(seed=9, spare=True), ADAMW)
    with tempfile.TemporaryDirectory() as own:
        shared = [own]
        broadcast_object_list(shared, 0)
        folder = Path(shared[0]) / "checkpoint"
        if isinstance(side.engine, FsdpEngine):
            dcp.save(side.engine.state_dict(), checkpoint_id=folder)
            dcp.load(state := second.engine.state_dict(), checkpoint_id=folder)
            second.engine.load_state_dict_(state)
        else:
            checkpoint_files.save(side.engine, folder)
            checkpoint_files.load_(second.engine, folder)
        barrier()
    return second


def resumed(make: Make) -> Answers:
    """Layers that are used only after a checkpoint start with no state, as they would without one."""
    side = make(net(spare=True), ADAMW)
    side.train()
    side = _resumed(side, make)
    side.net.use_spare = True
    return side.train()


def moved(make: Make) -> Answers:
    """The same over a change of the plan."""
    side = make(net(spare=True), ADAMW)
    side.train()
    if side.engine:
        # where fully_shard cuts is fixed: on it, what is kept whole changes
        alike = {
            "NNN": "NNN", "NNI": "III", "NNG": "GGG", "NII": "NNI", "NIG": "GNG", "NGG": "NIG", "INI": "III",
            "ING": "IIG", "III": "INI", "IIG": "ING", "IGG": "IIG", "GNG": "NNG", "GIG": "NGG", "GGG": "NIG",
        }  # fmt: skip
        side.engine.set_plan(alike[side.engine.plan.name] if isinstance(side.engine, FsdpEngine) else "NII")
    side.net.use_spare = True
    return side.train()


def moved_elsewhere(make: Make) -> Answers:
    side = make(net(), ADAMW)
    side.train()
    if side.engine:
        inside = isinstance(side.engine, FsdpEngine) and side.engine.plan.name in {"NNI", "NII", "INI", "III"}
        side.engine.set_plan("GGG" if inside else "NII")
    return side.train()


def resumed_of_several_ages(make: Make) -> Answers:
    side = make(net(spare=True), ADAMW)
    side.train(1)
    side.net.use_spare = True
    side.train(1)
    return _resumed(side, make).state()


def kept_optimizer(make: Make) -> Answers:
    side = make(net())
    side.train(1)
    side.optimizer.load_state_dict(side.optimizer.state_dict())
    return side.train(1)


def adversarial(make: Make) -> Answers:
    """The gradient of the input first, through the same graph and through one of its own."""
    side = make(net(), accumulate=2)
    for step in range(STEPS):
        x = rows(step).requires_grad_()
        loss = curved(side.call(x))
        (grad,) = torch.autograd.grad(loss, x, retain_graph=True)
        side.backward(loss)
        x = rows(step).requires_grad_()
        (grad,) = torch.autograd.grad(curved(side.call(x)), x)
        side.backward(curved(side.call((x + 0.1 * grad.sign()).detach())))
        side.step()
    return side.state()


def own_gradients(make: Make) -> Answers:
    """Gradients of parameters for a look: this rank's, which change nothing."""
    model = net()
    side = make(model)
    found = {}
    for step in range(STEPS):
        names, params = zip(*model.named_parameters(), strict=True)
        loss = curved(side.call(rows(step, count=2)))
        grads = torch.autograd.grad(loss, params, retain_graph=True)
        for grad in grads:
            all_reduce(grad)
        found |= {f"{name} {step}": grad for name, grad in zip(names, grads, strict=True)}
        side.backward(loss)
        side.step()
    return side.state() | found


def adversaries(make: Make) -> Answers:
    """Two models: the loss of the first goes through the second."""
    maker, critic = make(net(outputs=3)), make(net(seed=8, outputs=1))
    for step in range(3):
        critic.optimizer.zero_grad()
        critic.backward(curved(critic.call(rows(step))) - critic.call(maker.call(rows(step, 1)).detach()).mean())
        critic.step()
        maker.backward(-critic.call(maker.call(rows(step, 2))).mean())
        maker.step()
    return {f"maker {n}": v for n, v in maker.state().items()} | {f"critic {n}": v for n, v in critic.state().items()}


def penalised_gradient(make: Make) -> Answers:
    side = make(net())
    for step in range(STEPS):
        x = rows(step).requires_grad_()
        out = side.call(x)
        (grad,) = torch.autograd.grad(out.sum(), x, create_graph=True)
        side.backward(curved(out) + (grad.norm(dim=1) - 1).square().mean())
        side.step()
    return side.state()


def _segments(model: Net, h: Tensor, *, reentrant: bool) -> Tensor:
    for first in (0, 2):
        pair = nn.Sequential(model.blocks[first], model.blocks[first + 1])
        h = checkpoint(pair, h, use_reentrant=reentrant)
    return h


def _uneven(model: Net, h: Tensor, *, reentrant: bool) -> Tensor:
    """A segment of three blocks, and one that is not checkpointed below it."""
    return checkpoint(nn.Sequential(*model.blocks[1:]), model.blocks[0](h), use_reentrant=reentrant)  # type: ignore[no-any-return]


def _through(make: Make, reentrant: bool) -> Answers:
    found: Answers = {}
    for name, way in (("even", _segments), ("uneven", _uneven)):
        model = net(depth=4)
        model.through = partial(way, reentrant=reentrant)
        side = make(model, accumulate=2)
        for step in range(STEPS):
            for micro in range(2):
                side.backward(curved(side.call(rows(step, micro))))
            side.step()
        found |= {f"{name} {n}": v for n, v in side.state().items()}
    return found


def reentrant(make: Make) -> Answers:
    return _through(make, True)


def not_reentrant(make: Make) -> Answers:
    return _through(make, False)


def whole_model_checkpointed(make: Make) -> Answers:
    side = make(net())
    for step in range(STEPS):
        side.backward(curved(checkpoint(side.call, rows(step), use_reentrant=False)))
        side.step()
    return side.state()


def forwards_first(make: Make) -> Answers:
    side = make(net(), accumulate=2)
    for step in range(STEPS):
        losses = [curved(side.call(rows(step, micro))) for micro in range(2)]
        for loss in losses:
            side.backward(loss)
        side.step()
    return side.state()


def hooked(make: Make) -> Answers:
    model = net()
    model.head.weight.register_hook(lambda grad: grad.clamp(-0.5, 0.5))
    side = make(model, accumulate=2)
    model.blocks[1].first.weight.register_hook(lambda grad: grad * 3)
    for step in range(STEPS):
        for micro in range(2):
            side.backward(curved(side.call(rows(step, micro))))
        side.step()
    return side.state()


def hooked_before(make: Make) -> Answers:
    """Hooks of before, one of which is taken off between steps."""
    model = net()
    model.head.weight.register_hook(lambda grad: grad.clamp(-0.5, 0.5))
    tripled = model.blocks[1].first.weight.register_hook(lambda grad: grad * 3)
    side = make(model, accumulate=2)
    for step in range(3):
        for micro in range(2):
            side.backward(curved(side.call(rows(step, micro))))
        side.step()
        if step == 1:
            tripled.remove()
    return side.state()


def hooked_after(make: Make) -> Answers:
    """A hook after the gradient is there, of somebody who came later than the engine."""
    model = net()
    side = make(model)

    def clamp(parameter: Tensor) -> None:
        assert parameter.grad is not None
        parameter.grad.clamp_(-0.5, 0.5)

    for parameter in (model.head.weight, model.blocks[0].second.weight):
        parameter.register_post_accumulate_grad_hook(clamp)
    return side.train()
