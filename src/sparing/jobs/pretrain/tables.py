"""Tables of a run that are not curves: the plan, its rates by kind of layer, and what became of the masks."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from sparing.jobs.pretrain.state import TrainState
from sparing.report import Record
from sparing.scaling.entries import layer_pattern
from sparing.scaling.masks import dead
from sparing.scaling.planning import Plan

# Columns of the full plan.
SHOWN = ("parameter", "role", "fan_in", "m_in", "m_out", "density", "std", "lr", "decay", "eps", "forward", "why")


def rate_rows(plan: Plan, groups: Iterable[Mapping[str, Any]], lr: float) -> list[dict[str, Any]]:
    """Initial scale, learning rate and decay of every kind of layer, as the optimizer's groups have them."""
    options = {name: group for group in groups for name in group["param_names"]}
    rows: dict[tuple[Any, ...], dict[str, Any]] = {}
    for name, entry in plan.entries.items():
        group = options[name]
        factor = group["lr_scale"]
        key = (layer_pattern(name), round(entry.density, 6), factor)
        row = rows.setdefault(
            key,
            {
                "weights": key[0],
                "layers": 0,
                "parameters": 0,
                "role": entry.role,
                "density": entry.density,
                "initial_std": entry.std,
                "factor": factor,
                "peak_rate": lr * factor,
                "decay_per_step": lr * factor * group.get("weight_decay", 0.0),
            },
        )
        size = 1
        for edge in entry.shape:
            size *= edge
        row["layers"] += 1
        row["parameters"] += size
    return list(rows.values())


def note_plan(state: TrainState, record: Record) -> None:
    """Add the tables "plan", parameter by parameter, and "rates", by kind of layer."""
    for row in state.masks.plan.table():
        known = {column: row[column] for column in SHOWN if column in row}
        record.add("plan", **{column: None if value == "" else value for column, value in known.items()})
    for row in rate_rows(state.masks.plan, state.groups, state.settings.lr):
        record.add("rates", **row)


def note_layers(state: TrainState, record: Record) -> None:
    """Add the table "layers": what the mask of each weight leaves, and how the layer ran."""
    for name, mask in state.masks.items():
        outputs, inputs = dead(mask, transposed=state.masks.plan.entries[name].transposed)
        choice = state.choices.get(name)
        record.add(
            "layers",
            weight=name,
            shape=" × ".join(map(str, mask.shape)),
            live=int(mask.sum()),
            density=int(mask.sum()) / mask.numel(),
            dead_neurons=len(outputs),
            unread_inputs=len(inputs),
            backend=choice.backend if choice else "dense",
        )
