"""Reverse-mode unrolling by ``higher`` 0.2.1: a monkey-patched module and a differentiable torch optimizer."""

from __future__ import annotations

from collections.abc import Callable

import higher
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from benchmarks.hypergrad_toys import Reweighting


def prepare(task: Reweighting) -> Callable[[], Tensor]:
    """One exact hypergradient per call."""
    net = task.net()

    def run() -> Tensor:
        weights = task.weights().requires_grad_()
        optimizer = torch.optim.SGD(net.parameters(), lr=task.lr, momentum=task.momentum, weight_decay=task.decay)
        with higher.innerloop_ctx(net, optimizer) as (functional, differentiable):
            for _ in range(task.steps):
                differentiable.step(task.inner_loss(functional(task.images), weights))
            (gradient,) = torch.autograd.grad(task.outer_loss(functional(task.held_images)), weights)
        return gradient

    return run


def through_net(
    net: nn.Module, make: Callable[..., torch.optim.Optimizer], x: Tensor, y: Tensor, steps: int
) -> Callable[[], Tensor]:
    """One exact hypergradient per call, of the mean loss for a weight of each example."""

    def run() -> Tensor:
        weights = torch.ones(len(y)).requires_grad_()
        with higher.innerloop_ctx(net, make(net.parameters())) as (functional, differentiable):
            for _ in range(steps):
                differentiable.step((weights * F.cross_entropy(functional(x), y, reduction="none")).mean())
            (gradient,) = torch.autograd.grad(F.cross_entropy(functional(x), y), weights)
        return gradient

    return run
