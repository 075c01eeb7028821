"""Chapter on valleys: which side of a net's valley is flat, and which averages of two nets work."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Final

import torch
from torch import Tensor

from sparing.errors import UserError
from sparing.jobs.demo.chapter import begin_on, copy_tables, load_or_omit, seeds_of
from sparing.jobs.demo.settings import Scale
from sparing.jobs.demo.settings import Settings as Demo
from sparing.jobs.disk import save_tensors
from sparing.jobs.run import Run
from sparing.jobs.scan.curves import CurveSpec, describe_, measure_
from sparing.jobs.scan.inputs import Inputs as ScanInputs
from sparing.jobs.scan.settings import Settings
from sparing.jobs.subjects.images import Pair, digits, image_rows, inputs_of
from sparing.jobs.subjects.nets import Training, Vgg, initialize, train
from sparing.report import Progress, Record
from sparing.valley.aligning.align import align
from sparing.valley.aligning.matching import assignment
from sparing.valley.forecast.predict import predict_merge
from sparing.valley.scans.evaluators import Classification
from sparing.valley.scans.interpolate import interpolate

LOG = logging.getLogger("sparing.demo")


@dataclass(frozen=True, kw_only=True, slots=True)
class Work:
    """Size of the chapter."""

    data: str = "fashion-mnist"  # scikit-learn's digits stand in where it cannot be fetched
    start: int = 6000  # images that every net begins with (count)
    half: int = 2000  # images of each half that a net is then tuned on (count)
    rows: int = 1000  # test images that everything is measured on (count)
    widths: tuple[int, ...] = (8, 16, 32)  # channels of the units of the net (count)
    training: Training = field(default_factory=lambda: Training(epochs=6))  # from a random start
    tuning: Training = field(default_factory=lambda: Training(epochs=3, rate=0.02))  # on a half
    scan: Settings = field(default_factory=lambda: Settings(model="demo", points=11, draws=5))
    """Points and draws of a curve."""
    positions: int = 11  # points of a line between two nets (count)


WORK: Final = Work()  # a minute on two cores

WORKS: Final[dict[Scale, Work]] = {
    "small": WORK,
    "tiny": Work(
        start=2000, half=700, rows=400, training=Training(epochs=4), tuning=Training(epochs=2, rate=0.02), positions=7,
        scan=Settings(model="demo", points=7, draws=2),
    ),
}  # fmt: skip

CURVES: Final = (CurveSpec("gaussian", 0.0), CurveSpec("gaussian", 1.0))
STRANGERS: Final = "two random starts"
ALIGNED: Final = "two random starts, aligned"
PAIRS: Final = {
    "one start": ("tuned-a", "tuned-b"), STRANGERS: ("tuned-a", "other-b"), ALIGNED: ("tuned-a", "other-b"),
}  # fmt: skip
"""Pairs that are averaged -> their nets; of the aligned ones the second is first brought into the first's order."""
NETS: Final = ("start", "tuned-a", "tuned-b", "other-b")
AWAY: Final = 1000  # from the seed of a net to that of the stranger beside it
FILES: Final = {net: f"valley-{net}.safetensors" for net in NETS}

TABLES: Final = {"model": "valley_model", "curves": "valley_curves", "values": "valley_values"}
"""Table of a scan -> table of the demo's record."""


@dataclass(slots=True)
class Inputs:
    """What the chapter reads once: images, their parts, and how nets are judged."""

    work: Work
    name: str  # of the images
    start: Pair  # inputs and labels that every net begins with
    halves: dict[str, Pair]  # those of the two halves, by letter
    evaluate: Classification
    seed: int  # of the start and of the order of rows

    @property
    def calibrate(self) -> list[Tensor]:
        """Inputs that batch-norm statistics are taken from."""
        return [self.start[0][: self.work.rows]]


def load_inputs(work: Work, seed: int) -> Inputs:
    """Load and cut Fashion-MNIST, or the digits of scikit-learn where it cannot be fetched."""
    wanted, name = work.start + 2 * work.half, work.data
    try:
        train_part, test = image_rows(name, rows=work.rows, calibration=wanted)
    except UserError as missing:
        LOG.warning("demo: %s is not available (%s); scikit-learn's digits stand in", name, missing)
        name, (train_part, test) = "digits", digits()
    inputs, labels = inputs_of(train_part[0]), train_part[1]
    first = len(labels) * work.start // wanted
    half = (len(labels) - first) // 2
    ends = {"a": slice(first, first + half), "b": slice(first + half, first + 2 * half)}
    halves = {letter: (inputs[rows], labels[rows]) for letter, rows in ends.items()}
    evaluate = Classification(inputs_of(test[0], like=train_part[0]), test[1])
    return Inputs(work, name, (inputs[:first], labels[:first]), halves, evaluate, seed)


def net_of(inputs: Inputs, seed: int) -> Vgg:
    """A net at the random start of a seed."""
    return initialize(lambda: Vgg(inputs.start[0].shape[1], widths=inputs.work.widths), seed=seed)


