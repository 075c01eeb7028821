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
from sparing.jobs.adapt.lm import Language
from sparing.jobs.adapt.materials import Materials
from sparing.jobs.adapt.problem import draw_window, problem
from sparing.jobs.adapt.settings import Adapt
from sparing.jobs.adapt.weights import Phi, fresh


@dataclass(slots=True, eq=False)
class Course:
    """A meta-training on its way."""

    phi: Phi  # the weight network
    optimizer: torch.optim.Adam
    step: int = 0  # outer steps taken (count)
    seconds: float = 0.0  # CPU time of those steps (s)
    best: Phi = field(default_factory=dict)  # the network of lowest objective on the validation stream so far
    objective: float = math.inf  # of ``best`` (nat/token)


def begin(inputs: int, settings: Adapt, *, dtype: torch.dtype = torch.float32) -> Course:
    """A network that weighs all tokens alike; every method of a seed starts from the same one."""
    phi = fresh(inputs, width=settings.width, seed=settings.seed, dtype=dtype)
    return Course(phi, torch.optim.Adam(list(phi.values()), lr=settings.outer_lr))


def ended(course: Course, settings: Adapt) -> bool:
    """Whether its steps or its time are used up."""
    return course.step >= settings.steps or course.seconds >= settings.seconds


def share(course: Course, settings: Adapt) -> float:
    """How much of its budget is used: 0 at the start, 1 or a little more at the end."""
    return max(course.step / settings.steps, course.seconds / settings.seconds)


def due(before: float, now: float, looks: int) -> bool:
    """Whether a step took the used share of the budget into a new one of ``looks`` parts.

    Example:
        >>> due(0.2, 0.3, 4), due(0.3, 0.4, 4), due(0.9, 1.1, 4)
        (True, False, True)
    """
    return math.floor(min(now, 1.0) * looks) > math.floor(min(before, 1.0) * looks)


def keep_(course: Course, objective: float) -> None:
    """Keep the present network if none before it had a lower objective on the validation stream (nat/token)."""
    finite = objective if math.isfinite(objective) else math.inf
    if not course.best or finite < course.objective:
        course.best = {name: value.clone() for name, value in course.phi.items()}
        course.objective = finite


def outer_step_(course: Course, lm: Language, data: Materials, settings: Adapt, arm: Arm) -> dict[str, Any]:
    """One hypergradient and one step of Adam; a hypergradient that is not finite changes nothing and is counted."""
    begin = time.process_time()
    window = draw_window(lm, data, course.step, documents=arm.documents, context=settings.context, seed=settings.seed)
    fixed = {"lr": settings.lr, "locality": settings.locality, "clip": settings.inner_clip}
    posed = problem(lm, window, bottleneck=arm.bottleneck, **fixed)
    result = hypergradient(posed, course.phi, arm.method, seed=settings.seed * 1_000_003 + course.step)
    norm = math.sqrt(sum(float(slope.double().square().sum()) for slope in result.grad.values()))
    if math.isfinite(norm):
        for name, value in course.phi.items():
            value.grad = result.grad[name].detach() * min(1.0, settings.clip / max(norm, 1e-30))
        course.optimizer.step()
        course.optimizer.zero_grad(set_to_none=True)
    course.step += 1
    course.seconds += time.process_time() - begin
    row = {"step": course.step, "seconds": course.seconds, "outer": float(result.value), "norm": norm}
    return {"method": arm.name, **row, "applied": math.isfinite(norm)}


def state_of(course: Course) -> dict[str, Any]:
    """Everything that the next step depends on, as a tree for a checkpoint."""
    optimizer = course.optimizer.state_dict()["state"]
    kept = {"best": dict(course.best), "objective": course.objective}
    return {"phi": dict(course.phi), "adam": optimizer, "step": course.step, "seconds": course.seconds, **kept}


def restore_(course: Course, tree: dict[str, Any]) -> None:
    """Go back to where ``state_of`` was called, from a start with the same settings."""
    saved: dict[str, Tensor] = tree["phi"]
    with torch.no_grad():
        for name, value in course.phi.items():
            value.copy_(saved[name])
    groups = course.optimizer.state_dict()["param_groups"]
    course.optimizer.load_state_dict({"state": tree["adam"], "param_groups": groups})
    course.step, course.seconds = tree["step"], tree["seconds"]
    course.best, course.objective = tree["best"], tree["objective"]
