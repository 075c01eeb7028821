"""The page of a scan, made of its record alone."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from sparing.jobs.scan import figures
from sparing.jobs.scan.curves import GROUPS, SPECIALS, TITLES
from sparing.jobs.scan.reading import (
    Rows,
    curves_of,
    hundredths,
    index_of,
    is_minimum,
    listed,
    metric_of,
    model_of,
    rises_of,
    way_of,
    with_unit,
)
from sparing.report import Page, Record, Section, Table, format_number

PAPER: Final = "Li et al., NeurIPS 2024 (arXiv:2405.12489)"


def curve_rows(record: Record) -> list[dict[str, Any]]:
    """Rows of the table of all curves."""
    one = metric_of(record)
    metrics = model_of(record)["metrics"].split()
    rows = []
    for row in record.table("curves"):
        cells = {"direction": TITLES[row["kind"]], "signs": signs_in_words(row)}
        cells |= {"group": row["group"], "width": row["width"]}
        known = [name for name in metrics if f"asymmetry_{name}" in row]
        for metric in sorted(known, key=lambda name: name != one):
            cells |= {f"asymmetry_{metric}{end}": row[f"asymmetry_{metric}{end}"] for end in ("", "_low", "_high")}
        cells |= {"minimum": "yes" if is_minimum(row, one) else "no", "SCR": row["consistency"]}
        cells |= {"worse_minus": row[f"minus_{one}"], "worse_plus": row[f"plus_{one}"]}
        rows.append(cells | {"n": row["n"]})
    return rows


def signs_in_words(row: Mapping[str, Any]) -> str:
    """Whose signs a direction has, in a word or two."""
    words = {"raw": "as drawn", "consistent": "of the weights"}
    if row["group"] == "all" and row["kind"] in SPECIALS:
        return "its own"
    return words.get(row["sign"], f"{100 * row['ratio']:.0f} % of the weights'")


def ranged(rows: Rows, metric: str) -> str:
    """Lowest and highest index of the curves that have a minimum at λ = 0, such as "−0.10 to 0.21"."""
    usable = [row for row in rows if is_minimum(row, metric)]
    if rows and not usable:
        return "of no minimum"
    found = [value for row in usable if math.isfinite(value := index_of(row, metric))]
    if not found:
        return "below the noise"
    low, high = hundredths(min(found)), hundredths(max(found))
    return low if low == high else f"{low} to {high}"


def answer(record: Record) -> str:
    """What was found, in a sentence or two of markup."""
    metric = metric_of(record)
    raw, consistent = (curves_of(record, sign=sign, noises=True) for sign in ("raw", "consistent"))
    if not raw or not consistent:
        rows = curves_of(record)
        count = f"{len(rows)} curve{'s' if len(rows) != 1 else ''}"
        return (
            f"The asymmetry index of the {metric} is **{ranged(rows, metric)}** over {count}." if rows else "Nothing."
        )
    return (
        f"Along noise as it is drawn, the asymmetry index of the {metric} is **{ranged(raw, metric)}**; along the same "
        f"noise with the signs of the weights, **{ranged(consistent, metric)}** ({listed(raw)}). "
        f"{verdict(raw, consistent, metric)}"
    )


def verdict(raw: Rows, consistent: Rows, metric: str) -> str:
    """Whether the signs decide, in words."""
    pairs = [(_end(one, metric, "_high"), _end(two, metric, "_low")) for one, two in zip(raw, consistent, strict=True)]
    clear = sum(high < low for high, low in pairs)
    flat = sum(low > 0 for _, low in pairs)
    # Flat: the interval of the consistent noise is above zero. Clear: it is above that of the raw noise as well.
    if clear == flat == len(pairs):
        return "The valley is flatter on the side where weights grow in their own direction."
    if all(_end(row, metric, "_high") < 0 for row in consistent):
        return "Here it is the other way round: the valley is flatter on the side where weights shrink."
    if flat == 0:
        return "The signs of the weights do not show a flat side here."
    return f"The side where weights grow is clearly flatter, and flatter than as drawn, for {clear} of {len(pairs)}."


def _end(row: Mapping[str, Any], metric: str, end: str) -> float:
    """An end of an interval; of a line that is not drawn at random the index itself; NaN without a minimum."""
    if not is_minimum(row, metric):
        return math.nan
    found = index_of(row, metric, end)
    return index_of(row, metric) if math.isnan(found) and row["n"] == 1 else found


_COUNTS: Final = {1: "One noise", 2: "Two noises", 3: "Three noises", 7: "Seven noises"}

_NOISES: Final = """\
Each picture walks away from the finished weights θ in a straight line: at λ = ±1 they have moved by {width} their \
own length. If the {metric} gets worse alike on both sides, the valley is symmetric.

