"""The page of a scan, made of its record alone."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, Final

from sparing.jobs.scan import figures
from sparing.jobs.scan import shape_figures as shapes
from sparing.jobs.scan.curves import GROUPS, SPECIALS, TITLES
from sparing.jobs.scan.figures import (
    Row,
    curves_of,
    hundredths,
    index_of,
    is_minimum,
    metric_of,
    model_of,
    rows_of,
    values_of,
    way_of,
    with_unit,
)  # fmt: skip
from sparing.report import Record, format_number
from sparing.report.declared import Chapter, Rows, RunPage, applicable
from sparing.valley.scans.better import as_cost


def curve_rows(record: Record) -> list[dict[str, Any]]:
    """Rows of the table of all curves."""
    one = metric_of(record)
    metrics = model_of(record)["metrics"].split()
    rows = []
    for row in record.table("curves"):
        words = {"raw": "as drawn", "consistent": "of the weights"}
        signs = words.get(row["sign"], f"{100 * row['ratio']:.0f} % of the weights'")
        signs = "its own" if row["group"] == "all" and row["kind"] in SPECIALS else signs
        cells = {"direction": TITLES[row["kind"]], "signs": signs, "group": row["group"], "width": row["width"]}
        known = [name for name in metrics if f"asymmetry_{name}" in row]
        for metric in sorted(known, key=lambda name: name != one):
            cells |= {f"asymmetry_{metric}{end}": row[f"asymmetry_{metric}{end}"] for end in ("", "_low", "_high")}
        cells |= {"minimum": "yes" if is_minimum(row, one) else "no", "SCR": row["consistency"]}
        cells |= {"worse_minus": row[f"minus_{one}"], "worse_plus": row[f"plus_{one}"]}
        cells |= {side: row.get(f"{side}_{one}") for side in ("half_width_minus", "half_width_plus")}
        rows.append(cells | {"n": row["n"]})
    return rows


def range_text(rows: Sequence[Row], metric: str) -> str:
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
    rest = " ".join(shapes.shape_answers(record))
    return f"{curve_answer(record)} {rest}".strip() if curves_of(record) else rest or "Nothing."


def curve_answer(record: Record) -> str:
    """What the curves say, in a sentence or two of markup."""
    metric, rows = metric_of(record), curves_of(record)
    raw, consistent = (curves_of(record, sign=sign, noises=True) for sign in ("raw", "consistent"))
    if not raw or not consistent:
        count = f"{len(rows)} curve{'s' if len(rows) != 1 else ''}"
        return f"The asymmetry index of the {metric} is **{range_text(rows, metric)}** over {count}."
    draws = max(row["n"] for row in raw)
    count = f"{len(raw)} noise{'s' if len(raw) != 1 else ''}, n = {draws} draw{'s' if draws != 1 else ''} each"
    return (
        f"Along noise as it is drawn, the asymmetry index of the {metric} is **{range_text(raw, metric)}**; along the "
        f"same noise with the signs of the weights, **{range_text(consistent, metric)}** ({count}). "
        f"{verdict(raw, consistent, metric)}"
    )


def verdict(raw: Sequence[Row], consistent: Sequence[Row], metric: str) -> str:
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


def _end(row: Row, metric: str, end: str) -> float:
    """An end of an interval; of a line that is not drawn at random the index itself; NaN without a minimum."""
    if not is_minimum(row, metric):
        return math.nan
    found = index_of(row, metric, end)
    return index_of(row, metric) if math.isnan(found) and row["n"] == 1 else found


_NOISES: Final = """\
Each picture walks away from the finished weights θ in a straight line: at λ = ±1 {moved}. \
If the {metric} gets worse alike on both sides, the valley is symmetric.

**Left**, noise ε as it is drawn; **right**, the same sizes |ε|, each with the sign of its weight: to the right of 0 \
every weight grows in its own direction, to the left it shrinks and crosses zero.

