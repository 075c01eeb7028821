"""The page of one condensation, and the pictures that it shares with pages of several."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

from torch import Tensor

from sparing.jobs.condense.loop import LOOKED
from sparing.jobs.condense.methods import PAPER, ROLES, SOURCE
from sparing.jobs.condense.settings import usual_steps
from sparing.report import Figure, Record, Section, format_number, plots
from sparing.report.declared import Chapter, Rows, RunPage, applicable

Drawn = Sequence[Mapping[str, Any]]  # rows with a column "method", so that one run and many draw alike

CONTROL: Final = ("what", "accuracy", "n", "lr", "inner_steps")
COLUMNS: Final = ("method", "accuracy", "n", "steps", "seconds", "seconds_per_step", "outer_lr")


HELD_OUT: Final = "Judged on held-out training images, for choosing settings; the test images were not touched."
BYTES: Final = (
    "Counted over the live tensors of the first outer step: weights, graph or tangents, and what the loss on the "
    "real batch needs, which is the same for every method."
)
CURVE: Final = Rows("curve", "One net's accuracy on the way", folded=True, terminal=True)


def judged_on(record: Record) -> str:
    """Words for the real images that nets were judged on."""
    part = "test" if record.settings["judge"] == "test" else "held-out"
    return f"{part} images of {record.settings['data']}"


def answer(record: Record) -> str:
    """Its numbers: accuracy of fresh nets beside that of as many real images, what it cost and where it started."""
    row, start = record.table("methods")[0], record.table("curve")[0]["accuracy"]
    real, each = record.table("control")[0], record.settings["per_class"]
    images = "one image" if each == 1 else f"{each} images"
    held = record.table("memory")[0]["peak"]
    return (
        f"Nets trained on {images} per class get **{percent(row['accuracy'])}** of the {judged_on(record)} right "
        f"(lowest {percent(row['accuracy_low'])}, highest {percent(row['accuracy_high'])} of {row['n']} nets); on as "
        f"many real images they get **{percent(real['accuracy'])}** ({percent(real['accuracy_low'])} to "
        f"{percent(real['accuracy_high'])} over {real['n']} draws). It took "
        f"{format_number(row['seconds'], 's')} of CPU time in {row['steps']:,} outer steps; at the start it was "
        f"{percent(start)}. One outer step holds {format_number(held, 'B')}."
    )


def real_text(record: Record) -> str:
    """How the nets of the control were taught."""
    chosen = "that did best on held-out images for another draw"
    if not record.settings["held_out_images"]:
        chosen = "of the settings, since no images were held out to choose one by"
    return (
        f"As many real images, drawn anew for each net: each net takes the learning rate {chosen}, and their classes "
        "as labels."
    )


def moved(record: Record) -> str:
    """That nets see images moved, and what it means for whoever takes them."""
    pixels = record.settings["shift"]
    return (
        "Nets were taught with all their images, condensed or real, moved alike, by up to "
        f"{'one pixel' if pixels == 1 else f'{pixels} pixels'} to each side, anew in every step. Do the same when you "
        "use these: in trials on MNIST, one image a class, nets taught without it learned less."
    )


def accuracy_over_time(record: Record) -> Figure:
    """Accuracy on the way."""
    rows = record.table("curve")
    title = f"One net's accuracy goes from {percent(rows[0]['accuracy'])} to {percent(rows[-1]['accuracy'])}"
    caption = f"One fresh net at each look, on the first {LOOKED:,} images; nothing is chosen by this curve."
    return accuracy_figure(rows, title=title, judged=judged_on(record), caption=caption)


def paper_figure(record: Record) -> Figure | None:
    """Accuracy at the end beside the paper's, where the paper has one."""
    rows, settings = record.table("methods"), record.settings
    if (settings["data"], settings["per_class"]) not in PAPER or settings["judge"] != "test":
        return None
    title = f"{percent(rows[0]['accuracy'])} here; the paper's figures, at its own scale, beside it"
    scale = "Open: the paper, width 128, 100 inner and 10,000 outer steps. Solid: here, lowest to highest net."
    kind = {"data": settings["data"], "per_class": settings["per_class"], "judged": judged_on(record)}
    return beside_paper(rows, record.table("control"), title=title, caption=scale, **kind)


