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
        f"{format_number(row['seconds'], 's')} of CPU time a run."
    )


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
            for line in columns(record.table("path", seed=run["seed"]), x, {y: "ours"}, **{y: f"seed {run['seed']}"})
        ]
        for x, y in (("step", "nu"), ("seconds", "error"))
    )
    if not fields:
        last = max(row["step"] for row in record.table("path"))
        truth = EQUATIONS[record.settings["equation"]].truth
        path.append(plots.Series("true", [1, last], [truth, truth], "reference"))
    name, guesses = "mean of ν(x), geometric" if fields else "ν", "guess" if len(runs) == 1 else "guesses"
    worst = format_number(100 * max(run["coefficient_error"] for run in runs))
    title = f"From {len(runs)} {guesses}, {name} ends with an error of {worst} % or less"
    ends = f"The error of ν ends at {with_spread(row['coefficient_error'], row['coefficient_error_sd'])}"
    error = plots.Axis("relative error of ν", log=True)
    return [
        plots.lines(path, title=title, x="outer step", y=plots.Axis(name, log=True)),
        plots.lines(errors, title=ends, x=plots.Axis("CPU time", "s"), y=error),
    ]


def field_figure(record: Record) -> Figure | None:
    """ν(x), true and found in the mean over seeds, where it is a field."""
    rows, (summary,) = record.table("fields"), record.table("summary")
    if not rows:
        return None
    first = record.table("fields", seed=rows[0]["seed"])
    mean = [row | {"found": fmean(same["found"] for same in rows if same["x"] == row["x"])} for row in first]
    title = f"ν(x) is found to {with_spread(summary['coefficient_error'], summary['coefficient_error_sd'])}"
    return plots.lines(columns(mean, "x", FOUND), title=title, x="x", y=plots.Axis("ν", log=True))


def beside_paper(record: Record) -> list[dict[str, Any]]:
    """Our mean and spread beside the published ones, where ν is a number."""
    (ours,), equation = record.table("summary"), EQUATIONS[record.settings["equation"]]
    if record.table("fields"):
        return []
    known = equation.paper if ours["method"] == "numerical" else equation.paper_pinn
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
    if record.table("fields"):
        (known,) = record.table("identified")
        notes.append(
            f"Smoothness is rewarded: {settings['penalty']:g} times the mean of (∂x log ν)² is in the loss. At the "
            f"first guess the observations decide {known['decided']:.1f} of {known['unknowns']} unknowns; this prior "
            "decides the rest."
            if settings["penalty"]
            else f"No prior is used; the observations alone decide all {known['unknowns']} unknowns."
        )
    if settings["noise"] == 0:
        notes.append("Observations are free of noise; they come from a finer solve, or a closed form, not from this.")
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
    ),
    Chapter("The solution", "Of the first seed.", solution_figures),
    caveats=caveats,
)

write_page = PAGE.write
