"""The page of an inversion, made of its record alone."""

from __future__ import annotations

from statistics import fmean
from typing import Any, Final

from sparing.jobs.invert.equations import EQUATIONS
from sparing.report import Figure, Record, format_number, plots
from sparing.report.declared import Chapter, Rows, RunPage
from sparing.report.series import columns

PAPER: Final = "Shen et al. 2024, Figure 2"
FOUND: Final[dict[str, plots.Role]] = {"found": "ours", "true": "reference"}  # of the columns of a profile


def with_spread(mean: float, sd: float | None) -> str:
    """A mean and its standard deviation, in percent from ratios.

    Example:
        >>> with_spread(0.0097, 0.0045), with_spread(0.5, None)
        ('0.970 ± 0.450 %', '50.0 %')
    """
    spread = f" ± {format_number(100 * sd)}" if sd is not None else ""
    return f"{format_number(100 * mean)}{spread} %"


def answer(record: Record) -> str:
    """What was found, in one sentence."""
    (row,) = record.table("summary")
    what = "The field ν(x)" if record.table("fields") else "ν"
    found = with_spread(row["coefficient_error"], row["coefficient_error_sd"])
    fits = with_spread(row["solution_error"], row["solution_error_sd"])
    return (
        f"{what} is off by **{found}**, the solution by {fits} (relative L2; mean ± sd, n = {row['n']}), after "
        f"{format_number(row['seconds'], 's')} of CPU time a run.{intervals(record)}"
    )


def intervals(record: Record) -> str:
    """What intervals say, in a sentence with a space before it; nothing where there are none, or no noise."""
    runs = [row for row in record.table("runs") if "covered" in row]
    if not runs or not record.settings["noise"]:
        return ""
    if record.table("fields"):
        return f" 90 % intervals hold the truth at {100 * fmean(row['covered'] for row in runs):.0f} % of the unknowns."
    first = runs[0]
    ends = f"{format_number(first['low'])} to {format_number(first['high'])}"
    hold = f"{sum(row['covered'] for row in runs):.0f} of {len(runs)} hold the truth"
    return f" Its 90 % interval is {ends} in the first run; {hold}."


def solution_figures(record: Record) -> list[Figure]:
    """True and found u over x, one picture a time."""
    figures = []
    for t in dict.fromkeys(row["t"] for row in record.table("profiles")):
        rows = record.table("profiles", t=t)
        gap = max(abs(row["true"] - row["found"]) for row in rows)
        title = f"At t = {t:g} the solution found is within {format_number(gap)} of the true one"
        figures.append(plots.lines(columns(rows, "x", FOUND), title=title, x="x", y="u"))
    return figures


def path_figures(record: Record) -> list[Figure]:
    """ν over outer steps, and its error against CPU seconds: one thin line a seed."""
    (row,), runs, fields = record.table("summary"), record.table("runs"), record.table("fields")
    path, errors = (
        [
            line
            for run in runs
            for label, rows in _paths(record, run["seed"])
            for line in columns(rows, x, {y: "ours"}, **{y: label})
        ]
        for x, y in (("step", "nu"), ("seconds", "error"))
    )
    if not fields:
        last = max(row["step"] for row in record.table("path"))
        truth = EQUATIONS[record.settings["equation"]].truth
        path.append(plots.Series("true", [1, last], [truth, truth], "reference"))
    name, many = "mean of ν(x), geometric" if fields else "ν", "guess" if len(runs) == 1 else "guesses"
    worst = format_number(100 * max(run["coefficient_error"] for run in runs))
    title = f"From {len(runs)} {many}, {name} ends with an error of {worst} % or less"
    if (several := _guesses_each(record)) > 1:
        title = f"Of {several} guesses a seed the best ends with an error of {name} of {worst} % or less"
    ends = f"The error of ν ends at {with_spread(row['coefficient_error'], row['coefficient_error_sd'])}"
    error = plots.Axis("relative error of ν", log=True)
    return [
        plots.lines(path, title=title, x="outer step", y=plots.Axis(name, log=True)),
        plots.lines(errors, title=ends, x=plots.Axis("CPU time", "s"), y=error),
    ]


