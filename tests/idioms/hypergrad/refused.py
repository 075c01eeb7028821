"""What users write into an inner loss and no method can get right: a problem each, and what its refusal says."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from idioms.hypergrad.problems import STEPS, Net, Segment, bilevel, shaken
from oracles.problems import X, Y, draw
from sparing import hypergrad as hg


def own_generator() -> hg.Bilevel:
    generator = torch.Generator().manual_seed(3)
    return bilevel(extra=shaken(lambda: torch.randn(3, generator=generator)))


def own_generator_from_step_one() -> hg.Bilevel:
    generator = torch.Generator().manual_seed(3)
    noisy = shaken(lambda: torch.randn(3, generator=generator))
    extra = lambda theta, phi, batch: noisy(theta, phi, batch) if batch else 0.0  # noqa: E731
    return bilevel(batches=lambda step: step, extra=extra)


def batches_random(first: int) -> hg.Bilevel:
    """Other data in each call, from a step on."""
    generator = torch.Generator().manual_seed(3)

    def batches(step: int) -> Tensor:
        drawn = torch.randn(3, generator=generator, dtype=torch.float64)
        return drawn if step >= first else torch.ones(3, dtype=torch.float64)

    extra = lambda theta, phi, batch: (batch * theta["last.weight"][0] * phi["weight"][:3]).sum()  # noqa: E731
    return bilevel(batches=batches, extra=extra)


def checkpointed(*, reentrant: bool) -> hg.Bilevel:
    return bilevel(Net(Segment(reentrant=reentrant)))


def checkpointed_at_the_input() -> hg.Bilevel:
    """Reentrant where no input requires a gradient: torch warns, and the segment does not learn."""
    net = Net()

    def inner(theta: Any, phi: Any, batch: Any) -> Tensor:
        hidden = checkpoint(lambda x: torch.tanh(x @ theta["first.weight"].T), X, use_reentrant=True)
        miss = (hidden @ theta["last.weight"].T)[:, 0] - Y
        return (torch.sigmoid(phi["weight"]) * miss.square()).mean()

    return bilevel(net, inner=inner)


def checkpointed_outside() -> hg.Bilevel:
    """The outer loss alone."""
    net = Net(Segment(reentrant=False))
    made = bilevel(net)
    plain = lambda theta, phi, batch: sum(w.square().sum() for w in theta.values()) * phi["weight"].sum()  # noqa: E731
    return bilevel(net, inner=plain, outer=made.outer)


def batch_norm_that_learns() -> hg.Bilevel:
    return bilevel(Net(norm=nn.BatchNorm1d(3)))


def batch_norm_as_a_function() -> hg.Bilevel:
    mean, var = torch.zeros(3, dtype=torch.float64), torch.ones(3, dtype=torch.float64)

    def extra(theta: Any, phi: Any, batch: Any) -> Tensor:
        return F.batch_norm(X @ theta["first.weight"].T, mean, var, training=True).pow(3).mean()

    return bilevel(extra=extra)


def spectral_norm() -> hg.Bilevel:
    net = Net()
    nn.utils.spectral_norm(net.first)
    return bilevel(net)


def average_of_weights() -> hg.Bilevel:
    teacher = torch.zeros(3, dtype=torch.float64)

    def extra(theta: Any, phi: Any, batch: Any) -> Tensor:
        teacher.mul_(0.9).add_(theta["last.weight"][0].detach(), alpha=0.1)
        return (theta["last.weight"][0] - teacher).square().sum() * phi["weight"][0]

    return bilevel(extra=extra)


def batch_changed_in_place() -> hg.Bilevel:
    held = [draw(3, seed=step) for step in range(STEPS)]
    extra = lambda theta, phi, batch: (batch.mul_(0.5) * theta["last.weight"][0] * phi["weight"][:3]).sum()  # noqa: E731
    return bilevel(batches=held, extra=extra)


def counter() -> hg.Bilevel:
    count = itertools.count(1)
    extra = lambda theta, phi, batch: theta["last.weight"].square().sum() * phi["weight"][0] / next(count)  # noqa: E731
    return bilevel(extra=extra)


def iterator() -> hg.Bilevel:
    rows = iter(draw(40, 3, seed=1))
    return bilevel(extra=shaken(lambda: next(rows)))


def numpy_generator() -> hg.Bilevel:
    return bilevel(extra=shaken(lambda: np.random.default_rng().normal(size=3)))


def python_generator() -> hg.Bilevel:
    return bilevel(extra=shaken(lambda: [random.random() for _ in range(3)]))  # what a user does


def one_buffer_for_all_batches() -> hg.Bilevel:
    """A loader in numpy that fills one array again and again; torch cannot see it."""
    buffer, rows = np.zeros(3), np.arange(3.0 * STEPS).reshape(STEPS, 3)

    def batches(step: int) -> Tensor:
        buffer[:] = rows[step]
        return torch.from_numpy(buffer)

    extra = lambda theta, phi, batch: (batch * theta["last.weight"][0] * phi["weight"][:3]).square().sum()  # noqa: E731
    return bilevel(batches=batches, extra=extra)


def a_scheduler_that_counts() -> hg.Bilevel:
    weight = nn.Parameter(torch.zeros(1))
    scheduler = torch.optim.lr_scheduler.ExponentialLR(torch.optim.SGD([weight], lr=0.2), 0.5)

    def rate(step: int) -> float:
        now = scheduler.get_last_lr()[0]
        scheduler.optimizer.step()
        scheduler.step()
        return now

    return bilevel(optimizer=hg.SGD(lr=rate, momentum=0.9))


def random_augmentation() -> hg.Bilevel:
    """A dataset whose items are drawn anew each time they are asked for."""
    generator = torch.Generator().manual_seed(3)

    class Set:
        def __len__(self) -> int:
            return STEPS

        def __getitem__(self, step: int) -> Tensor:
            return torch.randn(3, generator=generator, dtype=torch.float64)

    extra = lambda theta, phi, batch: (batch * theta["last.weight"][0] * phi["weight"][:3]).sum()  # noqa: E731
    return bilevel(batches=Set(), extra=extra)


def hook_on_a_tensor() -> hg.Bilevel:
    """Gradients of a layer halved."""

    def extra(theta: Any, phi: Any, batch: Any) -> Tensor:
        hidden = torch.tanh(X @ theta["first.weight"].T)
        hidden.register_hook(lambda gradient: 0.5 * gradient)
        return (torch.sigmoid(phi["weight"]) * hidden.sum(1)).mean()

    return bilevel(extra=extra)


class Once(torch.autograd.Function):
    """As fused kernels are written."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x.exp()

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient * ctx.saved_tensors[0].exp()


