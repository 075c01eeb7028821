"""What the record of a scan says, and its pictures: the paper's Figures 3 to 7 for the user's own model."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, Final

import numpy as np

from sparing.jobs.scan.curves import GROUPS, SPECIALS, TITLES
from sparing.jobs.scan.panels import Panel, forest, grid, histogram
from sparing.report import Figure, Record, format_number, plots
from sparing.valley.scans.better import Better, better_by_metric
from sparing.valley.scans.plots import CLEAR

Row = Mapping[str, Any]
Rows = Sequence[Row]

UNITS: Final = {"loss": "nat", "error": "share of rows", "accuracy": "share of rows"}

HEADS: Final = ("noise as drawn", "with the weights' signs")
ROLES: Final[tuple[plots.Role, ...]] = ("baseline", "ours")  # of noise as drawn, and with the weights' signs
SIDES: Final[dict[str, plots.Role]] = {"λ < 0: weights shrink": "rival", "λ > 0: weights grow": "ours"}
ACROSS: Final = "λ, steps of the weights' own length"
AS_DRAWN: Final = "λ, steps of the noise as drawn"
STEEP: Final = 30.0  # highest over lowest value from which a picture is logarithmic


def model_of(record: Record) -> dict[str, Any]:
    """The row that says what was scanned."""
    (row,) = record.table("model")
    return row


def way_of(record: Record, metric: str) -> Better:
    """Which way a metric gets better: as the measure said, or by its name."""
    direction = model_of(record).get(f"better_{metric}")
    return better_by_metric([metric], {metric: direction} if direction else None)[metric]


def metric_of(record: Record) -> str:
    """The metric that is drawn first."""
    return str(model_of(record)["metric"])


def with_unit(metric: str) -> str:
    """A metric with its unit."""
    return f"{metric} ({UNITS[metric]})" if metric in UNITS else metric


def curves_of(
    record: Record, *, sign: str | None = None, group: str | None = "all", noises: bool = False
) -> list[dict[str, Any]]:
    """Rows of "curves" of the first width, optionally of some signs, a group, or the noises of the settings."""
    rows = [row for row in record.table("curves") if row["width"] == record.settings["distances"][0]]
    rows = [row for row in rows if group is None or row["group"] == group]
    rows = [row for row in rows if sign is None or row["sign"] == sign]
    wanted = record.settings["noises"] if "noises" in record.settings["parts"] else []
    return [row for row in rows if row["kind"] in wanted] if noises else rows


def values_of(rows: Rows, metric: str) -> tuple[list[float], Any]:
    """λ, shape (L,), and values of one curve, shape (draws, L)."""
    steps = list(dict.fromkeys(row["step"] for row in rows))
    return steps, np.array([row[metric] for row in rows], dtype=float).reshape(-1, len(steps))


def rows_of(record: Record, curve: int) -> Rows:
    """Rows of the table "values" that belong to a curve."""
    return [row for row in record.table("values") if row["curve"] == curve]


def index_of(row: Row, metric: str, end: str = "") -> float:
    """An index, or the end of its interval ("_low", "_high"); NaN where unknown."""
    return number_of(row.get(f"asymmetry_{metric}{end}"))


def is_minimum(row: Row, metric: str) -> bool:
    """Whether the model gets no better on either side of λ = 0; else the index says nothing of a valley."""
    return bool(row.get(f"minimum_{metric}", True))


def side_of(row: Row, metric: str) -> int:
    """The flatter side: 1, −1, or 0 where the draws leave it open, or λ = 0 is no minimum."""
    value, low, high = (index_of(row, metric, end) for end in ("", "_low", "_high"))
    if not is_minimum(row, metric):
        return 0
    # Of a single draw there is no interval; then the index itself has to be clear.
    if row["n"] == 1:
        low = high = value if abs(value) >= CLEAR else 0.0
    return int(low > 0) - int(high < 0)


def hundredths(value: float) -> str:
    """An index as text: two decimals, or a dash."""
    return f"{value:.2f}".replace("-", "−").replace("−0.00", "0.00") if math.isfinite(value) else "–"


def index_text(row: Row, metric: str, *, short: bool = False) -> str:
    """Index and sign consistency of a curve, such as "asymmetry 0.83 · SCR 0.99"."""
    index = hundredths(index_of(row, metric)) + ("" if is_minimum(row, metric) else ", no minimum")
    scr = f"{row['consistency']:.2f}"
    return f"{index} · {scr}" if short else f"asymmetry {index} · SCR {scr}"


def number_of(value: float | None) -> float:
    """A number of a cell; NaN where there is none."""
    return math.nan if value is None else value


def panel_of(row: Row, values: Rows, metric: str, role: plots.Role) -> Panel:
    """A curve as a small picture: mean, lowest and highest over draws; ``values`` are those of all curves."""
    steps, found = values_of([one for one in values if one["curve"] == row["curve"]], metric)
    name, note, short = TITLES[row["kind"]], index_text(row, metric), index_text(row, metric, short=True)
    return Panel(name, note, short, steps, found.mean(0), found.min(0), found.max(0), role)


def _steep(panels: Sequence[Panel]) -> bool:
    """Whether values spread over so many powers that only a logarithm shows them."""
    seen = [value for panel in panels for value in panel.mean if math.isfinite(value)]
    return bool(seen) and min(seen) > 0 and max(seen) > STEEP * min(seen) and max(seen) > 5


def noise_figures(record: Record) -> list[Figure]:
    """The grid of noises for the metric that is drawn first, and for error and loss beside it; none without noises."""
    first = metric_of(record)
    others = [name for name in model_of(record)["metrics"].split() if name != first and name in ("error", "loss")]
    drawn = curves_of(record, noises=True, sign="consistent")
    return [noise_figure(record, metric) for metric in [first, *others] if drawn]


def noise_figure(record: Record, metric: str) -> Figure:
    """The grid of noises, raw beside consistent: the paper's Figure 3."""
    raw, consistent = (curves_of(record, sign=sign, noises=True) for sign in ("raw", "consistent"))
    values = record.table("values")
    panels = [
        panel_of(row, values, metric, role)
        for pair in zip(raw, consistent, strict=True)
        for row, role in zip(pair, ROLES, strict=True)
    ]
    flat = sum(side_of(row, metric) > 0 for row in consistent)
    worsens = "falls" if way_of(record, metric) == "higher" else "rises"
    still = ", {1} is not drawn" if any(row["kind"] == "one" for row in raw) else ""
    caption = (
        f"{with_unit(metric).capitalize()} over λ. Line: mean of {max(row['n'] for row in raw)} draws{still}; band: "
        "lowest to highest. Above each, asymmetry index and SCR. All panels have the same axes."
    )
    title = f"With the weights' signs, the {metric} {worsens} less where weights grow: {flat} of {len(raw)} noises"
    if flat == 0:
        title = f"With the weights' signs, the {metric} {worsens} clearly less where weights grow along no noise"
    return grid(panels, columns=2, heads=HEADS, title=title, x=across(record), caption=caption, log=_steep(panels))


