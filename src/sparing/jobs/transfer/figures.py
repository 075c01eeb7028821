"""The pictures of a study: the paper's Figures 5 to 9, 13 and 14 remade."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from statistics import fmean
from typing import Any, Final

from sparing.jobs.transfer.settings import Axis, RuleName
from sparing.report import Figure, Record, format_number, plots

Rows = Sequence[Mapping[str, Any]]

TITLES: Final[Mapping[str, str]] = {
    "sp": "SP", "mup": "μP", "supar": "SμPar", "init-only": "μP + init only", "rate-only": "μP + rate only",
}  # fmt: skip
ROLES: Final[Mapping[str, plots.Role]] = {
    "SP": "baseline", "μP": "rival", "SμPar": "ours", "μP + init only": "second_rival", "μP + rate only": "good",
}  # fmt: skip
ORDER: Final[tuple[plots.Role, ...]] = (
    "reference", "ours", "extension", "good", "second_rival", "rival", "baseline",
)  # fmt: skip
"""Roles of places on a line, the reference first."""

SWEPT: Final[Mapping[Axis, str]] = {"lr": "learning rate of the base η", "std": "initial scale over the model's own"}


def place_label(width: int, density: float, *, widths: int) -> str:
    """Name a place, with its width where there are several.

    Example:
        >>> place_label(256, 0.0625, widths=1), place_label(128, 1.0, widths=2)
        ('1/16', 'd = 128, dense')
    """
    inverse = 1 / density
    share = (
        "dense" if density == 1 else f"1/{round(inverse)}" if abs(inverse - round(inverse)) < 0.02 else f"{density:.3g}"
    )
    return share if widths == 1 else f"d = {width}, {share}"


def x_position(row: Mapping[str, Any], along: str) -> float:
    """Where a place stands on the axis of a line: its width, or how many times fewer live weights it has."""
    return float(row["width"]) if along == "width" else 1 / row["density"]


def x_axis(along: str) -> plots.Axis:
    """That axis."""
    return plots.Axis("width" if along == "width" else "weights per live weight, 1/ρ", log=2)


def curves(record: Record, rule: RuleName, places: Sequence[tuple[int, float]], *, name: str) -> Figure | None:
    """Loss against what is swept, a line a place; the paper's Figures 6, 7, 9, 13 and 14."""
    axis: Axis = record.settings["axis"]
    widths = len({width for width, _ in places})
    series = []
    for place, role in zip(places, ORDER, strict=False):
        rows = [row for row in record.table("runs") if (row["rule"], row["width"], row["density"]) == (rule, *place)]
        one = _curve(rows, place_label(*place, widths=widths), role)
        series += [one] if one is not None else []
    if not series:
        return None
    return plots.lines(
        series, title=_title(record, rule, places, name), x=plots.Axis(SWEPT[axis], log=2),
        y=plots.Axis("training loss", "nat", log=True), caption=_caption(record, places),
    )  # fmt: skip


def _curve(rows: Rows, label: str, role: plots.Role) -> plots.Series | None:
    """Mean and ends over seeds; a rate at which a seed diverged is a gap."""
    # a rate at which one seed diverged has no mean: a line through the rest would flatter it
    by: dict[float, list[float]] = {}
    for row in rows:
        by.setdefault(row["x"], []).append(math.nan if row["diverged"] else row["loss"])
    xs = sorted(by)
    means = [fmean(by[x]) for x in xs]
    if not any(map(math.isfinite, means)):
        return None
    n = max(map(len, by.values()))
    low = [min(by[x]) if math.isfinite(m) else math.nan for x, m in zip(xs, means, strict=True)]
    high = [max(by[x]) if math.isfinite(m) else math.nan for x, m in zip(xs, means, strict=True)]
    return plots.Series(label, [2.0**x for x in xs], means, role, low, high, n)


def _title(record: Record, rule: str, places: Sequence[tuple[int, float]], name: str) -> str:
    """The finding: how far the optimum moves."""
    rows = {(row["width"], row["density"]): row for row in record.table("optima") if row["rule"] == rule}
    best = [rows[place] for place in places if place in rows and rows[place]["best"] is not None]
    head = f"{TITLES[rule]}, {name}"
    if len(best) < 2:
        return head
    drift = best[-1]["best"] - best[0]["best"]
    sparse = place_label(*places[-1], widths=len({width for width, _ in places}))
    bound = "at least " if best[-1]["found"].endswith("tried") else ""
    turn = "up" if drift > 0 else "down"
    moved = f"moves {bound}{format_number(2 ** abs(drift), '×')} {turn}" if abs(drift) > 0.25 else "stays"
    return f"{head}: the best {'rate' if record.settings['axis'] == 'lr' else 'scale'} {moved} at {sparse}"


