"""Pictures of a coordinate check: the size of each layer's output, gradient and update over density."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Final, get_args

from sparing.report import plots
from sparing.scaling.check.slopes import STATS, Row, Slope, Stat

if TYPE_CHECKING:
    from sparing.report import Figure

ROLES: Final[tuple[plots.Role, ...]] = tuple(role for role in get_args(plots.Role) if role != "warning")
NAMES: Final[dict[Stat, str]] = {
    "forward": "output (root mean square)",
    "gradient": "gradient at the input × width (root mean square)",
    "update": "change of the output in a step (root mean square)",
}
PLURALS: Final[dict[Stat, str]] = {"forward": "outputs", "gradient": "gradients", "update": "updates"}
MOST: Final = 7  # lines in a picture (count)


def figures(rule: str, rows: Sequence[Row], slopes: Sequence[Slope]) -> list[Figure]:
    """Draw each statistic at the last step and the largest width."""
    return [found for stat in STATS if (found := figure(rule, rows, slopes, stat)) is not None]


def figure(rule: str, rows: Sequence[Row], slopes: Sequence[Slope], stat: Stat) -> Figure | None:
    """Draw one statistic over density, a line a module; of many modules the steepest. None where no row has it."""
    width, last = max(row["width"] for row in rows), max(row["step"] for row in rows)
    kept = [row for row in rows if row["width"] == width and row["step"] == last and row[stat] is not None]
    fitted = {one.module: one for one in slopes if one.stat == stat and one.along == "density" and one.at == width}
    steep = sorted(fitted, key=lambda module: -abs(fitted[module].slope))[:MOST]
    shown = [module for module in dict.fromkeys(row["module"] for row in kept) if module in steep]
    if not shown:
        return None
    roles = dict(zip(shown, ROLES, strict=False))
    kept = [row for row in kept if row["module"] in shown]
    series = plots.series(kept, x="density", y=stat, by="module", roles=roles)
    worst, seeds = max(abs(one.slope) for one in fitted.values()), len({row["seed"] for row in rows})
    part = f"The {MOST} steepest of {len(fitted)} layers. " if len(fitted) > MOST else ""
    return plots.lines(
        series, title=f"{rule}: {PLURALS[stat]} go with density to the power ±{worst:.2f} at most",
        x=plots.Axis("density", log=2), y=plots.Axis(NAMES[stat], log=True),
        caption=f"{part}Width {width}, after {last} steps on one batch, {seeds} seed{'s' if seeds != 1 else ''}. "
        "Slopes are fitted where every neuron has 16 live inputs or more.",
    )  # fmt: skip
