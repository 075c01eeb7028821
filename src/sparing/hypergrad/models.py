"""Modules as functions of their weights, in a form that can be differentiated forward and twice."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call

from sparing.errors import UserError, require

_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm)


def stateless(model: nn.Module) -> tuple[dict[str, Tensor], Callable[..., Any]]:
    """A module's trainable weights, and the module as a function of them.

    Tied weights appear once, frozen ones and buffers stay as they are in the module. Recurrent layers run without
    their fused kernel, which has no forward mode. The module itself is not changed by calls.

    Args:
        model: Any module, in the mode (train or eval) that it should run in.

    Returns:
        Parameter name -> detached copy of the weight, and (weights, *args, **kwargs) -> the module's output.

    Raises:
        UserError: If the module updates buffers as it runs (batch norm with running statistics), if hooks on its
            parameters change their gradients (masks of sparse weights), or nothing trains.

    Example:
        >>> theta, call = stateless(nn.Linear(3, 2))
        >>> sorted(theta), call(theta, torch.ones(5, 3)).shape
        (['bias', 'weight'], torch.Size([5, 2]))
    """
    for name, module in model.named_modules():
        if isinstance(module, _NORMS) and module.track_running_stats and module.training:
            raise UserError(
                f"model.{name}", got="batch norm that updates running statistics",
                why="a step must be a function of weights and data only",
                do="use GroupNorm, or pass track_running_stats=False, or call model.eval()",
            )  # fmt: skip
    theta = {name: p.detach().clone() for name, p in model.named_parameters() if p.requires_grad}
    require(bool(theta), "model", "no parameter that requires gradients", "nothing trains", "unfreeze some")
    hooked = next((name for name, p in model.named_parameters() if p.requires_grad and p._backward_hooks), None)
    if hooked is not None:
        raise UserError(
            f"model.{hooked}", got="a hook on its gradient",
            why="the function's weights are not that parameter, so a mask kept by the hook would be lost",
            do="take the hooks off (scaling.apply.remove_) and multiply the weights by their masks in the step",
        )  # fmt: skip
    # the fused kernels of recurrent layers have no forward mode
    recurrent = any(isinstance(module, nn.RNNBase) for module in model.modules())

    def call(weights: dict[str, Tensor], *args: Any, **kwargs: Any) -> Any:
        plain: Any = torch.backends.mkldnn.flags(enabled=False) if recurrent else contextlib.nullcontext()
        with plain:
            return functional_call(model, weights, args, kwargs, tie_weights=True)

    return theta, call
