"""The pictures of a scan: the paper's Figures 3 to 7 for the user's own model."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, Final

import numpy as np

from sparing.jobs.scan.asks import GROUPS, SPECIALS, TITLES
from sparing.jobs.scan.panels import Mark, Panel, forest, grid, histogram
from sparing.report import Figure, Record, format_number, plots

Row = Mapping[str, Any]
Rows = Sequence[Row]

UNITS: Final = {"loss": "nat", "error": "share of rows"}
HEADS: Final = ("noise as drawn", "with the weights' signs")
ROLES: Final[tuple[plots.Role, ...]] = ("baseline", "ours")
"""Of noise as drawn, and with the weights' signs."""
ACROSS: Final = "λ, steps of the weights' own length"
STEEP: Final = 30.0
"""Highest over lowest value from which a picture is logarithmic."""


def model_of(record: Record) -> dict[str, Any]:
    """The row that says what was scanned."""
    (row,) = record.table("model")
    return row


def metric_of(record: Record) -> str:
    """The metric that is drawn first."""
    return str(model_of(record)["metric"])


def spelt(metric: str) -> str:
    """A metric with its unit."""
    return f"{metric} ({UNITS[metric]})" if metric in UNITS else metric


def curves_of(
    record: Record, *, sign: str | None = None, group: str | None = "all", noises: bool = False
) -> list[dict[str, Any]]:
    """Curves of the first width.

    Args:
        record: Of a scan.
        sign: Only those of these signs.
        group: Only those of this group; None for any.
        noises: Only those of the noises that the settings name.

    Returns:
        Rows of the table "curves".
    """
    rows = [row for row in record.table("curves") if row["width"] == record.settings["widths"][0]]
    rows = [row for row in rows if group is None or row["group"] == group]
    rows = [row for row in rows if sign is None or row["sign"] == sign]
    wanted = record.settings["noises"] if "noises" in record.settings["parts"] else []
    return [row for row in rows if row["kind"] in wanted] if noises else rows


def listed(rows: Rows) -> str:
    """How many noises and draws."""
    draws = max(row["n"] for row in rows)
    noises = f"{len(rows)} noise{'s' if len(rows) != 1 else ''}"
    return f"{noises}, n = {draws} draw{'s' if draws != 1 else ''} each"


def values_of(rows: Rows, metric: str) -> tuple[list[float], Any]:
    """Values of one curve.

    Args:
        rows: Those of the table "values" that belong to it.
        metric: Which one.

    Returns:
        λ, shape (L,), and values, shape (draws, L).
    """
    steps = list(dict.fromkeys(row["step"] for row in rows))
    return steps, np.array([row[metric] for row in rows], dtype=float).reshape(-1, len(steps))


def _rows_of(record: Record, curve: int) -> Rows:
    return [row for row in record.table("values") if row["curve"] == curve]


def index_of(row: Row, metric: str, end: str = "") -> float:
    """An index, or an end of its interval.

    Args:
        row: Of the table "curves".
        metric: Which one.
        end: "", "_low" or "_high".

    Returns:
        The number; NaN where it is not known.
    """
    return _number(row.get(f"asymmetry_{metric}{end}"))


def hundredths(value: float) -> str:
    """An index as text: two decimals, or a dash."""
    return f"{value:.2f}".replace("-", "−").replace("−0.00", "0.00") if math.isfinite(value) else "–"


def index_text(row: Row, metric: str, *, short: bool = False) -> str:
    """Index and sign consistency of a curve.

    Args:
        row: Of the table "curves".
        metric: Which one.
        short: For a phone.

    Returns:
        Such as "asymmetry 0.83 · SCR 0.99".
    """
    index = hundredths(index_of(row, metric))
    scr = f"{row['consistency']:.2f}"
    return f"{index} · {scr}" if short else f"asymmetry {index} · SCR {scr}"


