"""The pictures of federated training, made of its record alone."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, Final

from sparing.jobs.federate.methods import roles_of
from sparing.report import Figure, Record, format_number, plots

Format = Callable[[float], str]  # how a value is written

FEW: Final = 3  # methods that a title names one by one (count)


def is_finite(value: object) -> bool:
    """Whether a cell holds a finite number."""
    return isinstance(value, int | float) and math.isfinite(value)


def percent(value: float) -> str:
    """A share in per cent, to a tenth."""
    return f"{100 * value:.1f} %"


def points(value: float) -> str:
    """A difference of shares in percentage points, with its sign and without the unit."""
    return f"{100 * value:+.1f}".replace("-", "−")


def lines_of(record: Record, column: str, factor: float = 1.0) -> list[plots.Series]:
    """One line per method over rounds, for a column of the table "rounds" times a factor."""
    rows = [
        {"method": row["method"], "round": row["round"], "value": factor * row[column]}
        for row in record.table("rounds")
        if is_finite(row.get(column))
    ]
    return plots.series(rows, x="round", y="value", roles=roles_of(record.settings["method"]))


def ends_of(record: Record, column: str) -> list[tuple[str, float]]:
    """Last value of a column by method, largest first."""
    last = {row["method"]: row[column] for row in record.table("rounds") if is_finite(row.get(column))}
    return sorted(last.items(), key=lambda one: -one[1])


def _summary(ends: list[tuple[str, float]], format_value: Format) -> str:
    """Methods with their last values: all of a few, otherwise the first to the last."""
    texts = [f"{name} {format_value(value)}" for name, value in ends]
    return ", ".join(texts) if len(texts) <= FEW else f"{texts[0]} to {texts[-1]}"


def _curve(
    record: Record, column: str, title: str, format_value: Format, y: plots.Axis, caption: str = "", factor: float = 1.0
) -> list[Figure]:
    """One picture of a column, none where no method has it."""
    series = lines_of(record, column, factor)
    if not series:
        return []
    whole = f"{title}: {_summary(ends_of(record, column), format_value)}"
    caption = f"{caption} One seed ({record.seed}).".strip()
    return [plots.lines(series, title=whole, x=plots.Axis("round"), y=y, caption=caption)]


def accuracy_figures(record: Record) -> list[Figure]:
    """Accuracy of the global model on test rows."""
    n = record.table("methods")[0]["n"]
    axis = plots.Axis("accuracy of the global model", "%")
    return _curve(record, "accuracy", "Accuracy after the last round", percent, axis, f"On {n:,} test rows.", 100)


def sign_figures(record: Record) -> list[Figure]:
    """How many signs clients keep of what they received, and share among each other."""
    kept = plots.Axis("weights whose sign a client kept", "%")
    shared = plots.Axis("weights of equal sign in two clients", "%")
    first = "Mean over the clients of a round, after their local training."
    second = "Mean over pairs of clients of a round."
    return [
        *_curve(record, "ssr_global", "Signs that a client keeps, in the last round", percent, kept, first, 100),
        *_curve(record, "ssr_pairs", "Signs that two clients share, in the last round", percent, shared, second, 100),
    ]


def gap_figures(record: Record) -> list[Figure]:
    """What averaging gains over the clients' own models."""
    axis = plots.Axis("accuracy of the mean less that of its parts", "percentage points")
    note = "Global model less the mean of the clients' models before averaging, on the same test rows."
    return _curve(record, "fusion_gap", "Percentage points gained by the last averaging", points, axis, note, 100)


def weight_figures(record: Record) -> list[Figure]:
    """Norm of the weights, and whether clients move in the same direction."""
    length = plots.Axis("norm of the global model ‖θ‖")
    same = plots.Axis("cosine between the updates of two clients")
    note = "Mean over pairs of clients: 1 is the same way, 0 at right angles."
    return [
        *_curve(record, "norm", "Norm after the last round", format_number, length),
        *_curve(record, "update_cosine", "Cosine of two clients' updates, last round", format_number, same, note),
    ]


def partition_figure(record: Record) -> Figure:
    """Which classes each client holds."""
    clients = record.table("partition")
    classes = [name for name in clients[0] if name.startswith("class_")]
    held = [[row[name] for row in clients] for name in classes]
    largest = [max(row[name] for name in classes) / row["rows"] for row in clients]
    title = f"A client's commonest class makes up {percent(sum(largest) / len(largest))} of its rows on average"
    names = [name.removeprefix("class_") for name in classes]
    some = clients[0]
    alt = f"Map of {len(classes)} classes by {len(clients)} clients; client 0 holds {some['rows']} rows. {title}."
    return plots.heatmap(
        held, title=title, x=plots.Axis("client"), y="class", y_labels=names, kind="sequential",
        value=plots.Axis("rows"), alt=alt,
    )  # fmt: skip


def bytes_figure(record: Record) -> Figure:
    """Bytes sent, predicted beside counted."""
    stacks = []
    for row in record.table("methods"):
        known = {"to clients": row["predicted_down"], "to the server": row["predicted_up"]}
        made = {"to clients": row["bytes_down"], "to the server": row["bytes_up"]}
        stacks += [plots.Stack(row["method"], known, "predicted"), plots.Stack(row["method"], made, "measured")]
    off = [row for row in record.table("methods") if not is_exact(row)]
    title = "Every byte was foretold"
    if off:
        gone = bool(record.table("faults"))
        title = (
            "Clients were left out: less was counted than foretold" if gone else "Other bytes than foretold travelled"
        )
    return plots.stacked_bars(stacks, title=title, value=plots.Axis("bytes in all rounds", "B"))


def is_exact(row: dict[str, Any]) -> bool:
    """Whether a method's run sent what was predicted, to the byte."""
    return (row["bytes_down"], row["bytes_up"]) == (row["predicted_down"], row["predicted_up"])
