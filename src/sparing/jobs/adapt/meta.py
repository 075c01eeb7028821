"""Meta-training: Adam on the weight network, one hypergradient per window; the rivals differ in how it is computed."""

from __future__ import annotations

import contextlib
import math
import time
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch

from sparing.errors import RunError
from sparing.hypergrad import hypergradient
from sparing.hypergrad.checkpointed import Checkpointed
from sparing.hypergrad.forward import ForwardGradient
from sparing.hypergrad.reverse import Reverse
from sparing.jobs.adapt.corpus import Corpus
from sparing.jobs.adapt.lm import LanguageModel
from sparing.jobs.adapt.problem import draw_window, problem
from sparing.jobs.adapt.settings import Adapt, Name
from sparing.jobs.adapt.weights import Phi, init_weights
from sparing.report import plots


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
        plain = {"step": self.step, "seconds": self.seconds, "objective": self.objective}
        moments = self.optimizer.state_dict()["state"]
        return {"phi": dict(self.phi), "adam": moments, "best": dict(self.best), **plain}


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
    """One hypergradient and one step of Adam; one of a window that overflows changes nothing and is counted."""
    begin = time.process_time()
    window = draw_window(
        lm, data, state.step, documents=arm.documents, context=settings.question_length, seed=settings.seed
    )
    bilevel = problem(
        lm,
        window,
        lr=settings.inner_lr,
        locality=settings.locality,
        clip=settings.inner_clip,
        bottleneck=arm.bottleneck,
    )
    # directions are a function of (seed, step), so a resumed run draws the same ones
    # and no two seeds share a step's within a million steps
    outer = norm = math.nan
    # a step that changes nothing is counted too: its time is spent
    with contextlib.suppress(RunError):
        result = hypergradient(bilevel, state.phi, arm.method, seed=settings.seed * 1_000_003 + state.step)
        outer = float(result.value)
        norm = math.sqrt(sum(float(slope.double().square().sum()) for slope in result.grad.values()))
        for name, value in state.phi.items():
            value.grad = result.grad[name].detach() * min(1.0, settings.outer_clip / max(norm, 1e-30))
        state.optimizer.step()
        state.optimizer.zero_grad(set_to_none=True)
    state.step += 1
    state.seconds += time.process_time() - begin
    return {
        "method": arm.name, "step": state.step, "seconds": state.seconds, "outer": outer, "norm": norm,
        "applied": math.isfinite(norm),
    }  # fmt: skip


def restore_(state: TrainState, tree: dict[str, Any]) -> None:
    """Go back to where ``TrainState.tree`` was called, from a start with the same settings."""
    # in place: the optimizer holds these very tensors
    with torch.no_grad():
        for name, value in state.phi.items():
            value.copy_(tree["phi"][name])
    groups = state.optimizer.state_dict()["param_groups"]
    state.optimizer.load_state_dict({"state": tree["adam"], "param_groups": groups})
    state.step, state.seconds = tree["step"], tree["seconds"]
    state.best, state.objective = tree["best"], tree["objective"]


CAMELS = 6  # what CaMeLS unrolls in reverse, all that its memory allowed (count)

LABELS: dict[str, str] = {
    "base": "no adapting",
    "uniform": "uniform weights",
    "names": "names and numbers only",
    "rgu": f"RGU, at most {CAMELS} documents",
    "fg-phi": "(FG)²U in φ",
    "fg-psi": "(FG)²U in ψ",
    "checkpointed": "checkpointed reverse",
}

ROLES: dict[str, plots.Role] = {
    "base": "baseline",
    "uniform": "second_rival",
    "names": "baseline",
    "rgu": "rival",
    "fg-phi": "ours",
    "fg-psi": "extension",
    "checkpointed": "reference",
}
"""Colour of each: blue is the paper's method, sky our extension of it."""


class Arm(NamedTuple):
    """One way to learn the weights."""

    name: str
    method: Any  # of the hypergradient; None learns nothing
    documents: int  # depth of its windows (count)
    bottleneck: bool = True  # whether the run sees φ through ψ


def arm_of(name: Name, settings: Adapt) -> Arm:
    """The arm of a method. RGU is plain reverse over windows of 6 documents, as CaMeLS trains, not truncated over T."""
    sampled = ForwardGradient(directions=settings.forward.directions)
    methods = {"uniform": None, "names": None, "rgu": Reverse(), "checkpointed": Checkpointed()}
    depth = min(CAMELS, settings.documents) if name == "rgu" else settings.documents
    return Arm(name, methods.get(name, sampled), depth, bottleneck=name != "fg-phi")
