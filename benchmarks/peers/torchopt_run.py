"""Reverse-mode unrolling by TorchOpt 0.7.3: ``MetaSGD`` on a module whose state is put back after each call."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torchopt
from torch import Tensor

from benchmarks.hypergrad_toys import Reweighting


def prepare(task: Reweighting) -> Callable[[], Tensor]:
    """One exact hypergradient per call."""
    net = task.net()
    optimizer = torchopt.MetaSGD(net, lr=task.lr, momentum=task.momentum, weight_decay=task.decay)
    fresh = [torchopt.extract_state_dict(kept, by="reference") for kept in (net, optimizer)]

    def run() -> Tensor:
        weights = task.weights().requires_grad_()
        for _ in range(task.steps):
            optimizer.step(task.inner_loss(net(task.images), weights))
        (gradient,) = torch.autograd.grad(task.outer_loss(net(task.held_images)), weights)
        for kept, state in zip((net, optimizer), fresh, strict=True):
            torchopt.recover_state_dict(kept, state)
        return gradient

    return run
