"""What an optimizer step of any job needs: who holds gradients and optimizer state, and names for steps gone wrong."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor, nn

from sparing.errors import RunError
from sparing.layersample.masters import Masters


class DivergedError(RunError):
    """The loss or a gradient is not finite; the step was not applied."""


class SpoiltError(DivergedError):
    """The last step that was applied left weights that predict nothing; no state of this run is known to be good."""


def clip_(parameters: list[nn.Parameter], limit: float) -> Tensor:
    """Scale gradients down to a global norm (0: no limit); returns the norm before, of those that have a gradient.

    The norm, shape (), stays on its device: nothing waits for it here.
    """
    # the norm apart from the clipping: 0 is no limit here, and to ``clip_grad_norm_`` one that makes all gradients 0
    norm = torch.nn.utils.get_total_norm([p.grad for p in parameters if p.grad is not None])
    if limit:
        torch.nn.utils.clip_grads_with_norm_(parameters, limit, norm)
    return norm


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

    def step(self, loss: Tensor) -> tuple[float, float]:
        """Clip and apply what was added, if its norm and the loss of the step are finite.

        Returns both, the norm before clipping.
        """
        ...

    def clear_(self) -> None:
        """Drop the gradients."""

    def finish_(self) -> None:
        """After the last step: leave the same weights on all ranks."""


@dataclass(slots=True)
class LocalStepper:
    """The model of this process with an optimizer of torch."""

    model: nn.Module
    optimizer: torch.optim.Optimizer
    clip: float  # largest norm of the gradient; 0: no limit
    masters: Masters | None = None  # 32-bit copies of 16-bit weights; None where layer sampling has its own
    sharded: bool = False

    def backward(self, loss: Tensor, count: int) -> None:
        """Add the gradient of a sum of losses, of which the whole step has so many."""
        (loss / count).backward()  # type: ignore[no-untyped-call]

    def step(self, loss: Tensor) -> tuple[float, float]:
        """Clip and apply what was added if all is finite; returns loss and norm."""
        norm = clip_(list(self.model.parameters()), self.clip)
        # the only time in a step that the host waits for the device
        value, size = torch.stack([loss.double(), norm.to(loss.device).double()]).tolist()
        if math.isfinite(value) and math.isfinite(size):
            self.optimizer.step()
        return value, size

    def finish_(self) -> None:
        """Do nothing: there are no others."""

    def clear_(self) -> None:
        """Drop the gradients."""
        self.optimizer.zero_grad(set_to_none=True)


def apply_(stepper: Stepper, step: int, loss: Tensor, lr: float) -> tuple[float, float]:
    """Apply the gradients of a step (from 0), which ``clear_`` drops afterwards.

    Returns its mean loss and the norm of the gradients before clipping.
    """
    value, norm = stepper.step(loss)
    if not (math.isfinite(value) and math.isfinite(norm)):
        stepper.clear_()
        raise DivergedError(f"step {step + 1}: loss {value}, gradient norm {norm}, learning rate {lr:g}")
    return value, norm
