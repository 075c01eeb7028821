"""Points of a curve per second: ours, loss-landscapes, and a plain loop of the kind in Li et al.'s code.

All three walk the same line, clear and re-estimate the batch-norm statistics at every point from the same rows, and
measure the loss on the same rows; the numbers must be equal before the times count. They take turns in one process.
Rows and weights are contiguous, the layout that users have: a layout that is faster is for an arm to find.
loss-landscapes 3.0.6 is imported from the environment (``pip install --no-deps loss-landscapes==3.0.6``); it walks to
one side only, so that its line is asked for twice, with the direction turned round.
"""

from __future__ import annotations

import copy
import functools
import os
import time
from collections.abc import Callable
from dataclasses import replace
from statistics import median
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from benchmarks.valley.cases import RESNET_CIFAR, VGG, VGG_NONE, Case, Rows, rows_of
from benchmarks.valley.store import Store
from sparing.blocks import named_parameters
from sparing.valley.directions.config import Given, Noise
from sparing.valley.directions.resolve import direction_of
from sparing.valley.scans.evaluators import Classification
from sparing.valley.scans.scan import scan

SIDE, ROUNDS, REACH = 10, 7, 0.5
"""Points on either side, rounds in turn, largest λ."""
WIDE = Case("vgg", data="cifar10", wide=2)
"""With its initial weights, which take as long as trained ones."""
Numbers = list[float]


def batch_norms(model: nn.Module) -> list[nn.BatchNorm2d]:
    """Layers whose statistics go stale."""
    return [each for each in model.modules() if isinstance(each, nn.BatchNorm2d)]


def refresh_(model: nn.Module, rows: Tensor) -> None:
    """Clear and re-estimate batch norm, as anyone would write it."""
    layers = batch_norms(model)
    if not layers:
        return
    for layer in layers:
        layer.reset_running_stats()
        layer.momentum = None
    model.train()
    with torch.no_grad():
        model(rows)
    model.eval()


def ours(model: nn.Module, vector: dict[str, Tensor], data: Any, *, workers: int = 1) -> Numbers:
    """``scan`` with its checks."""
    direction = Given(vector, norm="raw")
    found = scan(
        model, Classification(*data.test, batch_size=1000), direction,
        calibrate=data.calibration if batch_norms(model) else None,
        points=2 * SIDE + 1, reach=REACH, draws=1, workers=workers, threads=1,
    )  # fmt: skip
    return list(found.curves[0].values["loss"][0])


def plain_loop(model: nn.Module, vector: dict[str, Tensor], data: Any) -> Numbers:
    """A copy of all weights, then for every point: load it, add the step tensor by tensor, refresh, evaluate."""
    model = copy.deepcopy(model)
    weights = [p.detach().clone() for p in model.parameters()]
    steps = [vector[name] for name in named_parameters(model)]
    found = []
    for at in (k * REACH / SIDE for k in range(-SIDE, SIDE + 1)):
        with torch.no_grad():
            for p, weight, step in zip(model.parameters(), weights, steps, strict=True):
                p.data = weight + at * step
        refresh_(model, data.calibration[0])
        total = 0.0
        with torch.no_grad():
            for inputs, targets in zip(data.test[0].split(1000), data.test[1].split(1000), strict=True):
                total += functional.cross_entropy(model(inputs), targets, reduction="sum").item()
        found.append(total / len(data.test[1]))
    return found


def loss_landscapes(model: nn.Module, vector: dict[str, Tensor], data: Any) -> Numbers:
    """``linear_interpolation`` from θ to both ends, with a metric that refreshes batch norm first."""
    import loss_landscapes as rival
    from loss_landscapes.metrics import Loss

    class Refreshed(Loss):  # type: ignore[misc]
        def __call__(self, wrapper: Any) -> float:
            refresh_(wrapper.get_modules()[0], data.calibration[0])
            with torch.no_grad():
                return float(super().__call__(wrapper))

    metric, sides = Refreshed(functional.cross_entropy, *data.test), []
    for sign in (-1, 1):
        end = copy.deepcopy(model)
        with torch.no_grad():
            for name, p in named_parameters(end).items():
                p.add_(vector[name], alpha=sign * REACH)
        sides.append(
            [float(v) for v in rival.linear_interpolation(model, end, metric, steps=SIDE, deepcopy_model=True)]
        )
    return sides[0][::-1] + sides[1]


def contiguous(data: str) -> Rows:
    """Rows of a data set in the layout that users have."""
    rows = rows_of(data)
    test = (rows.test[0].contiguous(), rows.test[1])
    return replace(rows, inputs=rows.inputs.contiguous(), test=test)


def speed() -> None:
    """Rounds in turn; the row holds every round's times and the load of the machine."""
    store = Store("speed")
    arms: dict[str, Callable[..., Numbers]] = {
        "ours": ours,
        "ours, two processes": functools.partial(ours, workers=2),
        "loss-landscapes": loss_landscapes,
        "plain loop": plain_loop,
    }
    for case in (VGG, VGG_NONE, RESNET_CIFAR, WIDE):
        model = (case.fresh if case is WIDE else case.trained)(0).eval().to(memory_format=torch.contiguous_format)
        vector = dict(direction_of(Noise("gaussian"), model, seed=0).vector)
        store.once(f"{case.name} 0", lambda: _rounds(arms, model, vector, contiguous(case.data)))  # noqa: B023


def _rounds(arms: dict[str, Callable[..., Numbers]], model: nn.Module, vector: dict[str, Tensor], data: Any) -> Any:
    times: dict[str, list[float]] = {name: [] for name in arms}
    cpu: dict[str, list[float]] = {name: [] for name in arms}
    numbers = {}
    for _ in range(ROUNDS):
        for name, arm in arms.items():
            began, worked = time.perf_counter(), time.process_time()
            numbers[name] = arm(model, vector, data)
            times[name].append(len(numbers[name]) / (time.perf_counter() - began))
            cpu[name].append(len(numbers[name]) / (time.process_time() - worked))
    full = numbers["ours"]
    middle = {len(full): full, len(full) - 1: full[:SIDE] + full[SIDE + 1 :]}  # loss-landscapes leaves λ = 0 out
    apart = {n: max(abs(a - b) for a, b in zip(v, middle[len(v)], strict=True)) for n, v in numbers.items()}
    return {
        "rows": len(data.test[1]), "load": os.getloadavg()[0], "apart": apart,
        "per_second": times, "per_cpu_second": cpu,
        "median_cpu": {name: median(found) for name, found in cpu.items()},
    }  # fmt: skip
