"""Fifth chapter: which side of a net's valley is flat, and which averages of two nets work."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from torch import Tensor

from sparing.errors import UserError
from sparing.jobs.demo.resuming import unchanged
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

    data: str = "fashion-mnist"
    """Images; scikit-learn's digits stand in where they cannot be had."""
    start: int = 6000
    """Images that every net begins with (count)."""
    half: int = 2000
    """Images of each half that a net is then tuned on (count)."""
    rows: int = 1000
    """Test images that everything is measured on (count)."""
    widths: tuple[int, ...] = (8, 16, 32)
    """Channels of the units of the net (count)."""
    training: Training = field(default_factory=lambda: Training(epochs=6))
    """From a random start."""
    tuning: Training = field(default_factory=lambda: Training(epochs=3, rate=0.02))
    """On a half."""
    scan: Settings = field(default_factory=lambda: Settings(checkpoint="demo", points=11, draws=5))
    """Points and draws of a curve."""
    positions: int = 11
    """Points of a line between two nets (count)."""


WORK: Final = Work()
"""A minute on two cores."""

WORKS: Final[Mapping[Scale, Work]] = {
    "small": WORK,
    "tiny": Work(
        start=2000, half=700, rows=400, training=Training(epochs=4), tuning=Training(epochs=2, rate=0.02), positions=7,
        scan=Settings(checkpoint="demo", points=7, draws=2),
    ),
}  # fmt: skip
"""By the scale of the demo."""

ASKS: Final = (CurveSpec("gaussian", 0.0), CurveSpec("gaussian", 1.0))
PAIRS: Final = {"one start": ("tuned-a", "tuned-b"), "two random starts": ("other-a", "other-b")}
"""Pairs that are averaged -> their nets."""

TABLES: Final = {"model": "valley_model", "curves": "valley_curves", "values": "valley_values"}
"""Table of a scan -> table of the demo's record."""


@dataclass(slots=True)
class Stage:
    """What the chapter works on."""

    work: Work
    """Its size."""
    name: str
    """Of the images."""
    start: Pair
    """Inputs and labels that every net begins with."""
    halves: dict[str, Pair]
    """Those of the two halves, by letter."""
    evaluate: Classification
    """The measure."""
    seed: int
    """Of everything."""

    @property
    def calibrate(self) -> list[Tensor]:
        """Inputs that batch-norm statistics are taken from."""
        return [self.start[0][: self.work.rows]]


def stage(work: Work, seed: int) -> Stage:
    """Load the images and cut them.

    Args:
        work: How many of each.
        seed: Of the chapter.

    Returns:
        Fashion-MNIST, or the digits of scikit-learn where it cannot be had.

    Raises:
        UserError: If neither can be had.
    """
    wanted, name = work.start + 2 * work.half, work.data
    try:
        train_part, test = image_rows(name, rows=work.rows, calibration=wanted)
    except UserError as missing:
        LOG.warning("demo: %s is not to be had (%s); scikit-learn's digits stand in", name, missing)
        name, (train_part, test) = "digits", digits()
    inputs, labels = inputs_of(train_part[0]), train_part[1]
    first = len(labels) * work.start // wanted
    half = (len(labels) - first) // 2
    ends = {"a": slice(first, first + half), "b": slice(first + half, first + 2 * half)}
    halves = {letter: (inputs[rows], labels[rows]) for letter, rows in ends.items()}
    evaluate = Classification(inputs_of(test[0], like=train_part[0]), test[1])
    return Stage(work, name, (inputs[:first], labels[:first]), halves, evaluate, seed)


def path_of(folder: Path, name: str) -> Path:
    """File of a net.

    Args:
        folder: Of the demo.
        name: Of the net.

    Returns:
        Its path.
    """
    return folder / f"valley-{name}.safetensors"


def _net(on: Stage) -> Vgg:
    channels = on.start[0].shape[1]
    return initialize(lambda: Vgg(channels, widths=on.work.widths), seed=on.seed)


def _fresh(on: Stage, seed: int) -> Vgg:
    """A net trained from the random start of a seed."""
    channels = on.start[0].shape[1]
    net = initialize(lambda: Vgg(channels, widths=on.work.widths), seed=seed)
    return train(net, *on.start, on.work.training, seed=seed)


def recipes(on: Stage, load: Callable[[str], Vgg]) -> dict[str, Callable[[], Vgg]]:
    """How each net comes about, in order; every one sees as many images in as many steps.

    Args:
        on: Images and sizes.
        load: Gives a net that was made before.

    Returns:
        Name -> maker. "start" is the common start; "tuned-…" are tuned from it on a half each; "other-…" have a start
        of their own.
    """

    def tuned(net: Vgg, letter: str) -> Vgg:
        return train(net, *on.halves[letter], on.work.tuning, seed=on.seed)

    return {
        "start": lambda: _fresh(on, on.seed),
        "tuned-a": lambda: tuned(load("start"), "a"),
        "tuned-b": lambda: tuned(load("start"), "b"),
        "other-a": lambda: tuned(_fresh(on, on.seed + 1), "a"),
        "other-b": lambda: tuned(_fresh(on, on.seed + 2), "b"),
    }


