"""The demo for people: its table in the terminal, its page with pictures."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

from sparing.jobs.condense.methods import ROLES as CONDENSERS
from sparing.jobs.demo import condensation_page, federated_page, sharding_page, transfer_page, valley_page
from sparing.jobs.transfer.figures import ROLES as RULES
from sparing.memory import CATEGORIES
from sparing.report import Figure, Page, Record, Sample, Section, Table, format_number, plots, print_table

ROLES: Final[dict[str, plots.Role]] = {
    "full": "reference", "LISA": "ours", "LISA, embedding frozen": "extension", "LoRA": "rival",
}  # fmt: skip
COLUMNS: Final = (
    "method",
    "lr",
    "loss_before",
    "loss_after",
    "seconds_per_step",
    "faster",
    "peak_measured",
    "peak_predicted",
)


def arms(record: Record) -> list[dict[str, Any]]:
    """Rows of the methods, with how many times faster than full fine-tuning a step was."""
    rows = record.table("arms")
    full = next(row["seconds_per_step"] for row in rows if row["method"] == "full")
    return [row | {"faster": full / row["seconds_per_step"]} for row in rows]


def show(record: Record) -> None:
    """Print the table of methods and where the page is.

    Args:
        record: What ``run`` returned.
    """
    units = record.units | {"faster": "×"}
    print_table(
        arms(record), title=record.table("run")[0]["materials"], units=units, columns=list(COLUMNS), roles=ROLES
    )
    if record.table("condensed"):
        print_table(
            condensation_page.rows_of(record), title="One condensed image per class, equal CPU time", units=units,
            columns=list(condensation_page.COLUMNS), roles=CONDENSERS,
        )  # fmt: skip
    if record.table("transfer_runs"):
        print_table(
            transfer_page.rows_of(transfer_page.study_of(record)), title="Best rates and losses by density",
            columns=list(transfer_page.COLUMNS), roles=RULES,
        )  # fmt: skip
    if record.table("shard_runs"):
        print_table(
            sharding_page.rows_of(record), title="Four processes, two groups: bytes and seconds",
            units=sharding_page.UNITS, columns=list(sharding_page.COLUMNS), roles=sharding_page.ROLES,
        )  # fmt: skip
    if record.table("valley_merges"):
        print_table(
            valley_page.rows_of(record), title="Two averages of two nets: gaps predicted and measured",
            units=valley_page.UNITS, columns=list(valley_page.COLUMNS), roles=valley_page.ROLES,
        )  # fmt: skip
    if record.table("federated_methods"):
        print_table(
            federated_page.rows_of(record), title="One hundred clients that keep their data",
            units=federated_page.UNITS, columns=list(federated_page.COLUMNS), roles=federated_page.roles(),
        )  # fmt: skip
    sys.stdout.write(f"report: {record.table('run')[0]['page']}\n")


def answer(record: Record) -> str:
    """One sentence with its numbers."""
    by = {row["method"]: row for row in arms(record)}
    lisa, full, frozen = by["LISA"], by["full"], by["LISA, embedding frozen"]
    saved = full["peak_measured"] / lisa["peak_measured"]
    held = {method: format_number(row["peak_measured"], "B") for method, row in by.items()}
    return (
        f"LISA ends at a held-out loss of **{format_number(lisa['loss_after'])}** nat/token, full fine-tuning at "
        f"{format_number(full['loss_after'])}; at its peak a step holds **{held['LISA']}**, full {held['full']} "
        f"({format_number(saved, '×')}). With the embedding frozen it holds {held['LISA, embedding frozen']}, and a "
        f"step is {format_number(frozen['faster'], '×')} as fast as a full one."
    )


def loss_figure(record: Record) -> Figure:
    """Held-out loss against training seconds."""
    best = min(arms(record), key=lambda row: row["loss_after"])
    series = plots.series(record.table("curve"), x="seconds", y="loss", by="method", roles=ROLES)
    return plots.lines(
        series, title=f"In the same number of steps, {_named(best['method'])} ends lowest",
        x=plots.Axis("training time", unit="s"), y=plots.Axis("held-out loss", unit="nat/token"),
        caption="Test rows, seen neither in training nor when choosing the rate. One run each (n = 1, one seed).",
    )  # fmt: skip


def bytes_figure(record: Record) -> Figure:
    """Held-out loss against bytes."""
    rows = arms(record)
    least, best = min(rows, key=lambda row: row["peak_measured"]), min(rows, key=lambda row: row["loss_after"])
    points = [(row["method"], [row["peak_measured"]], [row["loss_after"]]) for row in rows]
    return plots.scatter(
        [plots.Series(method, peak, loss, role=ROLES[method]) for method, peak, loss in points],
        title=f"{_named(least['method'])} holds least, {_named(best['method'])} ends lowest",
        x=plots.Axis("measured peak of a step", unit="B"), y=plots.Axis("held-out loss at the end", unit="nat/token"),
        caption="Lower left is better. One run each (n = 1, one seed).",
    )  # fmt: skip


def memory_figure(record: Record) -> Figure:
    """Bytes at the peak by category, predicted beside measured."""
    rows = record.table("memory")
    worst = max(abs(row["peak_predicted"] / row["peak_measured"] - 1) for row in arms(record))
    stacks = [plots.Stack(row["method"], {part: row[part] for part in CATEGORIES}, kind=row["kind"]) for row in rows]
    return plots.stacked_bars(
        stacks, title=f"Prediction and measurement agree within {max(worst * 100, 0.1):.1f} %",
        value=plots.Axis("held at the peak of a step", unit="B"),
        caption="Predicted from shapes alone, with nothing allocated; measured by counting live tensors. Float32.",
    )  # fmt: skip


def layers_figure(record: Record) -> Figure:
    """Which layer trained when, in the LISA run."""
    switches = [row for row in record.table("switches") if row["method"] == "LISA"]
    drawn = [{int(block) for block in str(row["blocks"]).split()} for row in switches]
    layers = 1 + max((block for blocks in drawn for block in blocks), default=0)
    values = [[float(layer in blocks) for blocks in drawn] for layer in range(layers)]
    edges = [row["step"] for row in switches]
    edges.append(2 * edges[-1] - edges[-2] if len(edges) > 1 else edges[-1] + 1)
    return plots.heatmap(
        values, title="Two layers train at a time; a new pair is drawn every five steps",
        x=plots.Axis("step"), y=plots.Axis("layer"), x_edges=edges, kind="switch",
        caption="The run called LISA; embedding, final norm and head train throughout.",
    )  # fmt: skip


def samples(record: Record) -> list[Sample]:
    """Continuations of the same openings, before and after."""
    texts: dict[str, dict[str, str]] = {}
    for row in record.table("samples"):
        texts.setdefault(str(row["prompt"]), {})[str(row["when"])] = str(row["text"])
    return [Sample(prompt=prompt, texts=by_when) for prompt, by_when in texts.items()]


def _named(method: str) -> str:
    return {"full": "full fine-tuning"}.get(method, method)


def write_page(record: Record, path: Path) -> None:
    """Write the page.

    Args:
        record: A finished demo.
        path: File of the page.
    """
    run = record.table("run")[0]
    units = record.units | {"faster": "×"}
    table = Table(arms(record), title="The four methods", units=units, columns=list(COLUMNS), roles=ROLES)
    sweep = Table(
        record.table("sweep"), title="Learning rates tried, on the development rows", units=units, roles=ROLES
    )
    chapter = Section(
        "Layer sampling: fine-tune a few layers at a time",
        text=(
            f"The model and the text: {run['materials']}. Every method starts from the same weights, sees the same "
            "rows in the same order and takes the same number of steps; its learning rate is the best of three, tried "
            "for a few steps and judged on development rows.\n\nLISA (Pan et al., NeurIPS 2024) trains embedding, head "
            "and a few layers drawn anew every few steps; what is frozen has no gradient and no optimizer state. With "
            "the embedding frozen as well, the backward pass stops at the lowest drawn layer."
        ),
        figures=[loss_figure(record), bytes_figure(record), memory_figure(record), layers_figure(record)],
        tables=[table, sweep],
        samples=samples(record),
    )
    caveats = [
        "One seed and few steps: a demonstration, not a comparison of quality.",
        "Measured comparisons, with their commands, are in docs/results.md.",
        "At this size the logits are most of the activations; the share that LISA saves grows with the model.",
    ]
    page = Page(
        title="sparing: training with little", question=record.question, answer=answer(record),
        sections=[chapter, *_others(record, path)], record=record, caveats=caveats,
        reproduce={"go deeper": "sparing finetune --help", "licences": run["licence"]},
    )  # fmt: skip
    page.write(path)


def _others(record: Record, path: Path) -> list[Section]:
    """The chapters after the first that were run."""
    chapters: list[tuple[str, Callable[[Record], Section]]] = [
        ("condensed", lambda made: condensation_page.chapter(made, path.parent)),
        ("transfer_runs", transfer_page.chapter), ("shards", sharding_page.chapter),
        ("valley_merges", valley_page.chapter), ("federated_methods", federated_page.chapter),
    ]  # fmt: skip
    return [chapter(record) for table, chapter in chapters if record.table(table)]
