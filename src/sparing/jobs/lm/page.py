"""What the pages of language models share: loss curves, speed, and what several ranks did."""

from __future__ import annotations

from typing import Final

from sparing.report import Figure, Record, plots
from sparing.report.declared import Chapter, Rows
from sparing.report.series import bin_means, columns

# Units of the columns that training adds.
UNITS: Final = {
    "loss": "nat/token", "sent": "B", "seconds": "s", "tokens_per_second": "tokens/s", "step_seconds": "s",
}  # fmt: skip

ONE_RUN: Final = "One run with one seed: no spread is known."

SPEED: Final = Rows("speed", "Speed", note="Without evaluation.")

RANKS: Final = Chapter(
    "Ranks",
    "The three letters of a plan say how ranks hold parameters, gradients and optimizer state: **N** whole on "
    "every rank, **I** cut inside a group, **G** cut over all. Bytes are counted in the rings, with evaluation; "
    "a run that was resumed has a row for each part.",
    Rows("sharding", "Plan"),
    Rows("traffic", "Sent by rank 0"),
)


def loss_curves(record: Record, title: str, role: plots.Role) -> Figure:
    """Loss over steps, in training and where rows were held out."""
    curves = [plots.Series("training", *bin_means(record.table("train"), "loss"), role="baseline")]
    if held := record.table("held_out"):
        curves += columns(held, "step", {"loss": role}, loss="held out")
    return plots.lines(curves, title=title, x="optimizer step", y=plots.Axis("loss", "nat/token"))
