"""The page of a fine-tuning run, made of its record alone."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from sparing.jobs.lm.controls import NGRAMS
from sparing.jobs.lm.page import RANKS, SPEED, loss_curves
from sparing.report import Figure, Record, format_number, plots
from sparing.report.declared import Chapter, Rows, RunPage, Samples

NAMES = {"full": "full fine-tuning", "lisa": "LISA", "lora": "LoRA"}
ROLES: dict[str, plots.Role] = {"full": "reference", "lisa": "ours", "lora": "rival"}
DRAWN = "Embeddings, final norm and head train at every step unless they were frozen; middle blocks when drawn."
BARS = 16  # blocks that get a bar each; deeper models get a curve


def ends(record: Record) -> tuple[Mapping[str, Any], Mapping[str, Any], str]:
    """First and last loss, and which: held-out where there is one, else training."""
    rows, name = record.table("held_out"), "Held-out loss"
    if not rows:
        rows, name = record.table("train"), "Training loss"
    return rows[0], rows[-1], name


def answer(record: Record) -> str:
    """The run in one sentence of markup."""
    before, after, name = ends(record)
    verb = "falls" if after["loss"] < before["loss"] else "rises"
    text = f"{name} {verb} from {format_number(before['loss'])} to **{format_number(after['loss'])} nat/token**"
    if "perplexity" in after:
        text += f" (perplexity {format_number(before['perplexity'])} to {format_number(after['perplexity'])})"
    train, method = record.table("train"), NAMES[record.settings["method"]]
    text += f" in {len(train):,} steps of {method}"
    total = next((row["measured"] for row in record.table("memory") if row["category"] == "total"), None)
    return f"{text}, with **{format_number(total, 'B')}** of tensors at the peak of a step." if total else f"{text}."


def exported_text(record: Record) -> str:
    """Which weights were exported, where that is not plain."""
    found = next(iter(record.table("exported")), None)
    if found is None:
        return ""
    loss = format_number(found["loss"])
    return f"OUT/model has the weights of step {found['step']:,}, of the lowest held-out loss ({loss} nat/token)."


def loss_figure(record: Record) -> Figure:
    """Loss curves, training and held out."""
    before, after, name = ends(record)
    title = f"{name} goes from {format_number(before['loss'])} to {format_number(after['loss'])}"
    return loss_curves(record, title, ROLES[record.settings["method"]])


def memory_text(record: Record) -> str:
    """How memory was counted, and what was not predicted."""
    missing = (f" {row['quantity'].capitalize()}: {row['why']}." for row in record.table("unpredicted"))
    later = (
        f" Predicted are the first blocks. Once every block has trained, the others keep state on top, "
        f"{format_number(row['state'], 'B')}: as predicted {format_number(row['peak'], 'B')} at the peak."
        for row in record.table("memory_later")
    )
    return (
        "Predicted from shapes alone before the first step; measured in the second by counting every live tensor. "
        "The categories are those of one instant, the peak; the program itself and its libraries come on top."
    ) + "".join((*later, *missing))


def memory_figure(record: Record) -> Figure | None:
    """Bytes by category, predicted beside measured."""
    rows = record.table("memory")
    stacks = [
        plots.Stack(NAMES[record.settings["method"]], {r["category"]: r[kind] for r in rows[:-1]}, kind=kind)
        for kind in ("predicted", "measured")
        if rows and rows[-1][kind] is not None
    ]
    axis = plots.Axis("memory at the peak", "B")
    return plots.stacked_bars(stacks, title=_held(rows[-1]), value=axis) if stacks else None


def _held(total: dict[str, Any]) -> str:
    """What a step holds, in a line; either figure may be missing."""
    predicted, measured = total["predicted"], total["measured"]
    if measured is None:
        return f"A step holds {format_number(predicted, 'B')} at its peak, as predicted before the first"
    found = f"A step holds {format_number(measured, 'B')} at its peak"
    if predicted is None:
        return f"{found}; it was not predicted"
    return f"{found}; the prediction is {100 * abs(predicted / measured - 1):.1f} % off"


def switch_map(record: Record) -> Figure | None:
    """Which middle block trained when; None where every step trains the same."""
    rows, depth = record.table("switches"), sum(r["role"] == "body" for r in record.table("movement"))
    if not rows or not depth:
        return None
    drawn = [set(map(int, row["blocks"].split())) for row in rows]
    values = [[float(block in chosen) for chosen in drawn] for block in range(depth)]
    # The row of a switch is noted after the first step of its interval.
    edges = [row["step"] - 1 for row in rows] + [len(record.table("train"))]
    seen = len(set().union(*drawn))
    title = f"{seen} of {depth} middle blocks trained in {len(rows)} intervals"
    return plots.heatmap(values, title=title, x="optimizer step", y="middle block", x_edges=edges)


def movement_figure(record: Record) -> Figure | None:
    """How far each block moved: bars, or a curve where there are many."""
    rows, role = record.table("movement"), ROLES[record.settings["method"]]
    if not rows:
        return None
    most = max(rows, key=lambda row: row["moved"])
    title = f"{most['block']} moved most: {format_number(100 * most['moved'])} % of its size"
    value, caption = plots.Axis("‖Δθ‖ / ‖θ‖"), "Change of all weights of a block relative to their norm."
    if len(rows) <= BARS:
        bars = [plots.Bar(str(row["block"]), row["moved"], role) for row in rows]
        return plots.bars(bars, title=title, value=value, caption=caption)
    curve = plots.Series("movement", list(range(len(rows))), [row["moved"] for row in rows], role=role)
    return plots.lines([curve], title=title, x="block in order of use", y=value, caption=caption)


PAGE: Final = RunPage(
    lambda record: f"Fine-tuning {Path(record.settings['model']).name} with {NAMES[record.settings['method']]}",
    answer,
    Chapter(
        "Loss",
        exported_text,
        loss_figure,
        Rows("held_out", "Held-out loss"),
        Rows("saved", "Held-out loss of the saved model, nothing rounded"),
        NGRAMS,
        SPEED,
    ),
    Chapter("Memory", memory_text, memory_figure, Rows("memory", "Memory at the peak of a step")),
    RANKS,
    Chapter("Blocks", lambda record: DRAWN if record.table("switches") else "", switch_map, movement_figure),
    Chapter(
        "Text before and after",
        "The model continues each prompt greedily: always the likeliest token, so training alone makes the difference.",
        Samples("samples", {"before": "before", "after": "after"}, "Prompt"),
    ),
    Chapter(
        "Data", "Records of each file, and the rows of tokens that they fill.", Rows("data", "Data", terminal=False)
    ),
    facts=lambda record: {"data": " ".join(record.settings["data"]), "model": record.settings["model"]},
)

write_page = PAGE.write
