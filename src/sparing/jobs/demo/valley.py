"""Chapter on valleys: which side of a net's valley is flat, and which averages of two nets work."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property, partial
from pathlib import Path
from typing import Final

from torch import Tensor

from sparing.errors import UserError
from sparing.jobs.demo.chapter import Chapter, Row, begin_on, copy_tables, load_or_omit
from sparing.jobs.demo.settings import Scale
from sparing.jobs.demo.settings import Settings as Demo
from sparing.jobs.disk import save_tensors
from sparing.jobs.run import Run
from sparing.jobs.scan.curves import CurveSpec, describe_, measure_
from sparing.jobs.scan.figures import hundredths, index_of, pair_figure
from sparing.jobs.scan.inputs import Inputs as ScanInputs
from sparing.jobs.scan.settings import Settings
from sparing.jobs.subjects.images import Pair, digits, image_rows, inputs_of
from sparing.jobs.subjects.nets import Training, Vgg, initialize, train
from sparing.report import Figure, Progress, Record, Table, plots
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
PAIRS: Final = {"one start": ("tuned-a", "tuned-b"), "two random starts": ("other-a", "other-b")}
"""Pairs that are averaged -> their nets."""
NETS: Final = ("start", "tuned-a", "tuned-b", "other-a", "other-b")
FILES: Final = {net: f"valley-{net}.safetensors" for net in NETS}

TABLES: Final = {"model": "valley_model", "curves": "valley_curves", "values": "valley_values"}
"""Table of a scan -> table of the demo's record."""

ROLES: Final[dict[str, plots.Role]] = {"one start": "ours", "two random starts": "rival"}
COLUMNS: Final = ("pair", "predicted", "gap", "verdict", "agreement", "error_members", "error_merged")
UNITS: Final = {
    "agreement": "%", "error_members": "%", "error_merged": "%", "gap": "points", "predicted": "points",
}  # fmt: skip


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


def net_of(inputs: Inputs, seed: int) -> Vgg:
    """A net at the random start of a seed."""
    return initialize(lambda: Vgg(inputs.start[0].shape[1], widths=inputs.work.widths), seed=seed)


