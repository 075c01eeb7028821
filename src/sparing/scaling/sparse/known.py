"""What optimizers know of the parameters of sparse layers: told of a change, or refused at their next step.

A conversion puts another parameter in the place of the old one; a change of the pattern keeps the parameter and gives
it other values, so that whoever holds it (an optimizer, hooks, a list to clip) holds it still. What an optimizer has
kept of a weight must move with it either way.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, MutableMapping
from typing import Any, Protocol
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.optim.optimizer import register_optimizer_step_pre_hook

from sparing.errors import UserError

_REPLACED = "_sparing_replaced"  # of a parameter: whether another stands in its place
_MOVES = "_sparing_moves"  # of a parameter of live values: how often its places have changed (count)
_STEPPED = "_sparing_stepped"  # of such a parameter: whether an optimizer has stepped it
_HOOKS = ("_backward_hooks", "_post_accumulate_grad_hooks")
# Optimizer -> its state as a whole, which loading replaces, and id of a parameter -> moves that the state has followed.
_FOLLOWED: WeakKeyDictionary[torch.optim.Optimizer, tuple[Any, dict[int, int]]] = WeakKeyDictionary()


class OptimizerLike(Protocol):
    """What is needed of an optimizer: one of torch's, or one that wraps it."""

    param_groups: list[dict[str, Any]]

    @property
    def state(self) -> MutableMapping[Tensor, Any]:
        """State by parameter."""


@functools.cache
def watch_optimizers() -> None:
    """Look before steps of every optimizer, from the first sparse layer of the process on."""
    register_optimizer_step_pre_hook(_before_step)


def count_moves_(parameter: nn.Parameter) -> None:
    """Begin to count how often a parameter of live values gets other places."""
    setattr(parameter, _MOVES, 0)
    watch_optimizers()


def is_stepped(parameter: nn.Parameter) -> bool:
    """Tell whether an optimizer has stepped a parameter of live values."""
    return getattr(parameter, _STEPPED, False)


def move_(parameter: nn.Parameter, values: Tensor, grad: Tensor | None = None) -> None:
    """Give a parameter the values and the gradient of other places, as many as there are."""
    parameter.grad = None
    if values.shape != parameter.shape:
        # Of another type for a moment: a loss that is still held keeps alive what would expect gradients of the old
        # shape, and torch makes that anew only where the type changes.
        parameter.data = values.to(torch.float32 if values.dtype is torch.float64 else torch.float64)
    parameter.data = values
    torch.autograd.graph.increment_version(parameter)  # a backward pass that waits for the old ones is refused
    parameter.grad = grad
    setattr(parameter, _MOVES, getattr(parameter, _MOVES, 0) + 1)


def move_state_(optimizer: OptimizerLike | None, parameter: nn.Parameter, move: Callable[[Tensor], Tensor]) -> None:
    """Move what an optimizer keeps of a parameter; call it before the parameter itself is moved."""
    if optimizer is None:
        return
    if parameter in optimizer.state:
        optimizer.state[parameter] = _moved(optimizer.state[parameter], parameter, move)
    _followed(_innermost(optimizer))[id(parameter)] = getattr(parameter, _MOVES, 0) + 1


def replace_parameter_(
    optimizer: OptimizerLike | None, old: nn.Parameter, new: nn.Parameter, move: Callable[[Tensor], Tensor]
) -> None:
    """Replace a parameter in its groups, with gradient, hooks and state moved by ``move`` (old shape -> new shape)."""
    new.requires_grad_(old.requires_grad)
    new.grad = None if old.grad is None else move(old.grad)
    for hooks in _HOOKS:
        setattr(new, hooks, getattr(old, hooks))
    watch_optimizers()
    setattr(old, _REPLACED, True)
    setattr(new, _REPLACED, False)
    if optimizer is None:
        return
    for group in optimizer.param_groups:
        # In place: LBFGS steps by the list itself.
        group["params"][:] = [new if parameter is old else parameter for parameter in group["params"]]
    if old in optimizer.state:
        optimizer.state[new] = _moved(optimizer.state.pop(old), old, move)
    _followed(_innermost(optimizer))[id(new)] = getattr(new, _MOVES, 0)


def _moved(held: dict[str, Any], parameter: Tensor, move: Callable[[Tensor], Tensor]) -> dict[str, Any]:
    return {
        key: move(value) if isinstance(value, Tensor) and value.shape == parameter.shape else value
        for key, value in held.items()
    }


def _innermost(optimizer: Any) -> torch.optim.Optimizer:
    """The optimizer that steps, within one that wraps it."""
    while not isinstance(optimizer, torch.optim.Optimizer) or hasattr(optimizer, "optimizer"):
        if not hasattr(optimizer, "optimizer"):
            break
        optimizer = optimizer.optimizer
    found: torch.optim.Optimizer = optimizer
    return found


def _followed(optimizer: torch.optim.Optimizer) -> dict[int, int]:
    """Moves that the state of an optimizer, as it is now, has followed; of a state that was loaded, none are known."""
    state, moves = _FOLLOWED.get(optimizer, (None, {}))
    if state is not optimizer.state:
        state, moves = _FOLLOWED[optimizer] = (optimizer.state, {})
    return moves


def _before_step(optimizer: torch.optim.Optimizer, *_: Any) -> None:
    """Refuse an optimizer that would train nothing, or step by what it has kept of other places."""
    held = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    if any(getattr(parameter, _REPLACED, False) for parameter in held):
        why = "convert_ has put another in its place, which this optimizer would not train"
        do = "pass optimizer= to convert_, or build the optimizer after it"
        raise UserError("optimizer", got="a parameter that no layer has any more", why=why, do=do)
    if not any(hasattr(parameter, _MOVES) for parameter in held):
        return
    followed = _followed(optimizer)
    for parameter in held:
        moves = getattr(parameter, _MOVES, None)
        if moves is None:
            continue
        kept = optimizer.state[parameter].values() if parameter in optimizer.state else ()
        if followed.get(id(parameter), moves) != moves and any(isinstance(k, Tensor) and k.ndim for k in kept):
            why = "load_state_dict has given a sparse layer another mask, and these are of the old one's places"
            do = "load the optimizer's state after the model's, or build it anew"
            raise UserError("optimizer", got="averages of weights that have moved", why=why, do=do)
        followed[id(parameter)] = moves
        setattr(parameter, _STEPPED, True)
