"""The page of an inversion, made of its record alone."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import groupby
from pathlib import Path
from typing import Any, Final

from sparing.jobs.invert.equations import EQUATIONS, Equation
from sparing.report import Figure, Page, Record, Section, Table, format_number, plots

Rows = Sequence[Mapping[str, Any]]
PAPER: Final = "Shen et al. 2024, Figure 2"


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
    for t, part in groupby(record.table("profiles"), key=lambda row: row["t"]):
        rows = list(part)
        x = [row["x"] for row in rows]
        gap = max(abs(row["true"] - row["found"]) for row in rows)
        curves = [
            plots.Series("found", x, [row["found"] for row in rows], "ours"),
            plots.Series("true", x, [row["true"] for row in rows], "reference"),
        ]
        title = f"At t = {t:g} the solution found is within {format_number(gap)} of the true one"
        figures.append(plots.lines(curves, title=title, x="x", y="u"))
    return figures


def _paths(rows: Rows, across: str, up: str) -> list[plots.Series]:
    """One thin line a seed."""
    lines = []
    for seed, part in groupby(rows, key=lambda row: row["seed"]):
        kept = list(part)
        lines.append(plots.Series(f"seed {seed}", [r[across] for r in kept], [r[up] for r in kept], "ours"))
    return lines


def path_figures(record: Record) -> list[Figure]:
    """ν over outer steps, and its error against CPU seconds."""
    rows, equation = record.table("path"), EQUATIONS[record.settings["equation"]]
    lines = _paths(rows, "step", "nu")
    name = "mean of ν(x), geometric" if record.table("fields") else "ν"
    if not record.table("fields"):
        last = max(row["step"] for row in rows)
        lines.append(plots.Series("true", [1, last], [equation.truth] * 2, "reference"))
    (row,) = record.table("summary")
    ends = with_spread(row["coefficient_error"], row["coefficient_error_sd"])
    errors = plots.lines(
        _paths(rows, "seconds", "error"), title=f"The error of ν ends at {ends}",
        x=plots.Axis("CPU time", "s"), y=plots.Axis("relative error of ν", log=True),
    )  # fmt: skip
    runs = record.table("runs")
    worst = format_number(100 * max(row["coefficient_error"] for row in runs))
    title = (
        f"From {len(runs)} {'guess' if len(runs) == 1 else 'guesses'}, {name} ends with an error of {worst} % or less"
    )
    path = plots.lines(lines, title=title, x="outer step", y=plots.Axis(name, log=True))
    return [path, errors]


def field_figure(record: Record) -> Figure:
    """ν(x), true and found by each seed."""
    rows = record.table("fields")
    lines = [plots.Series("found", *_mean(rows), role="ours")]
    first = [row for row in rows if row["seed"] == rows[0]["seed"]]
    truth = plots.Series("true", [row["x"] for row in first], [row["true"] for row in first], "reference")
    (row,) = record.table("summary")
    title = f"ν(x) is found to {with_spread(row['coefficient_error'], row['coefficient_error_sd'])}"
    return plots.lines([*lines, truth], title=title, x="x", y=plots.Axis("ν", log=True))


def _mean(rows: Rows) -> tuple[list[float], list[float]]:
    by: dict[float, list[float]] = {}
    for row in rows:
        by.setdefault(row["x"], []).append(row["found"])
    return list(by), [sum(values) / len(values) for values in by.values()]


def paper_table(record: Record, equation: Equation) -> Table:
    """Our mean and spread beside the published ones."""
    (ours,) = record.table("summary")
    known = equation.paper if ours["method"] == "numerical" else equation.paper_pinn
    rows = [
        {"source": "this run", **{name: ours[name] for name in _COLUMNS}, "n": ours["n"]},
        {"source": PAPER, **dict(zip(_COLUMNS, (*known[0], *known[1]), strict=True)), "n": None},
    ]
    return Table(rows, "Beside the paper (ratios; relative error of ν, relative L2 of u)", record.units)


_COLUMNS: Final = ("coefficient_error", "coefficient_error_sd", "solution_error", "solution_error_sd")


def write_page(record: Record, path: Path) -> Path:
    """Write the page."""
    equation = EQUATIONS[record.settings["equation"]]
    tables = [Table(record.table("runs"), "By seed", record.units)]
    figures = path_figures(record)
    if record.table("fields"):
        figures.insert(0, field_figure(record))
    else:
        tables.insert(0, paper_table(record, equation))
    return Page(
        title=f"Inverting {equation.name}",
        question=record.question,
        answer=answer(record),
        sections=[
            Section("The coefficient", figures=figures, tables=tables),
            Section("The solution", text="Of the first seed.", figures=solution_figures(record)),
        ],
        record=record,
        caveats=caveats(record, equation),
    ).write(path)


def caveats(record: Record, equation: Equation) -> list[str]:
    """What a reader should know before leaning on the numbers."""
    settings = record.settings
    notes = ["Time is CPU time of the process."]
    if equation.name == "allen-cahn":
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
