"""Meta-training: Adam on the weight network, one hypergradient per window."""

from __future__ import annotations

import math
import time
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from sparing.hypergrad import hypergradient
from sparing.jobs.adapt.arms import Arm
from sparing.jobs.adapt.corpus import Corpus
from sparing.jobs.adapt.lm import LanguageModel
from sparing.jobs.adapt.problem import draw_window, problem
from sparing.jobs.adapt.settings import Adapt
from sparing.jobs.adapt.weights import Phi, init_weights


@dataclass(slots=True, eq=False)
class TrainState:
    """What an outer step reads or changes."""

    phi: Phi  # the weight network
    optimizer: torch.optim.Adam
    step: int = 0  # outer steps taken (count)
    seconds: float = 0.0  # CPU time of those steps (s)
    best: Phi = field(default_factory=dict)  # the network of lowest objective on the validation stream so far
    objective: float = math.inf  # of ``best`` (nat/token)

    def tree(self) -> dict[str, Any]:
        """Everything that the next step depends on."""
        optimizer = self.optimizer.state_dict()["state"]
        kept = {"best": dict(self.best), "objective": self.objective}
        return {"phi": dict(self.phi), "adam": optimizer, "step": self.step, "seconds": self.seconds, **kept}


def start(inputs: int, settings: Adapt, *, dtype: torch.dtype = torch.float32) -> TrainState:
    """A network that weighs all tokens alike; every method of a seed starts from the same one."""
    phi = init_weights(inputs, width=settings.width, seed=settings.seed, dtype=dtype)
    return TrainState(phi, torch.optim.Adam(list(phi.values()), lr=settings.outer_lr))


def ended(state: TrainState, settings: Adapt) -> bool:
    """Whether its steps or its time are used up."""
    return state.step >= settings.steps or state.seconds >= settings.seconds


def budget_used(state: TrainState, settings: Adapt) -> float:
    """How much of its budget is used: 0 at the start, 1 or a little more at the end."""
    return max(state.step / settings.steps, state.seconds / settings.seconds)


def evaluation_due(before: float, now: float, looks: int) -> bool:
    """Whether a step took the used share of the budget into a new one of ``looks`` parts.

    Example:
        >>> evaluation_due(0.2, 0.3, 4), evaluation_due(0.3, 0.4, 4), evaluation_due(0.9, 1.1, 4)
        (True, False, True)
    """
    return math.floor(min(now, 1.0) * looks) > math.floor(min(before, 1.0) * looks)


def keep_best_(state: TrainState, objective: float) -> None:
    """Keep the present network if none before it had a lower objective on the validation stream (nat/token)."""
    # NaN compares false with every number: kept as best, it would never be replaced
    finite = objective if math.isfinite(objective) else math.inf
    if not state.best or finite < state.objective:
        state.best = {name: value.clone() for name, value in state.phi.items()}
        state.objective = finite


def outer_step_(state: TrainState, lm: LanguageModel, data: Corpus, settings: Adapt, arm: Arm) -> dict[str, Any]:
    """One hypergradient and one step of Adam; a hypergradient that is not finite changes nothing and is counted."""
    begin = time.process_time()
    window = draw_window(lm, data, state.step, documents=arm.documents, context=settings.context, seed=settings.seed)
    fixed = {"lr": settings.lr, "locality": settings.locality, "clip": settings.inner_clip}
    bilevel = problem(lm, window, bottleneck=arm.bottleneck, **fixed)
    # directions are a function of (seed, step), so a resumed run draws the same ones
    result = hypergradient(bilevel, state.phi, arm.method, seed=settings.seed * 1_000_003 + state.step)
    norm = math.sqrt(sum(float(slope.double().square().sum()) for slope in result.grad.values()))
    if math.isfinite(norm):
        for name, value in state.phi.items():
            value.grad = result.grad[name].detach() * min(1.0, settings.clip / max(norm, 1e-30))
        state.optimizer.step()
        state.optimizer.zero_grad(set_to_none=True)
    # a step that changed nothing is counted too: its time is spent
    state.step += 1
    state.seconds += time.process_time() - begin
    row = {"step": state.step, "seconds": state.seconds, "outer": float(result.value), "norm": norm}
    return {"method": arm.name, **row, "applied": math.isfinite(norm)}


def restore_(state: TrainState, tree: dict[str, Any]) -> None:
    """Go back to where ``TrainState.tree`` was called, from a start with the same settings."""
    saved: dict[str, Tensor] = tree["phi"]
    # in place: the optimizer holds these very tensors
    with torch.no_grad():
        for name, value in state.phi.items():
            value.copy_(saved[name])
    groups = state.optimizer.state_dict()["param_groups"]
    state.optimizer.load_state_dict({"state": tree["adam"], "param_groups": groups})
    state.step, state.seconds = tree["step"], tree["seconds"]
    state.best, state.objective = tree["best"], tree["objective"]
