"""Which plan is best on other networks: maps over the network's unevenness, accumulation and the trainable share."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache
from typing import Any, Final

from sparing.memory import parse_bytes
from sparing.report import Figure, Progress
from sparing.report.figure import Canvas
from sparing.report.palette import Role
from sparing.sharding import effective
from sparing.sharding.levels import Plan
from sparing.sharding.planner.choose import Verdict, choose, with_ratios
from sparing.sharding.planner.config import Topology, Workload
from sparing.sharding.planner.prediction import predict

RATIOS: Final = (1.0, 2.0, 5.0, 10.0, 25.0, 100.0)  # speeds inside a group over speeds between groups, B'/B

ACCUMULATES: Final = (1, 2, 4, 10, 30)  # micro-steps

# Shares of every block that trains, and how they are written.
SHARES: Final = {"1": 1.0, "1/4": 1 / 4, "1/16": 1 / 16, "1/100": 1 / 100, "3/1000": 3 / 1000}

# Blocks of the model that is simulated in place of a deeper one (count), for speed: bytes stay those of the model.
BLOCKS: Final = 8

# Memory of a rank, over that of the device.
MEMORIES: Final = {"half of it": 0.5, "as given": 1.0, "twice": 2.0, "4 times": 4.0, "16 times": 16.0}

# Colours of the plans that occur, in the order of their names.
ORDER: Final[tuple[Role, ...]] = ("ours", "second_rival", "good", "baseline", "warning", "rival", "extension")

# Map -> what its rows are.
TITLES: Final = {
    "accumulate": "micro-steps of a step", "trainable": "share that trains", "memory": "memory of a GPU",
    "middle": "speed inside a domain over speed inside a group",
}  # fmt: skip


def crossovers(work: Workload, cluster: Topology, memory: str) -> list[dict[str, Any]]:
    """The best plan at every point of the maps: rows map, ratio, row, its value, plan (or None), seconds."""
    shares = [("trainable", name, {"trainable": share}) for name, share in SHARES.items()]
    counts = [("accumulate", str(count), {"accumulate": count}) for count in ACCUMULATES]
    sizes = [("memory", name, {"memory": factor}) for name, factor in MEMORIES.items()]
    middles = [("middle", f"{ratio:g}", {"middle": ratio}) for ratio in RATIOS if cluster.tiers == 3]
    lines: list[tuple[str, str, dict[str, Any]]] = [*counts, *shares, *sizes, *middles]
    found: list[dict[str, Any]] = []
    ends = sum(spec.elements for spec in work.specs if spec.root)

    # Lines of the maps share points: memory changes what fits and not how long it takes.
    @cache
    def peaks(work: Workload) -> list[tuple[Plan, int]]:
        return [(plan, predict(work, cluster, plan).memory) for plan in effective(cluster.tiers)]

    @cache
    def best(work: Workload, ratio: float, middle: float | None, plans: tuple[Plan, ...]) -> Verdict:
        return choose(work, with_ratios(cluster, ratio, middle), None, top=1, plans=plans).best

    with Progress("maps", total=len(RATIOS) * len(lines), unit="cell") as bar:
        for kind, name, changes in lines:
            limit, middle = parse_bytes(memory) * changes.pop("memory", 1.0), changes.pop("middle", None)
            # The same model without its own buckets, so that another share of it can train.
            share = changes.pop("trainable", work.trainable / work.params)
            other = replace(work, specs=(), root_share=ends / work.params, trainable=share, **changes)
            plans = tuple(plan for plan, peak in peaks(other) if peak <= limit)
            # Bytes are those of the whole model; only the simulation of time runs on fewer blocks.
            few = replace(other, blocks=min(other.blocks, BLOCKS))
            for ratio in RATIOS:
                cell = best(few, ratio, middle, plans) if plans else None
                plan, seconds = (cell.plan.name, cell.seconds) if cell else (None, None)
                found.append({"map": kind, "ratio": ratio, "row": name, "plan": plan, "seconds": seconds})
                bar.advance(plan=plan or "none")
    return found


def crossover_figure(
    rows: Sequence[dict[str, Any]], kind: str, *, here: tuple[float, str], title: str, caption: str
) -> Figure:
    """A map of names: every cell says which plan is best there."""
    mine = [row for row in rows if row["map"] == kind]
    across, up = list(dict.fromkeys(row["ratio"] for row in mine)), list(dict.fromkeys(row["row"] for row in mine))
    plans = {(row["ratio"], row["row"]): row["plan"] for row in mine}
    names = sorted({plan for plan in plans.values() if plan})

    def draw(canvas: Canvas) -> None:
        # Light backgrounds for dark text, or dark for light; the name in the cell tells plans apart, not they.
        tints = {
            name: canvas.palette.pale(canvas.colour(ORDER[at % len(ORDER)]), 0.30 / by, 0.42 / by)
            for at, name in enumerate(names)
            for by in [1 + at // len(ORDER)]
        }
        for y, row in enumerate(up):
            line = [plans[ratio, row] for ratio in across]
            colours = [tints.get(plan, canvas.shades.panel) for plan in line]
            spans = [(x + 0.02, 0.96) for x in range(len(across))]
            canvas.axes.broken_barh(spans, (y + 0.03, 0.94), facecolors=colours, linewidth=0)
            for x, (ratio, plan) in enumerate(zip(across, line, strict=True)):
                _name(canvas, (x, y), plan or "–", here=here == (ratio, row))
        _axes(canvas, across, up, TITLES[kind])

    described = "; ".join(f"{row}: " + ", ".join(str(plans[r, row] or "nothing fits") for r in across) for row in up)
    ratios = ", ".join(f"{ratio:g}" for ratio in across)
    alt = f"Map of the best plan by {TITLES[kind]} (rows) and speed inside over between groups ({ratios}). {described}."
    height = 36.0 * len(up) + 62
    return Figure(title, alt, caption, draw, (height, height))


def _name(canvas: Canvas, at: tuple[int, int], text: str, *, here: bool) -> None:
    from matplotlib.patches import Rectangle

    x, y = at
    if here:
        frame = Rectangle((x + 0.04, y + 0.07), 0.92, 0.86, fill=False, edgecolor=canvas.shades.ink, linewidth=1.6)
        canvas.axes.add_patch(frame)
    write: Callable[..., object] = canvas.axes.text
    weight = "bold" if here else "normal"
    write(x + 0.5, y + 0.5, text, ha="center", va="center", color=canvas.shades.ink, fontweight=weight)


def _axes(canvas: Canvas, across: Sequence[float], up: Sequence[str], rows: str) -> None:
    canvas.axes.set(xlim=(0, len(across)), ylim=(0, len(up)))
    canvas.axes.set_xticks([x + 0.5 for x in range(len(across))], [f"{ratio:g}" for ratio in across])
    canvas.axes.set_yticks([y + 0.5 for y in range(len(up))], list(up))
    canvas.axes.tick_params(length=0)
    canvas.axes.grid(visible=False)
    for side in canvas.axes.spines.values():
        side.set_visible(False)
    canvas.axes.set_xlabel("speed inside a group over speed between groups, B′/B")
    canvas.axes.set_ylabel(rows)


def nearest(cluster: Topology, value: float, kind: str) -> tuple[float, str]:
    """Ratio and row of the cell nearest to a machine and its micro-steps, trainable share, or 1 for memory."""
    counts = {str(count): float(count) for count in ACCUMULATES}
    known = {"accumulate": counts, "trainable": SHARES, "memory": MEMORIES, "middle": {f"{r:g}": r for r in RATIOS}}
    ratio = cluster.axes[max(cluster.tiers - 2, 0)].rate / cluster.axes[-1].rate
    return _near(dict(zip(RATIOS, RATIOS, strict=True)), ratio), _near(known[kind], value)


def _near(choices: dict[Any, float], value: float) -> Any:
    # As a ratio: rates and shares are on a logarithmic scale.
    return min(choices, key=lambda name: max(choices[name] / value, value / choices[name]))
