"""Chapter on condensation: one synthetic image per digit class, learned through a training run in three ways."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Callable, Mapping
from functools import cached_property, partial
from pathlib import Path
from typing import Any, Final

from torch import Tensor

from sparing.errors import UserError
from sparing.jobs.condense.inputs import Inputs, gather
from sparing.jobs.condense.job import save_images
from sparing.jobs.condense.loop import LOOKED, UNITS, add_real_images, bytes_of_a_step, fix_length_, train
from sparing.jobs.condense.methods import PAPER, ROLES, TITLES, build_method
from sparing.jobs.condense.page import CONTROL, accuracy_figure, beside_paper, bytes_figure, percent, side_by_side
from sparing.jobs.condense.settings import Condense, Evaluation, Forward, Method, Truncated
from sparing.jobs.condense.state import TrainState, restore_, start
from sparing.jobs.demo.chapter import Chapter, Row, begin_on, copy_tables, keyed, licence_of
from sparing.jobs.demo.finding import Difference
from sparing.jobs.demo.settings import Scale, Settings
from sparing.jobs.demo.typeset import typeset_digits
from sparing.jobs.disk import load_tensors
from sparing.jobs.run import Run
from sparing.report import Figure, Record, Table, format_number
from sparing.report.page import Number

LOG = logging.getLogger("sparing.demo")

METHODS: Final[tuple[Method, ...]] = ("checkpointed", "truncated", "forward-gradient")
FILES: Final[dict[str, str]] = {method: f"condensed-{method}.safetensors" for method in METHODS}
"""Images that a method made, in the folder of the demo."""

WORK: Final = Condense(
    data="mnist", width=16, depth=2, unroll=10, inner_lr=0.05, shift=1, batch=128, seconds=60.0,
    forward=Forward(directions=4), truncated=Truncated(steps=3, ends="last"),
    evaluation=Evaluation(steps=100, lr=0.02, nets=5), measurements=3,
)  # fmt: skip
"""The recipe at the size of three minutes on one core."""

WORKS: Final[dict[Scale, Condense]] = {
    "small": WORK,
    "tiny": dataclasses.replace(
        WORK, width=16, seconds=5.0, evaluation=Evaluation(steps=50, lr=0.02, nets=1), measurements=2
    ),
}

TABLES: Final = {
    "methods": "condensed", "curve": "condense_curve", "control": "condense_control", "nets": "condense_nets",
}  # fmt: skip
"""Table of a condensation -> table of the demo's record."""

COLUMNS: Final = ("method", "accuracy", "steps", "seconds", "peak")
OURS: Final = "(FG)²U"
EXACT: Final = TITLES["checkpointed"]


def load_digits() -> Inputs:
    """MNIST, or digits typeset here where it cannot be fetched."""
    try:
        return gather(WORK.data, held_out=WORK.held_out_images)
    except UserError as missing:
        LOG.warning("demo: MNIST is not available (%s); digits are typeset here", missing)
        return typeset_digits()


@dataclasses.dataclass(slots=True)
class Condensation:
    """A condensation under way and its own record: what a checkpoint in the middle holds."""

    state: TrainState
    found: Record

    @property
    def step(self) -> int:
        """Outer steps finished."""
        return self.state.step

    def tree(self) -> Mapping[str, Any]:
        """State and rows."""
        return self.state.tree() | {"rows": self.found.rows}


def plan(state: TrainState, record: Record) -> dict[str, int]:
    """Turn seconds into outer steps, and measure the bytes of one."""
    title = TITLES[state.settings.method]
    fix_length_(state, Record(question="", settings={}, seed=0, environment={}))
    record.add("condense_memory", method=title, peak=bytes_of_a_step(state, build_method(state.settings)))
    return {"steps": state.steps, "turn": state.turn}


def condense(run: Run, state: TrainState) -> dict[str, Any]:
    """Condense by one method, from where it was interrupted; the images, their classes, and those on the way."""
    own = Condensation(state, Record(question="", settings={}, seed=0, environment={}))
    if (left := run.interrupted) is not None:
        restore_(state, left)
        own.found.rows[:] = left["rows"]

    def steps(_: TrainState, take_step: Callable[[], Mapping[str, Any]], **how: Any) -> None:
        run.steps(own, take_step, **how)

    train(state, own.found, steps)
    copy_tables(run.record, own.found, TABLES)
    return {"phi": state.mean, "labels": state.labels, "kept": state.kept}


def control(run: Run, state: TrainState) -> bool:
    """What as many real images teach."""
    found = Record(question="", settings={}, seed=0, environment={})
    add_real_images(state, found)
    copy_tables(run.record, found, TABLES)
    return True


