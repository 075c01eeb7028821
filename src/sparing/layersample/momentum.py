"""One more step along the momentum of parameters whose optimizer state is about to be dropped."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn

from sparing.errors import require
from sparing.layersample.masters import Masters


class MomentumStep:
    """``θ ← θ − α·β₁/(1 − β₁)·m/√(v + ε)`` with the learning rate of the last step and its β₁ and ε.

    Source: MISA (arXiv:2511.00056), Algorithm 1, line 16; m and v are without bias correction there.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, masters: Masters | None) -> None:
        """Hook into the optimizer; one without Adam's moments is refused."""
        adam = isinstance(optimizer, torch.optim.Adam | torch.optim.AdamW)
        name, why = type(optimizer).__name__, "the step is along Adam's first moment"
        require(adam, "LayerSampling.momentum_step", name, why, "use torch.optim.AdamW, or pass momentum_step=False")
        self._optimizer, self._masters = optimizer, masters
        # learning rate, β₁ and ε of each group in the last step
        self.rates: list[tuple[float, float, float]] = []
        # a scheduler, or the loop, may have changed the groups' options by the time the interval ends
        self._handle = optimizer.register_step_pre_hook(self._before)

    def apply_(self, params: Mapping[str, nn.Parameter]) -> None:
        """Take the step for those that have moments."""
        for group, (rate, beta, epsilon) in zip(self._optimizer.param_groups, self.rates, strict=False):
            mine = {p for p in group["params"] if self._optimizer.state.get(p)}
            for name, p in params.items():
                if p in mine:
                    state = self._optimizer.state[p]
                    step = (state["exp_avg_sq"] + epsilon).rsqrt_().mul_(state["exp_avg"])
                    self._add_(name, p, step.mul_(-rate * beta / (1.0 - beta)))

    def load(self, saved: Sequence[float | Sequence[float]]) -> None:
        """Take up ``rates`` as they were saved; older files have learning rates alone."""
        held = [(group["betas"][0], group["eps"]) for group in self._optimizer.param_groups]
        given = [(r, *more) if isinstance(r, float) else tuple(r) for r, more in zip(saved, held, strict=False)]
        self.rates = [(float(rate), float(beta), float(epsilon)) for rate, beta, epsilon in given]

    def close(self) -> None:
        """Leave the optimizer."""
        self._handle.remove()

    def _add_(self, name: str, p: nn.Parameter, step: torch.Tensor) -> None:
        with torch.no_grad():
            if self._masters is not None and name in self._masters.weights:
                self._masters.add_(name, p, step)
            else:
                p.add_(step)

    def _before(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        # numbers: a rate that is a tensor is changed in place
        groups = optimizer.param_groups
        self.rates = [(float(group["lr"]), float(group["betas"][0]), group["eps"]) for group in groups]
