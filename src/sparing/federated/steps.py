"""The arithmetic of a client's step, for one client and for many stacked: clipping, and SGD with momentum."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from sparing.federated.settings import Schedule

_TINY = 1e-6  # as torch.nn.utils.clip_grad_norm_


def clip_(grads: Mapping[str, Tensor], max_norm: float, *, stacked: bool = False) -> None:
    """Clip gradients in place as ``torch.nn.utils.clip_grad_norm_``; if stacked, each client alone."""
    first = 1 if stacked else 0
    # [..., None]: of a stacked scalar no dimension is left to reduce.
    norms = [torch.linalg.vector_norm(grad.flatten(first) if grad.ndim > first else grad[..., None], dim=-1)
             for grad in grads.values()]  # fmt: skip
    factor = (max_norm / (torch.linalg.vector_norm(torch.stack(norms), dim=0) + _TINY)).clamp_max(1.0)
    for grad in grads.values():
        grad.mul_(factor.view(*factor.shape, *[1] * (grad.ndim - first)) if stacked else factor)


def sgd_(
    params: Mapping[str, Tensor], grads: Mapping[str, Tensor], momenta: dict[str, Tensor], lr: float, plan: Schedule
) -> None:
    """Step in place: v ← βv + g + λθ and θ ← θ − lr·v, as ``torch.optim.SGD``; ``grads`` are used up."""
    for name, grad in grads.items():
        if plan.weight_decay:
            grad.add_(params[name], alpha=plan.weight_decay)
        if plan.momentum and name in momenta:
            grad = momenta[name].mul_(plan.momentum).add_(grad)
        elif plan.momentum:
            momenta[name] = grad
        params[name].add_(grad, alpha=-lr)
