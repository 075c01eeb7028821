"""The page of a study, made of its record alone."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any, Final

from sparing.jobs.lm.controls import CONTROLS, failed
from sparing.jobs.transfer import figures
from sparing.jobs.transfer.figures import TITLES
from sparing.jobs.transfer.settings import Transfer, lines, omitted, places
from sparing.report import Record, format_number
from sparing.report.declared import Chapter, Rows, RunPage, applicable

Row = Mapping[str, Any]


def answer(record: Record) -> str:
    """What was found, in a few sentences, a rule each."""
    rows = record.table("summary")
    if not rows:
        return f"{len(record.table('runs')):,} runs are done; no line of two places is complete."
    first = rows[0]["line"]
    mine = record.table("summary", along=rows[0]["along"], line=first)
    what = "rate" if record.settings["axis"] == "lr" else "initial scale"
    head = f"How far the best {what} moves from the reference's ({first}), and what keeping it costs: "
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


_TRANSFER = ["rule", "line", "width", "density", "drift", "censored", "regret", "collapse", "loss_transferred",
             "loss_retuned", "n"]  # fmt: skip
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
_DIVERGED = "a loss that is no number, or ends above where it began; they count as infinite and stand in the record."
_COORDINATES = "Size of the deepest hidden layer's output as the net gets sparser; flat is what transfer needs."

SUMMARY: Final = Rows("summary", "By rule", _SUMMARISED, _SUMMARY, by="rule", names=TITLES)
OPTIMA: Final = Rows(
    "optima", "Best value of each sweep", note=_FOUND, folded=True, terminal=True, by="rule", names=TITLES
)
MOVED: Final = Rows(
    "transfer", "Drift and regret", _TRANSFER, _REGRET, folded=True, terminal=True, by="rule", names=TITLES
)
_DRAWS = (
    "Each draw is a run of the dense base of {width} dimensions for {steps} steps; the loss is the mean of the last "
    "tenth. All other runs take up σ, α_in and α_out of the best one, and sweep rates around its own."
)
DRAWS: Final = Rows("draws", "Draws on the base, the best first", folded=12, terminal=True)
SLOPES: Final = Rows("slopes", "Slopes over density", note=_SLOPES, folded=True, by="rule", names=TITLES)


def page_of(settings: Transfer) -> RunPage:
    """The page of a study with these settings, which say what is compared with what."""
    swept = "learning rate" if settings.axis == "lr" else "initial scale"
    pieces = "characters" if settings.tokenizer == "char" else f"{settings.vocabulary:,} byte pairs"
    data = "scikit-learn's digits" if settings.family == "mlp" else f"{pieces} of {settings.data}"
    rate = f"rise {settings.warmup_share:g}, linear to {settings.final_share:g}"
    steps = f"{settings.steps} steps, batch {settings.batch}, {rate}"
    compared = dict.fromkeys((line.name, line.along) for line in lines(settings))  # whichever the rule
    shown = [(line.rule, line.places, line.name) for line in lines(settings)]
    shown = shown or [(rule, tuple(places(settings)), "every place") for rule in settings.rules]

    # seven places: as many as there are roles to color them
    sweeps = [partial(figures.curves, rule=rule, places=known[:7], name=name) for rule, known, name in shown]
    return RunPage(
        f"Does the best {swept} transfer? {settings.family} on {data}",
        answer,
        Chapter(
            "How far the best value moves",
            "",
            *(partial(figures.drift_figure, line=name, along=along) for name, along in compared),
            SUMMARY,
            OPTIMA,
        ),
        Chapter(
            "What keeping the reference's value costs",
            _PRICE,
            *(partial(figures.pareto_figure, line=name, along=along) for name, along in compared),
            MOVED,
        ),
        Chapter("Loss over the whole sweep", "", *sweeps),
        Chapter("What the model must pass", "", CONTROLS),
        Chapter(
            "Base tuning",
            _DRAWS.format(width=settings.base_width, steps=settings.tune.steps),
            figures.draws_figures,
            DRAWS,
        ),
        Chapter("Coordinate check", _COORDINATES, figures.coordinate_figure, SLOPES),
        caveats=partial(caveats, settings=settings),
        facts=lambda record: {"data": data, "training": steps},
    )


def write_page(record: Record, path: Path, settings: Transfer) -> Path:
    """Write the page of a study."""
    return page_of(settings).write(record, path)


def caveats(record: Record, settings: Transfer) -> list[str]:
    """What a reader should know before leaning on the numbers."""
    runs, seeds = record.table("runs"), len(settings.seeds)
    wanted = seeds * len(settings.rules) * len(places(settings)) * len(settings.swept)
    dropped = ", ".join(f"{width} at {density:g}" for width, density in omitted(settings))
    masks = (
        f"Masks change in training ({settings.dynamic}, every {settings.mask_updates.every} steps, {settings.follow})."
    )
    told = failed(record.table("controls"))
    return applicable(
        (told, told),
        (len(runs) < wanted, f"Unfinished: {len(runs)} of {wanted} runs are done."),
        (True, f"{seeds} seed{'s' if seeds != 1 else ''}; intervals resample them, no more."),
        (True, f"{sum(row['diverged'] for row in runs)} of {len(runs)} runs diverged: {_DIVERGED}"),
        (True, "Small models and short runs: a rank of rules here need not be that of large ones."),
        (dropped, f"Left out for fewer than {settings.least_live} live inputs per neuron: {dropped}."),
        (settings.dynamic != "none", masks),
    )
