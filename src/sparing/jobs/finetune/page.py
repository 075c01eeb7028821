"""The page of a fine-tuning run, made of its record alone."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from sparing.jobs.ranks_page import ranks_section
from sparing.report import Figure, Page, Record, Sample, Section, Table, format_number, plots
from sparing.report.series import binned

Rows = Sequence[Mapping[str, Any]]

NAMES = {"full": "full fine-tuning", "lisa": "LISA", "lora": "LoRA"}
ROLES: dict[str, plots.Role] = {"full": "reference", "lisa": "ours", "lora": "rival"}
BARS = 16  # blocks that get a bar each; deeper models get a curve


def _table(record: Record, name: str) -> list[Any]:
    """Rows whose cells have the types that this job gave them."""
    return list(record.table(name))


def ends(record: Record) -> tuple[Mapping[str, Any], Mapping[str, Any], str]:
    """First and last loss, and which: held-out where there is one, else training."""
    rows, name = _table(record, "held_out"), "Held-out loss"
    if not rows:
        rows, name = _table(record, "train"), "Training loss"
    return rows[0], rows[-1], name


def answer(record: Record) -> str:
    """The run in one sentence of markup."""
    before, after, name = ends(record)
    verb = "falls" if after["loss"] < before["loss"] else "rises"
    text = f"{name} {verb} from {format_number(before['loss'])} to **{format_number(after['loss'])} nat/token**"
    if "perplexity" in after:
        text += f" (perplexity {format_number(before['perplexity'])} to {format_number(after['perplexity'])})"
    train, method = _table(record, "train"), NAMES[record.settings["method"]]
    text += f" in {len(train):,} steps of {method}"
    total = next((row["measured"] for row in _table(record, "memory") if row["category"] == "total"), None)
    return f"{text}, with **{format_number(total, 'B')}** of tensors at the peak of a step." if total else f"{text}."


def loss_section(record: Record) -> Section:
    """Loss curves, training and held out."""
    held, method = _table(record, "held_out"), record.settings["method"]
    curves = [plots.Series("training", *binned(_table(record, "train"), "loss"), role="baseline")]
    if held:
        steps, losses = [row["step"] for row in held], [row["loss"] for row in held]
        curves.append(plots.Series("held out", steps, losses, role=ROLES[method]))
    before, after, name = ends(record)
    title = f"{name} goes from {format_number(before['loss'])} to {format_number(after['loss'])}"
    figure = plots.lines(curves, title=title, x="optimizer step", y=plots.Axis("loss", "nat/token"))
    speed = _table(record, "speed")
    note = f"Training ran at {speed[0]['tokens_per_second']:,.0f} tokens/s, evaluation excluded." if speed else ""
    return Section(
        "Loss", figures=[figure], tables=[Table(held, "Held-out loss", record.units, note=note)] if held else []
    )


def memory_section(record: Record) -> Section:
    """Bytes by category, predicted beside measured."""
    rows = _table(record, "memory")
    total = rows[-1]
    stacks = [
        plots.Stack(NAMES[record.settings["method"]], {r["category"]: r[kind] for r in rows[:-1]}, kind=kind)
        for kind in ("predicted", "measured")
        if total[kind] is not None
    ]
    text = (
        "Predicted from shapes alone before the first step; measured in the second by counting every live tensor. "
        "The categories are those of one instant, the peak; the program itself and its libraries come on top."
    )
    for row in _table(record, "unpredicted"):
        text += f" {row['quantity'].capitalize()}: {row['why']}."
    axis = plots.Axis("memory at the peak", "B")
    figures = [plots.stacked_bars(stacks, title=_held(total), value=axis)] if stacks else []
    return Section("Memory", text, figures, [Table(rows, "Memory at the peak of a step", record.units)])


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
    rows, depth = _table(record, "switches"), sum(r["role"] == "body" for r in _table(record, "movement"))
    if not rows or not depth:
        return None
    drawn = [set(map(int, row["blocks"].split())) for row in rows]
    values = [[float(block in chosen) for chosen in drawn] for block in range(depth)]
    # The row of a switch is noted after the first step of its interval.
    edges = [row["step"] - 1 for row in rows] + [len(_table(record, "train"))]
    seen = len(set().union(*drawn))
    title = f"{seen} of {depth} middle blocks trained in {len(rows)} intervals"
    return plots.heatmap(values, title=title, x="optimizer step", y="middle block", x_edges=edges)


def blocks_section(record: Record) -> Section:
    """Which block trained when, and how far each moved."""
    rows = _table(record, "movement")
    most = max(rows, key=lambda row: row["moved"])
    role = ROLES[record.settings["method"]]
    title = f"{most['block']} moved most: {format_number(100 * most['moved'])} % of its size"
    value, caption = plots.Axis("‖Δθ‖ / ‖θ‖"), "Change of all weights of a block relative to their norm."
    if len(rows) <= BARS:
        bars = [plots.Bar(str(row["block"]), row["moved"], role) for row in rows]
        moved = plots.bars(bars, title=title, value=value, caption=caption)
    else:
        curve = plots.Series("movement", list(range(len(rows))), [row["moved"] for row in rows], role=role)
        moved = plots.lines([curve], title=title, x="block in order of use", y=value, caption=caption)
    drawn = switch_map(record)
    if drawn is None:
        return Section("Blocks", figures=[moved])
    text = "Embeddings, final norm and head train at every step unless they were frozen; middle blocks when drawn."
    return Section("Blocks", text, [drawn, moved])


def text_section(record: Record) -> Section:
    """Continuations before and after."""
    samples = [
        Sample(row["prompt"], {"before": row["before"], "after": row["after"]}, f"Prompt {number}")
        for number, row in enumerate(_table(record, "samples"), start=1)
    ]
    text = (
        "The model continues each prompt greedily: always the likeliest token, so training alone makes the difference."
    )
    return Section("Text before and after", text, samples=samples)


def write_page(record: Record, path: Path, caveats: Sequence[str]) -> Path:
    """Write the page of a run."""
    sections = [loss_section(record)]
    chapters = {
        "memory": memory_section,
        "sharding": ranks_section,
        "movement": blocks_section,
        "samples": text_section,
    }
    for table, chapter in chapters.items():
        if record.table(table):
            sections.append(chapter(record))
    data, model = record.settings["data"], record.settings["model"]
    return Page(
        title=f"Fine-tuning {Path(model).name} with {NAMES[record.settings['method']]}",
        question=record.question,
        answer=answer(record),
        sections=sections,
        record=record,
        reproduce={"data": data, "model": model},
        caveats=caveats,
    ).write(path)
