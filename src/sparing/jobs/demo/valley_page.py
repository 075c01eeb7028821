"""The chapter on valleys: the two sides of a valley, the line between two nets, predicted and measured."""

from __future__ import annotations

from typing import Any, Final

from sparing.jobs.demo.chapter import Chapter, Claim, run_note
from sparing.jobs.scan.figures import pair_figure
from sparing.jobs.scan.reading import hundredths, index_of
from sparing.report import Figure, Record, Section, Table, plots
from sparing.report.page import Number

ROLES: Final[dict[str, plots.Role]] = {"one start": "ours", "two random starts": "rival"}
COLUMNS: Final = ("pair", "predicted", "gap", "verdict", "agreement", "error_members", "error_merged")
UNITS: Final = {
    "agreement": "%", "error_members": "%", "error_merged": "%", "gap": "points", "predicted": "points",
}  # fmt: skip


def rows_of(record: Record) -> list[dict[str, Any]]:
    """The pairs, shares in percent."""
    shares = {*UNITS, "predicted_low", "predicted_high"}
    rows = [
        row | {"error_members": (row["error_a"] + row["error_b"]) / 2, "verdict": row.get("verdict")}
        for row in record.table("valley_merges")
    ]
    return [
        {name: 100 * cell if name in shares and cell is not None else cell for name, cell in row.items()}
        for row in rows
    ]


def _points(value: float) -> str:
    """A gap in words."""
    size = f"{abs(value):.1f} points"
    return f"{size} {'worse' if value > 0 else 'better'}" if abs(value) >= 0.05 else "no better and no worse"


def _signed(value: float) -> str:
    """A gap with its sign."""
    return f"{value:+.1f} points".replace("-", "−")


def _forecast(row: dict[str, Any]) -> str:
    """What was predicted, and whether what was measured lies where it should."""
    if row["predicted"] is None:
        return "not predicted"
    low, high = row["predicted_low"], row["predicted_high"]
    outside = "" if low <= row["gap"] <= high else ", missed"
    parts = f"{row['predicted']:+.1f} [{low:+.1f}, {high:+.1f}]".replace("-", "−")
    return f"{parts}{outside}"


def answer(record: Record) -> str:
    """One sentence with its numbers."""
    raw, consistent = (hundredths(index_of(row, "error")) for row in record.table("valley_curves"))
    parts = []
    for row in rows_of(record):
        guess = "not predicted" if row["predicted"] is None else f"predicted: {_points(row['predicted'])}"
        parts.append(f"from {row['pair']} it is **{_points(row['gap'])}** ({guess})")
    return (
        f"The average of two nets against its members: {', '.join(parts)}. Around one net, the asymmetry index of the "
        f"error along noise is **{raw}**, with the signs of the weights **{consistent}**."
    )


def numbers(record: Record) -> tuple[Number, Number, Number]:
    """Both gaps and the index."""
    note = run_note(record.seed, "n = 1 pair")
    same, other = rows_of(record)
    curve = record.table("valley_curves")[1]
    low, high = (hundredths(index_of(curve, "error", end)) for end in ("_low", "_high"))
    return (
        Number(
            value=_signed(same["gap"]), note=f"{note}; {same['agreement']:.1f} % of signs agree",
            label="error of the average of two nets from one start, against its members",
        ),
        Number(
            value=_signed(other["gap"]), note=f"{note}; {other['agreement']:.1f} % of signs agree",
            label="the same from two random starts",
        ),
        Number(
            value=hundredths(index_of(curve, "error")),
            note=f"{run_note(record.seed, str(curve['n']) + ' draws')}: {low} to {high}",
            label="asymmetry index along the weights' signs: 0 even, 1 one side flat",
        ),
    )  # fmt: skip


