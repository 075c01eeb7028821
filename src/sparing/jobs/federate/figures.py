"""The pictures of federated training and words beside them, made of its record alone."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

from sparing.jobs.federate.methods import roles_of
from sparing.jobs.federate.settings import RATES
from sparing.report import Figure, Record, format_number, plots
from sparing.report.cells import is_finite

Format = Callable[[float], str]  # how a value is written

FEW: Final = 3  # methods that a title names one by one (count)


def optimizer_text(record: Record) -> str:
    """How clients step: the optimizer, its peak rate, and what else decides a step.

    Example:
        >>> settings = {"optimizer": "adamw", "lr": None, "momentum": 0.9}
        >>> optimizer_text(Record(question="", seed=0, settings=settings))
        'AdamW (rate 0.001, β₁ 0.9, β₂ 0.999)'
    """
    settings = record.settings
    optimizer = settings.get("optimizer", "sgd")
    rate, beta = settings["lr"] or RATES[optimizer], settings.get("momentum", 0.9)
    parts = [f"rate {rate:g}", f"β₁ {beta:g}, β₂ 0.999" if optimizer == "adamw" else f"momentum {beta:g}"]
    if decay := settings.get("weight_decay"):
        parts.append(f"weight decay {decay:g}")
    if settings.get("clip"):
        parts.append(f"gradients clipped to {settings['clip']:g}")
    return f"{'AdamW' if optimizer == 'adamw' else 'SGD'} ({', '.join(parts)})"


_MASKED: Final = """\
The server reads masked integers of {bits} bits an element, whose sum it can unmask while more than {threshold} of a \
round's clients stay; keys, shares and masks are in the bytes. {trust}"""

_TRUST: Final = {
    False: "Clients did not sign, so it is taken to follow the protocol: one that puts keys of its own in the clients' "
    "place reads every update. `--secure.signed` ends the round of such a server.",
    True: "Clients signed their keys and the list of who took part: a server that lies to them gets nothing. "
    "Their keys were made for this run; in a deployment they reach the clients by another way than the server.",
}


def secure_text(record: Record) -> str:
    """What a server that sums securely can read, and what of it rests on trust."""
    own = record.settings["secure"]
    return _MASKED.format(bits=own["bits"], threshold=percent(own["threshold"]), trust=_TRUST[own.get("signed", False)])


def percent(value: float) -> str:
    """A share in per cent, to a tenth."""
    return f"{100 * value:.1f} %"


def points(value: float) -> str:
    """A difference of shares in percentage points, with its sign and without the unit."""
    return f"{100 * value:+.1f}".replace("-", "−")


def roles(record: Record) -> dict[str, plots.Role]:
    """Role of each method of a run."""
    return roles_of(record.settings["methods"])


def over_rounds(
    column: str, y: plots.Axis, finding: str, write: Format, note: str = ""
) -> Callable[[Record], Figure | None]:
    """A column over rounds, a line a method; the title names the last values: all of a few, or first and last."""
    factor = 1.0 if write is format_number else 100.0  # shares are drawn in %

    def draw(record: Record) -> Figure | None:
        rows = [row | {column: factor * row[column]} for row in record.table("rounds") if is_finite(row.get(column))]
        if not rows:
            return None
        last = {row["method"]: row[column] for row in record.table("rounds") if is_finite(row.get(column))}
        texts = [f"{name} {write(value)}" for name, value in sorted(last.items(), key=lambda one: -one[1])]
        n, lines = record.table("methods")[0]["n"], plots.series(rows, x="round", y=column, roles=roles(record))
        what = "rows" if record.settings.get("model") is None else "tokens"
        return plots.lines(
            lines, title=f"{finding}: {', '.join(texts) if len(texts) <= FEW else f'{texts[0]} to {texts[-1]}'}",
            x="round", y=y, caption=f"{note.format(n=n, what=what)} One seed ({record.seed}).".strip(),
        )  # fmt: skip

    return draw


ACCURACY: Final = over_rounds(
    "accuracy", plots.Axis("accuracy of the global model", "%"), "Accuracy after the last round", percent,
    "On {n:,} test {what}.",
)  # fmt: skip
LOSS: Final = over_rounds(
    "loss", plots.Axis("loss of the global model", "nat"), "Loss after the last round", format_number,
    "Mean over {n:,} test {what}.",
)  # fmt: skip
KEPT: Final = over_rounds(
    "ssr_global", plots.Axis("weights whose sign a client kept", "%"), "Signs that a client keeps, in the last round",
    percent, "Mean over the clients of a round, after their local training.",
)  # fmt: skip
SHARED: Final = over_rounds(
    "ssr_pairs", plots.Axis("weights of equal sign in two clients", "%"),
    "Signs that two clients share, in the last round", percent, "Mean over pairs of clients of a round.",
)  # fmt: skip
GAP: Final = over_rounds(
    "fusion_gap", plots.Axis("accuracy of the mean less that of its parts", "percentage points"),
    "Percentage points gained by the last averaging", points,
    "Global model less the mean of the clients' models before averaging, on the same test {what}.",
)  # fmt: skip
NORM: Final = over_rounds(
    "norm", plots.Axis("norm of the global model ‖θ‖"), "Norm after the last round", format_number
)
COSINE: Final = over_rounds(
    "update_cosine", plots.Axis("cosine between the updates of two clients"),
    "Cosine of two clients' updates, last round", format_number,
    "Mean over pairs of clients: 1 is the same way, 0 at right angles.",
)  # fmt: skip


def partition_figure(record: Record) -> Figure | None:
    """Which classes each client holds; of texts, which have none, no figure."""
    clients = record.table("partition")
    classes = [name for name in clients[0] if name.startswith("class_")]
    if not classes:
        return None
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
    title = "Every byte was predicted"
    if not all(is_exact(row) for row in record.table("methods")):
        gone = "Clients were left out: less was counted than predicted"
        title = gone if record.table("faults") else "Other bytes were counted than predicted"
    return plots.stacked_bars(stacks, title=title, value=plots.Axis("bytes in all rounds", "B"))


def is_exact(row: dict[str, Any]) -> bool:
    """Whether a method's run sent what was predicted, to the byte."""
    return (row["bytes_down"], row["bytes_up"]) == (row["predicted_down"], row["predicted_up"])
