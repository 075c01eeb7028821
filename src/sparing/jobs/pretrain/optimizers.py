"""The optimizer of a run, on the groups of its plan."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from sparing.jobs.pretrain.settings import Pretrain
from sparing.scaling.planning import Plan
from sparing.scaling.spectral import Spectral

EPS = 1e-8  # of Adam in the base


class Both(torch.optim.Optimizer):
    """Two optimizers over different parameters as one, with common groups and a common state.

    Example:
        >>> one, other = (nn.Parameter(torch.ones(1)) for _ in range(2))
        >>> both = Both(torch.optim.SGD([one], lr=1.0), torch.optim.SGD([other], lr=2.0))
        >>> (3 * one + other).sum().backward()
        >>> both.step()
        >>> one.item(), other.item()
        (-2.0, -1.0)
    """

    def __init__(self, first: torch.optim.Optimizer, second: torch.optim.Optimizer) -> None:
        """Join two; the first has no state yet."""
        super().__init__([*first.param_groups, *second.param_groups], {})
        self.parts = (first, second)
        self._share()

    def _share(self) -> None:
        """Have both parts work on the groups and the state of the whole."""
        # ``load_state_dict`` of torch replaces both objects, so they are shared again after it.
        cut = len(self.parts[0].param_groups)
        self.parts[0].param_groups, self.parts[1].param_groups = self.param_groups[:cut], self.param_groups[cut:]
        for part in self.parts:
            part.state = self.state

    def step(self, closure: Callable[[], Any] | None = None) -> None:  # type: ignore[override]
        """Take one step with each."""
        assert closure is None
        for part in self.parts:
            part.step()

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Load what ``state_dict`` returned."""
        super().load_state_dict(dict(state_dict))
        self._share()


def groups_for(settings: Pretrain, model: nn.Module, plan: Plan) -> list[dict[str, Any]]:
    """Parameter groups with ``lr_scale`` at their peak rates, of an optimizer that treats each weight alone."""
    same: dict[str, Any] = {"lr": settings.lr, "weight_decay": settings.weight_decay}
    if settings.optimizer == "sgd":
        return plan.groups(model, **same, momentum=settings.betas[0])
    return plan.groups(model, **same, betas=tuple(settings.betas), eps=EPS)


def factory_for(settings: Pretrain) -> Callable[[Any], torch.optim.Optimizer]:
    """A function from groups to an optimizer, sgd or adamw."""
    if settings.optimizer == "sgd":
        return partial(torch.optim.SGD, lr=settings.lr)
    return partial(torch.optim.AdamW, lr=settings.lr, fused=True)


def optimizer_for(
    settings: Pretrain, model: nn.Module, plan: Plan, masks: Mapping[str, Tensor]
) -> torch.optim.Optimizer:
    """An optimizer of torch over all parameters, its groups at their peak rates."""
    if settings.optimizer != "muon":
        return factory_for(settings)(groups_for(settings, model, plan))
    same: dict[str, Any] = {"lr": settings.lr, "weight_decay": settings.weight_decay}
    moments: dict[str, Any] = {"betas": tuple(settings.betas), "eps": EPS}
    momentum: dict[str, Any] = {"momentum": settings.betas[0]}
    # Muon is defined for hidden matrices; embeddings, head and vectors go to AdamW.
    hidden = {name for name, entry in plan.entries.items() if entry.role == "hidden"}
    muon = torch.optim.Muon(plan.groups(model, names=hidden, **same, **momentum), lr=settings.lr)
    rest = plan.groups(model, names=plan.entries.keys() - hidden, **same, **moments)
    both = Both(muon, torch.optim.AdamW(rest, lr=settings.lr, fused=True))
    return Spectral(both, model, plan, masks, seed=settings.seed)
