"""The pictures of a scan: the paper's Figures 3 to 7 for the user's own model."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, Final

import numpy as np

from sparing.jobs.scan.curves import GROUPS, SPECIALS, TITLES
from sparing.jobs.scan.panels import Mark, Panel, forest, grid, histogram
from sparing.jobs.scan.reading import (
    Row,
    Rows,
    curves_of,
    hundredths,
    index_of,
    index_text,
    metric_of,
    number_of,
    rows_of,
    side_of,
    values_of,
    way_of,
    with_unit,
)  # fmt: skip
from sparing.report import Figure, Record, format_number, plots

HEADS: Final = ("noise as drawn", "with the weights' signs")
ROLES: Final[tuple[plots.Role, ...]] = ("baseline", "ours")  # of noise as drawn, and with the weights' signs
ACROSS: Final = "λ, steps of the weights' own length"
STEEP: Final = 30.0  # highest over lowest value from which a picture is logarithmic


def panel_of(row: Row, values: Rows, metric: str, role: plots.Role) -> Panel:
    """A curve as a small picture: mean, lowest and highest over draws."""
    steps, found = values_of(values, metric)
    name, note, short = TITLES[row["kind"]], index_text(row, metric), index_text(row, metric, short=True)
    return Panel(name, note, short, steps, found.mean(0), found.min(0), found.max(0), role)


def _panel(record: Record, row: Row, metric: str, role: plots.Role) -> Panel:
    return panel_of(row, rows_of(record, row["curve"]), metric, role)


def _steep(panels: Sequence[Panel]) -> bool:
    """Whether values spread over so many powers that only a logarithm shows them."""
    seen = [value for panel in panels for value in panel.mean if math.isfinite(value)]
    return bool(seen) and min(seen) > 0 and max(seen) > STEEP * min(seen) and max(seen) > 5


def noise_figure(record: Record, metric: str) -> Figure:
    """The grid of noises, raw beside consistent: the paper's Figure 3."""
    raw, consistent = (curves_of(record, sign=sign, noises=True) for sign in ("raw", "consistent"))
    panels = [
        panel for one, two in zip(raw, consistent, strict=True)
        for panel in (_panel(record, one, metric, "baseline"), _panel(record, two, metric, "ours"))
    ]  # fmt: skip
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
    return grid(
        panels, columns=2, heads=HEADS, title=title,
        x=ACROSS, caption=caption, log=_steep(panels),
    )  # fmt: skip


def pair_figure(curves: Rows, values: Rows, metric: str) -> Figure:
    """Two curves beside each other: along one noise as drawn, and with the weights' signs."""
    panels = [
        panel_of(row, [one for one in values if one["curve"] == row["curve"]], metric, role)
        for row, role in zip(curves, ROLES, strict=True)
    ]
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
    return plots.lines(lines, title=title, x=across, y=f"mean {with_unit(metric)} of a side")


def _side(record: Record, curve: int, metric: str, *, plus: bool) -> list[float]:
    """Mean over one side, a number a draw."""
    steps, values = values_of(rows_of(record, curve), metric)
    chosen = np.array(steps) > 0 if plus else np.array(steps) < 0
    return [float(value) for value in values[:, chosen].mean(1)]


def group_rows(record: Record) -> list[dict[str, Any]]:
    """Index by group of parameters, raw beside consistent, with intervals."""
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
    """Index by group with intervals, raw beside consistent: the paper's Figure 6."""
    metric, rows = metric_of(record), group_rows(record)
    signs = ("raw", "consistent")
    marks = [
        (row["group"], [Mark(*(number_of(row.get(f"{sign}{end}")) for end in ("", "_low", "_high"))) for sign in signs])
        for row in rows
    ]
    known = [row for row in rows if row.get("consistent") is not None]
    title = "No group rises above the noise"
    if known:
        most = max(known, key=lambda row: abs(row["consistent"]))  # −0.9 is as lopsided as 0.9
        title = f"With the weights' signs, the most lopsided is {most['group']}: {hundredths(most['consistent'])}"
    return forest(
        marks, names=HEADS, roles=ROLES, title=title,
        x=f"asymmetry index of the {metric}",
        caption=f"Lines: 95 % over n = {rows[0]['n']} noise draws. No mark: below the noise of the rows.",
    )  # fmt: skip


def special_figure(record: Record) -> Figure | None:
    """The special directions, the paper's Figure 5; None where there are none."""
    metric = metric_of(record)
    rows = [row for row in curves_of(record) if row["kind"] in SPECIALS]
    if not rows:
        return None
    panels = [_panel(record, row, metric, "ours") for row in rows]
    known = [row for row in rows if math.isfinite(index_of(row, metric))]
    ranked = sorted(known, key=lambda row: abs(index_of(row, metric)))
    title = "No special direction rises above the noise"
    if ranked:
        most, least = (f"{TITLES[row['kind']]}, {hundredths(index_of(row, metric))}" for row in (ranked[-1], ranked[0]))
        title = f"The most lopsided is {most}" + (f"; the least {least}" if len(ranked) > 1 else "")
    caption = (
        f"{with_unit(metric).capitalize()} over λ; nothing is drawn, so n = 1. Above each, asymmetry index and SCR."
    )
    return grid(
        panels, columns=2, heads=(), title=title, x=ACROSS, caption=caption,
        log=_steep(panels),
    )  # fmt: skip


def scale_figure(record: Record) -> Figure:
    """Scales of norm layers: the paper's Figure 7."""
    bars, layers = record.table("scales"), record.table("layers")
    edges = [bars[0]["left"], *(bar["right"] for bar in bars)]
    total = sum(row["count"] for row in layers)
    above = sum(row["positive"] * row["count"] for row in layers) / total
    title = (
        "All scales of norm layers are positive" if above == 1 else f"{100 * above:.0f} % of the scales are positive"
    )
    caption = f"{total:,} scales of {len(layers)} layers; hatched: below zero."
    return histogram(edges, [bar["count"] for bar in bars], title=title, x="scale", y="scales (count)", caption=caption)
