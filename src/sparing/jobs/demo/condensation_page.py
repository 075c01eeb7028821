"""The chapter on condensation for people: one sentence, the images, accuracy, bytes, and the paper's figures."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from sparing.jobs.condense.loop import LOOKED
from sparing.jobs.condense.methods import PAPER, ROLES
from sparing.jobs.condense.pictures import accuracy_figure, beside_paper, bytes_figure, percent, side_by_side
from sparing.jobs.demo.condensation import WORK, images_of
from sparing.report import Figure, Record, Section, Table, format_number

COLUMNS = ("method", "accuracy", "steps", "seconds", "peak")


def rows_of(record: Record) -> list[dict[str, Any]]:
    """The methods with the bytes that each held."""
    held = {row["method"]: row["peak"] for row in record.table("condense_memory")}
    return [row | {"peak": held[row["method"]]} for row in record.table("condensed")]


def answer(record: Record) -> str:
    """One sentence with its numbers.

    Args:
        record: Of the demo.

    Returns:
        What each method's images teach, in equal CPU time.
    """
    rows = sorted(rows_of(record), key=lambda row: -row["accuracy"])
    best, others = rows[0], rows[1:]
    data = record.table("condense_data")[0]["name"]
    named = ", ".join(f"{row['method']} {percent(row['accuracy'])}" for row in others)
    start = record.table("condense_curve")[0]["accuracy"]
    return (
        f"In about {format_number(WORK.seconds, 's')} of CPU time each, one image per class condensed by "
        f"**{best['method']}** teaches fresh nets to get **{percent(best['accuracy'])}** of the test images of {data} "
        f"right; {named}; grey images, {percent(start)}."
    )


def figures(record: Record, folder: Path) -> list[Figure]:
    """Images, accuracy against seconds, bytes, and the paper's numbers where it has any.

    Args:
        record: Of the demo.
        folder: Where the images lie.

    Returns:
        The pictures.
    """
    data, rows = record.table("condense_data")[0], rows_of(record)
    least = min(rows, key=lambda row: row["peak"])
    judged = f"test images of {data['name'].upper()}"
    looks = record.table("condense_curve")
    last = max({row["method"]: row for row in looks}.values(), key=lambda row: row["accuracy"])
    drawn = [
        side_by_side(
            images_of(folder, record), data["classes"].split(),
            title="Ten images made to teach a net, not to be looked at",
        ),
        accuracy_figure(
            looks, title=f"One fresh net at a look: in equal CPU time, {last['method']} ends highest", judged=judged,
            caption=f"One fresh net at each look, on {LOOKED:,} images; one run a method (n = 1, one seed).",
        ),
        bytes_figure(rows, title=f"{least['method']} holds least: {format_number(least['peak'], 'B')}"),
    ]  # fmt: skip
    if (data["name"], 1) in PAPER:
        title = "The paper's nets are wider and its runs far longer"
        scale = (
            f"Open: the paper, width 128, T = 100, 10,000 steps. Solid: here, width {WORK.width}, T = {WORK.unroll}."
        )
        drawn.append(beside_paper(rows, data=data["name"], per_class=1, title=title, judged=judged, caption=scale))
    return drawn


def chapter(record: Record, folder: Path) -> Section:
    """The chapter.

    Args:
        record: Of the demo.
        folder: Where the images lie.

    Returns:
        A section of the page.
    """
    text = (
        "Can ten images stand for sixty thousand? Each outer step trains a fresh net on the ten images alone, looks at "
        "its loss on real ones, and changes the images by the gradient through that whole training run: a "
        "hypergradient.\n\n(FG)²U (Shen et al., NeurIPS 2024) estimates it forward, along "
        f"{WORK.directions} random directions, holding the same however long the run; truncated reverse looks at the "
        f"last {WORK.truncate} of {WORK.unroll} steps only; checkpointed reverse is exact and keeps a few states. The "
        f"estimate along few of {28 * 28 * 10:,} directions is unbiased and very noisy, so in equal time on two cores "
        "it lags; it is meant for runs that no checkpoint fits.\n\nGo deeper: `sparing condense --method checkpointed "
        "--seconds 1800`, or `--method forward-gradient --width 128 --unroll 100` for the paper's own setting."
    )
    table = Table(rows_of(record), "Three methods, equal CPU time", record.units, COLUMNS, roles=ROLES)
    title = "Hypergradients: condense a data set to one image per class"
    return Section(title, text, figures(record, folder), [table], answer=answer(record))