def rises_of(record: Record, row: Row, metric: str) -> list[float]:
    """How far the mean curve has risen at each λ; zero where it is not finite.

    Args:
        record: Of a scan.
        row: Of the table "curves".
        metric: Which one.

    Returns:
        Shape (L,).
    """
    _, values = values_of(_rows_of(record, row["curve"]), metric)
    mean = values.mean(0)
    rise = mean - mean[len(mean) // 2]
    return [float(value) if math.isfinite(value) else 0.0 for value in rise]


def panel_of(row: Row, values: Rows, metric: str, role: plots.Role) -> Panel:
    """A curve as a small picture.

    Args:
        row: Of the table "curves".
        values: Its rows of the table "values".
        metric: Which one.
        role: Its colour.

    Returns:
        The panel: mean, lowest and highest over draws.
    """
    steps, found = values_of(values, metric)
    name, note, short = TITLES[row["kind"]], index_text(row, metric), index_text(row, metric, short=True)
    return Panel(name, note, short, steps, found.mean(0), found.min(0), found.max(0), role)


def _panel(record: Record, row: Row, metric: str, role: plots.Role) -> Panel:
    return panel_of(row, _rows_of(record, row["curve"]), metric, role)


def _steep(panels: Sequence[Panel]) -> bool:
    """Whether values spread over so many powers that only a logarithm shows them."""
    seen = [value for panel in panels for value in panel.mean if math.isfinite(value)]
    return bool(seen) and min(seen) > 0 and max(seen) > STEEP * min(seen) and max(seen) > 5


def noise_figure(record: Record, metric: str) -> Figure:
    """The grid of noises: raw beside consistent; the paper's Figure 3.

    Args:
        record: With both signs of each noise.
        metric: Which one.

    Returns:
        The picture.
    """
    raw, consistent = (curves_of(record, sign=sign, noises=True) for sign in ("raw", "consistent"))
    panels = [
        panel for one, two in zip(raw, consistent, strict=True)
        for panel in (_panel(record, one, metric, "baseline"), _panel(record, two, metric, "ours"))
    ]  # fmt: skip
    higher = sum(index_of(two, metric) > index_of(one, metric) for one, two in zip(raw, consistent, strict=True))
    still = ", {1} is not drawn" if any(row["kind"] == "one" for row in raw) else ""
    caption = (
        f"{spelt(metric).capitalize()} over λ. Line: mean of {max(row['n'] for row in raw)} draws{still}; band: lowest "
        "to highest. Above each, asymmetry index and SCR. All panels have the same axes."
    )
    title = f"With the weights' signs, the {metric} rises less where weights grow: {higher} of {len(raw)} noises"
    if higher == 0:
        title = f"The weights' signs do not make the {metric} rise less where weights grow"
    return grid(
        panels, columns=2, heads=HEADS, title=title,
        x=ACROSS, caption=caption, log=_steep(panels),
    )  # fmt: skip


def pair_figure(curves: Rows, values: Rows, metric: str) -> Figure:
    """Two curves beside each other: along one noise as drawn, and with the weights' signs.

    Args:
        curves: Two rows of the table "curves", as drawn first.
        values: Rows of the table "values".
        metric: Which one.

    Returns:
        The picture.
    """
    panels = [
        panel_of(row, [one for one in values if one["curve"] == row["curve"]], metric, role)
        for row, role in zip(curves, ROLES, strict=True)
    ]
    low, high = (hundredths(index_of(row, metric)) for row in curves)
    title = f"With the weights' signs the index goes from {low} to {high}: one side is flatter"
    if not index_of(curves[1], metric) > max(0.0, index_of(curves[0], metric)):
        title = f"The weights' signs take the index from {low} to {high}"
    caption = (
        f"{spelt(metric).capitalize()} over λ. Line: mean of {curves[0]['n']} draws; band: lowest to highest. SCR: "
        "share of elements whose sign is that of their weight."
    )
    return grid(panels, columns=2, heads=HEADS, title=title, x=ACROSS, caption=caption)


def ratio_figures(record: Record) -> list[Figure]:
    """Index and both branches over the sign-change ratio; the paper's Figure 4.

    Args:
        record: With curves along Gaussian noise.

    Returns:
        Two pictures; without an index above the noise, or a finite value everywhere, one less; none where there are
        fewer than two ratios.
    """
    metric, wanted = metric_of(record), set(record.settings["ratios"])
    rows = [row for row in curves_of(record) if row["kind"] == "gaussian" and row["ratio"] in wanted]
    rows.sort(key=lambda row: row["ratio"])
    if len(rows) < 2:
        return []
    across = plots.Axis("sign-change ratio r", low=0, high=1)
    drawn = [_dose(rows, metric, across)] if any(math.isfinite(index_of(row, metric)) for row in rows) else []
    finite = all(np.isfinite(values_of(_rows_of(record, row["curve"]), metric)[1]).all() for row in rows)
    return [*drawn, _branches(record, rows, metric, across)] if finite else drawn


def _dose(rows: Rows, metric: str, across: plots.Axis) -> Figure:
    x = [row["ratio"] for row in rows]
    y, low, high = ([index_of(row, metric, end) for row in rows] for end in ("", "_low", "_high"))
    title = f"As signs agree, the index goes from {hundredths(y[0])} to {hundredths(y[-1])}"
    known = [(a, b) for a, b in zip(x, y, strict=True) if math.isfinite(b)]
    caption = f"Gaussian noise. Mean SCR from {rows[0]['consistency']:.2f} to {rows[-1]['consistency']:.2f}."
    if len(known) > 2:
        caption += f" Pearson correlation of index and r: {np.corrcoef(np.array(known).T)[0, 1]:.3f}."
    line = plots.Series("asymmetry", x, y, "ours", low, high, rows[0]["n"])
    return plots.lines(
        [line],
        title=title,
        x=across,
        y=f"asymmetry index of the {metric}",
        between="95 % over noise draws",
        caption=caption,
    )


def _branches(record: Record, rows: Rows, metric: str, across: plots.Axis) -> Figure:
    sides = (("λ < 0: weights shrink", False, "rival"), ("λ > 0: weights grow", True, "ours"))
    lines = []
    for name, plus, role in sides:
        spread = [_side(record, row["curve"], metric, plus=plus) for row in rows]
        mean, low, high = ([pick(values) for values in spread] for pick in (np.mean, min, max))
        lines.append(plots.Series(name, [row["ratio"] for row in rows], mean, role, low, high, rows[0]["n"]))  # type: ignore[arg-type]
    ends = [format_number(line.y[-1]) for line in lines]
    title = f"At r = 1 the mean {metric} is {ends[1]} where weights grow, {ends[0]} where they shrink"
    return plots.lines(lines, title=title, x=across, y=f"mean {spelt(metric)} of a side")


def _side(record: Record, curve: int, metric: str, *, plus: bool) -> list[float]:
    """Mean over one side, a number a draw."""
    steps, values = values_of(_rows_of(record, curve), metric)
    chosen = np.array(steps) > 0 if plus else np.array(steps) < 0
    return [float(value) for value in values[:, chosen].mean(1)]


def group_rows(record: Record) -> list[dict[str, Any]]:
    """Index by group of parameters, raw beside consistent.

    Args:
        record: Of a scan.

    Returns:
        Rows "group", "raw", "consistent" with intervals, "SCR" of the raw noise, "n".
    """
    metric, wanted = metric_of(record), record.settings["groups"]
    found: dict[str, dict[str, Any]] = {}
    for row in curves_of(record, group=None):
        if row["kind"] == "gaussian" and row["sign"] in ("raw", "consistent") and row["group"] in wanted:
            one = found.setdefault(row["group"], {"group": GROUPS[row["group"]], "n": row["n"]})
            one |= {f"{row['sign']}{end}": row[f"asymmetry_{metric}{end}"] for end in ("", "_low", "_high")}
            if row["sign"] == "raw":
                one["SCR"] = row["consistency"]
    return [found[group] for group in wanted if group in found]


def group_figure(record: Record) -> Figure:
    """Index by group with intervals, raw beside consistent; the paper's Figure 6.

    Args:
        record: Of a scan.

    Returns:
        The picture.
    """
    metric, rows = metric_of(record), group_rows(record)
    signs = ("raw", "consistent")
    marks = [
        (row["group"], [Mark(*(_number(row.get(f"{sign}{end}")) for end in ("", "_low", "_high"))) for sign in signs])
        for row in rows
    ]
    known = [row for row in rows if row.get("consistent") is not None]
    title = "No group rises above the noise"
    if known:
        most = max(known, key=lambda row: row["consistent"])
        title = (
            f"With the weights' signs, the largest index is that of {most['group']}: {hundredths(most['consistent'])}"
        )
    return forest(
        marks, names=HEADS, roles=ROLES, title=title,
        x=f"asymmetry index of the {metric}",
        caption=f"Lines: 95 % over n = {rows[0]['n']} noise draws. No mark: below the noise of the rows.",
    )  # fmt: skip


def _number(value: float | None) -> float:
    return math.nan if value is None else value


def special_figure(record: Record) -> Figure | None:
    """The special directions; the paper's Figure 5.

    Args:
        record: Of a scan.

    Returns:
        The picture; None where none was walked.
    """
    metric = metric_of(record)
    rows = [row for row in curves_of(record) if row["kind"] in SPECIALS]
    if not rows:
        return None
    panels = [_panel(record, row, metric, "ours") for row in rows]
    ranked = sorted(rows, key=lambda row: -_number(row.get(f"asymmetry_{metric}")))
    ends = [f"{TITLES[row['kind']]}, {hundredths(index_of(row, metric))}" for row in (ranked[0], ranked[-1])]
    title = f"The largest index is that of {ends[0]}; the smallest that of {ends[1]}"
    caption = f"{spelt(metric).capitalize()} over λ; nothing is drawn, so n = 1. Above each, asymmetry index and SCR."
    return grid(
        panels, columns=2, heads=(), title=title, x=ACROSS, caption=caption,
        log=_steep(panels),
    )  # fmt: skip


def scale_figure(record: Record) -> Figure:
    """Scales of norm layers; the paper's Figure 7.

    Args:
        record: With tables "scales" and "layers".

    Returns:
        The picture.
    """
    bars, layers = record.table("scales"), record.table("layers")
    edges = [bars[0]["left"], *(bar["right"] for bar in bars)]
    total = sum(row["count"] for row in layers)
    above = sum(row["positive"] * row["count"] for row in layers) / total
    title = (
        "All scales of norm layers are positive" if above == 1 else f"{100 * above:.0f} % of the scales are positive"
    )
    caption = f"{total:,} scales of {len(layers)} layers; hatched: below zero."
    return histogram(edges, [bar["count"] for bar in bars], title=title, x="scale", y="scales (count)", caption=caption)