def _caption(record: Record, places: Sequence[tuple[int, float]]) -> str:
    known = set(places)
    mine = [row for row in record.table("optima") if (row["width"], row["density"]) in known]
    lost, runs = sum(row["diverged"] for row in mine), sum(row["runs"] for row in mine)
    settings = record.settings
    seeds = len(settings["seeds"])
    spread = f"lowest to highest of {seeds} seeds" if seeds > 1 else "one seed"
    return (
        f"Mean of the last tenth of {settings['steps']} steps; {spread}. "
        f"Gaps: a seed diverged ({lost} of {runs} runs over all rules)."
    )


def drift_figure(record: Record, line: str, along: str) -> Figure | None:
    """Best rate over density or width, a line a rule; the paper's Figures 6 and 9 in one."""
    places = {
        (row["width"], row["density"])
        for row in record.table("transfer") if (row["line"], row["along"]) == (line, along)
    }  # fmt: skip
    rows = [
        row | {"method": TITLES[row["rule"]], "at": x_position(row, along)}
        for row in record.table("optima") if (row["width"], row["density"]) in places and row["best"] is not None
    ]  # fmt: skip
    rows = [
        row | {name: 2.0 ** row[name] for name in ("best", "best_low", "best_high") if row[name] is not None}
        for row in rows
    ]
    series = plots.series(rows, x="at", y="best", by="method", roles=ROLES)
    if not series:
        return None
    what = "best rate" if record.settings["axis"] == "lr" else "best scale"
    caption = f"{line.capitalize()}. Vertex of the parabola through the best three; at an end of the sweep, that end."
    return plots.lines(
        series, title=_drift_title(record, line, along), x=x_axis(along), y=plots.Axis(f"{what} (base units)", log=2),
        between="95 % of resampled seeds", caption=caption,
    )  # fmt: skip


def _drift_title(record: Record, line: str, along: str) -> str:
    rows = [row for row in record.table("summary") if (row["line"], row["along"]) == (line, along)]
    rows = [row for row in rows if row["drift"] is not None]
    if not rows:
        return "No best rate is known on both ends"
    least, most = (pick(rows, key=lambda row: abs(row["drift"])) for pick in (min, max))
    if least is most:
        return f"{TITLES[least['rule']]} moves by {format_number(2 ** abs(least['drift']), '×')} at most"
    return (
        f"{TITLES[least['rule']]} moves by {format_number(2 ** abs(least['drift']), '×')} at most, "
        f"{TITLES[most['rule']]} by {format_number(2 ** abs(most['drift']), '×')}"
    )


def pareto_figure(record: Record, line: str, along: str) -> Figure | None:
    """Loss over density with the reference's rate and with each place's own best; the paper's Figure 8."""
    rows = [row for row in record.table("transfer") if (row["line"], row["along"]) == (line, along)]
    series = []
    for rule in dict.fromkeys(row["rule"] for row in rows):
        mine = [row for row in rows if row["rule"] == rule]
        xs = [x_position(row, along) for row in mine]
        for name, words, n in (("loss_transferred", "reference's rate", mine[0]["n"]), ("loss_retuned", "", 1)):
            ys = [row[name] if row[name] is not None and math.isfinite(row[name]) else math.nan for row in mine]
            source = "" if words else "re-tuned"
            if any(map(math.isfinite, ys)):
                series.append(plots.Series(TITLES[rule], xs, ys, ROLES[TITLES[rule]], n=n, source=source))
    if not series:
        return None
    return plots.lines(
        series, title="What re-using the reference's rate costs, and what is left once every rule is re-tuned",
        x=x_axis(along), y=plots.Axis("training loss", "nat", log=True),
        caption=f"{line.capitalize()}. Lines: the reference's best rate is used. Open marks: each place's own best.",
    )  # fmt: skip


def coordinate_figure(record: Record) -> Figure | None:
    """Size of the deepest hidden layer's output over density, a line a rule; the paper's Figure 5."""
    rows = [row | {"method": TITLES[row["rule"]]} for row in record.table("coordinates") if row["role"] == "hidden"]
    if not rows:
        return None
    deepest = rows[-1]["module"]
    rows = [row | {"at": x_position(row, "density")} for row in rows if row["module"] == deepest]
    slopes = {
        row["rule"]: row["slope"] for row in record.table("slopes")
        if (row["module"], row["stat"]) == (deepest, "forward")
    }  # fmt: skip
    said = ", ".join(f"{TITLES[rule]} {value:+.2f}" for rule, value in slopes.items())
    return plots.lines(
        plots.series(rows, x="at", y="forward", by="method", roles=ROLES),
        title=f"The deepest layer's output goes with density to the power: {said}" if said else "The deepest layer",
        x=x_axis("density"), y=plots.Axis(f"output of {deepest} (root mean square)", log=True),
        caption=f"Width {rows[0]['width']}, after 4 steps at η = 1/256 on one batch.",
    )  # fmt: skip
