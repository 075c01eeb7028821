"""Random search on the dense base: what is drawn, which runs that means, and the best of them."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

import torch

from sparing.jobs.transfer.settings import DRAWN, Cell, Draw, Transfer, places
from sparing.report import Record
from sparing.seeds import stream

Results = Mapping[Cell, Mapping[str, Any]]


def draw_of(settings: Transfer, number: int) -> Draw:
    """The draw of a number, uniform in logs between the ends that the settings state; another box stretches it.

    Example:
        >>> from sparing.jobs.transfer.settings import Tuning
        >>> box = Transfer(tune=Tuning(tries=1, log2_rate=(-6.0, -6.0), log2_output=(1.0, 1.0)))
        >>> draw_of(box, 0).log2_rate, draw_of(box, 0).log2_output
        (-6.0, 1.0)
    """
    shares = torch.rand(len(DRAWN), generator=stream(0, "transfer", "draw", number), dtype=torch.float64).tolist()
    ends = [getattr(settings.tune, name) for name in DRAWN]
    return Draw(**{n: low + at * (high - low) for n, (low, high), at in zip(DRAWN, ends, shares, strict=True)})


def of_draws(settings: Transfer) -> Transfer:
    """The settings of a draw's run: the dense base, plain, for the steps of the search."""
    plain: dict[str, Any] = {"axis": "lr", "dynamic": "none", "follow": "none", "backend": "dense", "pairs": ()}
    base: dict[str, Any] = {"widths": (settings.base_width,), "densities": (1.0,), "least_live": 1}
    return dataclasses.replace(settings, steps=settings.tune.steps, **plain, **base)


def draw_cells(settings: Transfer) -> list[Cell]:
    """A run for each draw, which ``x`` numbers; all begin with the first seed. At the base rules do not differ."""
    tries = range(settings.tune.tries)
    return [Cell("mup", settings.base_width, 1.0, float(number), settings.seeds[0]) for number in tries]


def best_draw(settings: Transfer, results: Results) -> Draw | None:
    """The draw of the lowest training loss; None without one that converged."""
    done = {cell.x: row["loss"] for cell, row in results.items() if not row["diverged"]}
    return draw_of(settings, int(min(done, key=done.__getitem__))) if done else None


def add_draws(record: Record, settings: Transfer, results: Results) -> None:
    """Put every draw with its loss into the table "draws", the best first; diverged ones come last."""
    rows = []
    for cell, row in results.items():
        own = dataclasses.asdict(draw_of(settings, int(cell.x)))
        lost = row["diverged"] or row["loss"] is None
        rows.append({"draw": int(cell.x)} | own | {"loss": None if lost else row["loss"], "diverged": row["diverged"]})
    for row in sorted(rows, key=lambda row: (math.inf if row["loss"] is None else row["loss"], row["draw"])):
        record.add("draws", **row)


def control_cells(settings: Transfer) -> list[Cell]:
    """Runs of the model without its blocks: over all that is swept, at the widest and densest place, on one seed."""
    width, _ = max(places(settings), key=lambda place: (place[1], place[0]))
    return [Cell(settings.rules[0], width, 1.0, float(x), settings.seeds[0]) for x in settings.swept]
