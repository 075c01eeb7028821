"""The page of a merge, made of its record alone."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from statistics import fmean
from typing import Any, Final

from sparing.report import Figure, Record, format_number, plots
from sparing.report.cells import is_finite
from sparing.report.declared import Chapter, Rows, RunPage, applicable
from sparing.report.series import columns

WORDS: Final = """\
Two trained models can be merged by averaging each weight of one with the same weight of the other. That works when \
both lie in one valley of the loss, as models do that were fine-tuned from a common ancestor; models trained apart \
have their weights in other places, and their mean is worse than either. Before anything is measured, the weights \
alone give the prediction: how many weights have equal signs, how far the models are apart, and where they moved.

The **gap** is what the merge scores less what its parents score on average: at or below 0 the merge costs nothing. \
Loss is the mean surprise per answer, in nats; error is the share of wrong answers: labels of images, next tokens of \
text."""

SIGNS: Final = """\
A weight votes by its sign. By chance about half of all signs agree, and scales of norm layers, which are positive, \
agree always; so beside each share stands what chance would give. **Corrected** is 0 for strangers and 1 for equal \
signs."""

BETWEEN: Final = """\
Weights are mixed in steps: all of A on the left, all of B on the right. If the curve stays at or below the straight \
line, the two lie in one valley; a hill between them is what a merge has to pay. Batch-norm statistics, where the \
model has them, are taken anew at every step."""

TASKS: Final = """\
Each text is a task. A merge of models of several tasks should come close to the best model on each, and be no worse \
than the plain average, which costs nothing to make."""

ABOVE: Final = "Above best: loss less that of the task's best parent, paired by rows, with its 95 % interval."

OTHER_WAY: Final = "The prediction is of the plain mean of two models; another way to merge may do better or worse."

OF_ROWS: Final = """\
What the models are weighed by was measured on the validation rows, with their answers: of other text, or of each \
model's own, it would be another."""

STALE: Final = """\
Batch-norm statistics were averaged, not taken anew, which is usually wrong: run again with `--data`, and `--net` for \
a file of weights."""

SEARCH: Final = """\
Weights and settings were chosen on the **validation rows**: {chosen} rows, none of which is a test row; the search \
starts from what the fixed recipes scored there. What was chosen was then measured once on the {judged} **test rows**, \
beside the best of the fixed recipes, chosen on the same validation rows, and the plain average. On validation rows \
the best of many is always better than it is elsewhere: only the test rows compare. A trial whose answers, without \
labels, lay clearly farther from those of all models together than the worst model's own was not measured."""

SEARCHED_LESS: Final = "Searched less: test loss of the searched merge less this one's, paired by rows, with 95 %."

FORECAST_NOTE: Final = "Forecast: how much farther from all models' answers than the worst model's are (nats)."

CORRECTED: Final = "Gaps as predicted; corrected: agreement of signs, 0 for strangers and 1 for equals."

UNITS: Final = {"loss": "nats", "error": "%"}  # of the metrics, as pictures show them

MOST_BARS: Final = 16  # blocks that are drawn as bars; more are a line (count)


def display_value(metric: str, value: float) -> float:
    """A value of a metric in the unit of pictures: losses in nats, errors in per cent."""
    return 100 * value if metric == "error" else value


def in_words(
    metric: str, value: float, low: float | None = None, high: float | None = None, *, difference: bool = False
) -> str:
    """A value of a metric in words; a difference has its sign, and errors in percentage points.

    Example:
        >>> in_words("error", 0.031), in_words("error", 0.5, difference=True)
        ('3.10 %', '+50.0 percentage points')
    """
    ends = [None if end is None else display_value(metric, end) for end in (low, high)]
    text = format_number(display_value(metric, value), low=ends[0], high=ends[1])
    unit = "percentage points" if difference and metric == "error" else UNITS[metric]
    return f"{'+' if difference and value > 0 else ''}{text} {unit}"


def score_figure(record: Record) -> Figure | None:
    """Every parent, the merge as predicted and as measured, in the metric that leads; None where none was measured."""
    metric = record.table("decision")[0]["metric"]
    if not record.table("models"):
        return None
    parents, (merged,) = record.table("models", kind="parent"), record.table("models", kind="merge")
    (gap,), mean = record.table("gap", metric=metric), fmean(row[metric] for row in parents)

    def height(value: float) -> float | None:
        return display_value(metric, value) if is_finite(value) else None

    bars = [plots.Bar(row["model"], height(row[metric]), "baseline") for row in parents]
    bars.append(plots.Bar("mean of these", height(mean), "reference"))
    if is_finite(gap["predicted"]) and math.isfinite(mean):
        value, least, most = (display_value(metric, mean + gap[f"predicted{end}"]) for end in ("", "_low", "_high"))
        bars.append(plots.Bar("the merge, predicted", value, "extension", low=max(least, 0.0), high=most))
    low, high = (height(mean + gap[end]) if is_finite(gap[end]) else None for end in ("gap_low", "gap_high"))
    low = low and max(low, 0.0)
    bars.append(plots.Bar("the merge, measured", height(merged[metric]), "ours", low=low, high=high))
    bars += [plots.Bar(row["model"], height(row[metric]), "baseline") for row in record.table("models", kind="average")]
    side = "above" if gap["gap"] > 0 else "below"
    size = in_words(metric, abs(gap["gap"]), difference=True).removeprefix("+")
    title = f"The merge is {size} {side} the mean of its parents"
    if not is_finite(gap["gap"]):
        title = f"The {metric} of the merge, or of a parent, is not finite"
    note = "Predicted: where nine in ten pairs as alike as these lie. Measured: 95 % interval over test rows."
    return plots.bars(bars, title=title, value=plots.Axis(f"{metric} on test rows", UNITS[metric]), caption=note)


