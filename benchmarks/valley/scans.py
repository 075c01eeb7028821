"""Scans of trained nets: noises, the sign-change ratio, groups, special directions, statistics, training settings."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Any, get_args

import torch
from torch import nn

from benchmarks.valley.cases import HYPER, MAIN, RESNET_CIFAR, SCALES, SEEDS, VGG, VGG_NONE, Case, Rows, rows_of
from benchmarks.valley.store import Store
from sparing.blocks import named_parameters
from sparing.valley.directions.config import Direction, GroupKind, Noise, NoiseKind, Special, SpecialKind
from sparing.valley.scans.asymmetry import half_widths, index
from sparing.valley.scans.curve import RISES
from sparing.valley.scans.evaluators import Classification
from sparing.valley.scans.scan import scan

POINTS = 7
"""Positions λ from −1 to 1; every training seed has a noise draw of its own."""
RATIOS = (0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9)
"""Sign-change ratios; 0 and 1 are the raw and the consistent Gaussian."""
BY_RATIO = (VGG,)
BY_GROUP = (VGG, RESNET_CIFAR)
SPECIAL = (VGG, RESNET_CIFAR, VGG_NONE)
BY_STATISTICS = (VGG, RESNET_CIFAR)


def scanned(
    model: nn.Module, rows: Rows, direction: Direction, *, seed: int, statistics: Any = "exact"
) -> dict[str, Any]:
    """One direction's curve on the test rows, reduced to what the tables need."""
    measure = Classification(*rows.test)
    found = scan(
        model, measure, direction, calibrate=rows.calibration, statistics=statistics, points=POINTS, draws=1, seed=seed,
    )  # fmt: skip
    curve = found.curves[0]
    row: dict[str, Any] = {"scr": float(curve.consistency[0])}
    for metric in ("error", "loss"):
        values = curve.values[metric][0]
        row[metric] = {
            "ai": index(curve.lambdas, values, curve.floor(metric)),
            "curve": list(values),
            "widths": half_widths(curve.lambdas, values, RISES[metric]),
        }
    return row


@functools.lru_cache(2)
def _net(case: Case, seed: int) -> nn.Module:
    return case.trained(seed)


def _each(cases: tuple[Case, ...], seeds: Any = SEEDS) -> Iterator[tuple[str, Case, int]]:
    for case in cases:
        for seed in seeds:
            yield f"{case.name} {seed}", case, seed


def measure_case(store: Store, key: str, case: Case, seed: int, direction: Direction, **how: Any) -> None:
    """One row of a scan."""

    def row() -> dict[str, Any]:
        about = {"case": case.name, "seed": seed, "direction": direction.label}
        return about | scanned(_net(case, seed), rows_of(case.data), direction, seed=seed, **how)

    store.once(key, row)


def noises() -> None:
    """Seven noises, raw and sign-consistent."""
    store = Store("noises")
    for key, case, seed in _each(MAIN):
        for kind in get_args(NoiseKind):
            for sign in ("raw", "consistent"):
                direction = Noise(kind, sign=sign)
                measure_case(store, f"{key} {kind} {sign}", case, seed, direction)


def ratio() -> None:
    """The sign-change ratio between the raw and the consistent Gaussian."""
    store = Store("ratio")
    for key, case, seed in _each(BY_RATIO):
        for share in RATIOS:
            measure_case(store, f"{key} {share}", case, seed, Noise("gaussian", sign=share))


def groups() -> None:
    """Gaussian noise on a part of the parameters, as long as that part."""
    store = Store("groups")
    for key, case, seed in _each(BY_GROUP):
        for group in get_args(GroupKind)[1:]:
            for sign in ("raw", "consistent"):
                direction = Noise("gaussian", sign=sign, group=group)
                measure_case(store, f"{key} {group} {sign}", case, seed, direction)


def special() -> None:
    """Six directions made of the weights."""
    store = Store("special")
    for key, case, seed in _each(SPECIAL):
        for kind in get_args(SpecialKind):
            initial = named_parameters(case.fresh(seed)) if kind == "initial" else None
            initial = {name: value.detach() for name, value in initial.items()} if initial else None
            measure_case(store, f"{key} {kind}", case, seed, Special(kind, initial=initial))


def scales() -> None:
    """Initial norm weights of three kinds; {0, 1} on norm weights only, and on everything."""
    store = Store("scales")
    for key, case, seed in _each(SCALES):
        weights = tuple(name for name in named_parameters(case.fresh(seed)) if name.endswith("norm.weight"))
        for name, group in (("norm weights", weights), ("all", "all")):
            measure_case(store, f"{key} {name}", case, seed, Noise("binary", group=group))
        store.once(f"{key} weights", functools.partial(_norm_weights, case, seed, weights))


def _norm_weights(case: Case, seed: int, names: tuple[str, ...]) -> dict[str, Any]:
    params = named_parameters(_net(case, seed))
    values = torch.cat([params[name].detach().flatten() for name in names])
    about = {"case": case.name, "seed": seed, "mean": values.mean().item(), "std": values.std().item()}
    return about | {"positive": (values > 0).float().mean().item()}


def hyper() -> None:
    """Learning rate, batch and weight decay: width against symmetry."""
    store = Store("hyper")
    for key, case, seed in _each((VGG, *HYPER), SEEDS):
        for sign in ("raw", "consistent"):
            measure_case(store, f"{key} {sign}", case, seed, Noise("gaussian", sign=sign))
        store.once(f"{key} fit", functools.partial(_fit, case, seed))


def _fit(case: Case, seed: int) -> dict[str, Any]:
    """Errors and the length of the parameters."""
    model, rows = _net(case, seed), rows_of(case.data)
    length = sum(float(p.detach().square().sum()) for p in model.parameters()) ** 0.5
    parts = {"test": rows.test, "train": (rows.inputs, rows.targets)}
    found = {name: Classification(*part)(model)["error"] for name, part in parts.items()}
    return {"case": case.name, "seed": seed, "norm": length} | found


def fits() -> None:
    """Test and training errors of every net of the first table."""
    store = Store("fits")
    for key, case, seed in _each(MAIN):
        store.once(key, functools.partial(_fit, case, seed))


def statistics() -> None:
    """Batch-norm statistics that do not follow the weights, against those that do."""
    store = Store("statistics")
    for key, case, seed in _each(BY_STATISTICS):
        for how in ("stale", "batch", "cumulative"):
            kinds = get_args(NoiseKind) if how == "stale" else ("gaussian",)
            for kind in kinds:
                for sign in ("raw", "consistent") if kind == "gaussian" else ("consistent",):
                    direction = Noise(kind, sign=sign)
                    name = f"{key} {how} {kind} {sign}"
                    measure_case(store, name, case, seed, direction, statistics=how)
