"""The arithmetic of a client's step, for one client and for many stacked: clipping, and SGD with momentum."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from sparing.federated.settings import Schedule

_TINY = 1e-6  # as torch.nn.utils.clip_grad_norm_


def clip_(grads: Mapping[str, Tensor], most: float, *, stacked: bool = False) -> None:
    """Shrink gradients in place to a largest norm, as ``torch.nn.utils.clip_grad_norm_``.

    Args:
        grads: Gradients by name; if stacked, shape (clients, ...).
        most: Largest Euclidean norm over all tensors of a client.
        stacked: Whether the first dimension is that of clients; each is clipped for itself.
    """
    first = 1 if stacked else 0
    norms = [torch.linalg.vector_norm(grad.flatten(first) if grad.ndim > first else grad[..., None], dim=-1)
             for grad in grads.values()]  # fmt: skip
    factor = (most / (torch.linalg.vector_norm(torch.stack(norms), dim=0) + _TINY)).clamp_max(1.0)
    for grad in grads.values():
        grad.mul_(factor.view(*factor.shape, *[1] * (grad.ndim - first)) if stacked else factor)


def sgd_(
    params: Mapping[str, Tensor], grads: Mapping[str, Tensor], momenta: dict[str, Tensor], lr: float, plan: Schedule
) -> None:
    """Step in place: v ← βv + g + λθ and θ ← θ − lr·v, as ``torch.optim.SGD``; ``grads`` are used up.

    Args:
        params: Detached parameters by name; those without a gradient stay.
        grads: Gradients by name.
        momenta: v by name, changed in place; empty before the first step.
        lr: Learning rate of this round.
        plan: Its ``momentum`` (β) and ``weight_decay`` (λ).
    """
    for name, grad in grads.items():
        if plan.weight_decay:
            grad.add_(params[name], alpha=plan.weight_decay)
        if plan.momentum and name in momenta:
            grad = momenta[name].mul_(plan.momentum).add_(grad)
        elif plan.momentum:
            momenta[name] = grad
        params[name].add_(grad, alpha=-lr)
