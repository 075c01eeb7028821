"""The page of a study, made of its record alone."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from sparing.jobs.transfer import figures
from sparing.jobs.transfer.figures import TITLES
from sparing.jobs.transfer.grid import Line, lines, omitted, places
from sparing.jobs.transfer.settings import Transfer
from sparing.report import Figure, Page, Record, Section, Table, format_number

Row = Mapping[str, Any]


def answer(record: Record) -> str:
    """What was found, in a few sentences, a rule each."""
    rows = record.table("summary")
    if not rows:
        return f"{len(record.table('runs')):,} runs are done; no line of two places is complete."
    first = (rows[0]["along"], rows[0]["line"])
    mine = [row for row in rows if (row["along"], row["line"]) == first]
    what = "rate" if record.settings["axis"] == "lr" else "initial scale"
    head = f"How far the best {what} moves from the reference's ({first[1]}), and what keeping it costs: "
    return head + "; ".join(map(_of_rule, mine)) + "."


def _of_rule(row: Row) -> str:
    name = TITLES[row["rule"]]
    if row["drift"] is None:
        return f"{name}: not known"
    turn = "" if abs(row["drift"]) < 0.05 else " up" if row["drift"] > 0 else " down"
    moved = f"**{'at least ' if row['censored'] else ''}{format_number(2 ** abs(row['drift']), '×')}{turn}**"
    if row["diverged_at_transfer"]:
        return f"{name} {moved}, diverges"
    cost = "not known" if row["regret"] is None else f"+{format_number(100 * row['regret'])} % loss"
    return f"{name} {moved}, {cost}"


def panels(record: Record, settings: Transfer) -> list[Figure]:
    """Loss against what is swept, one picture per rule and line."""
    # seven places: as many as there are roles to color them
    found = [figures.curves(record, line.rule, line.places[:7], name=line.name) for line in lines(settings)]
    if not found:
        found = [figures.curves(record, rule, places(settings)[:7], name="every place") for rule in settings.rules]
    return [figure for figure in found if figure is not None]


def comparisons(settings: Transfer) -> list[Line]:
    """One line of each kind and name, whichever the rule."""
    known: dict[tuple[str, str], Line] = {}
    for line in lines(settings):
        known.setdefault((line.along, line.name), line)
    return list(known.values())


def sections(record: Record, settings: Transfer) -> list[Section]:
    """Drift, price, curves and coordinates, those that have a picture."""
    chosen = comparisons(settings)
    drifts = [figures.drift_figure(record, line.name, line.along) for line in chosen]
    prices = [figures.pareto_figure(record, line.name, line.along) for line in chosen]
    units = record.units
    optima = Table(_titled(record, "optima"), "Best value of each sweep", units, note=_FOUND, folded=True)
    moved = Table(_titled(record, "transfer"), "Drift and regret", units, _TRANSFER, note=_REGRET, folded=True)
    summary = Table(_titled(record, "summary"), "By rule", units, _SUMMARISED, note=_SUMMARY)
    found = [
        Section("How far the best value moves", "", _present(drifts), [summary, optima]),
        Section("What keeping the reference's value costs", _PRICE, _present(prices), [moved]),
        Section("Loss over the whole sweep", "", panels(record, settings), []),
    ]
    if (coordinates := figures.coordinate_figure(record)) is not None:
        table = Table(_titled(record, "slopes"), "Slopes over density", units, note=_SLOPES, folded=True)
        found.append(Section("Coordinate check", _COORDINATES, [coordinates], [table]))
    return found


def _titled(record: Record, table: str) -> list[dict[str, Any]]:
    """Rows with the rules as they are written."""
    return [row | {"rule": TITLES[row["rule"]]} for row in record.table(table)]


_TRANSFER = ["rule", "line", "width", "density", "drift", "censored", "regret", "collapse", "n"]
_SUMMARISED = ["rule", "line", "slope", "drift", "regret", "collapse", "censored", "diverged", "runs"]
_FOUND = (
    "best, as log2: vertex of the parabola through the best value tried and its neighbours, with the interval from "
    "resampling seeds; “tried” means it was the first or last one tried, so that the true one lies beyond."
)
_REGRET = (
    "drift: log2 of the best value less the reference's. regret: loss at the reference's best value over the lowest "
    "loss, less 1. collapse: largest difference of log loss from the reference below both optima."
)
_SUMMARY = (
    "slope: of log2 best value over log2 density (or width), over places that are not censored; drift, regret and "
    "collapse: the largest of the line."
)
_PRICE = (
    "Lines show what a user gets who tunes once, at the reference; open marks what is left of the difference between "
    "rules when each is tuned again at every place."
)
_SLOPES = "Judged up to |slope| 0.05 for outputs, 0.1 for gradients and updates; a readout's output is not judged."
_COORDINATES = "Size of the deepest hidden layer's output as the net gets sparser; flat is what transfer needs."


def _present(found: list[Figure | None]) -> list[Figure]:
    return [figure for figure in found if figure is not None]


def caveats(record: Record, settings: Transfer) -> list[str]:
    """What a reader should know before leaning on the numbers."""
    runs = record.table("runs")
    lost = sum(row["diverged"] for row in runs)
    wanted = len(settings.seeds) * len(settings.rules) * len(places(settings)) * len(settings.swept)
    notes = [
        f"{len(settings.seeds)} seed{'s' if len(settings.seeds) != 1 else ''}; intervals resample them, no more.",
        f"{lost} of {len(runs)} runs diverged: a loss that is no number, or ends above where it began; they count as "
        "infinite and stand in the record.",
        "Small models and short runs: a rank of rules here need not be that of large ones.",
    ]
    if len(runs) < wanted:
        notes.insert(0, f"Unfinished: {len(runs)} of {wanted} runs are done.")
    if dropped := omitted(settings):
        names = ", ".join(f"{width} at {density:g}" for width, density in dropped)
        notes.append(f"Left out for fewer than {settings.least_live} live inputs per neuron: {names}.")
    if settings.dynamic != "none":
        notes.append(f"Masks change in training ({settings.dynamic}, every {settings.every} steps, {settings.scale}).")
    return notes


def write_page(record: Record, path: Path, settings: Transfer) -> Path:
    """Write the page of a study."""
    swept = "learning rate" if settings.axis == "lr" else "initial scale"
    data = "scikit-learn's digits" if settings.model == "mlp" else f"characters of {settings.text}"
    steps = f"{settings.steps} steps, batch {settings.batch}, rise {settings.warmup:g}, linear to {settings.final:g}"
    return Page(
        title=f"Does the best {swept} transfer? {settings.model} on {data}",
        question=record.question,
        answer=answer(record),
        sections=sections(record, settings),
        record=record,
        reproduce={"data": data, "training": steps},
        caveats=caveats(record, settings),
    ).write(path)
