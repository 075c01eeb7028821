"""Pictures of a coordinate check: the size of each layer's output, gradient and update over density."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, get_args

from sparing.report import plots
from sparing.scaling.coordinate_slopes import STATS, Stat

if TYPE_CHECKING:
    from sparing.report import Figure
    from sparing.scaling.coordinate import Check

ROLES: Final[tuple[plots.Role, ...]] = tuple(role for role in get_args(plots.Role) if role != "warning")
NAMES: Final[dict[Stat, str]] = {
    "forward": "output (root mean square)",
    "gradient": "gradient at the input × width (root mean square)",
    "update": "change of the output in a step (root mean square)",
}
MOST: Final = 7
"""Lines in a picture (count)."""


def figures(check: Check) -> list[Figure]:
    """Draw each statistic at the last step and the largest width."""
    return [found for stat in STATS if (found := figure(check, stat)) is not None]


def figure(check: Check, stat: Stat) -> Figure | None:
    """Draw one statistic over density, a line a module; of many modules the steepest."""
    width, last = max(row["width"] for row in check.rows), max(row["step"] for row in check.rows)
    kept = [row for row in check.rows if row["width"] == width and row["step"] == last and row[stat] is not None]
    mine = {one.module: one for one in check.slopes if one.stat == stat and one.along == "density" and one.at == width}
    steep = sorted(mine, key=lambda module: -abs(mine[module].slope))[:MOST]
    shown = [module for module in dict.fromkeys(row["module"] for row in kept) if module in steep]
    if not shown:
        return None
    roles = dict(zip(shown, ROLES, strict=False))
    kept = [row for row in kept if row["module"] in shown]
    series = plots.series(kept, x="density", y=stat, by="module", roles=roles)
    return plots.lines(
        series, title=_title(check, stat, [abs(one.slope) for one in mine.values()]),
        x=plots.Axis("density", log=2), y=plots.Axis(NAMES[stat], log=True), caption=_caption(check, len(mine), width),
    )  # fmt: skip


def _title(check: Check, stat: Stat, found: list[float]) -> str:
    name = {"forward": "outputs", "gradient": "gradients", "update": "updates"}[stat]
    return f"{check.rule}: {name} go with density to the power ±{max(found):.2f} at most"


def _caption(check: Check, modules: int, width: int) -> str:
    last, seeds = max(row["step"] for row in check.rows), len({row["seed"] for row in check.rows})
    part = f"The {MOST} steepest of {modules} layers. " if modules > MOST else ""
    fitted = "Slopes are fitted where every neuron has 16 live inputs or more."
    return f"{part}Width {width}, after {last} steps on one batch, {seeds} seed{'s' if seeds != 1 else ''}. {fitted}"