def run_chapter(run: Run) -> None:
    """Run every method for the same CPU time."""
    settings: Settings = run.settings
    if len(run.record.table("condensed")) == len(METHODS):
        return
    real = load_digits()
    begin_on(run, "condense_data", real.name, classes=" ".join(real.classes))
    # first, so that a chapter with all of its methods has it
    run.once("condense: as many real images", partial(control, run, start(WORKS[settings.scale], real)))
    for method in METHODS:
        state = start(dataclasses.replace(WORKS[settings.scale], method=method, seed=settings.seed), real)
        # how many steps fit the time depends on the machine and its load: timed once, however often a run stops
        length = run.once(f"condense: length of {method}", partial(plan, state, run.record))
        state.steps, state.turn = length["steps"], length["turn"]
        run.once(f"condense: images by {method}", partial(condense, run, state))


def write_files(run: Run) -> None:
    """Write the images of each method."""
    for method, made in run.results("condense: images by ").items():
        save_images(run.folder.at(FILES[method]), made["phi"], made["labels"], made["kept"])


class CondenseChapter(Chapter):
    """The images, accuracy beside as many real ones, bytes, and the paper's figures."""

    name, complete = "condense", ("condensed", len(METHODS))
    saves, topic = "long inner runs", "Long inner runs · (FG)²U"
    question = "Can ten images stand for sixty thousand, and how much memory does it take to find them?"
    paper = "Shen et al., (FG)²U, NeurIPS 2024, Table 1"
    deeper = (
        "sparing condense --seconds 1800",
        "sparing condense --help    # the last words before the settings: the paper's experiment",
    )
    more = "More: accuracy over time, bytes of a step, the paper's bars beside ours, every number"

    def __init__(self, record: Record, folder: Path) -> None:
        """With the names of the data as the paper and as sentences have them."""
        super().__init__(record, folder)
        self.work = WORKS[self.scale]
        self.data: str = record.table("condense_data")[0]["name"]
        self.classes = record.table("condense_data")[0]["classes"].split()

    @cached_property
    def rows(self) -> list[Row]:
        """The methods with the bytes that each held."""
        held = keyed(self.record.table("condense_memory"), "method")
        return [row | {"peak": held[row["method"]]["peak"]} for row in self.record.table("condensed")]

    @property
    def images(self) -> dict[str, Tensor]:
        """The images that each method ended with, after the real ones that all started from."""
        saved = {TITLES[method]: load_tensors(self.folder / FILES[method]) for method in METHODS}
        first = next(iter(saved.values()))
        return {"the start": first["step-00000000"], **{name: tensors["images"] for name, tensors in saved.items()}}

    @property
    def real(self) -> Row:
        """Nets trained on as many real images."""
        return self.record.table("condense_control")[0]

    def over_real(self, method: str) -> Difference:
        """Accuracy that a method's images teach less that of as many real ones, paired by net (points)."""
        scores = [
            [row["accuracy"] for row in self.record.table("condense_nets") if row["what"] == what]
            for what in (method, self.real["what"])
        ]
        return Difference.of([one - other for one, other in zip(*scores, strict=True)], "points")

    @property
    def nets(self) -> str:
        """The note under a number: what the interval is over."""
        n = self.real["n"]
        return f"over {n} fresh net{'s' if n > 1 else ''}; one condensation a method"

    def answer(self) -> str:
        """What each method's images teach, in equal CPU time, and what as many real ones do."""
        by = keyed(self.rows, "method")
        named = ", ".join(f"{name} {percent(row['accuracy'])}" for name, row in by.items() if name != EXACT)
        seconds = self.work.seconds
        spent = "Ten" if seconds is None else f"After {format_number(seconds, 's')} of CPU time each, ten"
        return (
            f"{spent} images made by **{EXACT}** gradients teach fresh nets to get "
            f"**{percent(by[EXACT]['accuracy'])}** of the test images of {self.data.upper()} right; {named}. Ten real "
            f"images teach them **{percent(self.real['accuracy'])}**: {self.over_real(EXACT).whole}."
        )

    def story(self) -> str:
        """What an outer step is, and three ways to its gradient."""
        return (
            f"Each outer step trains a fresh net for {self.work.unroll} steps on the ten images alone, moved by up to "
            "a pixel in each, looks at its loss on real ones, and changes the images by the gradient through that "
            "whole training run: a hypergradient. It begins with ten real images. Three ways to "
            "have it get the same CPU time: **checkpointed** reverse is exact and keeps some states, **truncated** "
            f"reverse looks at the last {self.work.truncated.steps} steps only, and (FG)²U runs forward along "
            f"{self.work.forward.directions} random directions and remembers nothing."
        )

    def pays(self) -> str:
        """Against as many real images."""
        return (
            f"Against as many real images: those made by {EXACT} hypergradients less ten real ones, "
            f"{self.over_real(EXACT).whole}, {self.nets}. (FG)²U itself is for runs that no schedule of checkpoints "
            "fits: it holds the same bytes however long the run is."
        )

    def fails(self) -> str:
        """Where checkpoints fit."""
        return (
            f"Where checkpoints fit, as here, take them. In equal CPU time the images of {OURS} less ten real ones: "
            f"{self.over_real(OURS).whole}. An estimate along few of many directions is too noisy for so few steps "
            "(docs/results/hypergradients.md)."
        )

    def card(self) -> Number:
        """Images made by exact gradients against real ones."""
        by, gap = keyed(self.rows, "method"), self.over_real(EXACT)
        row, ours = by[EXACT], by[OURS]
        return Number(
            value=gap.headline,
            label=f"test images right after training on ten condensed images, by {EXACT} hypergradients, over ten real "
            "ones",
            interval=gap.beside("nets"),
            control=f"ten real images {percent(self.real['accuracy'])}; condensed {percent(row['accuracy'])}, by "
            f"{OURS} {percent(ours['accuracy'])}",
        )  # fmt: skip

    def brief(self) -> str:
        """The finding in a line."""
        return f"exact over real images: {self.over_real(EXACT).headline}"

    def numbers(self) -> list[Number]:
        """The same of the paper's estimate, and its bytes."""
        ours = keyed(self.rows, "method")[OURS]
        most, gap = max(self.rows, key=lambda row: row["peak"]), self.over_real(OURS)
        rival = f"{most['method']} reverse {format_number(most['peak'], 'B')}"
        return [
            Number(
                value=gap.headline, interval=gap.beside("nets"),
                label=f"the same by the paper's {OURS}, {ours['steps']} outer steps in equal CPU time",
                control=f"ten real images {percent(self.real['accuracy'])}",
            ),
            Number(
                value=format_number(ours["peak"], "B"), label=f"held by a step of {OURS}, however long the run",
                control=rival, note=self.runs(),
            ),
        ]  # fmt: skip

    def licences(self) -> list[tuple[str, str]]:
        """The images."""
        return [licence_of(self.data)]

    def claims(self) -> list[tuple[str, str, str]]:
        """The paper's accuracies beside ours, where it has the data."""
        known, here = PAPER.get((self.data, 1), {}), keyed(self.rows, "method")
        pairs = (
            (OURS, OURS, OURS), ("truncated reverse", "truncated", "truncated"),
            ("exact reverse, here from checkpoints", "reverse", "checkpointed"),
        )  # fmt: skip
        claims = []
        for what, theirs, ours in pairs:
            paper = f"{known[theirs]:.1f} %" if theirs in known else "–"
            reached = f"{percent(here[ours]['accuracy'])} after {here[ours]['steps']} steps"
            claims.append((f"accuracy of {what}", paper, reached))
        return claims

    @property
    def limits(self) -> str:
        """Narrower nets, shorter runs, fewer directions."""
        steps = [row["steps"] for row in self.rows]
        return (
            "The paper's nets have three blocks, are 128 wide and train for 100 steps, 10,000 times over, along 512 "
            f"directions; here they have {self.work.depth}, are {self.work.width} wide and train for "
            f"{self.work.unroll}, {min(steps)} to {max(steps)} times, along {self.work.forward.directions}. With more "
            "time the order of the methods may be another: noisy steps need many."
        )

    @property
    def details(self) -> str:
        """What each estimate is."""
        return (
            f"(FG)²U estimates the hypergradient forward, along {self.work.forward.directions} random directions; "
            f"truncated reverse looks at the last {self.work.truncated.steps} of {self.work.unroll} steps only; "
            f"checkpointed reverse is exact and keeps a few states. The estimate along few of {28 * 28 * 10:,} "
            "directions is unbiased and very noisy, so in equal time on two cores it lags; it is meant for runs that "
            "no checkpoint fits."
        )

    def figures(self) -> list[Figure]:
        """The images, a row a method; accuracy over time, bytes, and the paper's bars where it has the data."""
        judged, looks = f"test images of {self.data.upper()}", self.record.table("condense_curve")
        least = min(self.rows, key=lambda row: row["peak"])
        last = {name: row["accuracy"] for name, row in keyed(looks, "method").items()}  # by their last looks
        ends = ", ".join(f"{name} {percent(last[name])}" for name in sorted(last, key=last.__getitem__, reverse=True))
        drawn = [
            side_by_side(
                self.images, self.classes, title="Ten images made to teach a net, not to be looked at",
                caption="One column a class; each row is what a method made of the real images in the first.",
            ),
            accuracy_figure(
                looks, title=f"One fresh net after equal CPU time: {ends}", judged=judged,
                caption=f"One fresh net at each look, on {LOOKED:,} images; one run a method (n = 1, one seed).",
            ),
            bytes_figure(self.rows, title=f"{least['method']} holds least: {format_number(least['peak'], 'B')}"),
        ]  # fmt: skip
        if (self.data, 1) in PAPER:
            here = f"Solid: here, {self.work.depth} blocks of width {self.work.width}, T = {self.work.unroll}."
            drawn.append(beside_paper(
                self.rows, [self.real], data=self.data, per_class=1,
                title="The paper's nets are wider and its runs far longer",
                judged=judged, caption=f"Open: the paper, width 128, T = 100, 10,000 steps. {here}",
            ))  # fmt: skip
        return drawn

    def tables(self) -> list[Table]:
        """The methods."""
        real = Table([self.real], "Nets trained on as many real images", UNITS, CONTROL)
        return [Table(self.rows, "Three methods, equal CPU time", UNITS, COLUMNS, roles=ROLES), real]
