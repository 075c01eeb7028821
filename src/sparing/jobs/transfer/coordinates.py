"""The coordinate check of each rule on the study's own net and data."""

from __future__ import annotations

from typing import Any

from sparing.jobs.transfer.grid import places
from sparing.jobs.transfer.inputs import Digits, Inputs
from sparing.jobs.transfer.models import build
from sparing.jobs.transfer.settings import Transfer
from sparing.jobs.transfer.train import LAWS, rule_of
from sparing.report import Record
from sparing.scaling.coordinate import Check, coordinate_check

STEPS, LR, EXAMPLES = 5, 2**-8, 128  # optimizer steps, learning rate and examples of the check


def check_rule(settings: Transfer, inputs: Digits, rule: str) -> Check | None:
    """Check one rule over the densities of the study at its largest width; None with fewer than two densities."""
    densities = sorted({density for _, density in places(settings)}, reverse=True)
    if len(densities) < 2:
        return None
    width = max(width for width, _ in places(settings))

    def make(size: int) -> Any:
        return build(settings, inputs.features, inputs.outputs, width=size, seed=0)

    batch = (inputs.train[:EXAMPLES], inputs.labels[:EXAMPLES])
    return coordinate_check(
        make, (width,), densities, rule=rule_of(settings, rule), optimizer=settings.optimizer,  # type: ignore[arg-type]
        lr=LR, steps=STEPS, batch=batch, base_width=settings.base_width, masks=LAWS[settings.masks],
    )  # fmt: skip


def add_coordinates(record: Record, settings: Transfer, inputs: Inputs) -> None:
    """Put layer sizes after the last step, and their slopes over density, into the record, rule by rule."""
    if not (settings.coordinates and isinstance(inputs, Digits)):
        return
    for rule in settings.rules:
        found = check_rule(settings, inputs, rule)
        for row in found.rows if found else ():
            if row["step"] == STEPS - 1:
                names = ("module", "role", "width", "density", "live", "forward", "gradient", "update")
                record.add("coordinates", rule=rule, **{name: row[name] for name in names})
        for one in found.slopes if found else ():
            cells = {name: getattr(one, name) for name in ("module", "stat", "slope", "points", "limit")}
            record.add("slopes", rule=rule, **cells, passed=one.passed)