def once_differentiable() -> hg.Bilevel:
    extra = lambda theta, phi, batch: (Once.apply(theta["last.weight"][0]) * phi["weight"][:3]).sum()  # noqa: E731
    return bilevel(extra=extra)


REFUSED: dict[str, tuple[Callable[[], hg.Bilevel], str]] = {
    "own generator": (own_generator, "inner: got another loss at step 0"),
    "batches random from step 1": (lambda: batches_random(1), "batches: got other data"),
    "batches random from step 0": (lambda: batches_random(0), "batches: got other data"),
    "checkpointing without reentry": (lambda: checkpointed(reentrant=False), "inner: got gradient checkpointing"),
    "reentrant checkpointing": (lambda: checkpointed(reentrant=True), "reentrant|inner: got gradient checkpointing"),
    "reentrant checkpointing of the input": (checkpointed_at_the_input, "inner: got gradient checkpointing"),
    "batch norm that learns its statistics": (batch_norm_that_learns, "on a tensor that it did not make"),
}
"""On every method."""

REFUSED_BY_ALGORITHM: dict[str, tuple[Callable[[], hg.Bilevel], str]] = {
    "checkpointing in the outer loss": (checkpointed_outside, "outer: got gradient checkpointing"),
    "batch norm as a function": (batch_norm_as_a_function, "on a tensor that it did not make"),
    "spectral norm": (spectral_norm, "on a tensor that it did not make"),
    "a running average of the weights": (average_of_weights, "on a tensor that it did not make"),
    "a batch changed in place": (batch_changed_in_place, "on a tensor that it did not make"),
    "a counter": (counter, "inner: got another loss at step 0"),
    "an iterator inside the loss": (iterator, "inner: got another loss at step 0"),
    "a generator of numpy": (numpy_generator, "inner: got another loss at step 0"),
    "the generator of Python": (python_generator, "inner: got another loss at step 0"),
    "one buffer for all batches": (one_buffer_for_all_batches, "batches: got a batch that changes"),
    "a scheduler that counts its calls": (a_scheduler_that_counts, "optimizer.lr: got another value at the same step"),
    "a dataset of random augmentations": (random_augmentation, "batches: got other data"),
    "register_hook inside the loss": (hook_on_a_tensor, "inner: got register_hook on a tensor"),
}
"""On one method of each algorithm."""
