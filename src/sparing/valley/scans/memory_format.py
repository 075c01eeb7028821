"""Convolutions in channels-last layout while a scan runs: the same numbers up to rounding, by other kernels."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import nn

from sparing.valley.apply import perturbing
from sparing.valley.scans.batch_norm import Refresher
from sparing.valley.scans.evaluators import run_evaluate

# How far numbers at θ may differ, relative and absolute: other kernels add in another order, which moved float32 losses
# by less than 1e-6; a row or two may change its class
CLOSE: float = 1e-5
ROWS: int = 2


@contextlib.contextmanager
def channels_last(model: nn.Module, *, wanted: bool = True) -> Iterator[None]:
    """Let convolutions read copies of their weights in channels-last layout within a block; then their own again."""
    held = [(one, one.data) for one in _weights(model)] if wanted else []
    try:
        for parameter, own in held:
            parameter.data = own.contiguous(memory_format=torch.channels_last)
        yield
    finally:
        for parameter, own in held:
            parameter.data = own


def suits_channels_last(model: nn.Module, evaluate: Any, refresher: Refresher) -> bool:
    """Whether a model has convolutions to gain by it, runs in it, and gives the same numbers at θ.

    A model that views an activation as if it were contiguous raises; one that reads its memory directly differs.
    """
    if not _weights(model):
        return False
    found: list[Mapping[str, float]] = []
    for wanted in (False, True):
        with channels_last(model, wanted=wanted), perturbing(model) as perturber:
            perturber.protect()
            model.eval()
            try:
                with refresher.at_point():
                    found.append(run_evaluate(evaluate, model))
            except RuntimeError:
                if not wanted:
                    raise
                return False
    return found[0].keys() == found[1].keys() and all(
        _close(name, value, found[1][name], getattr(evaluate, "rows", None)) for name, value in found[0].items()
    )


def _weights(model: nn.Module) -> list[nn.Parameter]:
    """Weights of dense two-dimensional convolutions on the CPU that are not in this layout yet, tied ones once."""
    convolutions = (one for one in model.modules() if isinstance(one, nn.Conv2d) and one.groups == 1)
    found = {id(one.weight): one.weight for one in convolutions if type(one.weight) is nn.Parameter}
    return [
        one for one in found.values()
        if one.device.type == "cpu" and one.is_floating_point()
        and not one.is_contiguous(memory_format=torch.channels_last)
    ]  # fmt: skip


def _close(name: str, one: float, other: float, rows: object) -> bool:
    if name in {"error", "accuracy"} and isinstance(rows, int) and rows > 0:
        return abs(one - other) <= (ROWS + 0.5) / rows
    return math.isclose(one, other, rel_tol=CLOSE, abs_tol=CLOSE) or one == other
