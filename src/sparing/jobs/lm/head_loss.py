"""Next-token loss of a linear head in parts: logits of a part become their own gradient, in place, and are dropped.

The gradient of a summed cross-entropy with respect to the logits, softmax less one at the target, needs the logits and
nothing that comes later. So the products with the head's weight and with its input follow in the forward pass, and no
logits are computed twice.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from sparing.jobs.lm.labels import IGNORED


def head_loss(head: nn.Linear, hidden: Tensor, targets: Tensor, at_once: int) -> Tensor:
    """Summed loss in nats, shape (), of ``hidden``, (tokens, width), against ``targets``, int64 (tokens,)."""
    total: Tensor = _HeadLoss.apply(hidden, head.weight, head.bias, targets, at_once)  # type: ignore[no-untyped-call]
    return total


class _HeadLoss(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, bias: Tensor | None, targets: Tensor, at_once: int) -> Tensor:
        to_hidden, to_weight, to_bias = ctx.needs_input_grad[:3]
        sums = _Sums(
            torch.zeros((), dtype=torch.promote_types(hidden.dtype, torch.float32), device=hidden.device),
            torch.empty_like(hidden) if to_hidden else None,
            torch.zeros_like(weight) if to_weight else None,
            torch.zeros_like(bias) if bias is not None and to_bias else None,
        )
        for start in range(0, len(targets), at_once):
            part = slice(start, start + at_once)
            sums.add_(part, hidden[part], weight, bias, targets[part])
        ctx.grads = sums.hidden, sums.weight, sums.bias
        return sums.loss

    @staticmethod
    def backward(ctx: Any, slope: Tensor) -> tuple[Tensor | None, ...]:
        # scaled in place, since a second table would weigh as much as the logits that are saved
        if ctx.grads is None:
            raise RuntimeError("a loss in parts goes backward once: take it anew, or all logits at once")
        grads, ctx.grads = ctx.grads, None
        return *(None if grad is None else grad.mul_(slope) for grad in grads), None, None


@dataclass(slots=True)
class _Sums:
    loss: Tensor
    hidden: Tensor | None
    weight: Tensor | None
    bias: Tensor | None

    def add_(self, part: slice, rows: Tensor, weight: Tensor, bias: Tensor | None, targets: Tensor) -> None:
        slope = F.linear(rows, weight, bias).to(self.loss.dtype)
        self.loss += to_slope_(slope, targets)
        slope = slope.to(rows.dtype)
        if self.hidden is not None:
            self.hidden[part] = slope @ weight
        if self.weight is not None:
            self.weight.addmm_(slope.t(), rows)
        if self.bias is not None:
            self.bias += slope.sum(0)


def to_slope_(logits: Tensor, targets: Tensor) -> Tensor:
    """Turn logits, (tokens, vocabulary), into the gradient of their summed loss, and return that loss, shape ()."""
    seen = (targets != IGNORED)[:, None]
    aims = targets.clamp_min(0)[:, None]
    logits -= logits.amax(-1, keepdim=True)
    aimed = logits.gather(-1, aims)
    total = logits.exp_().sum(-1, keepdim=True)
    loss = torch.where(seen, total.log() - aimed, 0).sum()
    logits /= total
    logits.scatter_add_(-1, aims, torch.full_like(aimed, -1))
    logits.masked_fill_(~seen, 0)
    return loss
