"""Fifth chapter: which side of a net's valley is flat, and which averages of two nets work."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from torch import Tensor

from sparing.errors import UserError
from sparing.jobs.demo.resuming import copy_tables, require_unchanged
from sparing.jobs.demo.settings import Scale
from sparing.jobs.disk import load_tensors, save_tensors
from sparing.jobs.scan.checkpoints import Inputs as ScanInputs
from sparing.jobs.scan.curves import CurveSpec
from sparing.jobs.scan.measure import describe_, measure_
from sparing.jobs.scan.settings import Settings
from sparing.jobs.subjects.images import Pair, digits, image_rows, inputs_of
from sparing.jobs.subjects.nets import Training, Vgg, initialize, train
from sparing.report import Progress, Record
from sparing.valley.evaluators import Classification
from sparing.valley.interpolate import interpolate
from sparing.valley.predict import predict_merge

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
    scan: Settings = field(default_factory=lambda: Settings(checkpoint="demo", points=11, draws=5))
    """Points and draws of a curve."""
    positions: int = 11  # points of a line between two nets (count)


WORK: Final = Work()  # a minute on two cores

WORKS: Final[Mapping[Scale, Work]] = {
    "small": WORK,
    "tiny": Work(
        start=2000, half=700, rows=400, training=Training(epochs=4), tuning=Training(epochs=2, rate=0.02), positions=7,
        scan=Settings(checkpoint="demo", points=7, draws=2),
    ),
}  # fmt: skip

ASKS: Final = (CurveSpec("gaussian", 0.0), CurveSpec("gaussian", 1.0))
PAIRS: Final = {"one start": ("tuned-a", "tuned-b"), "two random starts": ("other-a", "other-b")}
"""Pairs that are averaged -> their nets."""

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
    seed: int

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


def path_of(folder: Path, name: str) -> Path:
    """File of a net."""
    return folder / f"valley-{name}.safetensors"


def _net(inputs: Inputs, seed: int) -> Vgg:
    """A net at the random start of a seed."""
    return initialize(lambda: Vgg(inputs.start[0].shape[1], widths=inputs.work.widths), seed=seed)


def recipes(inputs: Inputs, load: Callable[[str], Vgg]) -> dict[str, Callable[[], Vgg]]:
    """How each net is made, in order; every one sees as many images in as many steps.

    "start" is the common start; "tuned-…" are tuned from it on a half each; "other-…" have a start of their own.
    """

    def fresh(seed: int) -> Vgg:
        return train(_net(inputs, seed), *inputs.start, inputs.work.training, seed=seed)

    # the order of rows is the demo's in every tuning: pairs differ in their starts and halves alone
    def tuned(net: Vgg, letter: str) -> Vgg:
        return train(net, *inputs.halves[letter], inputs.work.tuning, seed=inputs.seed)

    return {
        "start": lambda: fresh(inputs.seed),
        "tuned-a": lambda: tuned(load("start"), "a"),
        "tuned-b": lambda: tuned(load("start"), "b"),
        "other-a": lambda: tuned(fresh(inputs.seed + 1), "a"),
        "other-b": lambda: tuned(fresh(inputs.seed + 2), "b"),
    }


def train_all(inputs: Inputs, record: Record, path: Path) -> Callable[[str], Vgg]:
    """Train the nets that the record does not hold yet, each saved when done; returns what reads one from its file."""

    def load(name: str) -> Vgg:
        net = _net(inputs, inputs.seed)
        net.load_state_dict(load_tensors(path_of(path.parent, name)))
        return net.eval()

    made = recipes(inputs, load)
    done = {row["net"] for row in record.table("valley_nets") if path_of(path.parent, row["net"]).exists()}
    with Progress("train for the valleys", total=len(made), unit="net", resume_at=len(done)) as bar:
        for name in [name for name in made if name not in done]:
            net = made[name]()
            save_tensors(path_of(path.parent, name), net.state_dict())
            found = inputs.evaluate(net)
            record.add("valley_nets", net=name, **found)
            record.write(path)
            bar.advance(net=name, error=found["error"])
    return load


def scan_start(inputs: Inputs, record: Record, path: Path, net: Vgg) -> None:
    """Walk from the common start along noise as drawn and with the weights' signs."""
    if record.table("valley_curves"):
        return
    own = Record(question="", settings=inputs.work.scan, seed=inputs.seed, environment={})
    subject = ScanInputs(
        "the start", net, inputs.evaluate, inputs.calibrate, "error", f"{inputs.evaluate.rows} images of {inputs.name}"
    )
    describe_(own, subject)
    with Progress("scan", total=len(ASKS), unit="curve") as bar:
        for spec in ASKS:
            measure_(own, spec, subject, inputs.work.scan, None)
            bar.advance(signs=spec.sign)
    copy_tables(record, own, TABLES)
    record.write(path)


def merge_pair(inputs: Inputs, record: Record, path: Path, pair: str, load: Callable[[str], Vgg]) -> None:
    """Predict the gap of a pair's average, then measure it and the line between the two."""
    if pair in {row["pair"] for row in record.table("valley_merges")}:
        return
    first, second = (load(name) for name in PAIRS[pair])
    prediction: dict[str, float | str | None] = {"predicted": None, "predicted_low": None, "predicted_high": None}
    try:
        forecast = predict_merge(first, second, base=load("start") if pair == "one start" else None)
        low, high = forecast.interval["error"]
        prediction = {"predicted": forecast.gap["error"], "predicted_low": low, "predicted_high": high}
        prediction["verdict"] = forecast.verdict
    except UserError as missing:
        LOG.warning("demo: the gap is measured and not predicted (%s)", missing)
    positions = [at / (inputs.work.positions - 1) for at in range(inputs.work.positions)]
    line = interpolate(first, second, inputs.evaluate, lambdas=positions, calibrate=inputs.calibrate)
    for at, error in zip(line.lambdas, line.values["error"], strict=True):
        record.add("valley_lines", pair=pair, at=at, error=error)
    ends = (line.at("error", 0.0), line.at("error", 1.0))
    record.add(
        "valley_merges", pair=pair, agreement=line.agreement.element, chance=line.agreement.chance, error_a=ends[0],
        error_b=ends[1], error_merged=line.at("error", 0.5), gap=line.gap["error"], **prediction,
    )  # fmt: skip
    record.write(path)


def run_chapter(record: Record, *, seed: int, path: Path, work: Work = WORK) -> None:
    """Do what the record does not hold yet; without images the chapter is omitted."""
    if len(record.table("valley_merges")) == len(PAIRS):
        return
    try:
        inputs = load_inputs(work, seed)
    except UserError as missing:
        LOG.warning("demo: the chapter on valleys is left out (%s)", missing)
        return
    require_unchanged(record, "valley_data", inputs.name)
    if not record.table("valley_data"):
        sizes = {"start": len(inputs.start[1]), "half": len(inputs.halves["a"][1]), "rows": inputs.evaluate.rows}
        record.add("valley_data", name=inputs.name, draws=work.scan.draws, **sizes)
    load = train_all(inputs, record, path)
    scan_start(inputs, record, path, load("start"))
    for pair in PAIRS:
        merge_pair(inputs, record, path, pair, load)
