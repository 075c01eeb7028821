"""How long a rank computes: a micro-step of the live model, timed before it is sharded; nothing has changed afterwards.

micro = MicroStep(model=model, loss=lambda: model(**batch).loss)
times = time_on_all_ranks(mesh, micro)  # on all ranks; the same on each
Workload.of(specs, seconds_forward=times.forward, seconds_backward=times.backward)
"""

from __future__ import annotations

import contextlib
import random
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from sparing.blocks import find_blocks
from sparing.sharding.network.mesh import Mesh
from sparing.sharding.network.on_ranks import on_all_ranks, progress_on_first_rank

TIMED_MICRO_STEPS = 2  # micro-steps that are timed after one that warms up; the shortest counts

# A first micro-step of so many seconds warms nothing up any more: it counts, and is the only one.
LONG_SECONDS = 5.0


@dataclass(frozen=True, slots=True, kw_only=True)
class MicroStep:
    """A micro-step of one rank, which can be taken again and again."""

    model: nn.Module
    loss: Callable[[], Tensor]  # forward pass on some rows
    frozen: Collection[str] = ()  # names of blocks that do not train at first
    body: str | Sequence[str] | None = None  # where the repeated blocks are, as for ``find_blocks``


@dataclass(frozen=True, slots=True, kw_only=True)
class PassTimes:
    """What the arithmetic of a micro-step takes."""

    forward: float  # seconds
    backward: float  # seconds, recomputation included

    def __str__(self) -> str:
        """In words, for the reason of a choice."""
        return f"{self.forward:.3g} s forward and {self.backward:.3g} s backward a micro-step"


def time_micro_step(micro: MicroStep, advance: Callable[[], object] = lambda: None) -> PassTimes:
    """Time a micro-step: the shortest of a few. The model and random numbers are as before afterwards, to the bit."""
    taken: list[PassTimes] = []
    with _unchanged(micro):
        for turn in range(TIMED_MICRO_STEPS + 1):
            start = clock(micro.model)
            loss = micro.loss()
            middle = clock(micro.model)
            loss.backward()  # type: ignore[no-untyped-call]
            taken.append(PassTimes(forward=middle - start, backward=clock(micro.model) - middle))
            del loss  # its graph holds the activations
            advance()
            if turn == 0 and taken[0].forward + taken[0].backward > LONG_SECONDS:
                return taken[0]
    return min(taken[1:], key=lambda pace: pace.forward + pace.backward)


def time_on_all_ranks(mesh: Mesh, micro: MicroStep, label: str = "arithmetic") -> PassTimes | None:
    """Time a micro-step on all ranks at once, as in training; all get the longest of each pass.

    None if some rank has not enough memory for a micro-step of the whole model. ``label`` shows a progress bar.
    """
    # Ranks may share cores, so all must compute at the same time, as they will in training.
    mesh.gather_scalars(torch.zeros(1))

    def work() -> PassTimes | None:
        try:
            with progress_on_first_rank(mesh, label, TIMED_MICRO_STEPS + 1, "micro-step") as advance:
                return time_micro_step(micro, advance)
        except torch.OutOfMemoryError:
            return None

    mine = on_all_ranks(mesh, work)
    row = torch.tensor([0.0, 0.0, 1.0] if mine is None else [mine.forward, mine.backward, 0.0], dtype=torch.float64)
    forward, backward, short = mesh.gather_scalars(row).amax(0).tolist()
    return None if short else PassTimes(forward=forward, backward=backward)


def clock(model: nn.Module) -> float:
    """Seconds, once the device of the model has nothing left to do."""
    device = next(model.parameters()).device
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()


@contextlib.contextmanager
def _unchanged(micro: MicroStep) -> Iterator[None]:
    """Let the model train for a while, and put everything back that a pass changes."""
    model, device = micro.model, next(micro.model.parameters()).device
    modes = {module: module.training for module in model.modules()}
    buffers = [(m, name, b, b.clone()) for m in modes for name, b in m.named_buffers(recurse=False)]
    grads = {p: p.grad for p in model.parameters()}
    to_freeze = [
        p
        for block in find_blocks(model, body=micro.body)
        if block.name in micro.frozen
        for p in block.params.values()
        if p.requires_grad
    ]
    known = random.getstate()
    model.train()
    for parameter in grads:
        parameter.grad = None
    for parameter in to_freeze:
        parameter.requires_grad_(False)
    watched: list[Any] = [p for p in grads if p.requires_grad]
    # Gradients are dropped one by one as they come: those of a model that is to be cut need not fit as a whole.
    hooks = [parameter.register_post_accumulate_grad_hook(lambda p: setattr(p, "grad", None)) for parameter in watched]
    try:
        with torch.random.fork_rng([device] if device.type == "cuda" else []):
            yield
    finally:
        random.setstate(known)
        for hook in hooks:
            hook.remove()
        for parameter in to_freeze:
            parameter.requires_grad_(True)
        for parameter, grad in grads.items():
            parameter.grad = grad
        for module, name, buffer, value in buffers:
            # a pass may have put another tensor in its place
            setattr(module, name, buffer)
            with torch.no_grad():
                buffer.copy_(value)
        for module, mode in modes.items():
            module.training = mode
