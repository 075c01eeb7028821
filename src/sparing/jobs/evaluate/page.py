"""The page of an evaluation, made of its record alone."""

from __future__ import annotations

from pathlib import Path
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


def answer(record: Record) -> str:
    """What was found, in a sentence or two of markup."""
    told = []
    for row in record.table("against"):
        if row["difference"] is None:
            told.append(f"On {row['source']} the two cannot be compared.")
            continue
        size = in_words({key: value and abs(value) for key, value in row.items() if key == "difference"}, "difference")
        low, high = row["difference_low"], row["difference_high"]
        side = "lower" if row["difference"] < 0 else "higher"
        clear = low is not None and (high < 0 or low > 0)
        ends = "" if low is None else f" ({in_words(row, 'difference')})"
        word = "" if clear else ", which chance alone may do" if low is not None else ", of too few records to bound"
        told.append(f"On {row['source']} its loss is **{size} {row['per']} {side}**{ends}{word}.")
    if not told:
        told = [
            f"On {row['source']} its loss is **{in_words(row, 'loss', 'nat/token')}**." for row in record.table("loss")
        ]
    first = record.table("tasks")[:1]
    leading = record.table("tasks_against")[:1]
    told += [f"{row['task']}: {row['metric']} **{in_words(row, 'value')}**." for row in first if not leading]
    told += [f"{row['task']}: {row['metric']} differs by **{in_words(row, 'difference')}**." for row in leading]
    return " ".join(told)


def loss_figure(record: Record) -> Figure | None:
    """A bar for each model and source."""
    rows = record.table("loss")
    if not rows:
        return None
    models = list(dict.fromkeys(row["model"] for row in rows))
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
    side = "below" if gaps and gaps[0]["difference"] < 0 else "above"
    title = f"{models[0]} loses {in_words(rows[0], 'loss', 'nat')} a token on {rows[0]['source']}"
    if gaps:
        size = format_number(abs(gaps[0]["difference"]))
        title = f"{models[0]} is {size} {gaps[0]['per']} {side} {models[1]} on {gaps[0]['source']}"
    return plots.bars(bars, title=title, value=plots.Axis("held-out loss", "nat/token"))


PAGE: Final = RunPage(
    lambda record: f"{Path(str(record.settings['model'])).name.partition('@')[0]}, measured",
    answer,
    Chapter("Held-out loss", LOSS, loss_figure, Rows("loss", "Loss", by="model")),
    Chapter("Against the other", GAP, Rows("against", "Difference of the losses", by="source")),
    Chapter("Tasks", TASKS, Rows("tasks", "Tasks", by="model")),
    Chapter("Tasks against the other", TASKS_GAP, Rows("tasks_against", "Difference on tasks", by="task")),
    caveats=lambda record: applicable(
        (True, CAVEAT),
        (any(row["left_out"] for row in record.table("loss")), "Records with nothing to measure were left out."),
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