def sign_figure(record: Record) -> Figure | None:
    """Sign agreement of the first two models, block by block; None where no block has signs to compare."""
    rows = [row for row in record.table("signs") if is_finite(row["agreement"])]
    if not rows:
        return None
    least = min(rows, key=lambda row: row["agreement"])
    title = f"Signs agree least in {least['block']}: {format_number(100 * least['agreement'])} %"
    chance = 100 * fmean(row["chance"] for row in rows)
    axis = plots.Axis("weights of equal sign", "%", low=0, high=100)
    note = "Strangers agree where chance has it; models that were fine-tuned from one ancestor agree almost everywhere."
    if len(rows) <= MOST_BARS:
        bars = [plots.Bar(row["block"], 100 * row["agreement"], "ours") for row in rows]
        return plots.bars(bars, title=title, value=axis, mark=(chance, "strangers"), caption=note)
    shares = [{"at": at, "these two": 100 * row["agreement"], "strangers": 100 * row["chance"]}
              for at, row in enumerate(rows, start=1)]  # fmt: skip
    lines = columns(shares, "at", {"these two": "ours", "strangers": "baseline"})
    return plots.lines(lines, title=title, x="block, in order of name", y=axis, caption=note)


def between_figures(record: Record) -> list[Figure]:
    """Both metrics along the line from the first model to the second, the one that leads first."""
    rows, first = record.table("between"), record.table("decision")[0]["metric"]
    return [_between(rows, metric) for metric in (first, "error" if first == "loss" else "loss") if rows]


def _between(rows: Sequence[Mapping[str, Any]], metric: str) -> Figure:
    t, values = [row["t"] for row in rows], [display_value(metric, row[metric]) for row in rows]
    chord = [values[0] + at * (values[-1] - values[0]) for at in t]
    half = len(rows) // 2
    dip = values[half] - chord[half]
    if not math.isfinite(dip):
        title = f"Half-way, or at an end, the {metric} is not finite"
    elif abs(dip) < 1e-9:
        title = f"Half-way, the {metric} is the mean of both ends"
    else:
        amount = f"{format_number(abs(dip))} {'percentage points' if metric == 'error' else 'nats'}"
        title = f"Half-way, the {metric} is {amount} {'above' if dip > 0 else 'below'} the straight line"
    lines = [plots.Series("weights mixed", t, values, "ours"), plots.Series("straight line", t, chord, "baseline")]
    return plots.lines(
        lines, title=title, x="share of B in the mixed weights (0 is A, 1 is B)",
        y=plots.Axis(f"{metric} on test rows", UNITS[metric]),
    )  # fmt: skip


def answer(record: Record) -> str:
    """What was found, in two sentences or three of markup."""
    (decision,), (outlook,) = record.table("decision"), record.table("outlook")
    if not decision["merged"]:
        return f"**No merge was made.** {_sentence(decision['reason'])} {_sentence(decision['advice'])}"
    if not record.table("gap"):
        return f"**{outlook['sentence']}** The merge is made ({decision['way']}); without `--data` it is not measured."
    metric = decision["metric"]
    (gap,) = record.table("gap", metric=metric)
    measured = in_words(metric, gap["gap"], gap["gap_low"], gap["gap_high"], difference=True)
    prediction = "no gap could be predicted"
    if is_finite(gap["predicted"]):
        value, low, high = (gap[f"predicted{end}"] for end in ("", "_low", "_high"))
        prediction = f"predicted was {in_words(metric, value, low, high, difference=True)}"
        inside = low <= gap["gap_high"] and gap["gap_low"] <= high
        prediction += "" if inside else ", so the **prediction was wrong**"
    start = f"The merge ({decision['way']}) **{_cost(gap)}**: its {metric} less the mean of its parents is {measured}"
    return f"{start}; {prediction}. {_beside_best(record, metric)}{_beside_average(record, metric)}"


def _cost(gap: Mapping[str, Any]) -> str:
    """Whether the merge is worse than the mean of its parents, as far as the rows tell."""
    if not math.isfinite(gap["gap"]):
        return "gives numbers that are not finite"
    if not is_finite(gap["gap_low"]):
        return "costs what too few rows cannot bound"
    if gap["gap_low"] > 0:
        return "costs something"
    return "costs nothing" if gap["gap_high"] <= 0 else "costs nothing that these rows could tell"


