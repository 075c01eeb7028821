"""Tables of ours beside Landscaper and loss-landscape-3d for ``docs/results/valley.md``."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import median

from benchmarks.memory_tables import table
from benchmarks.valley.numbers import Row, bounds

RESULT = Path(__file__).parents[1] / "results" / "valley_landscapes.json"


def rows() -> dict[str, Row]:
    """Rows by task."""
    return dict(json.loads(RESULT.read_text())["rows"])


def times(theirs: Sequence[float], ours: Sequence[float]) -> str:
    """Geometric mean of the ratios of paired rounds, and its 95 % t-interval.

    Example:
        >>> times([2.0, 2.0, 2.0], [1.0, 1.0, 1.0])
        '2.00 [2.00, 2.00]'
    """
    logs = [math.log(a / b) for a, b in zip(theirs, ours, strict=True)]
    low, high = (math.exp(end) for end in bounds(logs))
    return f"{math.exp(sum(logs) / len(logs)):.2f} [{low:.2f}, {high:.2f}]"


def _line(title: str, work: object, arm: Row, ours: Row, apart: str) -> list[object]:
    ratio = "1" if arm is ours else times(arm["cpu"], ours["cpu"])
    return [title, work, apart, f"{median(arm['cpu']):.2f}", ratio, len(arm["cpu"])]


def losses() -> str:
    """Loss over the same points."""
    found = []
    for task, row in ((name, rows()[name]) for name in ("line", "plane")):
        for name, arm in row["arms"].items():
            apart = "–"
            if arm["apart"]:
                highest = arm["apart"]["all"]
                apart = f"{arm['apart']['rest']:.0e}"
                apart += f" (highest point {highest:.0e})" if highest > 10 * arm["apart"]["rest"] else ""
            found.append(_line(f"{task}: {name}", row["points"], arm, row["arms"]["ours"], apart))
    head = ["", "points", "largest relative error", "CPU seconds", "against ours, ×", "rounds"]
    return table(head, found)


def curvature() -> str:
    """Eigenvalues and traces."""
    found = []
    for task, title in (("eigenvalues", "two eigenvalues"), ("trace", "trace")):
        row = rows()[task]
        for name, arm in row["arms"].items():
            apart = f"{arm['apart']['all']:.0e}"
            found.append(_line(f"{title}: {name}", f"{arm['products']:g}", arm, row["arms"]["ours"], apart))
    head = ["", "products with the Hessian", "largest relative error", "CPU seconds", "against ours, ×", "rounds"]
    return table(head, found)


def pictures() -> str:
    """What peers return that is not what it says."""
    row, stop = rows()["pictures"], rows()["stopping"]
    off = {
        name: math.sqrt(sum((one / stop["true"] - 1) ** 2 for one in stop[name]) / len(stop[name]))
        for name in ("theirs", "ours")
    }
    seeds = len(stop["theirs"])
    found = [
        ["Landscaper: cosine between an eigenvector and the direction that is walked for it", f"{row['cosine']:.2f}"],
        [f"Landscaper: place of the point labelled {row['label']:g}, in ‖θ‖", f"{row['place']:.3f}"],
        ["Landscaper: points of a line that differ when it is computed twice, and by how much",
         f"{row['changed']}, {row['twice']:.0e}"],
        ["Landscaper: trace where its rule stops, root mean square relative error; probes",
         f"{off['theirs']:.0%}; {min(stop['probes'])} to {max(stop['probes'])}"],
        ["ours: trace of 32 probes, the same error; intervals that hold the trace",
         f"{off['ours']:.0%}; {stop['held']} of {seeds}"],
        ["loss-landscape-3d: points of its random plane that are not finite",
         ", ".join(f"{lost} of {row['points']}" for lost in row["lost"])],
        ["loss-landscape-3d: the plane of its Hessian directions", _refusal(row["refused"])],
    ]  # fmt: skip
    return table(["", "measured"], found)


def _refusal(text: str) -> str:
    """The second clause of torch's message."""
    return f"not loaded: {text.split(': ')[1]}" if text else "computed"


TABLES: dict[str, Callable[[], str]] = {
    "valley-landscapes": losses, "valley-landscapes-curvature": curvature, "valley-landscapes-pictures": pictures,
}  # fmt: skip
