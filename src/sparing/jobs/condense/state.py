"""A condensation under way: φ, its average, its Adam, and the outer step; saved and restored to the same bits."""

from __future__ import annotations

import statistics
import time
import warnings
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from sparing import hypergrad as hg
from sparing.errors import RunError, require
from sparing.hypergrad.optimizers import SGD
from sparing.hypergrad.reverse import Truncated
from sparing.hypergrad.trees import ravel
from sparing.jobs.condense.inputs import Inputs, draw
from sparing.jobs.condense.learned import Phi, average_, draw_shift, of_class, shifted, start_phi, targets
from sparing.jobs.condense.methods import schedule, window
from sparing.jobs.condense.net import Shape, Weights, init_weights, logits, penalty
from sparing.jobs.condense.ranks import Ranks
from sparing.jobs.condense.settings import Condense
from sparing.jobs.schedule import rate
from sparing.seeds import stream

MEDIAN_OF = 100  # last hypergradients whose median length bounds the next (count)
MOMENTUM = 0.9  # of the inner descent, in the outer loop and when images are judged


@dataclass(slots=True)
class TrainState:
    """Everything that an outer step reads or changes."""

    settings: Condense
    inputs: Inputs
    shape: Shape
    labels: Tensor  # class of each condensed image, (classes · per_class,)
    phi: Phi  # what is learned, and the images even if they stay
    mean: Phi  # its average over outer steps, which is judged and saved
    adam: torch.optim.Adam  # one group for each learned part
    steps: int  # outer steps of the whole run
    turn: int  # outer step at which the second phase begins; 0 where there is one phase
    step: int = 0  # outer steps finished
    seconds: float = 0.0  # CPU seconds of this process spent on them, judging excluded
    kept: dict[int, Tensor] = field(default_factory=dict)  # outer step -> the averaged images then
    lengths: list[float] = field(default_factory=list)  # of the last hypergradients, before they were shortened
    ranks: Ranks = field(default_factory=Ranks)

    @property
    def images(self) -> Tensor:
        """The condensed images as they are judged, 0 to 1, (classes · per_class, channels, side, side)."""
        return self.mean["images"]

    def tree(self) -> dict[str, Any]:
        """Everything that is needed to go on to the same bits."""
        moments = {name: dict(self.adam.state[self.phi[name]]) for name in self.settings.learn}
        plain = {"step": self.step, "seconds": self.seconds, "steps": self.steps, "turn": self.turn}
        held = {"phi": self.phi, "mean": self.mean, "adam": moments, "kept": self.kept, "lengths": self.lengths}
        return plain | held


def start(settings: Condense, inputs: Inputs) -> TrainState:
    """A run at outer step 0."""
    kinds = {"channels": inputs.channels, "side": inputs.side, "classes": len(inputs.classes)}
    labels = torch.arange(kinds["classes"]).repeat_interleave(settings.per_class)
    fits, why = settings.shift < inputs.side, f"images are {inputs.side} pixels wide"
    require(fits, "shift", settings.shift, why, "pass fewer pixels")
    # whatever the start: the result is compared with as many real images
    for kind in range(kinds["classes"]):
        of_class(inputs.train, kind, settings.per_class)
    shape = Shape(**kinds, width=settings.width, depth=settings.depth)
    phi = start_phi(settings, inputs, labels, len(shape.parameters))
    peaks = {"images": settings.outer_lr, "labels": settings.label_lr, "rates": settings.rate_lr}
    adam = torch.optim.Adam([{"params": [phi[name]], "peak": peaks[name]} for name in settings.learn])
    turn = round(settings.two_phase.first * settings.steps) if settings.method == "two-phase" else 0
    mean = {name: leaf.clone() for name, leaf in phi.items()}
    return TrainState(settings, inputs, shape, labels, phi, mean, adam, settings.steps, turn)


def inner_problem(
    settings: Condense, labels: Tensor, start: Weights, *, steps: int, lr: float | None
) -> dict[str, Any]:
    """The inner run on the condensed images from θ₀, as arguments of ``hypergrad.Bilevel`` without the outer loss.

    The rate is ``lr`` decayed to 0 over ``steps``, or, where that is None, what φ says of each step.
    """

    def inner(theta: Weights, phi: Phi, shift: tuple[int, int]) -> Tensor:
        out = logits(theta, shifted(phi["images"], shift))
        return F.cross_entropy(out, targets(phi, labels)) + settings.penalty * penalty(theta)

    shifts = lambda step, generator: draw_shift(settings.shift, generator)  # noqa: E731  of one line
    if lr is None:

        def learned(step: int, phi: Phi) -> Tensor | dict[str, Tensor]:
            rates = phi["rates"][step].exp()
            return dict(zip(start, rates.unbind(), strict=True)) if settings.rates_per == "tensor" else rates

        optimizer = SGD(lr=learned, momentum=MOMENTUM)
    else:
        optimizer = SGD(lr=lambda step: rate(step, peak=lr, steps=steps), momentum=MOMENTUM)
    return {"inner": inner, "init": start, "optimizer": optimizer, "steps": steps, "batches": shifts}


