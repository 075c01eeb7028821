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

    phi: Phi
    """The weight network."""

    optimizer: torch.optim.Adam
    """Of the network."""

    step: int = 0
    """Outer steps taken (count)."""

    seconds: float = 0.0
    """CPU time of those steps (s)."""

    best: Phi = field(default_factory=dict)
    """The network with the lowest objective on the validation stream so far."""

    objective: float = math.inf
    """That objective (nat/token)."""


def begin(inputs: int, settings: Adapt, *, dtype: torch.dtype = torch.float32) -> Course:
    """A network that weighs all tokens alike.

    Args:
        inputs: Features per token (count).
        settings: Width, rate and seed.
        dtype: Number format.

    Returns:
        The course at its start; every method of a seed starts from the same network.
    """
    phi = fresh(inputs, width=settings.width, seed=settings.seed, dtype=dtype)
    return Course(phi, torch.optim.Adam(list(phi.values()), lr=settings.outer_lr))


def ended(course: Course, settings: Adapt) -> bool:
    """Whether its steps or its time are used up.

    Args:
        course: The meta-training.
        settings: The limits.

    Returns:
        True when no step is to follow.
    """
    return course.step >= settings.steps or course.seconds >= settings.seconds


def share(course: Course, settings: Adapt) -> float:
    """How much of its budget a course has used.

    Args:
        course: The meta-training.
        settings: The limits.

    Returns:
        0 at the start, 1 or a little more at the end.
    """
    return max(course.step / settings.steps, course.seconds / settings.seconds)


def due(before: float, now: float, looks: int) -> bool:
    """Whether the validation stream is to be looked at after a step.

    Args:
        before: Share of the budget before the step.
        now: After it.
        looks: Measurements in a whole budget (count).

    Returns:
        True where a new part of the budget begins.

    Example:
        >>> due(0.2, 0.3, 4), due(0.3, 0.4, 4), due(0.9, 1.1, 4)
        (True, False, True)
    """
    return math.floor(min(now, 1.0) * looks) > math.floor(min(before, 1.0) * looks)


def keep_(course: Course, objective: float) -> None:
    """Keep the present network if none before it was better.

    Args:
        course: The meta-training.
        objective: Of the validation stream now (nat/token).
    """
    finite = objective if math.isfinite(objective) else math.inf
    if not course.best or finite < course.objective:
        course.best = {name: value.clone() for name, value in course.phi.items()}
        course.objective = finite


def outer_step_(course: Course, lm: Language, data: Materials, settings: Adapt, arm: Arm) -> dict[str, Any]:
    """One hypergradient and one step of Adam.

    A hypergradient that is not finite changes nothing and is counted.

    Args:
        course: One step further afterwards.
        lm: The model.
        data: Windows are drawn from it.
        settings: Of the run.
        arm: How.

    Returns:
        A row: step, CPU seconds so far, outer loss at θ_T before the step, norm of the hypergradient, applied or not.
    """
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
    """Everything that the next step depends on.

    Args:
        course: The meta-training.

    Returns:
        A tree for a checkpoint.
    """
    optimizer = course.optimizer.state_dict()["state"]
    kept = {"best": dict(course.best), "objective": course.objective}
    return {"phi": dict(course.phi), "adam": optimizer, "step": course.step, "seconds": course.seconds, **kept}


def restore_(course: Course, tree: dict[str, Any]) -> None:
    """Put a course where a checkpoint was made.

    Args:
        course: At its start, with the same settings.
        tree: Of ``state_of``.
    """
    saved: dict[str, Tensor] = tree["phi"]
    with torch.no_grad():
        for name, value in course.phi.items():
            value.copy_(saved[name])
    groups = course.optimizer.state_dict()["param_groups"]
    course.optimizer.load_state_dict({"state": tree["adam"], "param_groups": groups})
    course.step, course.seconds = tree["step"], tree["seconds"]
    course.best, course.objective = tree["best"], tree["objective"]
