"""The pictures of a study: the paper's Figures 5 to 9, 13 and 14 remade."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from statistics import fmean
from typing import Any, Final

from sparing.jobs.settings import RuleName
from sparing.jobs.transfer.settings import Axis
from sparing.report import Figure, Record, format_number, plots
from sparing.report.cells import is_finite
from sparing.report.series import rename

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
SEARCHED: Final = {
    "log2_rate": "learning rate η", "log2_std": "initial scale σ over the model's own",
    "log2_input": "multiplier of the embedding α_in", "log2_output": "multiplier of the logits α_out",
}  # fmt: skip


def swept_label(record: Record) -> str:
    """What the axis of a sweep shows."""
    around = record.settings["axis"] == "lr" and record.settings["tune"]["tries"]
    return "learning rate over the best draw's" if around else SWEPT[record.settings["axis"]]


def draws_figures(record: Record) -> list[Figure]:
    """Loss of every draw on the base over each of the four numbers that were drawn, the best marked."""
    rows = [row for row in record.table("draws") if row["loss"] is not None]
    found = []
    for name, label in SEARCHED.items() if len(rows) > 1 else ():
        xs, ys = [2.0 ** row[name] for row in rows], [row["loss"] for row in rows]
        title = f"Best of {len(rows)} draws: {label} {format_number(xs[0])}"
        parts = [plots.Series("best", xs[:1], ys[:1], "ours"), plots.Series("others", xs[1:], ys[1:], "baseline")]
        across, up = plots.Axis(label, log=2), plots.Axis("training loss", "nat")
        found.append(plots.scatter(parts, title=title, x=across, y=up))
    return found


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
    several = len({width for width, _ in places})
    series = [
        one
        for (width, density), role in zip(places, ORDER, strict=False)
        if (one := _curve(
            record.table("runs", rule=rule, width=width, density=density),
            place_label(width, density, widths=several), role,
        ))
    ]  # fmt: skip
    if not series:
        return None
    return plots.lines(
        series, title=_title(record, rule, places, name), x=plots.Axis(swept_label(record), log=2),
        y=plots.Axis("training loss", "nat", log=True), caption=_caption(record, places),
    )  # fmt: skip


def _curve(rows: Rows, label: str, role: plots.Role) -> plots.Series | None:
    """Mean and ends over seeds; a rate at which a seed diverged is a gap: a line through the rest would flatter it."""
    by: dict[float, list[float]] = {}
    for row in rows:
        by.setdefault(row["x"], []).append(math.nan if row["diverged"] else row["loss"])
    lost = [math.nan]
    runs = [by[x] if all(map(math.isfinite, by[x])) else lost for x in sorted(by)]
    mean, low, high = ([pick(values) for values in runs] for pick in (fmean, min, max))
    if not any(map(math.isfinite, mean)):
        return None
    return plots.Series(label, [2.0**x for x in sorted(by)], mean, role, low, high, max(map(len, by.values())))


def _title(record: Record, rule: str, places: Sequence[tuple[int, float]], name: str) -> str:
    """The finding: how far the optimum moves."""
    known = [
        row for width, density in places for row in record.table("optima", rule=rule, width=width, density=density)
    ]
    best = [row for row in known if row["best"] is not None]
    head = f"{TITLES[rule]}, {name}"
    # of the first place and the last, or what is said would be of others
    if len(best) < 2 or [(row["width"], row["density"]) for row in (best[0], best[-1])] != [places[0], places[-1]]:
        return head
    drift = best[-1]["best"] - best[0]["best"]
    # an end of the rates tried is no best one
    bound = "at least " if any(row["found"].endswith("tried") for row in (best[0], best[-1])) else ""
    if bound and abs(drift) <= 0.25:
        return head
    moved = f"moves {bound}{_factor(drift)} {'up' if drift > 0 else 'down'}" if abs(drift) > 0.25 else "stays"
    sparse = place_label(*places[-1], widths=len({width for width, _ in places}))
    return f"{head}: the best {'rate' if record.settings['axis'] == 'lr' else 'scale'} {moved} at {sparse}"


def _factor(drift: float) -> str:
    """A difference of log2, as the factor it stands for."""
    return format_number(2 ** abs(drift), "×")


def _caption(record: Record, places: Sequence[tuple[int, float]]) -> str:
    mine = [row for row in record.table("optima") if (row["width"], row["density"]) in places]
    lost, runs = (sum(row[name] for row in mine) for name in ("diverged", "runs"))
    seeds = len(record.settings["seeds"])
    return (
        f"Mean of the last tenth of {record.settings['steps']} steps; "
        f"{f'lowest to highest of {seeds} seeds' if seeds > 1 else 'one seed'}. "
        f"Gaps: a seed diverged ({lost} of {runs} runs over all rules)."
    )


def drift_figure(record: Record, line: str, along: str) -> Figure | None:
    """Best rate over density or width, a line a rule; the paper's Figures 6 and 9 in one."""
    places = {(row["width"], row["density"]) for row in record.table("transfer", line=line, along=along)}
    rows = [
        row | {"at": x_position(row, along)}
        | {name: 2.0 ** row[name] for name in ("best", "best_low", "best_high") if row[name] is not None}
        for row in rename(record.table("optima"), TITLES, "rule")
        if (row["width"], row["density"]) in places and row["best"] is not None
    ]  # fmt: skip
    if not rows:
        return None
    known = [row for row in record.table("summary", line=line, along=along) if row["drift"] is not None]
    known.sort(key=lambda row: abs(row["drift"]))
    # an optimum at an end of the sweep may lie beyond it
    ends = {TITLES[row["rule"]]: (_factor(row["drift"]), row["censored"]) for row in (known[:1] + known[-1:])}
    (least, (factor, lost)), *most = ends.items() or [("", ("", 0))]
    title = f"{least} moves by {'at least ' if lost else ''}{factor}{'' if lost else ' at most'}"
    title += "".join(f", {name} by {'at least ' if bound else ''}{by}" for name, (by, bound) in most)
    what = "best rate" if record.settings["axis"] == "lr" else "best scale"
    return plots.lines(
        plots.series(rows, x="at", y="best", by="rule", roles=ROLES),
        title=title if known else "No best rate is known on both ends",
        x=x_axis(along), y=plots.Axis(f"{what} (base units)", log=2), between="95 % of resampled seeds",
        caption=f"{line.capitalize()}. Vertex of the parabola through the best three; at an end of the sweep, that "
        "end.",
    )  # fmt: skip


