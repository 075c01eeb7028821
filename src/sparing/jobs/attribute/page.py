"""The page of an attribution: the rows that helped and harmed each prediction, and predictions held to retraining."""

from __future__ import annotations

import math
import statistics
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

import torch
from torch import Tensor

from sparing.jobs.attribute.inputs import Inputs
from sparing.jobs.attribute.settings import IMAGES
from sparing.report import Figure, Record, Section, format_number, plots
from sparing.report.declared import Chapter, Rows, RunPage, applicable
from sparing.report.page import Sample

ROLES: Final[tuple[plots.Role, ...]] = ("ours", "rival", "reference", "extension", "second_rival", "baseline")

WIDEST: Final = 60  # letters of a text in a table

ABOUT: Final = (
    "Influence is the derivative of the prediction's loss with respect to the weight of a training row, through every "
    "step of the run. **Helps**: with this row the loss is lower. **Harms**: with it the loss is higher; among these "
    "are rows that are mislabelled, ambiguous, or merely of another kind."
)

NUMBERS: Final = "The losses that were attributed, and the influence of every row that is shown, in nat. {}"

SHORT: Final = "Rows of fewer than four bytes, which are left out: {}. Row numbers count them."

DIVERGED: Final = (
    "Sets without which the retrained run diverged: {}. A prediction whose loss is then not a number has no rank "
    "correlation."
)

CHECK: Final = (
    "Random sets of rows were dropped, which keeps order, batches and steps as they are, and the model was trained "
    "again. **Predicted** is minus the sum of the influences of the set; **measured** is what the loss did."
)


def answer(record: Record) -> str:
    """How well predictions rank what happens, and what it took."""
    run, found = record.table("run")[0], [row["rank_correlation"] for row in record.table("agreement")]
    cost = f"{format_number(run['seconds'], 's')} for {run['steps']:,} steps over {run['rows']:,} rows"
    if not found:
        dropped = len({row["set"] for row in record.table("drops")})
        check = "too few to rank, or all alike" if dropped else "so nothing checks them"
        if diverged(record):
            check = "and retraining diverged"
        sets = {0: "No set was", 1: "One set was"}.get(dropped, f"{dropped} sets were")
        return f"The rows are below; the influences of all took {cost}. {sets} dropped, {check}."
    sets = record.table("agreement")[0]["n"]
    share = f"{100 * record.settings['share']:g}"
    return (
        f"Predicted and retrained losses have a rank correlation of **{statistics.fmean(found):.2f}** (lowest "
        f"{min(found):.2f} of {len(found)}), over {sets} random sets of {share} % of the rows. The influences took "
        f"{cost}."
    )


def diverged(record: Record) -> int:
    """Sets without which the loss of some prediction is no finite number (count)."""
    return len({row["set"] for row in record.table("drops") if not math.isfinite(row["measured"])})


def is_set_aside(record: Record) -> bool:
    """Whether the test rows are part of the data, and have numbers there."""
    data = record.settings["data"]
    return data == "digits" or (data not in IMAGES and record.settings.get("test") is None)


def numbering(record: Record) -> str:
    """What the numbers of rows mean."""
    data, test = record.settings["data"], record.settings.get("test")
    if data == "digits":
        return "**Row** is a place in scikit-learn's digits, **test** one in the third set aside; both count from 0."
    if data in IMAGES:
        return "**Row** is a place in the training images, **test** one in the test images, as packaged, from 0."
    place = f"**Row** is a place in {Path(data).name}, where short rows count too"
    if test is None:
        return f"{place}; **test** is one among the rows set aside from it. Both count from 0."
    return f"{place}; **test** is one in {Path(test).name}. Both count from 0."


def prediction_name(row: dict[str, Any], record: Record) -> str:
    """A prediction's number, and where it stands in the data."""
    own = f" (row {row['row']} of the data)" if is_set_aside(record) else ""
    return f"Test row {row['test']}{own}"


def brief(words: str) -> str:
    """A text as a table shows it."""
    return words if len(words) <= WIDEST else words[: WIDEST - 1] + "…"


def row_table(record: Record) -> list[dict[str, Any]]:
    """Rows on either side of each prediction."""
    return [
        {name: row[name] for name in ("test", "side", "place", "row")}
        | {"label_or_text": brief(row["label_or_text"]), "influence": row["influence"]}
        for row in record.table("rows")
    ]


