"""The page of one condensation."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from torch import Tensor

from sparing.jobs.condense import pictures
from sparing.jobs.condense.loop import LOOKED
from sparing.jobs.condense.methods import PAPER, SOURCE
from sparing.jobs.condense.pictures import percent
from sparing.report import Page, Record, Section, Table, format_number

COLUMNS: Final = ("method", "accuracy", "steps", "seconds", "seconds_per_step")


def judged_on(record: Record) -> str:
    """Words for the real images that nets were judged on."""
    part = "test" if record.settings["judge"] == "test" else "held-out"
    return f"{part} images of {record.settings['data']}"


def answer(record: Record) -> str:
    """One sentence with its numbers: accuracy of fresh nets, what it cost and where it started."""
    row, start = record.table("methods")[0], record.table("curve")[0]["accuracy"]
    each = record.settings["per_class"]
    images = "one image" if each == 1 else f"{each} images"
    held = record.table("memory")[0]["peak"]
    return (
        f"Nets trained on {images} per class get **{percent(row['accuracy'])}** of the {judged_on(record)} right "
        f"(lowest {percent(row['accuracy_low'])}, highest {percent(row['accuracy_high'])} of {row['n']} nets), after "
        f"{format_number(row['seconds'], 's')} of CPU time in {row['steps']:,} outer steps; at the start it was "
        f"{percent(start)}. One outer step holds {format_number(held, 'B')}."
    )


def images_section(record: Record, kept: Mapping[int, Tensor], classes: tuple[str, ...]) -> Section:
    """The images at the looks of the run, and all of the final ones."""
    last = max(kept)
    figures = [pictures.evolution(kept, classes, title=f"From the start to {last:,} outer steps")]
    if record.settings["per_class"] > 1:
        title = f"All {len(kept[last])} condensed images"
        figures.append(pictures.gallery(kept[last], classes, title=title))
    text = "All that a fresh net sees. Files: `images.safetensors` (numbers from 0 to 1) and `images.png`."
    return Section("The images", text, figures)


def accuracy_section(record: Record) -> Section:
    """Accuracy on the way, and at the end beside the paper's."""
    rows, settings, judged = record.table("curve"), record.settings, judged_on(record)
    last = rows[-1]["accuracy"]
    title = f"One net's accuracy goes from {percent(rows[0]['accuracy'])} to {percent(last)}"
    caption = f"One fresh net at each look, on the first {LOOKED:,} images; nothing is chosen by this curve."
    figures = [pictures.accuracy_figure(rows, title=title, judged=judged, caption=caption)]
    done = record.table("methods")
    known = PAPER.get((settings["data"], settings["per_class"]))
    if known and settings["judge"] == "test":
        title = f"{percent(done[0]['accuracy'])} here; the paper's figures, at its own scale, beside it"
        scale = "Open: the paper, width 128, 100 inner and 10,000 outer steps. Solid: this run, lowest to highest net."
        figures.append(
            pictures.beside_paper(
                done, data=settings["data"], per_class=settings["per_class"], title=title, judged=judged, caption=scale
            )
        )
    return Section("Accuracy", "", figures, [Table(done, "This run", record.units, COLUMNS)])


def memory_section(record: Record) -> Section:
    """What one outer step holds at its peak, of this method or of all."""
    rows, figures = record.table("memory"), []
    if len(rows) > 1:
        own, least = rows[0], min(rows, key=lambda row: row["peak"])
        title = f"{own['method']} holds {format_number(own['peak'], 'B')}; {least['method']} the least"
        figures.append(pictures.bytes_figure(rows, title=title))
    text = (
        "Counted over the live tensors of the first outer step: weights, graph or tangents, and what the loss on the "
        "real batch needs, which is the same for every method."
    )
    return Section("Bytes", text, figures, [Table(rows, "Peak of one outer step", record.units)])


def caveats(record: Record) -> list[str]:
    """What a reader should know before leaning on the numbers, a sentence each."""
    settings, notes = record.settings, ["One run with one seed: the spread is over nets, not over runs."]
    paper = {"width": 128, "unroll": 100, "steps": 10_000}
    row = record.table("methods")[0]
    ours = {"width": settings["width"], "unroll": settings["unroll"], "steps": row["steps"]}
    smaller = [f"{name} {ours[name]:,} (paper {paper[name]:,})" for name in paper if ours[name] < paper[name]]
    if smaller:
        notes.append(f"Smaller than the paper's runs: {', '.join(smaller)}.")
    warned = [row["warning"] for row in record.table("train") if row["warning"]]
    counted = {text: warned.count(text) for text in warned}
    notes += [
        f"In {times:,} of {row['steps']:,} outer steps the method warned: {text}." for text, times in counted.items()
    ]
    if shared := [row["ranks"] for row in record.table("train") if "ranks" in row]:
        lost = f", of which {shared[-1]} were left at the end" if shared[-1] < shared[0] else ""
        notes.append(f"{shared[0]} processes{lost} shared the directions; CPU seconds and bytes are of the first.")
    if settings["judge"] != "test":
        notes.append("Judged on held-out training images, for choosing settings; the test images were not touched.")
    if PAPER.get((settings["data"], settings["per_class"])):
        notes.append(
            f"The paper's figures are from {SOURCE}; it gives neither truncation length nor Neumann's settings."
        )
    return notes


def write_page(record: Record, path: Path, kept: Mapping[int, Tensor], classes: tuple[str, ...]) -> Path:
    """Write the page of a finished run."""
    settings: Any = record.settings
    method = record.table("methods")[0]["method"]
    return Page(
        title=f"Condensing {settings['data']} with {method}",
        question=record.question,
        answer=answer(record),
        sections=[images_section(record, kept, classes), accuracy_section(record), memory_section(record)],
        record=record,
        reproduce={"data": settings["data"]},
        caveats=caveats(record),
    ).write(path)
