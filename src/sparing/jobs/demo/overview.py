"""All six answers in one picture, for light and dark pages, and the numbers that are drawn there.

The pictures of the README are copies: `sparing demo`, then copy all three from `runs/demo` to `docs/pictures`.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from sparing.jobs.condense.methods import ROLES as CONDENSERS
from sparing.jobs.condense.page import pixels
from sparing.jobs.demo import memory, shard_page, valley_page
from sparing.jobs.demo.chapter import Chapter
from sparing.jobs.demo.condense import CondenseChapter
from sparing.jobs.demo.federate_page import FederateChapter
from sparing.jobs.demo.transfer import TransferChapter
from sparing.jobs.transfer.figures import ROLES as RULES
from sparing.jobs.transfer.figures import TITLES
from sparing.report import Figure, Record, format_number
from sparing.report.atomic import write_whole
from sparing.report.cells import superscript
from sparing.report.figure import Canvas
from sparing.report.palette import Role, Theme, style

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from torch import Tensor

Rows = Sequence[Mapping[str, Any]]
Panel = Callable[[Any, Canvas, Rows, str], None]

PICTURES: Final[dict[Theme, str]] = {"light": "overview-light.png", "dark": "overview-dark.png"}
FILES: Final = (*PICTURES.values(), "overview.json")

_TEXT, _SMALL = 9.0, 8.0

WIDEST: Final = 52  # letters of a finding that fit above a panel (count)


REAL = "ten real images"


def write_overview(record: Record, folder: Path, chapters: Sequence[Chapter]) -> None:
    """Write the picture and its numbers, of a demo with all six chapters."""
    federated = FederateChapter(record, folder)
    rounds = [row for row in federated.study.table("rounds") if row.get("accuracy") is not None]
    lines = [row for row in record.table("valley_lines") if row["seed"] == record.seed]
    picked: dict[str, tuple[Rows, tuple[str, ...]]] = {
        "memory": (_beside_large(record), ("method", "peak_measured", "peak_large")),
        "condense": ([*record.table("condensed"), *_real(record)], ("method", "accuracy")),
        "transfer": (TransferChapter(record, folder).study.table("optima"), ("rule", "density", "best")),
        "shard": (record.table("shard_runs"), ("plan", "held", "seconds")),
        "valley": (lines, ("pair", "at", "error")),
        "federate": (rounds, ("method", "round", "accuracy")),
    }
    rows = {name: [{key: row.get(key) for key in keys} for row in table] for name, (table, keys) in picked.items()}
    findings = {chapter.name: chapter.brief() for chapter in chapters}
    numbers = {
        "settings": record.settings, "seed": record.seed, "environment": dict(record.environment),
        "findings": findings, "rows": rows,
    }  # fmt: skip
    write_whole(folder / FILES[-1], json.dumps(numbers, indent=1, ensure_ascii=False, allow_nan=False) + "\n")
    images = CondenseChapter(record, folder).images
    picture = figure(rows, list(findings.values()), images, federated.roles)
    for theme, name in PICTURES.items():
        picture.save_png(folder / name, theme=theme)


def _beside_large(record: Record) -> Rows:
    """Peaks of the small model, each beside what the large one would hold."""
    large = {row["method"]: row["peak"] for row in record.table("large")}
    return [row | {"peak_large": large[row["method"]]} for row in record.table("arms")]


def _real(record: Record) -> Rows:
    """What as many real images teach, as a row beside the methods."""
    return [row | {"method": REAL} for row in record.table("condense_control")]


def figure(
    rows: Mapping[str, Rows], findings: Sequence[str], images: Mapping[str, Tensor], methods: Mapping[str, Role]
) -> Figure:
    """Six small pictures in one, each under its finding."""

    def draw(canvas: Canvas) -> None:
        # a figure comes with one pair of axes; six take its place
        canvas.axes.remove()
        panels: tuple[Panel, ...] = (
            _memory,
            partial(_condense, images),
            _transfer,
            _shard,
            _valley,
            partial(_federate, methods),
        )
        shown_with = zip(panels, rows.values(), findings, strict=True)
        for at, (draw_panel, shown, finding) in enumerate(shown_with, start=1):
            axes = canvas.drawing.add_subplot(2, 3, at)
            axes.tick_params(labelsize=_SMALL)
            draw_panel(axes, canvas, shown, finding)

    title = "Six questions about training with little: one command, two cores, no GPU"
    return Figure(title, "Six small charts, one a chapter of the demo.", "", draw, (410.0, 410.0))


def _title(axes: Axes, canvas: Canvas, topic: str, finding: str) -> None:
    """What a panel is about, and what it shows."""
    axes.set_title(f"{topic}\n", loc="left", fontsize=_TEXT, fontweight="bold", color=canvas.shades.ink)
    told = axes.annotate(
        finding, (0, 1), xytext=(0, 6), xycoords="axes fraction", textcoords="offset points", fontsize=_SMALL,
        color=canvas.shades.quiet, va="bottom",
    )  # fmt: skip
    # a text that counts would make its panel narrower the longer it is
    told.set_in_layout(False)


def _bars(axes: Axes, canvas: Canvas, bars: Sequence[tuple[str, float, str, Role]]) -> None:
    """Level bars with their names above and values behind."""
    for at, (name, value, text, role) in enumerate(bars):
        axes.barh(-at, value, height=0.34, color=canvas.colour(role))
        axes.text(0, 0.26 - at, name, fontsize=_SMALL, color=canvas.shades.ink, va="bottom")
        axes.text(value, -at, f" {text}", fontsize=_SMALL, color=canvas.shades.quiet, va="center")
    axes.set(xlim=(0, 1.35 * max(value for _, value, _, _ in bars)), ylim=(0.5 - len(bars), 0.75))
    axes.set_axis_off()


def _lines(
    axes: Axes, canvas: Canvas, lines: Mapping[str, tuple[Rows, Role]], x: str, y: str, labels: tuple[str, str],
    by: float = 1.0,
) -> None:  # fmt: skip
    """A line a method, named below the axes in its colour."""
    for name, (rows, role) in lines.items():
        known = [row for row in rows if row[y] is not None and math.isfinite(row[y])]
        look = style(role)
        axes.plot(
            [row[x] for row in known], [by * row[y] for row in known], color=canvas.colour(role), label=name,
            linestyle=(0, look.dash) if look.dash else "-", marker=look.marker, markersize=3.5,
            markevery=max(1, len(known) // 8),
        )  # fmt: skip
    axes.legend(fontsize=_SMALL, loc="best", labelcolor=canvas.shades.ink, handlelength=1.0)
    axes.set_xlabel(labels[0], fontsize=_SMALL)
    axes.set_ylabel(labels[1], fontsize=_SMALL)


def _grouped(rows: Rows, key: str, roles: Mapping[str, Role]) -> dict[str, tuple[Rows, Role]]:
    names = dict.fromkeys(str(row[key]) for row in rows)
    return {name: ([row for row in rows if row[key] == name], roles.get(name, "baseline")) for name in names}


def _memory(axes: Axes, canvas: Canvas, rows: Rows, finding: str) -> None:
    held = {str(row["method"]): float(row["peak_large"]) for row in rows}
    _title(axes, canvas, "Fine-tuning memory, 7B predicted", finding)
    _bars(axes, canvas, [(name, size, format_number(size, "B"), memory.ROLES[name]) for name, size in held.items()])


def _condense(images: Mapping[str, Tensor], axes: Axes, canvas: Canvas, rows: Rows, finding: str) -> None:
    import numpy as np

    names = [str(row["method"]) for row in rows if row["method"] != REAL]
    blocks: list[Any] = []
    for name in names:  # ten images as two rows of five, white below them
        made = pixels(images[name])
        half = len(made) // 2
        blocks += [np.hstack(made[:half]), np.hstack(made[half:])]
        blocks.append(np.full((6, blocks[-1].shape[1]), np.nan))
    sheet = np.vstack(blocks)
    _title(axes, canvas, "Ten images for sixty thousand", finding)
    axes.imshow(sheet, cmap="gray", vmin=0, vmax=1, interpolation="nearest")
    axes.set_anchor("NW")
    axes.set_frame_on(False)
    step = len(sheet) / len(names)
    axes.set_yticks([(at + 0.5) * step for at in range(len(names))], labels=names, fontsize=_SMALL)
    for tick, name in zip(axes.get_yticklabels(), names, strict=True):
        tick.set_color(canvas.shades.ink if CONDENSERS[name] == "reference" else canvas.colour(CONDENSERS[name]))
    axes.set_xticks([])
    axes.grid(visible=False)


def _transfer(axes: Axes, canvas: Canvas, rows: Rows, finding: str) -> None:
    points = [{"rule": TITLES[r["rule"]], "at": -math.log2(r["density"]), "best": r["best"]} for r in rows]
    grouped = _grouped([point for point in points if point["best"] is not None], "rule", RULES)
    found = {rule: [row["best"] for row in mine] for rule, (mine, _) in grouped.items()}
    _title(axes, canvas, "Tuning sparse nets", finding)
    _lines(axes, canvas, grouped, "at", "best", ("live weights", "best learning rate"))
    places = sorted({point["at"] for point in points})
    axes.set_xticks(places, labels=[f"{100 * 2.0**-at:g} %" for at in places])
    powers = range(math.floor(min(map(min, found.values()))), math.ceil(max(map(max, found.values()))) + 1)
    axes.set_yticks(list(powers), labels=[f"2{superscript(power)}" for power in powers])


def _shard(axes: Axes, canvas: Canvas, rows: Rows, finding: str) -> None:
    by = {str(row["plan"]): row for row in rows}
    _title(axes, canvas, "Slow network", finding)
    named = {"NNN": "DDP", "NNG": "ZeRO-1", "IIG": "PaRO IIG", "GGG": "ZeRO-3", "IIG, 8 bits": "PaRO IIG, 8 bits"}
    bars: list[tuple[str, float, str, Role]] = []
    for plan, row in by.items():
        held, step = f"{format_number(row['held'], 'B')} held", format_number(row["seconds"], "s")
        role = shard_page.ROLES.get(plan, "baseline")
        bars.append((f"{named.get(plan, plan)}, {held}", float(row["seconds"]), step, role))
    _bars(axes, canvas, bars)


def _valley(axes: Axes, canvas: Canvas, rows: Rows, finding: str) -> None:
    _title(axes, canvas, "Averaging two nets", finding)
    labels = ("share of the second net", "error, %")
    _lines(axes, canvas, _grouped(rows, "pair", valley_page.ROLES), "at", "error", labels, by=100.0)
    axes.set_ylim(bottom=0)


def _federate(methods: Mapping[str, Role], axes: Axes, canvas: Canvas, rows: Rows, finding: str) -> None:
    _title(axes, canvas, "Data that stay put", finding)
    labels = ("round", "accuracy, %")
    _lines(axes, canvas, _grouped(rows, "method", methods), "round", "accuracy", labels, by=100.0)
