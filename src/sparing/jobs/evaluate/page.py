"""The page of an evaluation, made of its record alone."""

from __future__ import annotations

from typing import Any, Final

from sparing.report import Figure, Record, format_number, plots
from sparing.report.declared import Chapter, Rows, RunPage, applicable

LOSS: Final = (
    "Of a text every token counts but the first of each row, of prompts and conversations the answers. Brackets: 95 % "
    "interval over records, which are taken to be independent; n counts them."
)
GAP: Final = (
    "MODEL less the other on the same records, below 0 where MODEL is better. The interval is over records, each with "
    "both losses, so that what makes a record hard for both does not widen it."
)
TASKS: Final = "By lm-evaluation-harness. Brackets: 95 % interval over items, not over seeds or wordings."
TASKS_GAP: Final = (
    "MODEL less the other on the same items. p: how often equally good models differ by chance at least so much "
    "(exact McNemar test), where an item is right or wrong."
)
CAVEAT: Final = "Whether a model has seen this text or these items in training, nothing here tells."


def in_words(row: dict[str, Any], name: str, unit: str = "") -> str:
    """A value with its interval and unit."""
    text = format_number(row[name], low=row.get(f"{name}_low"), high=row.get(f"{name}_high"))
    return f"{text} {unit}".strip()


def size_and_side(row: dict[str, Any], more: str, less: str) -> str:
    """A difference in words, its size and interval above 0 where it is.

    Example:
        >>> row = {"difference": -0.25, "difference_low": -0.31, "difference_high": -0.19}
        >>> size_and_side(row, "above", "below")
        '**0.25 [0.19, 0.31]** below'
    """
    turned = row["difference"] < 0
    names = ("difference", "difference_high", "difference_low") if turned else tuple(_ENDS)
    found = {end: row[name] for end, name in zip(_ENDS, names, strict=True)}
    if turned:
        found = {end: value if value is None else -value for end, value in found.items()}
    return f"**{in_words(found, 'difference', row.get('per', ''))}** {less if turned else more}"


_ENDS: Final = ("difference", "difference_low", "difference_high")


def _surely(row: dict[str, Any]) -> str:
    """What to add of a difference that may be none."""
    low, high = row["difference_low"], row["difference_high"]
    if low is None:
        return f", of too few records for an interval (n = {row['n']})"
    return "" if low > 0 or high < 0 else ", which chance alone may do"


def models_of(record: Record) -> list[str]:
    """The models, MODEL first."""
    return list(dict.fromkeys(row["model"] for row in (*record.table("loss"), *record.table("tasks"))))


def answer(record: Record) -> str:
    """What was found, in a sentence or two of markup."""
    first, *others = models_of(record)
    told = []
    for row in record.table("against"):
        if row["difference"] is None:
            told.append(f"On {row['source']} the two cannot be compared.")
            continue
        where = size_and_side(row, "above", "below")
        told.append(f"On {row['source']} the loss of {first} is {where} that of {others[0]}{_surely(row)}.")
    losses, tasks = ([], []) if others else (record.table("loss"), record.table("tasks")[:1])
    told += [f"On {row['source']} the loss is **{in_words(row, 'loss', 'nat/token')}**." for row in losses]
    told += [f"On {row['task']} {row['metric']} is **{in_words(row, 'value')}**." for row in tasks]
    for row in record.table("tasks_against")[:1]:
        where = size_and_side(row, "above", "below")
        told.append(f"On {row['task']} {row['metric']} of {first} is {where} that of {others[0]}{_surely(row)}.")
    return " ".join(told)


def loss_figure(record: Record) -> Figure | None:
    """A bar for each model and source."""
    rows = record.table("loss")
    if not rows:
        return None
    models = models_of(record)
    one = len({row["source"] for row in rows}) == 1
    bars = [
        plots.Bar(
            row["model"] if one else f"{row['source']}: {row['model']}", row["loss"],
            "ours" if row["model"] == models[0] else "reference", low=row["loss_low"],
            high=row["loss_high"], n=row["n"],
        )
        for row in sorted(rows, key=lambda row: row["source"])
    ]  # fmt: skip
    gaps = [row for row in record.table("against") if row["difference"] is not None]
    title = f"{models[0]} loses {format_number(rows[0]['loss'])} nat a token on {rows[0]['source']}"
    if gaps:
        where = size_and_side(gaps[0], "above", "below").replace("*", "")
        title = f"{models[0]} is {where} {models[1]} on {gaps[0]['source']}"
    return plots.bars(bars, title=title, value=plots.Axis("held-out loss", "nat/token"))


PAGE: Final = RunPage(
    lambda record: " against ".join(models_of(record)),
    answer,
    Chapter("Held-out loss", LOSS, loss_figure, Rows("loss", "Loss", by="model")),
    Chapter("Against the other", GAP, Rows("against", "Difference of the losses", by="source")),
    Chapter("Tasks", TASKS, Rows("tasks", "Tasks", by="model")),
    Chapter("Tasks against the other", TASKS_GAP, Rows("tasks_against", "Difference on tasks", by="task")),
    caveats=lambda record: applicable(
        (True, CAVEAT),
        (any(row["left_out"] for row in record.table("loss")), "Records with nothing to measure were left out."),
        (
            any(row["dropped"] or row["cut"] for row in record.table("loss")),
            "Records whose prompt fills a row were left out (dropped), and tokens of answers beyond a row (cut).",
        ),
        (
            any(row["per"] == "not comparable" for row in record.table("against")),
            "Two tokenizers cut conversations differently: their losses per token are not of the same tokens.",
        ),
        (
            any(row["per"] == "bit/byte" for row in record.table("against")),
            "The models have different tokenizers: differences are per byte of text, and losses per token say nothing "
            "of each other.",
        ),
    ),
)
write_page = PAGE.write
