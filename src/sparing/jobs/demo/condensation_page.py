"""The chapter on condensation: the images, accuracy, bytes, and the paper's figures."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Final

from sparing.jobs.condense.loop import LOOKED
from sparing.jobs.condense.methods import PAPER, ROLES
from sparing.jobs.condense.pictures import accuracy_figure, beside_paper, bytes_figure, percent, side_by_side
from sparing.jobs.condense.settings import Condense
from sparing.jobs.demo.chapter import Chapter, Claim, run_note
from sparing.jobs.demo.condensation import WORK, images_of
from sparing.report import Figure, Record, Section, Table, format_number
from sparing.report.page import Number

COLUMNS = ("method", "accuracy", "steps", "seconds", "peak")
OURS: Final = "(FG)²U"


def rows_of(record: Record) -> list[dict[str, Any]]:
    """The methods with the bytes that each held."""
    held = {row["method"]: row["peak"] for row in record.table("condense_memory")}
    return [row | {"peak": held[row["method"]]} for row in record.table("condensed")]


def answer(record: Record, work: Condense = WORK) -> str:
    """One sentence with its numbers: what each method's images teach, in equal CPU time."""
    rows = sorted(rows_of(record), key=lambda row: -row["accuracy"])
    best, others = rows[0], rows[1:]
    data = record.table("condense_data")[0]["name"].upper()
    named = ", ".join(f"{row['method']} {percent(row['accuracy'])}" for row in others)
    start = record.table("condense_curve")[0]["accuracy"]
    spent = "" if work.seconds is None else f"After {format_number(work.seconds, 's')} of CPU time each, "
    text = (
        f"ten images made by **{best['method']}** gradients teach fresh nets to get "
        f"**{percent(best['accuracy'])}** of the test images of {data} right; {named}; grey images, {percent(start)}."
    )
    return spent + text if spent else text[0].upper() + text[1:]


def numbers(record: Record) -> tuple[Number, Number, Number]:
    """The best images, ours, and the bytes of ours."""
    rows = rows_of(record)
    ours = next(row for row in rows if row["method"] == OURS)
    best, most = max(rows, key=lambda row: row["accuracy"]), max(rows, key=lambda row: row["peak"])

    def note(row: dict[str, Any]) -> str:
        ends = f", {row['accuracy_low']:.3g} to {row['accuracy_high']:.3g} %" if row["n"] > 1 else ""
        return run_note(record.seed, f"{row['n']} fresh net{'s' if row['n'] > 1 else ''}") + ends

    return (
        Number(
            value=percent(best["accuracy"]), note=note(best),
            label=f"of test images right after training on ten images alone ({best['method']})",
        ),
        Number(
            value=percent(ours["accuracy"]), note=note(ours),
            label=f"the same with the paper's {OURS}, {ours['steps']} outer steps in equal CPU time",
        ),
        Number(
            value=format_number(ours["peak"], "B"), note=run_note(record.seed),
            label=f"held by a step of {OURS}, however long the run; by {most['method']} reverse "
            f"{format_number(most['peak'], 'B')}",
        ),
    )  # fmt: skip


def claims(record: Record) -> list[Claim]:
    """The paper's accuracies beside ours, where it has the data."""
    data = record.table("condense_data")[0]["name"]
    known = PAPER.get((data, 1), {})
    here = {row["method"]: row for row in rows_of(record)}
    pairs = (
        (OURS, OURS, OURS), ("truncated reverse", "truncated", "truncated"),
        ("exact reverse, here from checkpoints", "reverse", "checkpointed"),
    )  # fmt: skip
    return [
        Claim(
            what=f"accuracy of {what}",
            paper=f"{known[theirs]:.1f} %" if theirs in known else "–",
            here=f"{percent(here[ours]['accuracy'])} after {here[ours]['steps']} steps",
        )
        for what, theirs, ours in pairs
    ]  # fmt: skip


def details(record: Record, work: Condense, folder: Path) -> Section:
    """All that a first look can do without."""
    data, rows = record.table("condense_data")[0], rows_of(record)
    least = min(rows, key=lambda row: row["peak"])
    judged = f"test images of {data['name'].upper()}"
    looks = record.table("condense_curve")
    last = max({row["method"]: row for row in looks}.values(), key=lambda row: row["accuracy"])
    drawn = [
        accuracy_figure(
            looks, title=f"One fresh net at a look: in equal CPU time, {last['method']} ends highest", judged=judged,
            caption=f"One fresh net at each look, on {LOOKED:,} images; one run a method (n = 1, one seed).",
        ),
        bytes_figure(rows, title=f"{least['method']} holds least: {format_number(least['peak'], 'B')}"),
    ]  # fmt: skip
    if (data["name"], 1) in PAPER:
        title = "The paper's nets are wider and its runs far longer"
        scale = (
            f"Open: the paper, width 128, T = 100, 10,000 steps. Solid: here, width {work.width}, T = {work.unroll}."
        )
        drawn.append(beside_paper(rows, data=data["name"], per_class=1, title=title, judged=judged, caption=scale))
    text = (
        f"(FG)²U estimates the hypergradient forward, along {work.directions} random directions; truncated reverse "
        f"looks at the last {work.truncate} of {work.unroll} steps only; checkpointed reverse is exact and keeps a few "
        f"states. The estimate along few of {28 * 28 * 10:,} directions is unbiased and very noisy, so in equal time "
        "on two cores it lags; it is meant for runs that no checkpoint fits."
    )
    table = Table(rows, "Three methods, equal CPU time", record.units, COLUMNS, roles=ROLES)
    title = "More: accuracy over time, bytes of a step, the paper's bars beside ours, every number"
    return Section(title, text, drawn, [table])


def picture(record: Record, folder: Path) -> Figure:
    """The images, a row a method."""
    classes = record.table("condense_data")[0]["classes"].split()
    title = "Ten images made to teach a net, not to be looked at"
    caption = "One column a class; each row is what a method made of the grey in the first."
    return side_by_side(images_of(folder, record), classes, title=title, caption=caption)


def chapter(record: Record, work: Condense, folder: Path) -> Chapter:
    """The chapter as its page shows it."""
    steps = [row["steps"] for row in record.table("condensed")]
    least, most = min(steps), max(steps)
    return Chapter(
        name="condense", topic="Long inner runs · (FG)²U",
        question="Can ten images stand for sixty thousand, and how much memory does it take to find them?",
        answer=answer(record, work), numbers=numbers(record), picture=picture(record, folder), claims=claims(record),
        story=(
            f"Each outer step trains a fresh net for {work.unroll} steps on the ten images alone, looks at its loss on "
            "real ones, and changes the images by the gradient through that whole training run: a hypergradient. "
            "Three ways to have it get the same CPU time: **checkpointed** reverse is exact and keeps some states, "
            f"**truncated** reverse looks at the last {work.truncate} steps only, and (FG)²U runs forward along "
            f"{work.directions} random directions and remembers nothing."
        ),
        paper="Shen et al., (FG)²U, NeurIPS 2024, Table 1",
        limits=(
            "The paper's nets are 128 wide and train for 100 steps, 10,000 times over, along 512 directions; here they "
            f"are {work.width} wide and train for {work.unroll}, {least} to {most} times, along {work.directions}. Its "
            "accuracies are out of reach at this budget, and the order of the methods may be another: noisy steps need "
            "many."
        ),
        deeper=(
            "sparing condense --method checkpointed --seconds 1800",
            "sparing condense --method forward-gradient --width 128 --unroll 100    # as the paper",
        ),
        details=details(record, work, folder),
    )  # fmt: skip
