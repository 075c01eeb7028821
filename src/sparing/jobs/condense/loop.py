"""The outer loop: steps, looks at the images on the way, the verdict at the end, and what a step costs in bytes."""

from __future__ import annotations

import io
import statistics
import time
from collections.abc import Callable
from typing import Any

from torch import Tensor, nn

from sparing.hypergrad.implicit import HessianFree
from sparing.jobs.condense.course import Course, hypergradient_at, take_step_
from sparing.jobs.condense.evaluate import judged
from sparing.jobs.condense.methods import TITLES, simple
from sparing.jobs.condense.pictures import spread
from sparing.memory import Ledger
from sparing.report import Progress, Record

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


def seconds_of_a_step(course: Course, method: Any) -> float:
    """CPU seconds of one outer step: the median of ``TIMED`` that change nothing, after one that warms up."""
    taken = []
    for step in range(TIMED + 1):
        begin = time.process_time()
        hypergradient_at(course, step, method)
        taken.append(time.process_time() - begin)
    return statistics.median(taken[1:])


def fix_length_(course: Course, record: Record) -> None:
    """Turn the seconds of the settings into a number of steps, once."""
    settings = course.settings
    if settings.seconds is not None:
        share = settings.first_phase if settings.method == "two-phase" else 0.0
        second = seconds_of_a_step(course, course.crew.own(simple(settings)))
        first = seconds_of_a_step(course, HessianFree()) if share else second
        course.turn = round(share * settings.seconds / first)
        course.steps = max(1, course.turn + round((1 - share) * settings.seconds / second))
    record.add("length", method=TITLES[settings.method], steps=course.steps, turn=course.turn)


def bytes_of_a_step(course: Course, method: Any) -> int:
    """Peak bytes of one hypergradient (fresh weights, real batch, graph, tangents), beyond what was held before it."""
    with Ledger(nn.Module(), inputs=course.images) as ledger:
        hypergradient_at(course, 0, method)
    return int(ledger.peak.total)


def look_(course: Course, record: Record, kept: dict[int, Tensor]) -> None:
    """Keep the images and judge them by one net."""
    kept[course.step] = course.images.clone()
    score = judged(course, course.images, nets=1, most=LOOKED)[0]
    title = TITLES[course.settings.method]
    record.add("curve", method=title, step=course.step, seconds=course.seconds, accuracy=score)


def advance_(
    course: Course,
    record: Record,
    kept: dict[int, Tensor],
    *,
    label: str = "condense",
    after: Callable[[Course], None] = lambda course: None,
) -> None:
    """Take a run to its end and judge the images by several fresh nets; of several processes the first judges."""
    settings = course.settings
    first, title = course.crew.first, TITLES[settings.method]
    looks = look_steps(course.steps, settings.looks) if first else []
    if course.step == 0 and looks:
        look_(course, record, kept)
    shown = None if first else io.StringIO()
    with Progress(label, total=course.steps, unit="outer step", resume_at=course.step, file=shown) as bar:
        while course.step < course.steps:
            row = take_step_(course)
            record.add("train", method=title, **row)
            if course.step in looks:
                look_(course, record, kept)
            seen = f"{record.table('curve')[-1]['accuracy']:.1f} %" if looks else "not yet judged"
            bar.advance(loss=row["loss"], accuracy=seen)
            after(course)
    if not first:
        return
    scores = judged(course, course.images, nets=settings.eval_nets)
    cost = {"steps": course.steps, "seconds": course.seconds, "seconds_per_step": course.seconds / course.steps}
    record.add("methods", method=title, **spread(scores), **cost, outer_lr=settings.outer_lr)
