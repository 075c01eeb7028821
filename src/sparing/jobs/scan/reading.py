"""What the record of a scan says, for its pictures and its page."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, Final

import numpy as np

from sparing.report import Record
from sparing.valley.better import Better, as_cost, better_by_metric
from sparing.valley.plots import CLEAR

Row = Mapping[str, Any]
Rows = Sequence[Row]

UNITS: Final = {"loss": "nat", "error": "share of rows", "accuracy": "share of rows"}


def model_of(record: Record) -> dict[str, Any]:
    """The row that says what was scanned."""
    (row,) = record.table("model")
    return row


def way_of(record: Record, metric: str) -> Better:
    """Which way a metric gets better: as the measure said, or by its name."""
    direction = model_of(record).get(f"better_{metric}")
    return better_by_metric([metric], {metric: direction} if direction else None)[metric]


def metric_of(record: Record) -> str:
    """The metric that is drawn first."""
    return str(model_of(record)["metric"])


def with_unit(metric: str) -> str:
    """A metric with its unit."""
    return f"{metric} ({UNITS[metric]})" if metric in UNITS else metric


def curves_of(
    record: Record, *, sign: str | None = None, group: str | None = "all", noises: bool = False
) -> list[dict[str, Any]]:
    """Rows of "curves" of the first width, optionally of some signs, a group, or the noises of the settings."""
    rows = [row for row in record.table("curves") if row["width"] == record.settings["widths"][0]]
    rows = [row for row in rows if group is None or row["group"] == group]
    rows = [row for row in rows if sign is None or row["sign"] == sign]
    wanted = record.settings["noises"] if "noises" in record.settings["parts"] else []
    return [row for row in rows if row["kind"] in wanted] if noises else rows


def listed(rows: Rows) -> str:
    """How many noises and draws."""
    draws = max(row["n"] for row in rows)
    noises = f"{len(rows)} noise{'s' if len(rows) != 1 else ''}"
    return f"{noises}, n = {draws} draw{'s' if draws != 1 else ''} each"


def values_of(rows: Rows, metric: str) -> tuple[list[float], Any]:
    """λ, shape (L,), and values of one curve, shape (draws, L)."""
    steps = list(dict.fromkeys(row["step"] for row in rows))
    return steps, np.array([row[metric] for row in rows], dtype=float).reshape(-1, len(steps))


def rows_of(record: Record, curve: int) -> Rows:
    """Rows of the table "values" that belong to a curve."""
    return [row for row in record.table("values") if row["curve"] == curve]


def index_of(row: Row, metric: str, end: str = "") -> float:
    """An index, or the end of its interval ("_low", "_high"); NaN where unknown."""
    return number_of(row.get(f"asymmetry_{metric}{end}"))


def is_minimum(row: Row, metric: str) -> bool:
    """Whether the model gets no better on either side of λ = 0; else the index says nothing of a valley."""
    return bool(row.get(f"minimum_{metric}", True))


def side_of(row: Row, metric: str) -> int:
    """The flatter side: 1, −1, or 0 where the draws leave it open, or λ = 0 is no minimum."""
    value, low, high = (index_of(row, metric, end) for end in ("", "_low", "_high"))
    if not is_minimum(row, metric):
        return 0
    # Of a single draw there is no interval; then the index itself has to be clear.
    if row["n"] == 1:
        low = high = value if abs(value) >= CLEAR else 0.0
    return int(low > 0) - int(high < 0)


def hundredths(value: float) -> str:
    """An index as text: two decimals, or a dash."""
    return f"{value:.2f}".replace("-", "−").replace("−0.00", "0.00") if math.isfinite(value) else "–"


def index_text(row: Row, metric: str, *, short: bool = False) -> str:
    """Index and sign consistency of a curve, such as "asymmetry 0.83 · SCR 0.99"."""
    index = hundredths(index_of(row, metric)) + ("" if is_minimum(row, metric) else ", no minimum")
    scr = f"{row['consistency']:.2f}"
    return f"{index} · {scr}" if short else f"asymmetry {index} · SCR {scr}"


def rises_of(record: Record, row: Row, metric: str) -> list[float]:
    """How much worse than at λ = 0 the mean curve is at each λ, shape (L,); zero where it is not finite."""
    _, values = values_of(rows_of(record, row["curve"]), metric)
    mean = as_cost(values.mean(0), way_of(record, metric))
    rise = mean - mean[len(mean) // 2]
    return [float(value) if math.isfinite(value) else 0.0 for value in rise]


def number_of(value: float | None) -> float:
    """A number of a cell; NaN where there is none."""
    return math.nan if value is None else value
