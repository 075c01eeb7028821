"""Pictures of condensations: the images, accuracy against seconds, bytes, and the paper's numbers beside ours.

Every function takes rows with a column "method", so that a page of one run and one of many draw alike.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor

from sparing.jobs.condense.methods import PAPER, ROLES, SOURCE
from sparing.report import Figure, format_number, plots

Rows = Sequence[Mapping[str, Any]]


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


def accuracy_figure(rows: Rows, *, title: str, judged: str, caption: str = "") -> Figure:
    """Accuracy of a fresh net (%) against CPU seconds of the outer loop."""
    series = plots.series(rows, x="seconds", y="accuracy", by="method", roles=ROLES)
    return plots.lines(
        series, title=title, x=plots.Axis("CPU time of the outer loop, judging apart", "s"),
        y=plots.Axis(f"accuracy on {judged}", "%"), caption=caption,
    )  # fmt: skip


def spread(values: Sequence[float]) -> dict[str, Any]:
    """Mean, ends and number of some values, as the columns of a row.

    Example:
        >>> spread([1.0, 3.0])
        {'accuracy': 2.0, 'accuracy_low': 1.0, 'accuracy_high': 3.0, 'n': 2}
    """
    return {
        "accuracy": sum(values) / len(values), "accuracy_low": min(values), "accuracy_high": max(values),
        "n": len(values),
    }  # fmt: skip


def paper_bars(data: str, per_class: int) -> list[plots.Bar]:
    """The paper's accuracies as open bars; none where it has no number."""
    known = PAPER.get((data, per_class), {})
    return [plots.Bar(name, value, ROLES[name], source=SOURCE) for name, value in known.items()]


def beside_paper(rows: Rows, *, data: str, per_class: int, title: str, judged: str, caption: str = "") -> Figure:
    """Our accuracies as solid bars, the paper's as open ones."""
    ours = [
        plots.Bar(
            str(row["method"]), row["accuracy"], ROLES[row["method"]], low=row["accuracy_low"],
            high=row["accuracy_high"], n=row["n"],
        )
        for row in rows
    ]  # fmt: skip
    # the whole range, so that bars of ours and of the paper compare by length
    value = plots.Axis(f"accuracy on {judged}", "%", low=0, high=100)
    return plots.bars([*ours, *paper_bars(data, per_class)], title=title, value=value, caption=caption)


def bytes_figure(rows: Rows, *, title: str, caption: str = "") -> Figure:
    """Bytes that one hypergradient holds at its peak."""
    bars = [plots.Bar(str(row["method"]), row["peak"], ROLES[row["method"]]) for row in rows]
    return plots.bars(bars, title=title, value=plots.Axis("held at the peak of one outer step", "B"), caption=caption)


def percent(value: float) -> str:
    """A percentage as a sentence says it: ``45.3 %``."""
    return f"{format_number(value)} %"
