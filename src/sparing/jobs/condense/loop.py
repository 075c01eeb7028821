"""The outer loop: steps, looks at the images on the way, the verdict at the end, and what a step costs in bytes."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any

from torch import nn

from sparing.hypergrad.implicit import HessianFree
from sparing.jobs.condense.evaluate import accuracies
from sparing.jobs.condense.methods import TITLES, build_method
from sparing.jobs.condense.pictures import spread
from sparing.jobs.condense.state import TrainState, hypergradient_at, take_step_
from sparing.jobs.run import take_steps
from sparing.memory import Ledger
from sparing.report import Record

UNITS = {"seconds": "s", "seconds_per_step": "s", "peak": "B", "accuracy": "%", "loss": "nat"}

TIMED = 3  # outer steps timed to turn seconds into a number of steps, after one that warms up
LOOKED = 2000  # real images that judge one net at a look (count); the final verdict is on all of them


def look_steps(steps: int, looks: int) -> list[int]:
    """Outer steps after which the images are kept and judged: ``looks`` times, evenly, and at the start.

    Example:
        >>> look_steps(10, 4), look_steps(1, 4)
        ([0, 2, 5, 8, 10], [0, 1])
    """
    return sorted({round(at * steps / looks) for at in range(looks + 1)}) if looks else []


def seconds_of_a_step(state: TrainState, method: Any) -> float:
    """CPU seconds of one outer step: the median of ``TIMED`` that change nothing, after one that warms up."""
    taken = []
    for step in range(TIMED + 1):
        begin = time.process_time()
        hypergradient_at(state, step, method)
        taken.append(time.process_time() - begin)
    return statistics.median(taken[1:])


def fix_length_(state: TrainState, record: Record) -> None:
    """Turn the seconds of the settings into a number of steps, once."""
    settings = state.settings
    # timed once and recorded: a resumed run, or one with that many steps, has the same bits on a faster machine
    if settings.seconds is not None:
        share = settings.first_phase if settings.method == "two-phase" else 0.0
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
    score = accuracies(state, state.images, nets=1, most=LOOKED)[0]
    title = TITLES[state.settings.method]
    record.add("curve", method=title, step=state.step, seconds=state.seconds, accuracy=score)


def train(state: TrainState, record: Record, steps: Callable[..., None] = take_steps) -> None:
    """Take a run to its end and judge the images by several fresh nets; of several processes the first judges."""
    settings, first = state.settings, state.ranks.first
    title = TITLES[settings.method]
    looks = look_steps(state.steps, settings.looks) if first else []
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
    scores = accuracies(state, state.images, nets=settings.eval_nets)
    cost = {"steps": state.steps, "seconds": state.seconds, "seconds_per_step": state.seconds / state.steps}
    record.add("methods", method=title, **spread(scores), **cost, outer_lr=settings.outer_lr)