def window_end(settings: Condense, step: int) -> int:
    """Inner step at which the outer loss of an outer step looks: the last one, or that of a random window."""
    if settings.method != "truncated" or settings.truncated.ends == "last":
        return settings.inner_steps
    generator = stream(settings.seed, "condense", "window", step)
    return int(torch.randint(window(settings), settings.inner_steps + 1, (), generator=generator))


def problem_at(state: TrainState, step: int, method: Any = None) -> hg.Bilevel:
    """The two-level problem of an outer step: its own fresh net, real batch and window, functions of (seed, step).

    A ``method`` other than that of the run, whose bytes are compared, sees the whole unroll.
    """
    settings = state.settings
    start = init_weights(state.shape, stream(settings.seed, "condense", "net", step))
    real, goals = draw(state.inputs.train, settings.batch, stream(settings.seed, "condense", "real", step))

    def outer(theta: Weights, phi: Phi) -> Tensor:
        return F.cross_entropy(logits(theta, real), goals)

    lr = None if "rates" in settings.learn else settings.inner_rate
    run = inner_problem(settings, state.labels, start, steps=settings.inner_steps, lr=lr)
    own = method is None or isinstance(method, Truncated)
    return hg.Bilevel(outer=outer, **(run | {"steps": window_end(settings, step) if own else settings.inner_steps}))


def hypergradient_at(state: TrainState, step: int, method: Any) -> Any:
    """The hypergradient of an outer step; nothing is changed."""
    seed = stream(state.settings.seed, "condense", "directions", step).initial_seed()
    # what the method warns of stands in its report; said at every step it would drown the progress bar
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)
        return hg.hypergradient(problem_at(state, step, method), state.phi, method, seed=seed)


def take_step_(state: TrainState) -> dict[str, Any]:
    """One outer step: hypergradient, Adam, images back into 0 to 1; if it cannot be taken φ is as before."""
    begin = time.process_time()
    settings, step = state.settings, state.step
    method = schedule(settings, state.turn)(step)
    state.ranks.begin_step(step, ravel(state.phi))
    result = hypergradient_at(state, step, state.ranks.shared(method))
    ranks = state.ranks.end_step()
    slopes = {name: result.grad[name] for name in settings.learn}
    size = float(ravel(slopes).norm())
    # checked before anything changes, so that a caller may save what was
    if not all(bool(torch.isfinite(slope).all()) for slope in slopes.values()):
        do = "try a smaller --inner-lr"
        raise RunError(f"the hypergradient of outer step {step} is not finite; {do}")
    # the rate is a function of the step, so a checkpoint needs no scheduler
    for group in state.adam.param_groups:
        group["lr"] = rate(step, peak=group["peak"], steps=state.steps, schedule=settings.outer_schedule)
    state.lengths = [*state.lengths, size][-MEDIAN_OF:]
    # Through three blocks some hypergradients are up to 26 times as long as the median, and Adam's second moment
    # would then stop the images for many steps.
    limit = settings.clip_medians * statistics.median(state.lengths)
    factor = limit / size if 0 < limit < size else 1.0
    for name, slope in slopes.items():
        state.phi[name].grad = slope * factor
    state.adam.step()
    state.adam.zero_grad()
    state.phi["images"].clamp_(0, 1)
    state.step += 1
    average_(state.mean, state.phi, share=settings.average, step=state.step)
    state.seconds += time.process_time() - begin
    row = {"step": state.step, "loss": float(result.value), "seconds": state.seconds}
    notes = {"phase": str(method), "warning": "; ".join(result.report.warnings)}
    return row | {"grad_norm": size} | notes | ranks


def restore_(state: TrainState, tree: Mapping[str, Any]) -> None:
    """Go back to where ``TrainState.tree`` was called, from a start of the same settings and data."""
    # in place: Adam holds these very tensors
    for name, leaf in state.phi.items():
        leaf.copy_(tree["phi"][name])
        state.mean[name].copy_(tree["mean"][name])
    for name in state.settings.learn:
        state.adam.state[state.phi[name]] = dict(tree["adam"][name])
    state.step, state.seconds = tree["step"], tree["seconds"]
    state.steps, state.turn, state.kept = tree["steps"], tree["turn"], dict(tree["kept"])
    state.lengths = list(tree["lengths"])
