"""What an optimizer step of any job needs: gradients cut to a norm, and names for steps that went wrong."""

from __future__ import annotations

import torch
from torch import nn

from sparing.errors import RunError


class DivergedError(RunError):
    """The loss or a gradient is not finite; the step was not applied."""


class SpoiltError(DivergedError):
    """The last step that was applied left weights that predict nothing; no state of this run is known to be good."""


def clip_(parameters: list[nn.Parameter], limit: float) -> float:
    """Scale gradients down to a global norm.

    Args:
        parameters: Those whose gradients count; without gradient, none.
        limit: Largest norm; 0 for no limit.

    Returns:
        The norm before scaling.
    """
    norm = torch.nn.utils.get_total_norm([p.grad for p in parameters if p.grad is not None])
    if limit:
        torch.nn.utils.clip_grads_with_norm_(parameters, limit, norm)
    return norm.item()