def _guesses_each(record: Record) -> int:
    """First guesses of each seed (count); lines of those that were not kept are drawn too."""
    return 1 + max((row["start"] for row in guesses(record)), default=0)


def _paths(record: Record, seed: int) -> list[tuple[str, list[dict[str, Any]]]]:
    """Rows of the paths of one seed by label, one path a first guess."""
    rows = record.table("path", seed=seed)
    starts = list(dict.fromkeys(row.get("start", 0) for row in rows))
    label = f"seed {seed}"
    return [
        (
            label if len(starts) == 1 else f"{label}, guess {start}",
            [row for row in rows if row.get("start", 0) == start],
        )
        for start in starts
    ]


def field_figure(record: Record) -> Figure | None:
    """ν(x), true and found in the mean over seeds, where it is a field."""
    rows, (summary,) = record.table("fields"), record.table("summary")
    if not rows:
        return None
    first = record.table("fields", seed=rows[0]["seed"])
    if "low" in first[0]:
        return _band_figure(record, first)
    mean = [row | {"found": fmean(same["found"] for same in rows if same["x"] == row["x"])} for row in first]
    title = f"ν(x) is found to {with_spread(summary['coefficient_error'], summary['coefficient_error_sd'])}"
    return plots.lines(columns(mean, "x", FOUND), title=title, x="x", y=plots.Axis("ν", log=True))


def _band_figure(record: Record, rows: list[dict[str, Any]]) -> Figure:
    """ν(x) of the first seed with its interval at each point, and the truth."""
    x, runs = [row["x"] for row in rows], record.table("runs", seed=rows[0]["seed"])
    found, low, high, true = ([row[name] for row in rows] for name in ("found", "low", "high", "true"))
    lines = [
        plots.Series("found", x, found, "ours", low=low, high=high),
        plots.Series("true", x, true, "reference"),
    ]
    error = format_number(100 * runs[0]["coefficient_error"])
    title = f"The data decide {runs[0]['freedom']:.0f} numbers of ν(x), which is found to {error} %"
    return plots.lines(lines, title=title, x="x", y=plots.Axis("ν", log=True), between="90 % interval")


def guesses(record: Record) -> list[dict[str, Any]]:
    """Where each first guess led, if a run had several."""
    rows = record.table("starts")
    return rows if any(row["start"] for row in rows) else []


def beside_paper(record: Record) -> list[dict[str, Any]]:
    """Our mean and spread beside the published ones, where ν is a number."""
    (ours,), equation = record.table("summary"), EQUATIONS[record.settings["equation"]]
    if record.table("fields"):
        return []
    known = equation.paper if ours["method"] != "pinn" else equation.paper_pinn
    return [
        {"source": "this run", **{name: ours[name] for name in _COLUMNS}, "n": ours["n"]},
        {"source": PAPER, **dict(zip(_COLUMNS, (*known[0], *known[1]), strict=True)), "n": None},
    ]


_COLUMNS: Final = ("coefficient_error", "coefficient_error_sd", "solution_error", "solution_error_sd")


