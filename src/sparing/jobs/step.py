"""What an optimizer step of any job needs: who holds gradients and optimizer state, and names for steps gone wrong."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor, nn

from sparing.errors import RunError


class DivergedError(RunError):
    """The loss or a gradient is not finite; the step was not applied."""


class SpoiltError(DivergedError):
    """The last step that was applied left weights that predict nothing; no state of this run is known to be good."""


def clip_(parameters: list[nn.Parameter], limit: float) -> float:
    """Scale gradients down to a global norm (0: no limit); returns the norm before, of those that have a gradient."""
    # the norm apart from the clipping: 0 is no limit here, and to ``clip_grad_norm_`` one that makes all gradients 0
    norm = torch.nn.utils.get_total_norm([p.grad for p in parameters if p.grad is not None])
    if limit:
        torch.nn.utils.clip_grads_with_norm_(parameters, limit, norm)
    return norm.item()


class Stepper(Protocol):
    """Gradients and optimizer state of a model: whole in this process, or sharded over several."""

    @property
    def optimizer(self) -> torch.optim.Optimizer:
        """Its groups have the learning rates."""
        ...

    @property
    def sharded(self) -> bool:
        """Whether parameters are slices, which a checkpoint has beside its tree."""
        ...

    def backward(self, loss: Tensor, count: int) -> None:
        """Add the gradient of a sum of losses, of which the whole step has so many."""

    def step(self, *, apply: bool) -> float:
        """Clip and apply what was added, if ``apply`` and its norm is finite; returns the norm before."""
        ...

    def clear_(self) -> None:
        """Drop the gradients."""


@dataclass(slots=True)
class LocalStepper:
    """The model of this process with an optimizer of torch."""

    model: nn.Module
    optimizer: torch.optim.Optimizer
    clip: float  # largest norm of the gradient; 0: no limit
    sharded: bool = False

    def backward(self, loss: Tensor, count: int) -> None:
        """Add the gradient of a sum of losses, of which the whole step has so many."""
        (loss / count).backward()  # type: ignore[no-untyped-call]

    def step(self, *, apply: bool) -> float:
        """Clip and apply what was added; returns the norm before."""
        norm = clip_(list(self.model.parameters()), self.clip)
        if apply and math.isfinite(norm):
            self.optimizer.step()
        return norm

    def clear_(self) -> None:
        """Drop the gradients."""
        self.optimizer.zero_grad(set_to_none=True)


def apply_(stepper: Stepper, step: int, loss: float, lr: float) -> float:
    """Apply the gradients of a step (from 0), which ``clear_`` drops afterwards; returns their norm before clipping."""
    norm = stepper.step(apply=math.isfinite(loss))
    if not (math.isfinite(loss) and math.isfinite(norm)):
        stepper.clear_()
        raise DivergedError(f"step {step + 1}: loss {loss}, gradient norm {norm}, learning rate {lr:g}")
    return norm
