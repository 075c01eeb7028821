"""The page of a merge, made of its record alone."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from sparing.jobs.merge.figures import Rows, between_figure, in_words, is_finite, score_figure, sign_figure
from sparing.report import Page, Record, Section, Table

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


def head_metric(record: Record) -> str:
    """The metric that the page leads with: error for images, loss for texts."""
    (row,) = record.table("decision")
    return str(row["metric"])


def answer(record: Record) -> str:
    """What was found, in two sentences or three of markup."""
    (decision,) = record.table("decision")
    (outlook,) = record.table("outlook")
    if not decision["merged"]:
        return f"**No merge was made.** {_sentence(decision['reason'])} {_sentence(decision['advice'])}"
    gap = next((row for row in record.table("gap") if row["metric"] == decision["metric"]), None)
    if gap is None:
        return f"**{outlook['sentence']}** The merge is made ({decision['way']}); without `--data` it is not measured."
    metric = decision["metric"]
    measured = in_words(metric, gap["gap"], gap["gap_low"], gap["gap_high"], difference=True)
    verdict = _cost(gap)
    prediction = "no gap could be predicted"
    if is_finite(gap["predicted"]):
        value, low, high = (gap[f"predicted{end}"] for end in ("", "_low", "_high"))
        prediction = f"predicted was {in_words(metric, value, low, high, difference=True)}"
        inside = low <= gap["gap_high"] and gap["gap_low"] <= high
        prediction += "" if inside else ", so the **prediction was wrong**"
    start = f"The merge ({decision['way']}) **{verdict}**: its {metric} less the mean of its parents is {measured}"
    return f"{start}; {prediction}. {_beside_best(record, metric)}"


def _cost(gap: Mapping[str, Any]) -> str:
    """Whether the merge is worse than the mean of its parents, as far as the rows tell."""
    if not math.isfinite(gap["gap"]):
        return "gives numbers that are not finite"
    low, high = (gap[f"gap_{end}"] if is_finite(gap[f"gap_{end}"]) else math.nan for end in ("low", "high"))
    if math.isnan(low):
        return "costs what too few rows cannot bound"
    if low > 0:
        return "costs something"
    return "costs nothing" if high <= 0 else "costs nothing that these rows could tell"


def _beside_best(record: Record, metric: str) -> str:
    """Whether the merge is better than its best parent on the same rows, which a mean of parents does not tell."""
    rows = record.table("models")
    (pair,) = [row for row in record.table("best") if row["metric"] == metric]
    values = [next(row for row in rows if row["model"] == name)[metric] for name in ("the merge", pair["best"])]
    low, high = (
        pair[f"difference_{end}"] if is_finite(pair[f"difference_{end}"]) else math.nan for end in ("low", "high")
    )
    beats = "Row by row it is not told apart from"
    if high < 0:
        beats = "Row by row the merge is better than"
    elif low > 0:
        beats = "Row by row it does not beat"
    apart = in_words(metric, pair["difference"], pair["difference_low"], pair["difference_high"], difference=True)
    test = f"; McNemar's p = {pair['mcnemar_p']:.2g}" if pair.get("mcnemar_p") is not None and metric == "error" else ""
    merged, best = (in_words(metric, value) for value in values)
    return f"{beats} the best parent, {pair['best']}: {merged}, {best}, {apart}{test}."


def _sentence(words: str) -> str:
    """Words with a capital at the start and a full stop."""
    return f"{words[0].upper()}{words[1:].rstrip('.')}."


def columns_of(rows: Rows) -> list[str]:
    """Columns of the first row, ends of intervals left to the column they belong to."""
    return [name for name in rows[0] if not name.endswith(("_low", "_high"))] if rows else []


def _prediction(record: Record) -> Section:
    (outlook,) = record.table("outlook")
    metric = head_metric(record)
    figures = [score_figure(record, metric)] if record.table("gap") else []
    tables = []
    if record.table("gap"):
        tables.append(Table(record.table("gap"), "Predicted and measured gap", record.units))
    if record.table("best"):
        tables.append(Table(record.table("best"), "The merge less its best parent, row by row", record.units))
    if record.table("models"):
        tables.append(Table(record.table("models"), "Every model on the same test rows", record.units))
    columns = ["pair", "verdict", "gap_loss", "gap_error", "corrected"]
    note = "Gaps as predicted; corrected: agreement of signs, 0 for strangers and 1 for equals."
    tables.append(Table(record.table("forecast"), "What the weights say", record.units, columns, note))
    return Section(
        "Prediction and measurement", text=f"{WORDS}\n\n{outlook['sentence']}", figures=figures, tables=tables
    )


def _signs(record: Record) -> Section:
    figure = sign_figure(record)
    table = Table(record.table("signs"), "Agreement of A and B by block", record.units, folded=True)
    return Section("Do the signs agree?", text=SIGNS, figures=[figure] if figure else [], tables=[table])


def _between(record: Record) -> list[Section]:
    metric = head_metric(record)
    other = "error" if metric == "loss" else "loss"
    figures = [figure for name in (metric, other) if (figure := between_figure(record, name))]
    return [Section("The way from A to B", text=BETWEEN, figures=figures)] if figures else []


def _choice(record: Record) -> Section:
    (decision,) = record.table("decision")
    tables = []
    if tried := record.table("tried"):
        tables.append(Table(tried, "Measured on validation rows, which are not test rows", record.units))
    if written := record.table("written"):
        tables.append(Table(written, "What was written", record.units))
    start = f"Made: **{decision['way']}**." if decision["merged"] else "No merge was made."
    text = f"{start} {_sentence(decision['reason'])}"
    advice = "" if decision["merged"] else f" {_sentence(decision['advice'])}"
    return Section("The choice", text=text + advice, tables=tables)


def caveats(record: Record) -> list[str]:
    """What a reader should know before relying on the numbers."""
    (decision,) = record.table("decision")
    models = record.table("models")
    notes = ["The prediction knows small models; its interval is of how far it was off on them."]
    notes += [_sentence(row["what"]) for row in record.table("differences")]
    if models:
        notes.append(f"Measured on {decision['source']}; the interval is over those rows, for these very models.")
        notes.append("The same rows serve every parent: on other tasks than these the merge may lose more or less.")
    elif decision["merged"]:
        notes.append("Nothing was measured: pass `--data` to see what the merge loses.")
    if len(record.settings["models"]) > 2:
        notes.append(
            "Signs and the way between are those of the first two models; the prediction is of the worst pair."
        )
    if decision["merged"] and decision["way"] not in {"soup", "greedy"}:
        notes.append("The prediction is of the plain mean of two models; another way to merge may do better or worse.")
    if decision["stale"]:
        notes.append(
            "Batch-norm statistics were averaged, not taken anew, which is usually wrong: run again with `--data`, and "
            "`--net` for a file of weights."
        )
    return notes


def write_page(record: Record, path: Path) -> Path:
    """Write the page."""
    return Page(
        title=f"Merging {len(record.settings['models'])} models",
        question=record.question,
        answer=answer(record),
        sections=[_prediction(record), _signs(record), *_between(record), _choice(record)],
        record=record,
        caveats=caveats(record),
    ).write(path)