def bytes_by_method(record: Record) -> Figure | None:
    """What one outer step holds at its peak, where several methods were measured."""
    rows = record.table("memory")
    least = min(rows, key=lambda row: row["peak"])
    title = f"{rows[0]['method']} holds {format_number(rows[0]['peak'], 'B')}; {least['method']} the least"
    return bytes_figure(rows, title=title) if len(rows) > 1 else None


def caveats(record: Record) -> list[str]:
    """What a reader should know before leaning on the numbers, a sentence each."""
    settings, row = record.settings, record.table("methods")[0]
    paper = {"width": 128, "unroll": 100, "steps": 10_000}
    ours = {
        "width": settings["width"],
        "unroll": settings["unroll"] or usual_steps(settings["per_class"]),
        "steps": row["steps"],
    }
    smaller = [f"{name} {ours[name]:,} (paper {paper[name]:,})" for name in paper if ours[name] < paper[name]]
    warned = Counter(step["warning"] for step in record.table("train") if step["warning"])
    ranks = [step["ranks"] for step in record.table("train") if "ranks" in step] or [0]
    lost = f", of which {ranks[-1]} were left at the end" if ranks[-1] < ranks[0] else ""
    known = (settings["data"], settings["per_class"]) in PAPER
    judged = Counter(net["what"] for net in record.table("nets"))
    diverged = Counter(net["what"] for net in record.table("nets") if net["accuracy"] == 0)
    return applicable(
        (True, "One run with one seed: the spread is over nets, not over runs."),
        (smaller, f"Smaller than the paper's runs: {', '.join(smaller)}."),
        (settings["shift"], moved(record)),
        *(
            (True, f"In {times:,} of {row['steps']:,} outer steps the method warned: {text}.")
            for text, times in warned.items()
        ),
        *(
            (True, f"{count} of {judged[what]} nets ({what}) got 0 %, which is what a net that diverges counts as.")
            for what, count in diverged.items()
        ),
        (ranks[0], f"{ranks[0]} processes{lost} shared the directions; CPU seconds and bytes are of the first."),
        (settings["judge"] != "test", HELD_OUT),
        (known, f"The paper's figures are from {SOURCE}; it gives neither truncation length nor Neumann's settings."),
    )


PAGE: Final = RunPage(
    lambda record: f"Condensing {record.settings['data']} with {record.table('methods')[0]['method']}",
    answer,
    Chapter("Accuracy", "", accuracy_over_time, CURVE, paper_figure, Rows("methods", "This run's fresh nets", COLUMNS)),
    Chapter("As many real images", real_text, Rows("control", "Nets trained on real images", CONTROL)),
    Chapter("Bytes", BYTES, bytes_by_method, Rows("memory", "Peak of one outer step")),
    caveats=caveats,
    facts=lambda record: {"data": record.settings["data"]},
)


def images_section(record: Record, kept: Mapping[int, Tensor], classes: tuple[str, ...]) -> Section:
    """The images, which the record does not hold: at the looks of the run, and all of the final ones."""
    last = max(kept)
    figures = [evolution(kept, classes, title=f"From the start to {last:,} outer steps")]
    if record.settings["per_class"] > 1:
        figures.append(gallery(kept[last], classes, title=f"All {len(kept[last])} condensed images"))
    text = "All that a fresh net sees. Files: `images.safetensors` (numbers from 0 to 1) and `images.png`."
    return Section("The images", text, figures)


def write_page(record: Record, path: Path, kept: Mapping[int, Tensor], classes: tuple[str, ...]) -> Path:
    """Write the page of a run whose images, by outer step, are these."""
    page = PAGE.of(record)
    return replace(page, sections=[images_section(record, kept, classes), *page.sections]).write(path)


