"""The outer loop: steps, looks at the images on the way, what a step costs in bytes, and how good images are.

Images are judged by fresh nets that are trained on them alone and read real ones.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, Final

import torch
from torch import nn

from sparing import hypergrad as hg
from sparing.errors import RunError
from sparing.hypergrad.implicit import HessianFree
from sparing.jobs.condense.inputs import Pair, floats
from sparing.jobs.condense.learned import Phi, real_images
from sparing.jobs.condense.methods import TITLES, build_method
from sparing.jobs.condense.net import Weights, init_weights, logits
from sparing.jobs.condense.state import TrainState, hypergradient_at, inner_problem, take_step_
from sparing.jobs.run import take_steps
from sparing.jobs.sweeps import inside
from sparing.memory import Ledger
from sparing.report import Record
from sparing.seeds import stream

UNITS = {"seconds": "s", "seconds_per_step": "s", "peak": "B", "accuracy": "%", "loss": "nat"}

TIMED = 3  # outer steps timed to turn seconds into a number of steps, after one that warms up
TIMED_WINDOWS = 15  # the same where each outer step is as long as its random window
LOOKED = 2000  # real images that judge one net at a look (count); the final verdict is on all of them


def look_steps(steps: int, looks: int) -> list[int]:
    """Outer steps after which the images are kept and judged: ``looks`` times, evenly, and at the start.

    Example:
        >>> look_steps(10, 4), look_steps(1, 4)
        ([0, 2, 5, 8, 10], [0, 1])
    """
    return sorted({round(at * steps / looks) for at in range(looks + 1)}) if looks else []


def seconds_of_a_step(state: TrainState, method: Any) -> float:
    """CPU seconds of one outer step: the median of some that change nothing, after one that warms up."""
    taken = []
    random = state.settings.method == "truncated" and state.settings.truncated.ends == "random"
    for step in range((TIMED_WINDOWS if random else TIMED) + 1):
        begin = time.process_time()
        hypergradient_at(state, step, method)
        taken.append(time.process_time() - begin)
    return statistics.median(taken[1:])


def fix_length_(state: TrainState, record: Record) -> None:
    """Turn the seconds of the settings into a number of steps, once."""
    settings = state.settings
    # timed once and recorded: a resumed run, or one with that many steps, has the same bits on a faster machine
    if settings.seconds is not None:
        share = settings.two_phase.first if settings.method == "two-phase" else 0.0
        second = seconds_of_a_step(state, state.ranks.per_rank(build_method(settings)))
        first = seconds_of_a_step(state, HessianFree()) if share else second
        state.turn = round(share * settings.seconds / first)
        state.steps = max(1, state.turn + round((1 - share) * settings.seconds / second))
    record.add("length", method=TITLES[settings.method], steps=state.steps, turn=state.turn)


def bytes_of_a_step(state: TrainState, method: Any) -> int:
    """Peak bytes of one hypergradient (fresh weights, real batch, graph, tangents), beyond what was held before it."""
    with Ledger(nn.Module(), inputs=state.images) as ledger:
        hypergradient_at(state, 0, method)
    return int(ledger.peak.total)


def look_(state: TrainState, record: Record) -> None:
    """Keep the images and judge them by one net."""
    state.kept[state.step] = state.images.clone()
    score = accuracies(state, state.mean, nets=1, most=LOOKED)[0]
    title = TITLES[state.settings.method]
    record.add("curve", method=title, step=state.step, seconds=state.seconds, accuracy=score)


def spread(values: Sequence[float]) -> dict[str, Any]:
    """Mean, ends and number of some values, as the columns of a row.

    Example:
        >>> spread([1.0, 3.0])
        {'accuracy': 2.0, 'accuracy_low': 1.0, 'accuracy_high': 3.0, 'n': 2}
    """
    return {
        "accuracy": sum(values) / len(values), "accuracy_low": min(values), "accuracy_high": max(values),
        "n": len(values),
    }  # fmt: skip


def train(state: TrainState, record: Record, steps: Callable[..., None] = take_steps) -> None:
    """Take a run to its end and judge the images by several fresh nets; of several processes the first judges."""
    settings, first = state.settings, state.ranks.first
    title = TITLES[settings.method]
    looks = look_steps(state.steps, settings.measurements) if first else []
    if state.step == 0 and looks:
        look_(state, record)

    def take_step() -> dict[str, Any]:
        row = take_step_(state)
        record.add("train", method=title, **row)
        if state.step in looks:
            look_(state, record)
        seen = f"{record.table('curve')[-1]['accuracy']:.1f} %" if looks else "not yet judged"
        return {"loss": row["loss"], "accuracy": seen}

    label = f"condense {state.inputs.name}, {title}"
    steps(state, take_step, total=state.steps, label=label, unit="outer step", every=settings.save_every)
    if not first:
        return
    scores = accuracies(state, state.mean, nets=settings.evaluation.nets)
    cost = {"steps": state.steps, "seconds": state.seconds, "seconds_per_step": state.seconds / state.steps}
    record.add("methods", method=title, **spread(scores), **cost, outer_lr=settings.outer_lr)
    add_nets(record, title, scores)


def add_real_images(state: TrainState, record: Record) -> None:
    """Add what as many real images teach: the control that every condensation is held against."""
    lr, scores = real_accuracies(state)
    each = state.settings.per_class
    what = "one real image a class" if each == 1 else f"{each} real images a class"
    record.add("control", what=what, **spread(scores), lr=lr, inner_steps=state.settings.evaluation.steps)
    add_nets(record, what, scores)


def add_nets(record: Record, what: str, scores: Sequence[float]) -> None:
    """Add every judging net by itself; nets of the same number began with the same weights."""
    for number, score in enumerate(scores):
        record.add("nets", what=what, net=number, accuracy=score)


AT_ONCE = 500  # real images judged at once (count): what stays in a processor's cache


def accuracy(weights: Weights, real: Pair) -> float:
    """Share of real images that a net puts in the right class (%); RunError where it diverged."""
    images, labels = real
    with torch.no_grad():
        parts = [logits(weights, floats(images[at : at + AT_ONCE])) for at in range(0, len(images), AT_ONCE)]
    scores = torch.cat(parts)
    # argmax takes NaN for the largest score: class 0 everywhere, which is right for a tenth of the images
    if not torch.isfinite(scores).all():
        raise RunError("the scores of a net are not finite")
    return 100 * float((scores.argmax(1) == labels).double().mean())


def fresh_net(state: TrainState, phi: Phi, number: int) -> Weights:
    """Train a net that the outer loop has not seen; the same number is the same start for every method and seed."""
    settings, judge = state.settings, state.settings.evaluation
    start = init_weights(state.shape, stream(0, "condense", "judge", number))
    # learned rates are those of the inner run, and so is its length
    length = {"steps": settings.inner_steps, "lr": None} if "rates" in phi else {"steps": judge.steps, "lr": judge.lr}
    run = inner_problem(settings, state.labels, start, **length)
    # a problem needs an outer loss, which solving it never asks for
    none = lambda theta, phi: theta["linear.bias"].sum() * 0  # noqa: E731
    weights: Any = hg.solve(hg.Bilevel(outer=none, **run), phi, seed=number)
    return {name: weight.detach() for name, weight in weights.items()}


def accuracies(
    state: TrainState, phi: Phi, *, nets: int, first: int = 0, most: int | None = None, held_out: bool = False
) -> list[float]:
    """Accuracy (%) of fresh nets on the real images that the settings name, or on the first ``most`` of them.

    RunError where one of them diverges.
    """
    test = state.settings.judge == "test" and not held_out
    real = state.inputs.test if test else state.inputs.held_out
    real = (real[0][:most], real[1][:most])
    found = []
    for number in range(first, first + nets):
        try:
            found.append(accuracy(fresh_net(state, phi, number), real))
        except RunError:
            flag = "--inner-lr" if "rates" in phi else "--evaluation.lr"
            what = f"a net that judges the images of outer step {state.step:,} diverges"
            raise RunError(f"{what}; pass a smaller {flag}") from None
    return found


MULTIPLES: Final = (0.03, 0.1, 0.3, 1.0, 3.0, 10.0)
"""Learning rates tried for real images at first, in units of ``evaluation.lr``."""


def accuracy_or_zero(state: TrainState, draw: Callable[[int], Phi], number: int, *, held_out: bool = False) -> float:
    """Accuracy (%) of one net on its draw, on the first ``LOOKED`` held-out images if asked; 0 where it diverges."""
    most = LOOKED if held_out else None
    try:
        return accuracies(state, draw(number), nets=1, first=number, most=most, held_out=held_out)[0]
    except RunError:
        return 0.0


def tuned_accuracies(state: TrainState, draw: Callable[[int], Phi]) -> tuple[float, list[float]]:
    """The learning rate that is best on held-out images, and the accuracy (%) of fresh nets trained by it.

    Each net trains on a draw of its number; the rate is chosen for the draw that follows them, in a sweep that goes on
    until the best rate is inside. A net that diverges counts as 0 %.
    """
    settings, nets = state.settings, state.settings.evaluation.nets

    def at(lr: float) -> TrainState:
        return replace(state, settings=replace(settings, evaluation=replace(settings.evaluation, lr=lr)))

    # without held-out images nothing may be chosen
    best = settings.evaluation.lr
    if len(state.inputs.held_out[0]):
        rates = [best * multiple for multiple in MULTIPLES]
        best, _ = inside(rates, lambda lr: 100.0 - accuracy_or_zero(at(lr), draw, nets, held_out=True))
    return best, [accuracy_or_zero(at(best), draw, number) for number in range(nets)]


def real_draw(state: TrainState) -> Callable[[int], Phi]:
    """As many real images of the training part as are condensed, drawn anew for each number."""
    classes, count = len(state.inputs.classes), state.settings.per_class

    def draw(number: int) -> Phi:
        generator = stream(0, "condense", "real control", number)
        return {"images": real_images(state.inputs.train, classes, count, generator)}

    return draw


def real_accuracies(state: TrainState) -> tuple[float, list[float]]:
    """The same of as many real images, a draw for each net."""
    return tuned_accuracies(state, real_draw(state))