def train_all(inputs: Inputs, run: Run) -> Callable[[str], Vgg]:
    """Train the nets, every one on as many images in as many steps; returns what gives a copy of one.

    "start" is the common start; "tuned-…" are tuned from it on a half each; "other-…" have a start of their own.
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
        "other-a": lambda: tuned(fresh(inputs.seed + 1), "a"),
        "other-b": lambda: tuned(fresh(inputs.seed + 2), "b"),
    }

    def train_one(name: str, bar: Progress) -> dict[str, Tensor]:
        net = recipes[name]()
        found = inputs.evaluate(net)
        run.record.add("valley_nets", net=name, **found)
        bar.advance(net=name, error=found["error"])
        return dict(net.state_dict())

    done = len(run.results("valley: net "))
    with Progress("train for the valleys", total=len(NETS), unit="net", resume_at=done) as bar:
        for name in NETS:
            weights[name] = run.once(f"valley: net {name}", partial(train_one, name, bar))
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
        record.add("valley_lines", pair=pair, at=at, error=error)
    ends = (line.at("error", 0.0), line.at("error", 1.0))
    record.add(
        "valley_merges", pair=pair, agreement=line.agreement.element, chance=line.agreement.chance, error_a=ends[0],
        error_b=ends[1], error_merged=line.at("error", 0.5), gap=line.gap["error"], **prediction,
    )  # fmt: skip


def run_chapter(run: Run) -> None:
    """Train five nets, scan one of them, and average two pairs."""
    settings: Demo = run.settings
    if len(run.record.table("valley_merges")) == len(PAIRS):
        return
    work = WORKS[settings.scale]
    inputs = load_or_omit(lambda: load_inputs(work, settings.seed))
    sizes = {"start": len(inputs.start[1]), "half": len(inputs.halves["a"][1]), "rows": inputs.evaluate.rows}
    begin_on(run, "valley_data", inputs.name, draws=work.scan.draws, **sizes)
    copy = train_all(inputs, run)
    run.once("valley: scan", lambda: scan_start(inputs, run.record, copy("start")))
    for pair in PAIRS:
        run.once(f"valley: merge {pair}", partial(merge_pair, inputs, run.record, pair, copy))


def write_files(run: Run) -> None:
    """Write the nets."""
    for name, weights in run.results("valley: net ").items():
        save_tensors(run.folder.at(FILES[name]), weights)


def points(value: float) -> str:
    """A gap in words."""
    size = f"{abs(value):.1f} points"
    return f"{size} {'worse' if value > 0 else 'better'}" if abs(value) >= 0.05 else "no better and no worse"


def forecast_text(row: Row) -> str:
    """What was predicted, and whether what was measured lies where it should."""
    if row["predicted"] is None:
        return "not predicted"
    low, high = row["predicted_low"], row["predicted_high"]
    outside = "" if low <= row["gap"] <= high else ", missed"
    return f"{row['predicted']:+.1f} [{low:+.1f}, {high:+.1f}]{outside}".replace("-", "−")


class ValleyChapter(Chapter):
    """The two sides of a valley, the line between two nets, predicted and measured."""

    name, complete = "valley", ("valley_merges", len(PAIRS))
    saves, topic = "merging nets", "Merging nets · valleys"
    question = "Which nets can be averaged, and can it be told before anything is evaluated?"
    paper = "Li et al., asymmetric valleys, NeurIPS 2024, arXiv:2405.12489; it has these as plots"
    deeper = ("sparing merge DIR DIR --data TEXT.txt", "sparing scan module:function    # the valley of your net")
    more = "More: both sides of the valley, every number"
    details = (
        "The net is moved along random noise, as drawn and with each number given the sign of its weight; "
        "batch-norm statistics are estimated anew at every point. An asymmetry index of 0 says that both sides "
        "rise alike, 1 that only the side rises on which weights shrink.\n\nIn the paper Figure 3 shows VGG16 and "
        "ResNet20 flatter on the side of the weights' signs; Figure 11 shows averages that beat their members "
        "where both come from one pretrained net, and a gap that grows as halves train on from one random start."
    )

    def __init__(self, record: Record, folder: Path) -> None:
        """With the asymmetry index along noise as drawn and along the weights' signs."""
        super().__init__(record, folder)
        self.data = record.table("valley_data")[0]
        self.raw, self.consistent = (hundredths(index_of(row, "error")) for row in record.table("valley_curves"))

    @cached_property
    def rows(self) -> list[Row]:
        """The pairs, shares in percent."""
        shares = {*UNITS, "predicted_low", "predicted_high"}
        rows = []
        for row in self.record.table("valley_merges"):
            row |= {"error_members": (row["error_a"] + row["error_b"]) / 2, "verdict": row.get("verdict")}
            rows.append({k: 100 * cell if k in shares and cell is not None else cell for k, cell in row.items()})
        return rows

    def answer(self) -> str:
        """Two gaps, predicted and measured, and two indices."""
        parts = []
        for row in self.rows:
            guess = "not predicted" if row["predicted"] is None else f"predicted: {points(row['predicted'])}"
            parts.append(f"from {row['pair']} it is **{points(row['gap'])}** ({guess})")
        return (
            f"The average of two nets against its members: {', '.join(parts)}. Around one net, the asymmetry index of "
            f"the error along noise is **{self.raw}**, with the signs of the weights **{self.consistent}**."
        )

    def story(self) -> str:
        """Five nets, two averages."""
        start, half = (f"{self.data[name]:,}" for name in ("start", "half"))
        return (
            f"A small net with batch norm is trained on {start} images of {self.data['name']}. Two copies of it are "
            f"tuned on {half} new images each, and averaged; then two nets with the same training from two random "
            "starts. The gap is the error of the average less the mean error of its two members, in percentage points. "
            "It is predicted from the weights alone: what tells most is how many of them have the same sign."
        )

    def numbers(self) -> list[tuple[str, str, str]]:
        """Both gaps and the index."""
        gaps = [f"{row['gap']:+.1f} points".replace("-", "−") for row in self.rows]
        signs = [f"{self.runs('n = 1 pair')}; {row['agreement']:.1f} % of signs agree" for row in self.rows]
        curve = self.record.table("valley_curves")[1]
        low, high = (hundredths(index_of(curve, "error", end)) for end in ("_low", "_high"))
        index = "asymmetry index along the weights' signs: 0 even, 1 one side flat"
        return [
            (gaps[0], "error of the average of two nets from one start, against its members", signs[0]),
            (gaps[1], "the same from two random starts", signs[1]),
            (self.consistent, index, f"{self.runs(str(curve['n']) + ' draws')}: {low} to {high}"),
        ]

    def claims(self) -> list[tuple[str, str, str]]:
        """The sides of a valley, signs, and averages."""
        same, other = self.rows
        uneven, signed = "strongly uneven, the + side flat (Figure 3)", f"index {self.consistent}"
        signs = f"{same['agreement']:.1f} %; from two random starts {other['agreement']:.1f} %"
        forecasts = "; ".join(map(forecast_text, self.rows))
        return [
            ("sides of the valley along noise as drawn", "nearly even (Figure 3)", f"index {self.raw}"),
            ("along noise with the weights' signs", uneven, signed),
            ("equal signs of two nets tuned from one pretrained net", "95 % or more (Figure 11)", signs),
            ("their average", "better than its members (Figure 11)", points(same["gap"])),
            ("their gap predicted; that from two random starts", "–", forecasts),
        ]

    @property
    def limits(self) -> str:
        """A small net, few test images."""
        return (
            "The paper's nets are VGG16 and ResNets, trained for 200 epochs; this one trains for a few, and its error "
            f"is measured on {self.data['rows']:,} images, so that gaps below about a point are noise."
        )

    def figures(self) -> list[Figure]:
        """Error on the straight line between two nets, a line a pair; both sides of the valley."""
        rows = [row | {"error": 100 * row["error"]} for row in self.record.table("valley_lines")]
        worst = max(self.rows, key=lambda row: row["gap"])
        between = plots.lines(
            plots.series(rows, x="at", y="error", by="pair", roles=ROLES),
            title=f"Half-way between nets from {worst['pair']}, the error is {points(worst['gap'])}",
            x=plots.Axis("share of the second net", low=0, high=1), y=plots.Axis("error on test images", "%", low=0),
            caption="Batch-norm statistics are estimated anew at every point. One pair each (n = 1, one seed).",
        )  # fmt: skip
        return [between, pair_figure(self.record.table("valley_curves"), self.record.table("valley_values"), "error")]

    def tables(self) -> list[Table]:
        """Both averages."""
        note = (
            "predicted, gap: error of the average less the mean of its members, before and after measuring; brackets: "
            "where 90 % of the pairs lie that the prediction was fitted to. agreement: weights of the same sign. One "
            "seed."
        )
        return [Table(self.rows, "Two averages, predicted and measured", UNITS, COLUMNS, note, ROLES)]
