"""Tables of a run that are not curves: the plan, its rates by kind of layer, and what became of the masks."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from sparing.jobs.pretrain.course import Course
from sparing.report import Record
from sparing.scaling.entries import layer_pattern
from sparing.scaling.masks import dead
from sparing.scaling.planning import Plan

SHOWN = ("parameter", "role", "fan_in", "m_in", "m_out", "density", "std", "lr", "decay", "eps", "forward", "why")
"""Columns of the full plan."""


def rate_rows(plan: Plan, groups: Iterable[Mapping[str, Any]], lr: float) -> list[dict[str, Any]]:
    """Initial scale, learning rate and decay of every kind of layer.

    Args:
        plan: The plan at realised densities.
        groups: Those of the optimizer, which say what truly happens.
        lr: Peak rate of the base.

    Returns:
        One row per kind and density: ``weights`` (pattern), ``layers`` and ``parameters`` (counts), ``role``,
        ``density``, ``initial_std``, ``factor`` (rate over the base's), ``peak_rate``, ``decay_per_step`` at that rate.
    """
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


def note_plan(course: Course, record: Record) -> None:
    """Add the tables "plan", parameter by parameter, and "rates", by kind of layer.

    Args:
        course: The run, before its first step.
        record: Receives them.
    """
    for row in course.masks.plan.table():
        known = {column: row[column] for column in SHOWN if column in row}
        record.add("plan", **{column: None if value == "" else value for column, value in known.items()})
    for row in rate_rows(course.masks.plan, course.groups, course.settings.lr):
        record.add("rates", **row)


def note_layers(course: Course, record: Record) -> None:
    """Add the table "layers": what the mask of each weight leaves, and how the layer ran.

    Args:
        course: The finished run.
        record: Receives a row per masked weight.
    """
    for name, mask in course.masks.items():
        outputs, inputs = dead(mask, transposed=course.masks.plan.entries[name].transposed)
        choice = course.choices.get(name)
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