def _beside_best(record: Record, metric: str) -> str:
    """Whether the merge is better than its best parent on the same rows, which a mean of parents does not tell."""
    (pair,) = record.table("best", metric=metric)
    values = [record.table("models", model=name)[0][metric] for name in ("the merge", pair["best"])]
    low, high = (pair[f"difference_{end}"] for end in ("low", "high"))
    beats = "Row by row it is not told apart from"
    if is_finite(high) and high < 0:
        beats = "Row by row the merge is better than"
    elif is_finite(low) and low > 0:
        beats = "Row by row it does not beat"
    apart = in_words(metric, pair["difference"], low, high, difference=True)
    test = f"; McNemar's p = {pair['mcnemar_p']:.2g}" if pair.get("mcnemar_p") is not None and metric == "error" else ""
    merged, best = (in_words(metric, value) for value in values)
    return f"{beats} the best parent, {pair['best']}: {merged}, {best}, {apart}{test}."


def _beside_average(record: Record, metric: str) -> str:
    """Whether the merge is better than the plain average on the same rows; empty where it is that."""
    rows = record.table("control", metric=metric)
    if not rows:
        return ""
    low, high = (rows[0][f"difference_{end}"] for end in ("low", "high"))
    beats = "is not told apart from"
    if is_finite(high) and high < 0:
        beats = "is better than"
    elif is_finite(low) and low > 0:
        beats = "is worse than"
    apart = in_words(metric, rows[0]["difference"], low, high, difference=True)
    return f" It {beats} the plain average of the models: {apart}."


def _sentence(words: str) -> str:
    """Words with a capital at the start and a full stop."""
    return f"{words[0].upper()}{words[1:].rstrip('.')}."


def choice(record: Record) -> str:
    """What was made, and why."""
    (decision,) = record.table("decision")
    if not decision["merged"]:
        return f"No merge was made. {_sentence(decision['reason'])} {_sentence(decision['advice'])}"
    return f"Made: **{decision['way']}**. {_sentence(decision['reason'])}"


def search_text(record: Record) -> str:
    """How the rows were split, and what was given up."""
    rows = record.table("search")
    return SEARCH.format(chosen=rows[0]["n_validation"], judged=rows[0]["n"])


def caveats(record: Record) -> list[str]:
    """What a reader should know before relying on the numbers."""
    (decision,), measured = record.table("decision"), bool(record.table("models"))
    merged, several = decision["merged"], len(record.settings["models"]) > 2
    return applicable(
        (
            not any(row.get("rows") for row in record.table("forecast")),
            "The prediction is from the weights alone: it knows small models; its interval is of how far it was off.",
        ),
        (
            any(row.get("rows") for row in record.table("forecast")),
            "The prediction takes what both models answer to validation rows for their labels, and does not see those.",
        ),
        *((True, _sentence(row["what"])) for row in record.table("differences")),
        (measured, f"Measured on {decision['source']}; the interval is over those rows, for these very models."),
        (measured, "The same rows serve every parent: on other tasks than these the merge may lose more or less."),
        (merged and not measured, "Nothing was measured: pass `--data` to see what the merge loses."),
        (several, "Signs and the way between are those of the first two models; the prediction is of the worst pair."),
        (merged and decision["way"] not in {"soup", "greedy"}, OTHER_WAY),
        (record.settings.get("method") in {"fisher", "regmean"}, OF_ROWS),
        (decision["stale"], STALE),
    )


FORECAST: Final = ("pair", "verdict", "gap_loss", "gap_error", "corrected")

PAGE: Final = RunPage(
    lambda record: f"Merging {len(record.settings['models'])} models",
    answer,
    Chapter(
        "Prediction and measurement",
        lambda record: f"{WORDS}\n\n{record.table('outlook')[0]['sentence']}",
        score_figure,
        Rows("gap", "Predicted and measured gap: the merge less the mean of its parents"),
        Rows("best", "The merge less its best parent, row by row"),
        Rows("control", "The merge less the plain average, row by row"),
        Rows("models", "Every model on the same test rows"),
        Rows("forecast", "What is predicted of each pair", FORECAST, note=CORRECTED),
    ),
    Chapter(
        "Task by task",
        TASKS,
        Rows("tasks", "Every model on the test rows of each task", note=ABOVE),
    ),
    Chapter(
        "The search",
        search_text,
        Rows("search", "Chosen on validation rows, judged on test rows", by="role", note=SEARCHED_LESS),
        Rows("trials", "Every trial, on validation rows", folded=True, by="way", note=FORECAST_NOTE),
    ),
    Chapter("Do the signs agree?", SIGNS, sign_figure, Rows("signs", "Agreement of A and B by block", folded=True)),
    Chapter("The way from A to B", BETWEEN, between_figures),
    Chapter(
        "The choice",
        choice,
        Rows("tried", "Measured on validation rows, which are not test rows"),
        Rows("written", "What was written"),
        words_alone=True,
    ),
    caveats=caveats,
)

write_page = PAGE.write