def pixels(images: Tensor) -> list[Any]:
    """Condensed images as ``plots.images`` takes them: N arrays (side, side), or (side, side, 3) of color images."""
    if images.shape[1] == 1:
        return list(images[:, 0].numpy())
    return list(images.permute(0, 2, 3, 1).numpy())


def firsts(images: Tensor, classes: int) -> Tensor:
    """The first condensed image of each class, of images sorted by class."""
    return images[:: len(images) // classes]


def evolution(kept: Mapping[int, Tensor], classes: Sequence[str], *, title: str) -> Figure:
    """The first image of each class at several outer steps."""
    steps = sorted(kept)
    rows = [(f"outer step {step:,}", pixels(firsts(kept[step], len(classes)))) for step in steps]
    each = len(kept[steps[0]]) // len(classes)
    caption = "" if each == 1 else f"The first of {each} images of each class."
    return plots.images(rows, title=title, columns=classes, caption=caption)


def gallery(images: Tensor, classes: Sequence[str], *, title: str) -> Figure:
    """All condensed images, one column a class; sorted by class."""
    each = len(images) // len(classes)
    rows = [(f"image {at + 1}" if each > 1 else "", pixels(images[at::each])) for at in range(each)]
    return plots.images(rows, title=title, columns=classes)


def side_by_side(images: Mapping[str, Tensor], classes: Sequence[str], *, title: str, caption: str = "") -> Figure:
    """The first image of each class, one row a method."""
    rows = [(name, pixels(firsts(found, len(classes)))) for name, found in images.items()]
    return plots.images(rows, title=title, columns=classes, caption=caption)


def accuracy_figure(rows: Drawn, *, title: str, judged: str, caption: str = "") -> Figure:
    """Accuracy of a fresh net (%) against CPU seconds of the outer loop."""
    series = plots.series(rows, x="seconds", y="accuracy", by="method", roles=ROLES)
    return plots.lines(
        series, title=title, x=plots.Axis("CPU time of the outer loop, judging apart", "s"),
        y=plots.Axis(f"accuracy on {judged}", "%"), caption=caption,
    )  # fmt: skip


def paper_bars(data: str, per_class: int) -> list[plots.Bar]:
    """The paper's accuracies as open bars; none where it has no number."""
    known = PAPER.get((data, per_class), {})
    return [plots.Bar(name, value, ROLES[name], source=SOURCE) for name, value in known.items()]


def beside_paper(
    rows: Drawn, control: Drawn, *, data: str, per_class: int, title: str, judged: str, caption: str = ""
) -> Figure:
    """Our accuracies and those of as many real images as solid bars, the paper's as open ones."""
    ours = [
        plots.Bar(
            str(row["method"]), row["accuracy"], ROLES[row["method"]], low=row["accuracy_low"],
            high=row["accuracy_high"], n=row["n"],
        )
        for row in rows
    ]  # fmt: skip
    ours += [
        plots.Bar(
            str(row["what"]),
            row["accuracy"],
            "baseline",
            low=row["accuracy_low"],
            high=row["accuracy_high"],
            n=row["n"],
        )
        for row in control
    ]
    # the whole range, so that bars of ours and of the paper compare by length
    value = plots.Axis(f"accuracy on {judged}", "%", low=0, high=100)
    return plots.bars([*ours, *paper_bars(data, per_class)], title=title, value=value, caption=caption)


def bytes_figure(rows: Drawn, *, title: str, caption: str = "") -> Figure:
    """Bytes that one hypergradient holds at its peak."""
    bars = [plots.Bar(str(row["method"]), row["peak"], ROLES[row["method"]]) for row in rows]
    return plots.bars(bars, title=title, value=plots.Axis("held at the peak of one outer step", "B"), caption=caption)


def percent(value: float) -> str:
    """A percentage as a sentence says it: ``45.3 %``."""
    return f"{format_number(value)} %"