def pareto_figure(record: Record, line: str, along: str) -> Figure | None:
    """Loss over density with the reference's rate and with each place's own best; the paper's Figure 8."""
    rows, series = record.table("transfer", line=line, along=along), []
    for rule in dict.fromkeys(row["rule"] for row in rows):
        mine = [row for row in rows if row["rule"] == rule]
        xs, role = [x_position(row, along) for row in mine], ROLES[TITLES[rule]]
        for column, source, n in (("loss_transferred", "", mine[0]["n"]), ("loss_retuned", "re-tuned", 1)):
            ys = [row[column] if is_finite(row[column]) else math.nan for row in mine]
            if any(map(math.isfinite, ys)):
                series.append(plots.Series(TITLES[rule], xs, ys, role, n=n, source=source))
    if not series:
        return None
    return plots.lines(
        series, title="What re-using the reference's rate costs, and what is left once every rule is re-tuned",
        x=x_axis(along), y=plots.Axis("training loss", "nat", log=True),
        caption=f"{line.capitalize()}. Lines: the reference's best rate is used. Open marks: each place's own best.",
    )  # fmt: skip


def coordinate_figure(record: Record) -> Figure | None:
    """Size of the deepest hidden layer's output over density, a line a rule; the paper's Figure 5."""
    hidden = record.table("coordinates", role="hidden")
    if not hidden:
        return None
    deepest = hidden[-1]["module"]
    rows = [row | {"at": x_position(row, "density")} for row in hidden if row["module"] == deepest]
    slopes = record.table("slopes", module=deepest, stat="forward")
    said = ", ".join(f"{TITLES[row['rule']]} {row['slope']:+.2f}" for row in slopes)
    return plots.lines(
        plots.series(rename(rows, TITLES, "rule"), x="at", y="forward", by="rule", roles=ROLES),
        title=f"The deepest layer's output goes with density to the power: {said}" if said else "The deepest layer",
        x=x_axis("density"), y=plots.Axis(f"output of {deepest} (root mean square)", log=True),
        caption=f"Width {rows[0]['width']}, after 4 steps at η = 1/256 on one batch.",
    )  # fmt: skip
