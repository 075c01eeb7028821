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
from sparing.jobs.condense.inputs import Inputs, draw
from sparing.jobs.condense.methods import schedule
from sparing.jobs.condense.net import Shape, Weights, init_weights, logits, penalty
from sparing.jobs.condense.ranks import Ranks
from sparing.jobs.condense.settings import Condense
from sparing.jobs.schedule import rate
from sparing.seeds import stream

MOMENTUM = 0.9  # of the inner descent, in the outer loop and when images are judged


@dataclass(slots=True)
class TrainState:
    """Everything that an outer step reads or changes."""

    settings: Condense
    inputs: Inputs
    shape: Shape
    labels: Tensor  # class of each condensed image, (classes · per_class,)
    images: Tensor  # φ, 0 to 1, (classes · per_class, channels, side, side)
    adam: torch.optim.Adam
    steps: int  # outer steps of the whole run
    turn: int  # outer step at which the second phase begins; 0 where there is one phase
    step: int = 0  # outer steps finished
    seconds: float = 0.0  # CPU seconds of this process spent on them, judging excluded
    kept: dict[int, Tensor] = field(default_factory=dict)  # outer step -> the images then
    ranks: Ranks = field(default_factory=Ranks)

    def tree(self) -> dict[str, Any]:
        """Everything that is needed to go on to the same bits."""
        moments = dict(self.adam.state[self.images])
        plain = {"step": self.step, "seconds": self.seconds, "steps": self.steps, "turn": self.turn}
        return plain | {"images": self.images, "adam": moments, "kept": self.kept}


def start(settings: Condense, inputs: Inputs) -> TrainState:
    """A run at outer step 0; its images are gray, or uniform noise that belongs to the seed."""
    classes, count = len(inputs.classes), settings.per_class
    shape = Shape(channels=inputs.channels, side=inputs.side, classes=classes, width=settings.width)
    size = (classes * count, inputs.channels, inputs.side, inputs.side)
    drawn = torch.rand(size, generator=stream(settings.seed, "condense", "images"))
    images = drawn if settings.start == "noise" else torch.full(size, 0.5)
    labels = torch.arange(classes).repeat_interleave(count)
    adam = torch.optim.Adam([images], lr=settings.outer_lr)
    turn = round(settings.two_phase.first * settings.steps) if settings.method == "two-phase" else 0
    return TrainState(settings, inputs, shape, labels, images, adam, settings.steps, turn)


def inner_problem(settings: Condense, labels: Tensor, start: Weights, *, steps: int, lr: float) -> dict[str, Any]:
    """The inner run on the condensed images from θ₀, as arguments of ``hypergrad.Bilevel`` without the outer loss."""

    def inner(theta: Weights, phi: dict[str, Tensor], batch: None) -> Tensor:
        return F.cross_entropy(logits(theta, phi["images"]), labels) + settings.penalty * penalty(theta)

    decay = lambda step: rate(step, peak=lr, steps=steps)  # noqa: E731  a schedule is a function of one line
    return {"inner": inner, "init": start, "optimizer": SGD(lr=decay, momentum=MOMENTUM), "steps": steps}


def problem_at(state: TrainState, step: int) -> hg.Bilevel:
    """The two-level problem of an outer step: its own fresh net, its own real batch, both functions of (seed, step)."""
    settings = state.settings
    start = init_weights(state.shape, stream(settings.seed, "condense", "net", step))
    real, targets = draw(state.inputs.train, settings.batch, stream(settings.seed, "condense", "real", step))

    def outer(theta: Weights, phi: dict[str, Tensor]) -> Tensor:
        return F.cross_entropy(logits(theta, real), targets)

    run = inner_problem(settings, state.labels, start, steps=settings.unroll, lr=settings.inner_lr)
    return hg.Bilevel(outer=outer, **run)


def hypergradient_at(state: TrainState, step: int, method: Any) -> Any:
    """The hypergradient of an outer step; nothing is changed."""
    seed = stream(state.settings.seed, "condense", "directions", step).initial_seed()
    # what the method warns of stands in its report; said at every step it would drown the progress bar
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)
        return hg.hypergradient(problem_at(state, step), {"images": state.images}, method, seed=seed)


def take_step_(state: TrainState) -> dict[str, Any]:
    """One outer step: hypergradient, Adam, then back into 0 to 1; if it cannot be taken the images are as before."""
    begin = time.process_time()
    step, method = state.step, schedule(state.settings, state.turn)(state.step)
    state.ranks.begin_step(step, state.images)
    result = hypergradient_at(state, step, state.ranks.shared(method))
    ranks = state.ranks.end_step()
    slope = result.grad["images"]
    # checked before anything changes, so that a caller may save what was
    if not bool(torch.isfinite(slope).all()):
        do = "try a smaller --inner-lr"
        raise RunError(f"the hypergradient of outer step {step} is not finite; {do}")
    # the rate is a function of the step, so a checkpoint needs no scheduler
    for group in state.adam.param_groups:
        group["lr"] = rate(step, peak=state.settings.outer_lr, steps=state.steps, schedule="linear")
    state.images.grad = slope
    state.adam.step()
    state.images.grad = None
    state.images.clamp_(0, 1)
    state.step += 1
    state.seconds += time.process_time() - begin
    row = {"step": state.step, "loss": float(result.value), "seconds": state.seconds}
    notes = {"phase": str(method), "warning": "; ".join(result.report.warnings)}
    return row | {"grad_norm": float(slope.norm())} | notes | ranks


def restore_(state: TrainState, tree: Mapping[str, Any]) -> None:
    """Go back to where ``TrainState.tree`` was called, from a start of the same settings and data."""
    # in place: Adam holds this very tensor
    state.images.copy_(tree["images"])
    state.adam.state[state.images] = dict(tree["adam"])
    state.step, state.seconds = tree["step"], tree["seconds"]
    state.steps, state.turn, state.kept = tree["steps"], tree["turn"], dict(tree["kept"])