def caveats(record: Record) -> list[str]:
    """What a reader should know before leaning on the numbers."""
    settings = record.settings
    notes = ["Time is CPU time of the process."]
    if settings["equation"] == "allen-cahn":
        notes.append("Solved as periodic: u(±1) = −1 holds at t = 0 and within 1 % afterwards at the true ν.")
    if settings["method"] == "pinn":
        pinn = settings["pinn"]
        notes.append(
            f"A small network: depth {pinn['depth']}, width {pinn['width']}, {pinn['steps']} unrolled steps, batch "
            f"{pinn['batch']}; the paper takes depth 9, 1000 steps and batch 5000. Its weights are carried from one "
            "outer step to the next, their tangents are not."
        )
    if (rows := guesses(record)) and len(record.table("runs")):
        lost = sum(not row["kept"] and row["misfit"] > 2 * _least(rows, row["seed"]) for row in rows)
        notes.append(
            f"Each run began from {1 + max(row['start'] for row in rows)} first guesses and kept the fit with the "
            f"least misfit; {lost} of {len(rows)} ended elsewhere, in a local minimum."
        )
    if record.table("runs") and "covered" in record.table("runs")[0]:
        notes.extend(_least_squares_notes(record))
    elif record.table("fields"):
        (known,) = record.table("identified")
        notes.append(
            f"Smoothness is rewarded: {_weight(settings['penalty']):g} times the mean square of a derivative of log ν "
            f"(order {settings['smoothness']}) is in the loss. At the "
            f"first guess the observations decide {known['decided']:.1f} of {known['unknowns']} unknowns; this prior "
            "decides the rest."
            if _weight(settings["penalty"])
            else f"No prior is used; the observations alone decide all {known['unknowns']} unknowns."
        )
    if settings["noise"] == 0:
        notes.append("Observations are free of noise.")
    exact = settings["equation"] == "burgers" and not record.table("fields")
    source = "a closed form" if exact else "finite differences on two finer grids with steps of their own"
    notes.append(f"Observations come from {source}, not from the solver that is inverted.")
    return notes


def _weight(penalty: float | str) -> float:
    """Of the penalty under Adam."""
    return 1e-6 if isinstance(penalty, str) else penalty


def _least(rows: list[dict[str, Any]], seed: int) -> float:
    return min(float(row["misfit"]) for row in rows if row["seed"] == seed)


def _least_squares_notes(record: Record) -> list[str]:
    """How intervals and penalty are to be read."""
    settings, runs = record.settings, record.table("runs")
    kept = [row for row in record.table("starts") if row["kept"] and row.get("warnings")]
    notes = [f"Seed {row['seed']}: {row['warnings']}." for row in kept]
    noise, real = format_number(fmean(row["noise"] for row in runs)), format_number(settings["noise"])
    if not settings["noise"]:
        notes.append(
            f"Without noise the residuals ({noise}) are errors of two discretizations, not chance: the intervals are "
            "shown, but hold the truth or do not."
        )
    elif record.table("fields"):
        notes.append(
            f"Intervals are of the posterior of the linearized problem, for noise of unknown size (estimated {noise}, "
            f"true {real}): they hold the truth with their frequency in the mean over the unknowns, not at each."
        )
    else:
        notes.append(f"Intervals are for noise of unknown size (estimated {noise}, true {real}), by Student's law.")
    if record.table("fields"):
        how = {
            "evidence": "chosen by the largest marginal likelihood",
            "discrepancy": "the largest that leaves no more than the noise in what the field can explain",
        }.get(settings["penalty"], "given")
        notes.append(
            f"Smoothness is rewarded: the mean square of a derivative of log ν (order {settings['smoothness']}) is in "
            f"the loss, its weight {how}. The observations decide {fmean(row['freedom'] for row in runs):.1f} of "
            f"{settings['field']} unknowns; this prior decides the rest."
            if settings["penalty"]
            else f"No prior is used; the observations alone decide all {settings['field']} unknowns."
        )
    return notes


PAGE: Final = RunPage(
    lambda record: f"Inverting {EQUATIONS[record.settings['equation']].name}",
    answer,
    Chapter(
        "The coefficient",
        "",
        field_figure,
        path_figures,
        Rows(beside_paper, "Beside the paper (ratios; relative error of ν, relative L2 of u)", terminal=False),
        Rows("runs", "By seed"),
        Rows(guesses, "By first guess", terminal=False),
    ),
    Chapter("The solution", "Of the first seed.", solution_figures),
    caveats=caveats,
)

write_page = PAGE.write
