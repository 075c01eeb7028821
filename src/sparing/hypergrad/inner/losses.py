"""Losses whose forward-mode derivative in torch 2.13 is missing or wrong, by their formulas."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

from torch import Tensor
from torch.nn import _reduction
from torch.nn import functional as F


def _reduced(kwargs: dict[str, Any]) -> str:
    """The reduction that is asked for, also by the two deprecated switches."""
    old = kwargs.get("size_average"), kwargs.get("reduce")
    return str(kwargs["reduction"]) if old == (None, None) else _reduction.legacy_get_string(*old, emit_warning=False)


def _mean_square(prediction: Tensor, target: Tensor, **kwargs: Any) -> Tensor:
    """Mean squared error."""
    # torch's rule writes in place into a tangent of zeros where the target has none, and fails
    if _reduced(kwargs) != "mean" or kwargs.get("weight") is not None:
        return F.mse_loss(prediction, target, **kwargs)
    return F.mse_loss(prediction, target, reduction="none").mean()


def _mean_by_class(loss: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """A loss of classes whose weights may depend on φ."""
    # torch's rule takes the sum of weights that the mean divides by as constant: a wrong gradient without an error

    def weighted_mean(prediction: Tensor, target: Tensor, **kwargs: Any) -> Tensor:
        weight = kwargs.get("weight")
        if _reduced(kwargs) != "mean" or weight is None or target.is_floating_point():
            return loss(prediction, target, **kwargs)
        summed = kwargs | {"size_average": None, "reduce": None, "reduction": "sum"}
        ignored = target == kwargs["ignore_index"]
        shares = weight[target.masked_fill(ignored, 0)].masked_fill(ignored, 0)
        whole: Tensor = loss(prediction, target, **summed) / shares.sum()
        return whole

    return weighted_mean


def _absolute(prediction: Tensor, target: Tensor, **kwargs: Any) -> Tensor:
    """Mean absolute error."""
    # torch does not pass its weight on to a function mode, so that is read from the frame of the call
    frame: Any = sys._getframe()
    while frame is not None and frame.f_code is not F.l1_loss.__code__:
        frame = frame.f_back
    weight = None if frame is None else frame.f_locals.get("weight")
    return F.l1_loss(prediction, target, **kwargs, **({} if weight is None else {"weight": weight}))


# Function of torch -> its replacement; a function mode receives two tensors, and the rest by name.
REPLACEMENTS: dict[Any, Callable[..., Tensor]] = {
    F.mse_loss: _mean_square,
    F.cross_entropy: _mean_by_class(F.cross_entropy),
    F.nll_loss: _mean_by_class(F.nll_loss),
    F.l1_loss: _absolute,
}
