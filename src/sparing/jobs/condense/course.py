"""A condensation under way: the images, their Adam, and the outer step; saved and restored to the same bits."""

from __future__ import annotations

import time
import warnings
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from sparing import hypergrad as hg
from sparing.errors import RunError
from sparing.hypergrad.optimizers import SGD
from sparing.jobs.condense.material import Material, draw
from sparing.jobs.condense.methods import schedule
from sparing.jobs.condense.net import Shape, Weights, initial, logits, penalty
from sparing.jobs.condense.ranks import Crew
from sparing.jobs.condense.settings import Condense
from sparing.jobs.schedule import rate
from sparing.seeds import stream

MOMENTUM = 0.9  # of the inner descent, in the outer loop and when images are judged


@dataclass(slots=True)
class Course:
    """Everything that an outer step reads or changes."""

    settings: Condense
    material: Material
    shape: Shape
    labels: Tensor  # class of each condensed image, (classes · per_class,)
    images: Tensor  # φ, 0 to 1, (classes · per_class, channels, side, side)
    adam: torch.optim.Adam
    steps: int  # outer steps of the whole run
    turn: int  # outer step at which the second phase begins; 0 where there is one phase
    step: int = 0  # outer steps finished
    seconds: float = 0.0  # CPU seconds of this process spent on them, judging excluded
    crew: Crew = field(default_factory=Crew)


def begun(settings: Condense, material: Material) -> Course:
    """A run at outer step 0; its images are gray, or uniform noise that belongs to the seed."""
    classes, count = len(material.classes), settings.per_class
    shape = Shape(channels=material.channels, side=material.side, classes=classes, width=settings.width)
    size = (classes * count, material.channels, material.side, material.side)
    drawn = torch.rand(size, generator=stream(settings.seed, "condense", "images"))
    images = drawn if settings.start == "noise" else torch.full(size, 0.5)
    labels = torch.arange(classes).repeat_interleave(count)
    adam = torch.optim.Adam([images], lr=settings.outer_lr)
    turn = round(settings.first_phase * settings.steps) if settings.method == "two-phase" else 0
    return Course(settings, material, shape, labels, images, adam, settings.steps, turn)


def training(settings: Condense, labels: Tensor, start: Weights, *, steps: int, lr: float) -> dict[str, Any]:
    """The inner run on the condensed images from θ₀, as arguments of ``hypergrad.Bilevel`` without the outer loss."""

    def inner(theta: Weights, phi: dict[str, Tensor], batch: None) -> Tensor:
        return F.cross_entropy(logits(theta, phi["images"]), labels) + settings.penalty * penalty(theta)

    decay = lambda step: rate(step, peak=lr, steps=steps)  # noqa: E731  a schedule is a function of one line
    return {"inner": inner, "init": start, "optimizer": SGD(lr=decay, momentum=MOMENTUM), "steps": steps}


def problem_at(course: Course, step: int) -> hg.Bilevel:
    """The two-level problem of an outer step: its own fresh net, its own real batch, both functions of (seed, step)."""
    settings = course.settings
    start = initial(course.shape, stream(settings.seed, "condense", "net", step))
    real, targets = draw(course.material.train, settings.batch, stream(settings.seed, "condense", "real", step))

    def outer(theta: Weights, phi: dict[str, Tensor]) -> Tensor:
        return F.cross_entropy(logits(theta, real), targets)

    run = training(settings, course.labels, start, steps=settings.unroll, lr=settings.inner_lr)
    return hg.Bilevel(outer=outer, **run)


def hypergradient_at(course: Course, step: int, method: Any) -> Any:
    """The hypergradient of an outer step; nothing is changed."""
    seed = stream(course.settings.seed, "condense", "directions", step).initial_seed()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)
        return hg.hypergradient(problem_at(course, step), {"images": course.images}, method, seed=seed)


def take_step_(course: Course) -> dict[str, Any]:
    """One outer step: hypergradient, Adam, then back into 0 to 1; if it cannot be taken the images are as before."""
    begin = time.process_time()
    step, method = course.step, schedule(course.settings, course.turn)(course.step)
    course.crew.begin_step(step, course.images)
    result = hypergradient_at(course, step, course.crew.shared(method))
    ranks = course.crew.end_step()
    slope = result.grad["images"]
    if not bool(torch.isfinite(slope).all()):
        do = "try a smaller --inner-lr"
        raise RunError(f"the hypergradient of outer step {step} is not finite; {do}")
    for group in course.adam.param_groups:
        group["lr"] = rate(step, peak=course.settings.outer_lr, steps=course.steps, schedule="linear")
    course.images.grad = slope
    course.adam.step()
    course.images.grad = None
    course.images.clamp_(0, 1)
    course.step += 1
    course.seconds += time.process_time() - begin
    row = {"step": course.step, "loss": float(result.value), "seconds": course.seconds}
    told = {"phase": str(method), "warning": "; ".join(result.report.warnings)}
    return row | {"grad_norm": float(slope.norm())} | told | ranks


def state_of(course: Course) -> dict[str, Any]:
    """Everything that is needed to go on to the same bits."""
    moments = dict(course.adam.state[course.images])
    plain = {"step": course.step, "seconds": course.seconds, "steps": course.steps, "turn": course.turn}
    return plain | {"images": course.images, "adam": moments}


def restore_(course: Course, tree: Mapping[str, Any]) -> None:
    """Go back to where ``state_of`` was called, from a start of the same settings and data."""
    course.images.copy_(tree["images"])
    course.adam.state[course.images] = dict(tree["adam"])
    course.step, course.seconds = tree["step"], tree["seconds"]
    course.steps, course.turn = tree["steps"], tree["turn"]
