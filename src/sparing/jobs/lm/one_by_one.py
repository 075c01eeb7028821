"""Optimizers of other libraries, made to step one parameter at a time and to hold plain state between steps."""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import math
import sys
from collections.abc import Callable, Iterable
from functools import cache
from typing import Any

import torch
from torch import Tensor

from sparing.errors import UserError
from sparing.report.quiet import silently

FLOAT = 4  # bytes of a float32

INSTALL = "run pip install 'sparing[lowbit]'"


class OneByOne(torch.optim.Optimizer):
    """Steps by the class after it in the order of inheritance, one parameter at a time.

    What the step of a parameter leaves behind is gone before the next, which the libraries' own loops hold on to. And
    between steps ``state`` has tensors and numbers alone, so that it can be saved, moved and counted.
    """

    @property
    def shared(self) -> list[Tensor]:
        """Tensors held once for all parameters, beside ``state``."""
        return []

    def open_(self, state: dict[str, Any], p: Tensor, group: dict[str, Any]) -> None:
        """Give the state of a parameter the form that the library wants; an empty one is the library's to fill."""

    def close_(self, state: dict[str, Any], p: Tensor) -> None:
        """Give it its plain form back."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Step every parameter that has a gradient."""
        assert closure is None, "the loss is computed before"
        # without the hooks of ``step``: those of this class run around the whole loop
        step = inspect.unwrap(super().step.__func__)  # type: ignore[attr-defined]
        groups = self.param_groups
        try:
            for group in groups:
                for p in (p for p in group["params"] if p.grad is not None):
                    alone = {**group, "params": [p]}
                    self.param_groups, state = [alone], self.state[p]
                    self.open_(state, p, alone)
                    try:
                        step(self)
                    finally:
                        self.close_(state, p)
        finally:
            self.param_groups = groups


class AllOnDevice:
    """What an optimizer says whose whole state is on the device, parameter by parameter."""

    def host(self, shape: tuple[int, ...], dtype: torch.dtype) -> int:
        """Bytes held in host memory between steps for a parameter."""
        return 0

    def shared(self) -> int:
        """Bytes held once, whatever trains."""
        return 0


def load(module: str) -> Any:
    """Import a library that talks while it is imported, without a word."""
    if (known := sys.modules.get(module)) is not None:
        # a 4-bit step asks for every parameter; what is imported says no more
        return known
    if not is_installed(module):
        raise UserError(module.partition(".")[0], got="not installed", why="the optimizer is its", do=INSTALL)
    with silently():
        return importlib.import_module(module)


@cache
def after(mixin: type[OneByOne], module: str, name: str) -> Callable[..., torch.optim.Optimizer]:
    """The optimizer of a library, stepping as ``mixin`` says."""
    return type(name, (mixin, getattr(load(module), name)), {})


def is_installed(module: str) -> bool:
    """Whether a library can be imported; it is not."""
    return importlib.util.find_spec(module.partition(".")[0]) is not None


def tight(tensor: Tensor) -> Tensor:
    """The tensor alone in its storage: a view would keep the whole of it alive."""
    return tensor.clone() if tensor.untyped_storage().nbytes() != tensor.nbytes else tensor


def largest(sizes: Iterable[int]) -> int:
    """The largest of sizes that may be none."""
    return max(sizes, default=0)


def numel(shape: tuple[int, ...]) -> int:
    """Elements of a tensor (count)."""
    return math.prod(shape)
