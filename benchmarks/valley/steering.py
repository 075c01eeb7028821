"""A step from an average to the flat side of its valley, beside plain scaling of its norm."""

from __future__ import annotations

from typing import Any

from benchmarks.valley.cases import SEEDS, VGG, Case, rows_of
from benchmarks.valley.pairs import EPOCHS, base_of, half_of
from benchmarks.valley.store import Store
from sparing.valley.merging.soup import soup
from sparing.valley.scans.evaluators import Classification
from sparing.valley.scans.steer import Along, steer

WAYS: tuple[Along, ...] = ("sign", "difference")


def steering() -> None:
    """Averages of two halves of every seed, searched on validation rows by their loss, judged on test rows."""
    store = Store("steering")
    for start in ("scratch", "pretrained"):
        for seed in SEEDS:
            for along in WAYS:
                at = (VGG, start, seed, along)
                store.once(f"{VGG.name} {start} {seed} {along}", lambda at=at: _steered(*at))


def _steered(case: Case, start: str, seed: int, along: Along) -> dict[str, Any]:
    rows = rows_of(case.data)
    members = [half_of(case, seed, start, half, EPOCHS[-1]) for half in (0, 1)]
    model = base_of(case, seed, start)
    made = soup(members, "uniform", model=model, calibrate=rows.calibration)
    model.load_state_dict(made.state)
    test = Classification(*rows.test)
    found = steer(
        model.eval(), Classification(*rows.validation), test=test, calibrate=rows.calibration, along=along,
        other=members[0] if along == "difference" else None,
    )  # fmt: skip
    return {
        "case": case.name, "start": start, "seed": seed, "along": along, "at": test(model),
        "step": found.path.step, "gain": dict(found.path.gain), "step_norm": found.scaling.step,
        "gain_norm": dict(found.scaling.gain), "beyond": found.beyond,
    }  # fmt: skip