def across(record: Record) -> str:
    """What a step of λ is."""
    return AS_DRAWN if record.settings["norm"] == "raw" else ACROSS


def pair_figure(curves: Rows, values: Rows, metric: str) -> Figure:
    """Two curves beside each other: along one noise as drawn, and with the weights' signs."""
    panels = [panel_of(row, values, metric, role) for row, role in zip(curves, ROLES, strict=True)]
    low, high = (hundredths(index_of(row, metric)) for row in curves)
    title = f"The weights' signs take the index from {low} to {high}"
    if side_of(curves[1], metric):
        title = f"With the weights' signs the index goes from {low} to {high}: one side is flatter"
    caption = (
        f"{with_unit(metric).capitalize()} over λ. Line: mean of {curves[0]['n']} draws; band: lowest to highest. SCR: "
        "share of elements whose sign is that of their weight."
    )
    return grid(panels, columns=2, heads=HEADS, title=title, x=ACROSS, caption=caption)


def ratio_figures(record: Record) -> list[Figure]:
    """Index and both branches over the sign-change ratio (the paper's Figure 4); none below two ratios."""
    if "ratio" not in record.settings["parts"]:
        return []
    metric, wanted = metric_of(record), set(record.settings["ratios"])
    rows = [row for row in curves_of(record) if row["kind"] == "gaussian" and row["ratio"] in wanted]
    rows.sort(key=lambda row: row["ratio"])
    if len(rows) < 2:
        return []
    across = plots.Axis("sign-change ratio r", low=0, high=1)
    drawn = [_dose(rows, metric, across)] if any(math.isfinite(index_of(row, metric)) for row in rows) else []
    # A branch with one infinite value has no mean to draw.
    finite = all(np.isfinite(values_of(rows_of(record, row["curve"]), metric)[1]).all() for row in rows)
    return [*drawn, _branches(record, rows, metric, across)] if finite else drawn


def _dose(rows: Rows, metric: str, across: plots.Axis) -> Figure:
    x = [row["ratio"] for row in rows]
    y, low, high = ([index_of(row, metric, end) for row in rows] for end in ("", "_low", "_high"))
    known = [(a, b) for a, b in zip(x, y, strict=True) if math.isfinite(b)]
    (first, start), (last, end) = known[0], known[-1]
    title = f"From r = {first:g} to r = {last:g}, the index goes from {hundredths(start)} to {hundredths(end)}"
    caption = f"Gaussian noise. Mean SCR from {rows[0]['consistency']:.2f} to {rows[-1]['consistency']:.2f}."
    if len(known) > 2:
        caption += f" Pearson correlation of index and r: {np.corrcoef(np.array(known).T)[0, 1]:.3f}."
    line = plots.Series("asymmetry", x, y, "ours", low, high, rows[0]["n"])
    y_axis = f"asymmetry index of the {metric}"
    return plots.lines([line], title=title, x=across, y=y_axis, between="95 % over noise draws", caption=caption)