def train_all(on: Stage, record: Record, path: Path) -> Callable[[str], Vgg]:
    """Train the nets that the record does not know yet.

    Args:
        on: Images and sizes.
        record: Receives a row of "valley_nets" each; written after each.
        path: File of the record; the nets lie beside it.

    Returns:
        Name -> the net, read from its file.
    """

    def load(name: str) -> Vgg:
        net = _net(on)
        net.load_state_dict(load_tensors(path_of(path.parent, name)))
        return net.eval()

    made = recipes(on, load)
    done = {row["net"] for row in record.table("valley_nets") if path_of(path.parent, row["net"]).exists()}
    with Progress("train for the valleys", total=len(made), unit="net", resume_at=len(done)) as bar:
        for name in [name for name in made if name not in done]:
            net = made[name]()
            save_tensors(path_of(path.parent, name), net.state_dict())
            found = on.evaluate(net)
            record.add("valley_nets", net=name, **found)
            record.write(path)
            bar.advance(net=name, error=found["error"])
    return load


def scan_start(on: Stage, record: Record, path: Path, net: Vgg) -> None:
    """Walk from the common start along noise as drawn and with the weights' signs.

    Args:
        on: Images and sizes.
        record: Receives tables "valley_model", "valley_curves" and "valley_values"; written once, at the end.
        path: File of the record.
        net: The start.
    """
    if record.table("valley_curves"):
        return
    own = Record(question="", settings=on.work.scan, seed=on.seed, environment={})
    subject = ScanInputs(
        "the start", net, on.evaluate, on.calibrate, "error", f"{on.evaluate.rows} images of {on.name}"
    )
    describe_(own, subject)
    with Progress("scan", total=len(ASKS), unit="curve") as bar:
        for spec in ASKS:
            measure_(own, spec, subject, on.work.scan, None)
            bar.advance(signs=spec.sign)
    for name, theirs in TABLES.items():
        for row in own.table(name):
            record.add(theirs, **row)
    record.write(path)


def merge_pair(on: Stage, record: Record, path: Path, pair: str, load: Callable[[str], Vgg]) -> None:
    """Predict the gap of a pair's average, then measure it and the line between the two.

    Args:
        on: Images and sizes.
        record: Receives a row of "valley_merges" and rows of "valley_lines".
        path: File of the record.
        pair: Name of the pair.
        load: Gives a net.
    """
    if pair in {row["pair"] for row in record.table("valley_merges")}:
        return
    first, second = (load(name) for name in PAIRS[pair])
    told: dict[str, float | str | None] = {"predicted": None, "predicted_low": None, "predicted_high": None}
    try:
        forecast = predict_merge(first, second, base=load("start") if pair == "one start" else None)
        low, high = forecast.interval["error"]
        told = {"predicted": forecast.gap["error"], "predicted_low": low, "predicted_high": high}
        told["verdict"] = forecast.verdict
    except UserError as missing:
        LOG.warning("demo: the gap is measured and not predicted (%s)", missing)
    positions = [at / (on.work.positions - 1) for at in range(on.work.positions)]
    line = interpolate(first, second, on.evaluate, lambdas=positions, calibrate=on.calibrate)
    for at, error in zip(line.lambdas, line.values["error"], strict=True):
        record.add("valley_lines", pair=pair, at=at, error=error)
    ends = (line.at("error", 0.0), line.at("error", 1.0))
    record.add(
        "valley_merges", pair=pair, agreement=line.agreement.element, chance=line.agreement.chance, error_a=ends[0],
        error_b=ends[1], error_merged=line.at("error", 0.5), gap=line.gap["error"], **told,
    )  # fmt: skip
    record.write(path)


def run_chapter(record: Record, *, seed: int, path: Path, work: Work = WORK) -> None:
    """Do what the record does not hold yet; without images the chapter is left out.

    Args:
        record: Filled in place: tables "valley_data", "valley_nets", those of the scan, "valley_merges" and
            "valley_lines".
        seed: Of weights, rows and noise.
        path: File of the record; nets lie beside it.
        work: Size of the work.
    """
    if len(record.table("valley_merges")) == len(PAIRS):
        return
    try:
        on = stage(work, seed)
    except UserError as missing:
        LOG.warning("demo: the chapter on valleys is left out (%s)", missing)
        return
    unchanged(record, "valley_data", on.name)
    if not record.table("valley_data"):
        sizes = {"start": len(on.start[1]), "half": len(on.halves["a"][1]), "rows": on.evaluate.rows}
        record.add("valley_data", name=on.name, draws=work.scan.draws, **sizes)
    load = train_all(on, record, path)
    scan_start(on, record, path, load("start"))
    for pair in PAIRS:
        merge_pair(on, record, path, pair, load)
