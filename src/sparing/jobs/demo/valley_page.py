"""The chapter on valleys for people: the two sides of a valley, the line between two nets, predicted and measured."""

from __future__ import annotations

from typing import Any, Final

from sparing.jobs.scan.figures import hundredths, index_of, pair_figure
from sparing.report import Figure, Record, Section, Table, plots

ROLES: Final[dict[str, plots.Role]] = {"one start": "ours", "two random starts": "rival"}
COLUMNS: Final = ("pair", "predicted", "gap", "verdict", "agreement", "error_members", "error_merged")
UNITS: Final = {
    "agreement": "%", "error_members": "%", "error_merged": "%", "gap": "points", "predicted": "points",
}  # fmt: skip


def rows_of(record: Record) -> list[dict[str, Any]]:
    """The pairs, shares in per cent.

    Args:
        record: Of the demo.

    Returns:
        Rows.
    """
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


def answer(record: Record) -> str:
    """One sentence with its numbers.

    Args:
        record: Of the demo.

    Returns:
        Both indices, both gaps, both predictions.
    """
    raw, consistent = (hundredths(index_of(row, "error")) for row in record.table("valley_curves"))
    told = []
    for row in rows_of(record):
        guess = "not predicted" if row["predicted"] is None else f"predicted {_points(row['predicted'])}"
        told.append(f"from {row['pair']} is **{_points(row['gap'])}** than they are ({guess})")
    return (
        f"Along Gaussian noise the asymmetry index of the error is **{raw}**; with the signs of the weights, "
        f"**{consistent}**. The average of two nets {'; '.join(told)}."
    )


def line_figure(record: Record) -> Figure:
    """Error on the straight line between two nets, a line a pair.

    Args:
        record: Of the demo.

    Returns:
        The picture.
    """
    rows = [row | {"error": 100 * row["error"]} for row in record.table("valley_lines")]
    gaps = {row["pair"]: row["gap"] for row in rows_of(record)}
    worst = max(gaps, key=lambda pair: gaps[pair])
    title = f"Half-way between nets from {worst}, the error is {_points(gaps[worst])}"
    return plots.lines(
        plots.series(rows, x="at", y="error", by="pair", roles=ROLES), title=title,
        x=plots.Axis("share of the second net", low=0, high=1), y=plots.Axis("error on test images", "%", low=0),
        caption="Batch-norm statistics are estimated anew at every point. One pair each (n = 1, one seed).",
    )  # fmt: skip


def chapter(record: Record) -> Section:
    """The chapter.

    Args:
        record: Of the demo.

    Returns:
        A section of the page.
    """
    data = record.table("valley_data")[0]
    start, half, rows = (f"{data[name]:,}" for name in ("start", "half", "rows"))
    text = (
        f"How does a net's error rise as its weights move away? A small net with batch norm is trained on {start} "
        f"images of {data['name']}, then moved along random noise, as drawn and with each number given the sign of its "
        "weight; batch-norm statistics are estimated anew at every point. An asymmetry index of 0 says that both sides "
        "rise alike, 1 that only the side rises on which weights shrink.\n\nSigns also tell which averages work. Two "
        f"copies of that net are tuned on {half} new images each, and averaged; then two nets with the same training "
        "from two random starts. The gap is the error of the average less the mean of its two members, in percentage "
        "points; it is predicted from the weights alone, before anything is evaluated.\n\nIn the paper (Li et al., "
        "NeurIPS 2024) Figure 3 shows VGG16 and ResNet20 flatter on the side of the weights' signs; Figure 11 shows "
        "averages that beat their members where both come from one pretrained net, and a gap that grows as halves "
        f"train on from one random start. Here the net is small, and measured on {rows} images.\n\nGo deeper: "
        "`sparing scan module:function` on a model of yours, or `sparing merge A B`."
    )
    note = (
        "predicted, gap: error of the average less the mean of its members, before and after measuring; brackets: "
        "where 90 % of the pairs lie that the prediction was fitted to. agreement: weights of the same sign. One seed."
    )
    table = Table(rows_of(record), "Two averages, predicted and measured", UNITS, COLUMNS, note=note, roles=ROLES)
    figures = [pair_figure(record.table("valley_curves"), record.table("valley_values"), "error"), line_figure(record)]
    return Section("Valleys: the flat side, and merges that work", text, figures, [table], answer=answer(record))