def _branches(record: Record, rows: Rows, metric: str, across: plots.Axis) -> Figure:
    """Mean of each side of every draw, over the ratio."""
    means = []
    for row in rows:
        steps, values = values_of(rows_of(record, row["curve"]), metric)
        for side, sign in zip(SIDES, (-1, 1), strict=True):
            means += [
                {"side": side, "ratio": row["ratio"], "mean": float(mean)}
                for mean in values[:, sign * np.array(steps) > 0].mean(1)
            ]
    lines = plots.series(means, x="ratio", y="mean", by="side", roles=SIDES)
    ends = [format_number(line.y[-1]) for line in lines]
    title = (
        f"At r = {rows[-1]['ratio']:g} the mean {metric} is {ends[1]} where weights grow, {ends[0]} where they shrink"
    )
    return plots.lines(lines, title=title, x=across, y=f"mean {with_unit(metric)} of a side")


def group_rows(record: Record) -> list[dict[str, Any]]:
    """Index by group of parameters, raw beside consistent, with intervals."""
    metric, rows = metric_of(record), []
    for group in record.settings["parameter_groups"] if "groups" in record.settings["parts"] else ():
        found = {row["sign"]: row for row in curves_of(record, group=group) if row["kind"] == "gaussian"}
        known = [(sign, found[sign]) for sign in ("raw", "consistent") if sign in found]
        ends = {f"{sign}{end}": row[f"asymmetry_{metric}{end}"] for sign, row in known for end in ("", "_low", "_high")}
        scr = found["raw"]["consistency"] if "raw" in found else None
        if known:
            rows.append({"group": GROUPS[group], **ends, "SCR": scr, "n": known[0][1]["n"]})
    return rows


def group_figure(record: Record) -> Figure | None:
    """Index by group with intervals, raw beside consistent: the paper's Figure 6."""
    metric, rows = metric_of(record), group_rows(record)
    if not rows:
        return None
    marks = [
        [[number_of(row.get(f"{sign}{end}")) for end in ("", "_low", "_high")] for sign in ("raw", "consistent")]
        for row in rows
    ]
    title = "No group rises above the noise"
    if known := [row for row in rows if row.get("consistent") is not None]:
        most = max(known, key=lambda row: abs(row["consistent"]))  # −0.9 is as lopsided as 0.9
        title = f"With the weights' signs, the most lopsided is {most['group']}: {hundredths(most['consistent'])}"
    return forest(
        [(row["group"], some) for row, some in zip(rows, marks, strict=True)], names=HEADS, roles=ROLES, title=title,
        x=f"asymmetry index of the {metric}",
        caption=f"Lines: 95 % over n = {rows[0]['n']} noise draws. No mark: below the noise of the rows.",
    )  # fmt: skip


def special_figure(record: Record) -> Figure | None:
    """The special directions, the paper's Figure 5; None where there are none."""
    metric = metric_of(record)
    rows = [row for row in curves_of(record) if row["kind"] in SPECIALS]
    if not rows or "special" not in record.settings["parts"]:
        return None
    panels = [panel_of(row, record.table("values"), metric, "ours") for row in rows]
    known = [row for row in rows if math.isfinite(index_of(row, metric))]
    title = "No special direction rises above the noise"
    if ranked := sorted(known, key=lambda row: abs(index_of(row, metric))):
        most, least = (f"{TITLES[row['kind']]}, {hundredths(index_of(row, metric))}" for row in (ranked[-1], ranked[0]))
        title = f"The most lopsided is {most}" + (f"; the least {least}" if len(ranked) > 1 else "")
    caption = (
        f"{with_unit(metric).capitalize()} over λ; nothing is drawn, so n = 1. Above each, asymmetry index and SCR."
    )
    return grid(panels, columns=2, heads=(), title=title, x=across(record), caption=caption, log=_steep(panels))


def scale_figure(record: Record) -> Figure | None:
    """Scales of norm layers: the paper's Figure 7."""
    bars, layers = record.table("scales"), record.table("layers")
    if not layers:
        return None
    edges = [bars[0]["left"], *(bar["right"] for bar in bars)]
    total = sum(row["count"] for row in layers)
    above = sum(row["positive"] * row["count"] for row in layers) / total
    title = f"{100 * above:.0f} % of the scales are positive" if above < 1 else "All scales of norm layers are positive"
    caption = f"{total:,} scales of {len(layers)} layers; hatched: below zero."
    return histogram(edges, [bar["count"] for bar in bars], title=title, x="scale", y="scales (count)", caption=caption)