def agreement(record: Record) -> Figure | None:
    """Predicted against measured change of the loss."""
    tests = [row["test"] for row in record.table("predictions")][: len(ROLES)]
    series = []
    for role, test in zip(ROLES, tests, strict=False):
        rows = record.table("drops", test=test)
        rows = [row for row in rows if math.isfinite(row["measured"])]
        if rows:
            points = [row["predicted"] for row in rows], [row["measured"] for row in rows]
            series.append(plots.Series(f"test row {test}", *points, role))
    if not series:
        return None
    found = [row["rank_correlation"] for row in record.table("agreement")]
    unranked = "Retraining diverged" if diverged(record) else "Too few sets to rank"
    title = f"Rank correlation {min(found):.2f} to {max(found):.2f}" if found else unranked
    sides = (plots.Axis(f"{name} change of the loss", "nat") for name in ("predicted", "measured"))
    x, y = sides
    return plots.scatter(series, title=title, x=x, y=y)


def caveats(record: Record) -> list[str]:
    """What a reader should know before relying on the numbers."""
    run = record.table("run")[0]
    return applicable(
        (run["warning"], f"This run is not smooth: {run['warning']}."),
        (run.get("left_out"), SHORT.format(run.get("left_out"))),
        (diverged(record), DIVERGED.format(diverged(record))),
        (
            True,
            "Influences are of this very run: its order, its initial weights, its seed. Another seed has others.",
        ),
        (True, "They are first derivatives: good for small sets, less so for large ones, whose rows act together."),
    )


def facts(record: Record) -> dict[str, Any]:
    """What reproduces the run."""
    run = record.table("run")[0]
    return {
        "data": record.settings["data"],
        "model": f"{format_number(run['parameters'])} parameters",
        "metasmoothness": f"{run['metasmoothness']:.2f} (1 is smooth), bend {run['bend']:.2f} (0 is straight)",
        "source": "Ilyas & Engstrom 2025 (arXiv:2504.16430), Engstrom et al. 2025 (arXiv:2503.13751)",
    }


def prediction_columns(record: Record) -> list[str]:
    """Of the table of predictions."""
    return ["test", *(["row"] if is_set_aside(record) else []), "label_or_text", "loss"]


PAGE: Final = RunPage(
    lambda record: f"Which rows of {Path(record.settings['data']).name} made these predictions",
    answer,
    Chapter(
        "Every row shown", lambda record: NUMBERS.format(numbering(record)),
        Rows("predictions", "What was predicted", prediction_columns, by="label_or_text"),
        Rows(row_table, "Rows with the largest influence", folded=True, by="side"),
    ),
    Chapter("Predicted and retrained", CHECK, agreement, Rows("agreement", "By prediction", by="label_or_text")),
    caveats=caveats,
    facts=facts,
)  # fmt: skip


def write_page(record: Record, path: Path, inputs: Inputs) -> Path:
    """Write the page; images are not in the record."""
    page = PAGE.of(record)
    return replace(page, sections=[rows_section(record, inputs), *page.sections]).write(path)


def rows_section(record: Record, inputs: Inputs) -> Section:
    """The rows themselves, most helpful and most harmful first."""
    figures, samples = [], []
    for at, row in enumerate(record.table("predictions")):
        sides = {side: record.table("rows", test=row["test"], side=side) for side in ("helps", "harms")}
        if record.settings["data"] in IMAGES:
            figures.append(_mosaic(row, at, sides, inputs, prediction_name(row, record)))
        else:
            texts = {
                f"{side}, row {one['row']}": one["label_or_text"] for side, rows in sides.items() for one in rows[:3]
            }
            predicted = {"predicted": row["label_or_text"]}
            samples.append(Sample("", predicted | texts, f"{prediction_name(row, record)}, loss {row['loss']:.2f}"))
    return Section("The rows", ABOUT, figures, [], samples)


def _mosaic(row: dict[str, Any], at: int, sides: dict[str, list[dict[str, Any]]], inputs: Inputs, name: str) -> Figure:
    """The predicted image, and those that helped and harmed it."""
    assert inputs.train_images is not None
    assert inputs.test_images is not None
    test, train = inputs.test_images[at], inputs.train_images
    longest, blank = max(map(len, sides.values())), torch.ones_like(test)
    rows: list[tuple[str, list[Tensor]]] = [
        (side, [test, *(train[one["position"]] for one in found), *[blank] * (longest - len(found))])
        for side, found in sides.items()
    ]
    labels = {side: ", ".join(one["label_or_text"] for one in found) or "none" for side, found in sides.items()}
    columns = ["test", *(str(place) for place in range(1, len(rows[0][1])))]
    title = f"{name}, a {row['label_or_text']}: loss {row['loss']:.2g}"
    caption = f"Labels of what helps: {labels['helps']}; of what harms: {labels['harms']}."
    return plots.images(rows, title=title, columns=columns, caption=caption)
