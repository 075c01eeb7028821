"""Page of the chapter on valleys: the two sides of one, and lines between nets, predicted and measured."""

from __future__ import annotations

from functools import cached_property
from pathlib import Path
from typing import Final

from sparing.jobs.demo.chapter import Chapter, Row, licence_of
from sparing.jobs.demo.finding import Difference
from sparing.jobs.demo.valley import ALIGNED, CURVES, PAIRS, STRANGERS
from sparing.jobs.scan.figures import hundredths, index_of, pair_figure
from sparing.report import Figure, Record, Table, plots
from sparing.report.page import Number

ROLES: Final[dict[str, plots.Role]] = {"one start": "ours", STRANGERS: "rival", ALIGNED: "extension"}
COLUMNS: Final = ("pair", "seed", "predicted", "gap", "verdict", "agreement", "error_members", "error_merged")
UNITS: Final = {
    "agreement": "%", "error_members": "%", "error_merged": "%", "gap": "points", "predicted": "points",
}  # fmt: skip


def points(value: float) -> str:
    """A gap in words."""
    size = f"{abs(value):.1f} points"
    return f"{size} {'worse' if value > 0 else 'better'}" if abs(value) >= 0.05 else "no better and no worse"


def forecast_text(row: Row) -> str:
    """What was predicted, and whether what was measured lies where it should."""
    if row["predicted"] is None:
        return "not predicted"
    low, high = row["predicted_low"], row["predicted_high"]
    outside = "" if low <= row["gap"] <= high else ": outside, the prediction is wrong"
    text = f"predicted {row['predicted']:+.1f} [{low:+.1f}, {high:+.1f}], measured {row['gap']:+.1f}{outside}"
    return text.replace("-", "−")