**Asymmetry** is (N − P) / (|N| + |P|), where N and P say by how much the {metric} is worse in the mean for λ < 0 and \
λ > 0 ({better} is better): 0 when both sides get worse alike, 1 when only the left one does. It is not given where \
the change is below the noise of the rows. Where a side gets better, the model stands at no minimum of this line, and \
the index says nothing of a valley: "no minimum". **SCR** is the \
share of elements in which direction and weight have the same sign."""

_PLATEAU: Final = """\
The walk is long: next to λ = 0 the {metric} is already worse by more than half of what it gets worse in all, so the \
index speaks of a plateau; `--distances 0.1` looks closer."""

_SLOPE: Final = """\
Along {slopes} of {every} curves the {metric} gets better on a side: the model stands at no minimum there, and their \
indices are of a slope, not of a valley."""

_ONE_MODEL: Final = """\
One model. Intervals are over {draws} noise draws of seed {seed}, not over training runs: train again with another \
seed to see whether it holds."""

_PRECISION: Final = """\
A standard error of {asked:g} was asked for. Draws were added, and rows that each has to itself, split by how much the \
index varies between draws and between rows of a draw; so intervals are over draws and rows, and λ = 0 is measured on \
the rows of each draw. 95 % intervals reach about two standard errors to either side."""

_ENDED: Final = """\
The rows end before the standard error that was asked for is reached along {count} of {every} curves: more rows would \
help."""

_NOT_REFRESHED: Final = """\
Nothing was given to re-estimate batch-norm statistics from; a model without batch norm needs none."""

_STALE: Final = """\
Batch-norm statistics are those of the checkpoint (stale): far out they are wrong, and so is the curve."""

_RATIO: Final = """\
How much agreement does it take? Gaussian noise is drawn, and a share r of its elements is given the sign of its \
weight: at r = 0 it is plain noise, at r = 1 sign-consistent. All curves of one draw have the same sizes |ε|."""

_GROUPS: Final = """\
Only one group of parameters moves; the others stay. Gaussian noise, as drawn and with the signs of \
the weights."""

_SPECIAL: Final = """\
Directions made of the weights themselves; nothing is drawn, μ is the mean of each tensor. θ and sign(θ) have the sign \
of every weight, sign(θ − μ) that of nearly every one: a flat side is to be expected along them, so a plot along such \
a line says little about this model in particular. The last two move only weights that are above zero, or above their \
mean; the paper finds them nearly symmetric. SCR leaves out elements that do not move."""

_NORMS: Final = """\
The scales of {kinds}. Where all of them are positive, as when they start at one and stay there, every positive \
direction is sign-consistent for them, and noise such as {{0, 1}} or {{1}} is asymmetric without being told to."""


_TABLE: Final = (
    "SCR: share of elements whose signs agree. worse minus, worse plus: by how much λ < 0 and λ > 0 are worse in the "
    "mean than 0. half width minus, half width plus: |λ| at which the model is worse by 0.5 nat, or by 5 points of the "
    "share of rows. minimum: no if a side is better. Brackets: 95 % over noise draws (Fieller); from −1 to 1 where "
    "they do not tell. A dash: below the noise of the rows; of a half width, never so much worse."
)


def noises_title(record: Record) -> str:
    """How many noises there are."""
    count = len(record.settings["noises"])
    written = {1: "One noise", 2: "Two noises", 3: "Three noises", 7: "Seven noises"}
    return f"{written.get(count, f'{count} noises')}, as drawn and with the signs of the weights"


def noises_text(record: Record) -> str:
    """What the pictures of the noises show."""
    width, metric = format_number(record.settings["distances"][0], "×"), metric_of(record)
    moved = f"they have moved by {width} their own length"
    if record.settings["norm"] == "raw":
        moved = f"{width} the noise as drawn has been added"
    return _NOISES.format(metric=metric, moved=moved, better=way_of(record, metric))


def group_note(record: Record) -> str:
    """What the table by group has, and which groups the model lacks."""
    gone = [GROUPS[row["group"]] for row in record.table("left_out")]
    note = f"Asymmetry of the {metric_of(record)}; SCR of the noise as drawn."
    return note + (f" The model has no {', '.join(gone)}." if gone else "")


def norms_text(record: Record) -> str:
    """Which norm layers there are, and why their signs matter."""
    layers = record.table("layers")
    kinds = ", ".join(dict.fromkeys(row["kind"] for row in layers))
    return _NORMS.format(kinds=f"{len(layers)} norm layers ({kinds})")


def caveats(record: Record) -> list[str]:
    """What a reader should know before relying on the numbers."""
    model, settings, metric = model_of(record), record.settings, metric_of(record)
    every, refreshed = record.table("curves"), model["refreshed"]
    slopes = sum(not is_minimum(row, metric) for row in every)
    ended = sum(row["ended"] != "reached" for row in record.table("precision"))
    return applicable(
        (too_far(record), _PLATEAU.format(metric=metric)),
        (slopes, _SLOPE.format(slopes=slopes, every=len(every), metric=metric)),
        (True, _ONE_MODEL.format(draws=draws_text(record), seed=settings["seed"])),
        (ended, _ENDED.format(count=ended, every=len(record.table("precision")))),
        (True, "A flat side is a statement about straight lines of this length, not about the whole neighbourhood."),
        (model["source"], f"Measured on {model['source']}."),
        (not refreshed, _NOT_REFRESHED),
        (refreshed and settings["statistics"] == "stale", _STALE),
        (every and settings["norm"] != "scaled", f"Length of directions: {settings['norm']}."),
    )


def draws_text(record: Record) -> str:
    """How many draws a curve has."""
    counts = [row["draws"] for row in record.table("precision")]
    if not counts:
        return str(record.settings["draws"])
    return f"{min(counts)} to {max(counts)}" if min(counts) < max(counts) else str(counts[0])


def precision_text(record: Record) -> str:
    """What was asked, and how it was reached."""
    return _PRECISION.format(asked=record.settings["precision"])


def too_far(record: Record) -> bool:
    """Whether next to λ = 0 raw noise already takes the metric more than half-way up."""
    rows = curves_of(record, sign="raw", noises=True) or curves_of(record)
    if not rows or record.settings["points"] < 5:
        return False
    # how much worse than at λ = 0 the mean curve is at each λ; zero where it is not finite
    _, values = values_of(rows_of(record, rows[0]["curve"]), metric_of(record))
    mean = as_cost(values.mean(0), way_of(record, metric_of(record)))
    middle = len(mean) // 2
    rise = [float(value) if math.isfinite(value) else 0.0 for value in mean - mean[middle]]
    return min(rise[middle - 1], rise[middle + 1]) > 0.5 * max(rise)


def facts(record: Record) -> dict[str, Any]:
    """What reproduces the scan, beside its command."""
    model, settings = model_of(record), record.settings
    given = "".join(f" --{name} {settings[name]}" for name in ("data", "entry", "initial") if settings[name])
    here = (f"{with_unit(name)} {format_number(model[f'at_{name}'])}" for name in model["metrics"].split())
    return {
        "model": f"{model['name']}, {format_number(model['parameters'])} parameters",
        "at λ = 0": ", ".join(here),
        "go deeper": f"sparing scan {settings['model']}{given} --points 41 --draws 10 --distances 1 0.2 2",
        "source": "Li et al., NeurIPS 2024 (arXiv:2405.12489)",
    }


PAGE: Final = RunPage(
    lambda record: f"The valley around {model_of(record)['name']}",
    answer,
    Chapter(noises_title, noises_text, figures.noise_figures),
    Chapter("How many signs must agree", _RATIO, figures.ratio_figures),
    Chapter("Which parameters", _GROUPS, figures.group_figure, Rows(figures.group_rows, "By group", note=group_note)),
    Chapter("Special directions", _SPECIAL, figures.special_figure),
    Chapter(
        "Scales of the norm layers",
        norms_text,
        figures.scale_figure,
        Rows("layers", "By layer", note="positive: share of scales above zero.", folded=True),
    ),
    Chapter(
        "Towards other models",
        shapes.LINES,
        shapes.line_figure,
        Rows("lines", "By model", note="agreement: share of weights of one sign; chance: expected by chance."),
    ),
    Chapter(
        "The plane of three models",
        shapes.PLANE,
        shapes.plane_figure,
        Rows(shapes.place_rows, "Models and checkpoints", note="off: share of the distance that lies off the plane."),
    ),
    Chapter("A surface", shapes.SURFACE, shapes.surface_figure),
    Chapter("Curvature", shapes.curvature_text, Rows("curvature", "Slope and Hessian", note="Brackets: 95 %.")),
    Chapter("Sharpness", shapes.sharpness_text, Rows("sharpness", "Highest rise", by="ball")),
    Chapter(
        "How precisely",
        precision_text,
        Rows(
            "precision",
            "Draws, rows and standard errors",
            note="evaluated: rows run at all points of all draws.",
            by="kind",
            names=TITLES,
        ),
    ),
    Chapter("Every curve", _TABLE, Rows(curve_rows, "Indices by curve", folded=True, terminal=True)),
    caveats=caveats,
    facts=facts,
)

write_page = PAGE.write