def train_all(inputs: Inputs, run: Run) -> Callable[[str], Vgg]:
    """Train the nets, every one on as many images in as many steps; returns what gives a copy of one.

    "start" is the common start; "tuned-…" are tuned from it on a half each; "other-…" has a start of its own.
    """
    weights: dict[str, dict[str, Tensor]] = {}

    def copy(name: str) -> Vgg:
        net = net_of(inputs, inputs.seed)
        net.load_state_dict(weights[name])
        return net.eval()

    def fresh(seed: int) -> Vgg:
        return train(net_of(inputs, seed), *inputs.start, inputs.work.training, seed=seed)

    # the order of rows is the demo's in every tuning: pairs differ in their starts and halves alone
    def tuned(net: Vgg, letter: str) -> Vgg:
        return train(net, *inputs.halves[letter], inputs.work.tuning, seed=inputs.seed)

    recipes: dict[str, Callable[[], Vgg]] = {
        "start": lambda: fresh(inputs.seed),
        "tuned-a": lambda: tuned(copy("start"), "a"),
        "tuned-b": lambda: tuned(copy("start"), "b"),
        "other-b": lambda: tuned(fresh(inputs.seed + AWAY), "b"),
    }
    label = f"valley: net of seed {inputs.seed}, "

    def train_one(name: str, bar: Progress) -> dict[str, Tensor]:
        net = recipes[name]()
        found = inputs.evaluate(net)
        run.record.add("valley_nets", seed=inputs.seed, net=name, **found)
        bar.advance(net=name, error=found["error"])
        return dict(net.state_dict())

    done = len(run.results(label))
    with Progress("train for the valleys", total=len(NETS), unit="net", resume_at=done) as bar:
        for name in NETS:
            weights[name] = run.once(f"{label}{name}", partial(train_one, name, bar))
    return copy


def scan_start(inputs: Inputs, record: Record, net: Vgg) -> None:
    """Walk from the common start along noise as drawn and with the weights' signs."""
    own = Record(question="", settings=inputs.work.scan, seed=inputs.seed, environment={})
    images = f"{inputs.evaluate.rows} images of {inputs.name}"
    subject = ScanInputs("the start", net, inputs.evaluate, inputs.calibrate, "error", images)
    describe_(own, subject)
    with Progress("scan", total=len(CURVES), unit="curve") as bar:
        for spec in CURVES:
            measure_(own, spec, subject, inputs.work.scan, None)
            bar.advance(signs=spec.sign)
    copy_tables(record, own, TABLES)


def merge_pair(inputs: Inputs, record: Record, pair: str, copy: Callable[[str], Vgg]) -> None:
    """Predict the gap of a pair's average, then measure it and the line between the two."""
    first, second = map(copy, PAIRS[pair])
    if pair == ALIGNED:
        second.load_state_dict(align(first, second, inputs.calibrate, by="activations", seed=inputs.seed).state)
    prediction: dict[str, float | str | None] = {"predicted": None, "predicted_low": None, "predicted_high": None}
    try:
        forecast = predict_merge(first, second, base=copy("start") if pair == "one start" else None)
        low, high = forecast.interval["error"]
        prediction = {"predicted": forecast.gap["error"], "predicted_low": low, "predicted_high": high}
        prediction["verdict"] = forecast.verdict
    except UserError as missing:
        LOG.warning("demo: the gap is measured and not predicted (%s)", missing)
    positions = [at / (inputs.work.positions - 1) for at in range(inputs.work.positions)]
    line = interpolate(first, second, inputs.evaluate, lambdas=positions, calibrate=inputs.calibrate)
    for at, error in zip(line.lambdas, line.values["error"], strict=True):
        record.add("valley_lines", seed=inputs.seed, pair=pair, at=at, error=error)
    ends = (line.at("error", 0.0), line.at("error", 1.0))
    record.add(
        "valley_merges", seed=inputs.seed, pair=pair, agreement=line.agreement.element, chance=line.agreement.chance,
        error_a=ends[0], error_b=ends[1], error_merged=line.at("error", 0.5), gap=line.gap["error"], **prediction,
    )  # fmt: skip


def run_chapter(run: Run) -> None:
    """For every seed train four nets and average three pairs of them; scan the first net."""
    settings: Demo = run.settings
    if run.record.table("valley_curves"):
        return
    work, seeds = WORKS[settings.scale], seeds_of(settings)
    inputs = load_or_omit(lambda: load_inputs(work, settings.seed))
    # units are assigned by SciPy, of an extra: asked for before nets are trained for minutes
    load_or_omit(lambda: assignment(torch.zeros(1, 1)))
    sizes = {"start": len(inputs.start[1]), "half": len(inputs.halves["a"][1]), "rows": inputs.evaluate.rows}
    begin_on(run, "valley_data", inputs.name, draws=work.scan.draws, **sizes)
    copies = {}
    for seed in seeds:
        mine = replace(inputs, seed=seed)
        copies[seed] = train_all(mine, run)
        for pair in PAIRS:
            label = f"valley: merge {pair}, seed {seed}"
            run.once(label, partial(merge_pair, mine, run.record, pair, copies[seed]))
    run.once("valley: scan", lambda: scan_start(inputs, run.record, copies[settings.seed]("start")))


def write_files(run: Run) -> None:
    """Write the nets of the demo's own seed."""
    settings: Demo = run.settings
    for name, weights in run.results(f"valley: net of seed {settings.seed}, ").items():
        save_tensors(run.folder.at(FILES[name]), weights)
