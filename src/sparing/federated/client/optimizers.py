"""A client's step on its gradients, the same on one client's parameters as on those of many, stacked."""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
from torch import Tensor

from sparing.federated.settings import Schedule

Moments = dict[str, dict[str, Tensor]]
"""Running means of gradients and of their squares, by parameter; empty before a round's first step."""


def clip_(grads: Mapping[str, Tensor], max_norm: float, *, stacked: bool = False) -> None:
    """Clip gradients in place as ``torch.nn.utils.clip_grad_norm_``; if stacked, each client alone."""
    first = 1 if stacked else 0
    # 1e-6 as torch has it. [..., None]: of a stacked scalar no dimension is left to reduce.
    norms = [torch.linalg.vector_norm(grad.flatten(first) if grad.ndim > first else grad[..., None], dim=-1)
             for grad in grads.values()]  # fmt: skip
    factor = (max_norm / (torch.linalg.vector_norm(torch.stack(norms), dim=0) + 1e-6)).clamp_max(1.0)
    for grad in grads.values():
        grad.mul_(factor.view(*factor.shape, *[1] * (grad.ndim - first)) if stacked else factor)


def step_(
    params: Mapping[str, Tensor], grads: Mapping[str, Tensor], moments: Moments, lr: float, plan: Schedule, at: int
) -> None:
    """Step in place by the schedule's optimizer; ``at`` counts the steps made in this round. ``grads`` are used up."""
    if plan.optimizer == "adamw":
        _adamw_(params, grads, moments, lr, plan, at + 1)
    else:
        _sgd_(params, grads, moments.setdefault("mean", {}), lr, plan)


def first_clients(moments: Moments, clients: int) -> Moments:
    """Return the stacked moments of the first ``clients`` clients."""
    return {kind: {name: value[:clients] for name, value in by.items()} for kind, by in moments.items()}


def _sgd_(
    params: Mapping[str, Tensor], grads: Mapping[str, Tensor], momenta: dict[str, Tensor], lr: float, plan: Schedule
) -> None:
    """As ``torch.optim.SGD``: v ← βv + g + λθ and θ ← θ − lr·v."""
    for name, grad in grads.items():
        if plan.weight_decay:
            grad.add_(params[name], alpha=plan.weight_decay)
        if plan.momentum and name in momenta:
            grad = momenta[name].mul_(plan.momentum).add_(grad)
        elif plan.momentum:
            momenta[name] = grad
        params[name].add_(grad, alpha=-lr)


def _adamw_(
    params: Mapping[str, Tensor], grads: Mapping[str, Tensor], moments: Moments, lr: float, plan: Schedule, count: int
) -> None:
    """θ ← θ − lr·λθ − lr·m̂/(√v̂ + ε), in the order of ``torch.optim.AdamW``, so with its bits."""
    means, squares = moments.setdefault("mean", {}), moments.setdefault("square", {})
    unbiased, root = 1 - plan.momentum**count, math.sqrt(1 - plan.beta2**count)
    for name, grad in grads.items():
        if name not in means:
            means[name], squares[name] = torch.zeros_like(grad), torch.zeros_like(grad)
        mean = means[name].lerp_(grad, 1 - plan.momentum)
        square = squares[name].mul_(plan.beta2).addcmul_(grad, grad, value=1 - plan.beta2)
        params[name].mul_(1 - lr * plan.weight_decay)
        params[name].addcdiv_(mean, (square.sqrt() / root).add_(plan.eps), value=-lr / unbiased)