**Left**, noise ε as it is drawn; **right**, the same sizes |ε|, each with the sign of its weight: to the right of 0 \
every weight grows in its own direction, to the left it shrinks and crosses zero.

**Asymmetry** is (N − P) / (|N| + |P|), where N and P say by how much the {metric} is worse in the mean for λ < 0 and \
λ > 0 ({better} is better): 0 when both sides get worse alike, 1 when only the left one does. It is not given where \
the change is below the noise of the rows. Where a side gets better, the model stands at no minimum of this line, and \
the index says nothing of a valley: "no minimum". **SCR** is the \
share of elements in which direction and weight have the same sign."""

_RATIO: Final = """\
How much agreement does it take? Gaussian noise is drawn, and a share r of its elements is given the sign of its \
weight: at r = 0 it is plain noise, at r = 1 sign-consistent. All curves of one draw have the same sizes |ε|."""

_GROUPS: Final = """\
Only one group of parameters moves, by its own length; the others stay. Gaussian noise, as drawn and with the signs of \
the weights."""

_SPECIAL: Final = """\
Directions made of the weights themselves; nothing is drawn, μ is the mean of each tensor. θ and sign(θ) have the sign \
of every weight, sign(θ − μ) that of nearly every one: a flat side is to be expected along them, so a plot along such \
a line says little about this model in particular. The last two move only weights that are above zero, or above their \
mean; the paper finds them nearly symmetric. SCR leaves out elements that do not move."""

_NORMS: Final = """\
The scales of {kinds}. Where all of them are positive, as when they start at one and stay there, every positive \
direction is sign-consistent for them, and noise such as {{0, 1}} or {{1}} is asymmetric without being told to."""


def sections(record: Record) -> list[Section]:
    """The sections that have something to show."""
    made = (_noises, _ratio, _groups, _special, _norms)
    return [section for section in (make(record) for make in made) if section is not None]


def _noises(record: Record) -> Section | None:
    if not curves_of(record, noises=True, sign="consistent"):
        return None
    width = format_number(record.settings["widths"][0], "×")
    metric = metric_of(record)
    text = _NOISES.format(metric=metric, width=width, better=way_of(record, metric))
    pictures = [figures.noise_figure(record, metric) for metric in _drawn(record)]
    whole = Table(curve_rows(record), "Every curve", record.units, note=_TABLE, folded=True)
    count = len(record.settings["noises"])
    title = f"{_COUNTS.get(count, f'{count} noises')}, as drawn and with the signs of the weights"
    return Section(title, text, pictures, [whole])


def _drawn(record: Record) -> list[str]:
    first = metric_of(record)
    return [
        first,
        *(name for name in model_of(record)["metrics"].split() if name != first and name in ("error", "loss")),
    ]


_TABLE: Final = (
    "SCR: share of elements whose signs agree. worse minus, worse plus: by how much λ < 0 and λ > 0 are worse in the "
    "mean than 0. minimum: no if a side is better. Brackets: 95 % over noise draws (Fieller); from −1 to 1 where they "
    "do not tell. A dash: below the noise of the rows."
)


def _ratio(record: Record) -> Section | None:
    pictures = figures.ratio_figures(record) if "ratio" in record.settings["parts"] else []
    return Section("How many signs must agree", _RATIO, pictures) if pictures else None


def _groups(record: Record) -> Section | None:
    rows = figures.group_rows(record) if "groups" in record.settings["parts"] else []
    if not rows:
        return None
    metric = metric_of(record)
    names = ["group", "raw", "raw_low", "raw_high", "consistent", "consistent_low", "consistent_high", "SCR", "n"]
    shown = [{name: row[name] for name in names} for row in rows]
    gone = [GROUPS[row["group"]] for row in record.table("left_out")]
    note = f"Asymmetry of the {metric}; SCR of the noise as drawn."
    note += f" The model has no {', '.join(gone)}." if gone else ""
    return Section("Which parameters", _GROUPS, [figures.group_figure(record)], [Table(shown, "By group", note=note)])


def _special(record: Record) -> Section | None:
    figure = figures.special_figure(record) if "special" in record.settings["parts"] else None
    return Section("Special directions", _SPECIAL, [figure]) if figure is not None else None


def _norms(record: Record) -> Section | None:
    layers = record.table("layers")
    if not layers:
        return None
    kinds = ", ".join(dict.fromkeys(row["kind"] for row in layers))
    table = Table(layers, "By layer", note="positive: share of scales above zero.", folded=True)
    text = _NORMS.format(kinds=f"{len(layers)} norm layers ({kinds})")
    return Section("Scales of the norm layers", text, [figures.scale_figure(record)], [table])


def caveats(record: Record) -> list[str]:
    """What a reader should know before relying on the numbers."""
    model, settings = model_of(record), record.settings
    notes = [
        f"One model. Intervals are over {settings['draws']} noise draws of seed {settings['seed']}, not over training "
        "runs: train again with another seed to see whether it holds.",
        "A flat side is a statement about straight lines of this length, not about the whole neighbourhood.",
    ]
    metric, every = metric_of(record), record.table("curves")
    if slopes := [row for row in every if not is_minimum(row, metric)]:
        notes.insert(0, f"Along {len(slopes)} of {len(every)} curves the {metric} gets better on a side: the model "
                     "stands at no minimum there, and their indices are of a slope, not of a valley.")  # fmt: skip
    if too_far(record):
        notes.insert(0, f"The walk is long: next to λ = 0 the {metric} is already worse by more than half of what it "
                     "gets worse in all, so the index speaks of a plateau; `--widths 0.1` looks closer.")  # fmt: skip
    if model["source"]:
        notes.append(f"Measured on {model['source']}.")
    if not model["refreshed"]:
        notes.append(
            "Nothing was given to re-estimate batch-norm statistics from; a model without batch norm needs none."
        )
    elif settings["statistics"] == "stale":
        notes.append(
            "Batch-norm statistics are those of the checkpoint (stale): far out they are wrong, and so is the curve."
        )
    if "curves" in record.tables and settings["norm"] != "scaled":
        notes.append(f"Length of directions: {settings['norm']}.")
    return notes


def too_far(record: Record) -> bool:
    """Whether next to λ = 0 raw noise already takes the metric more than half-way up."""
    rows = curves_of(record, sign="raw", noises=True) or curves_of(record)
    if not rows or record.settings["points"] < 5:
        return False
    rise = rises_of(record, rows[0], metric_of(record))
    middle = len(rise) // 2
    return min(rise[middle - 1], rise[middle + 1]) > 0.5 * max(rise)


def deeper(settings: Mapping[str, Any]) -> str:
    """The command for a closer look."""
    parts = ["sparing scan", str(settings["checkpoint"])]
    for name in ("data", "entry", "initial"):
        parts += [f"--{name} {settings[name]}"] if settings[name] else []
    return " ".join([*parts, "--points 41 --draws 10 --widths 1 0.2 2"])


def write_page(record: Record, path: Path) -> Path:
    """Write the page."""
    model = model_of(record)
    here = ", ".join(f"{with_unit(name)} {format_number(model[f'at_{name}'])}" for name in model["metrics"].split())
    facts: dict[str, Any] = {"model": f"{model['name']}, {format_number(model['parameters'])} parameters"}
    facts |= {"at λ = 0": here, "go deeper": deeper(record.settings), "source": PAPER}
    return Page(
        title=f"The valley around {model['name']}",
        question=record.question,
        answer=answer(record),
        sections=sections(record),
        record=record,
        reproduce=facts,
        caveats=caveats(record),
    ).write(path)