def claims(record: Record) -> list[Claim]:
    """What the paper shows of valleys and averages, and what was found here."""
    raw, consistent = (hundredths(index_of(row, "error")) for row in record.table("valley_curves"))
    same, other = rows_of(record)
    return [
        Claim(
            what="sides of the valley along noise as drawn", paper="nearly even (Figure 3)", here=f"index {raw}",
        ),
        Claim(
            what="along noise with the weights' signs",
            paper="strongly uneven, the + side flat (Figure 3)",
            here=f"index {consistent}",
        ),
        Claim(
            what="equal signs of two nets tuned from one pretrained net",
            paper="95 % or more (Figure 11)",
            here=f"{same['agreement']:.1f} %; from two random starts {other['agreement']:.1f} %",
        ),
        Claim(
            what="their average", paper="better than its members (Figure 11)", here=f"{_points(same['gap'])}",
        ),
        Claim(
            what="their gap predicted; that from two random starts", paper="–",
            here="; ".join(map(_forecast, (same, other))),
        ),
    ]  # fmt: skip


def line_figure(record: Record) -> Figure:
    """Error on the straight line between two nets, a line a pair."""
    rows = [row | {"error": 100 * row["error"]} for row in record.table("valley_lines")]
    gaps = {row["pair"]: row["gap"] for row in rows_of(record)}
    worst = max(gaps, key=lambda pair: gaps[pair])
    title = f"Half-way between nets from {worst}, the error is {_points(gaps[worst])}"
    return plots.lines(
        plots.series(rows, x="at", y="error", by="pair", roles=ROLES), title=title,
        x=plots.Axis("share of the second net", low=0, high=1), y=plots.Axis("error on test images", "%", low=0),
        caption="Batch-norm statistics are estimated anew at every point. One pair each (n = 1, one seed).",
    )  # fmt: skip


def details(record: Record) -> Section:
    """All that a first look can do without."""
    text = (
        "The net is moved along random noise, as drawn and with each number given the sign of its weight; batch-norm "
        "statistics are estimated anew at every point. An asymmetry index of 0 says that both sides rise alike, 1 that "
        "only the side rises on which weights shrink.\n\nIn the paper Figure 3 shows VGG16 and ResNet20 flatter on the "
        "side of the weights' signs; Figure 11 shows averages that beat their members where both come from one "
        "pretrained net, and a gap that grows as halves train on from one random start."
    )
    note = (
        "predicted, gap: error of the average less the mean of its members, before and after measuring; brackets: "
        "where 90 % of the pairs lie that the prediction was fitted to. agreement: weights of the same sign. One seed."
    )
    table = Table(rows_of(record), "Two averages, predicted and measured", UNITS, COLUMNS, note=note, roles=ROLES)
    valley = pair_figure(record.table("valley_curves"), record.table("valley_values"), "error")
    return Section("More: both sides of the valley, every number", text, [valley], [table])


def chapter(record: Record) -> Chapter:
    """The chapter as its page shows it."""
    data = record.table("valley_data")[0]
    start, half, rows = (f"{data[name]:,}" for name in ("start", "half", "rows"))
    return Chapter(
        name="valley", topic="Merging nets · valleys",
        question="Which nets can be averaged, and can it be told before anything is evaluated?",
        answer=answer(record), numbers=numbers(record), picture=line_figure(record), claims=claims(record),
        story=(
            f"A small net with batch norm is trained on {start} images of {data['name']}. Two copies of it are tuned "
            f"on {half} new images each, and averaged; then two nets with the same training from two random starts. "
            "The gap is the error of the average less the mean error of its two members, in percentage points. It is "
            "predicted from the weights alone: what tells most is how many of them have the same sign."
        ),
        paper="Li et al., asymmetric valleys, NeurIPS 2024, arXiv:2405.12489; it has these as plots",
        limits=(
            f"The paper's nets are VGG16 and ResNets, trained for 200 epochs; this one trains for a few, and its error "
            f"is measured on {rows} images, so that gaps below about a point are noise."
        ),
        deeper=("sparing merge DIR DIR --data TEXT.txt", "sparing scan module:function    # the valley of your net"),
        details=details(record),
    )  # fmt: skip