class ValleyChapter(Chapter):
    """The two sides of a valley, the line between two nets, predicted and measured."""

    name, complete = "valley", ("valley_curves", len(CURVES))
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

    def of_pair(self, pair: str) -> list[Row]:
        """A kind of pair, a row a seed."""
        return [row for row in self.rows if row["pair"] == pair]

    def gap(self, pair: str) -> Difference:
        """Gap of a kind of pair, over seeds (points)."""
        return Difference.of([row["gap"] for row in self.of_pair(pair)], "points")

    @cached_property
    def closed(self) -> Difference:
        """Gap of aligned strangers less that of the same nets as they are, over seeds (points)."""
        pairs = zip(self.of_pair(ALIGNED), self.of_pair(STRANGERS), strict=True)
        return Difference.of([one["gap"] - other["gap"] for one, other in pairs], "points")

    def predictions(self, pair: str) -> str:
        """In how many cases what was measured lies outside what was predicted, which was wrong there."""
        rows = [row for row in self.of_pair(pair) if row["predicted"] is not None]
        if not rows:
            return "not predicted"
        outside = sum(not row["predicted_low"] <= row["gap"] <= row["predicted_high"] for row in rows)
        if outside:
            return f"{outside} of {len(rows)} outside the predicted interval: the prediction was wrong"
        return f"{len(rows)} of {len(rows)} inside the predicted interval"

    def answer(self) -> str:
        """Gaps, measured and predicted, and two indices."""
        parts = [f"from {pair} **{self.gap(pair).text}** {self.gap(pair).interval} ({self.predictions(pair)})"
                 for pair in PAIRS]  # fmt: skip
        return (
            f"Error of the average of two nets less that of its members: {'; '.join(parts)}. Around one net, the "
            f"asymmetry index of the error along noise is **{self.raw}**, with the signs of the weights "
            f"**{self.consistent}**."
        )

    def story(self) -> str:
        """Four nets, three averages."""
        start, half = (f"{self.data[name]:,}" for name in ("start", "half"))
        return (
            f"A small net with batch norm is trained on {start} images of {self.data['name']}. Two copies of it are "
            f"tuned on {half} new images each, and averaged; then one of them with a net of the same training from "
            "another random start, as it is and with its units brought into the other's order. The gap is the error of "
            "the average less the mean error of its two members, in percentage points. It is predicted from the "
            "weights alone: what tells most is how many of them have the same sign. All of it "
            f"{f'with {self.seeds} seeds' if self.seeds > 1 else 'with one seed'} of nets."
        )

    def pays(self) -> str:
        """Nets of one start, and strangers once aligned."""
        return (
            f"Nets from one start average without alignment: {self.gap('one start').whole}. Of strangers, "
            f"`valley.align` reorders the units of one, which changes the gap by {self.closed.whole}."
        )

    def fails(self) -> str:
        """What is left after alignment, and where the prediction is wrong."""
        left, strangers = self.gap(ALIGNED), self.gap(STRANGERS)
        return (
            f"Strangers as they are: {strangers.whole}. What alignment leaves: {left.whole}; residual nets "
            "keep more (docs/results/valley.md). The prediction was fitted to other pairs: of strangers "
            f"{self.predictions(STRANGERS)}; aligned, {self.predictions(ALIGNED)}."
        )

    def card(self) -> Number:
        """What alignment does to the gap of strangers."""
        gap = self.closed
        before, after, same = (self.gap(pair).text for pair in (STRANGERS, ALIGNED, "one start"))
        return Number(
            value=gap.headline, interval=gap.beside("pairs"),
            label=f"gap of the average of two nets from two random starts, once aligned: from {before} to {after}",
            control=f"two nets from one start: {same}",
        )  # fmt: skip

    def brief(self) -> str:
        """The finding in a line."""
        return f"gap of strangers, once aligned: {self.closed.headline}"

    def numbers(self) -> list[Number]:
        """Predictions and the index."""
        curve = self.record.table("valley_curves")[1]
        low, high = (hundredths(index_of(curve, "error", end)) for end in ("_low", "_high"))
        told = [row for row in self.rows if row["predicted"] is not None]
        inside = sum(row["predicted_low"] <= row["gap"] <= row["predicted_high"] for row in told)
        return [
            Number(
                value=f"{inside} of {len(told)}", interval="nine of ten should",
                label="measured gaps that lie inside the interval predicted from weights",
                control=f"nets from one start: {self.predictions('one start')}",
            ),
            Number(
                value=self.consistent, label="asymmetry index along the weights' signs: 0 even, 1 one side flat",
                interval=f"[{low}, {high}], {curve['n']} draws around one net", control=f"noise as drawn {self.raw}",
            ),
        ]  # fmt: skip

    def licences(self) -> list[tuple[str, str]]:
        """The images."""
        return [licence_of(self.data["name"])]

    def claims(self) -> list[tuple[str, str, str]]:
        """The sides of a valley, signs, and averages."""
        same, other = self.of_pair("one start")[0], self.of_pair(STRANGERS)[0]
        uneven, signed = "strongly uneven, the + side flat (Figure 3)", f"index {self.consistent}"
        signs = f"{same['agreement']:.1f} %; from two random starts {other['agreement']:.1f} %"
        forecasts = "; ".join(forecast_text(row) for row in (same, other))
        return [
            ("sides of the valley along noise as drawn", "nearly even (Figure 3)", f"index {self.raw}"),
            ("along noise with the weights' signs", uneven, signed),
            ("equal signs of two nets tuned from one pretrained net", "95 % or more (Figure 11)", signs),
            ("their average", "better than its members (Figure 11)", self.gap("one start").whole),
            (f"their gap predicted (seed {same['seed']}); that from two random starts", "–", forecasts),
        ]

    @property
    def limits(self) -> str:
        """A small net, few test images."""
        return (
            "The paper's nets are VGG16 and ResNets, trained for 200 epochs; this one trains for a few, and its error "
            f"is measured on {self.data['rows']:,} images, on which gaps below about a point are noise."
        )

    def figures(self) -> list[Figure]:
        """Error on the straight line between two nets, a line a pair; both sides of the valley."""
        rows = [
            row | {"error": 100 * row["error"]}
            for row in self.record.table("valley_lines")
            if row["seed"] == self.record.seed
        ]
        left = self.closed
        title = f"Alignment changes the gap of strangers by {left.whole}"
        between = plots.lines(
            plots.series(rows, x="at", y="error", by="pair", roles=ROLES), title=title,
            x=plots.Axis("share of the second net", low=0, high=1), y=plots.Axis("error on test images", "%", low=0),
            caption=f"Batch-norm statistics are estimated anew at every point. Lines of seed {self.record.seed}; the "
            f"finding is that of {left.n} pairs.",
        )  # fmt: skip
        return [between, pair_figure(self.record.table("valley_curves"), self.record.table("valley_values"), "error")]

    def tables(self) -> list[Table]:
        """Every average."""
        note = (
            "predicted, gap: error of the average less the mean of its members, before and after measuring; brackets: "
            "where 90 % of the pairs lie that the prediction was fitted to. agreement: weights of the same sign."
        )
        return [Table(self.rows, "Averages, predicted and measured", UNITS, COLUMNS, note, ROLES)]
