"""Accelerators for a machine without one, whose tensors lie apart from the host's.

    with cards.there():
        model = net().to(cards.FIRST)

Every operator computes on the CPU, so results are exact, and raises where CUDA would: tensors of two devices meet, or
NumPy reads a card's memory. As on CUDA a tensor of no dimensions may come from the host, and so may row numbers. What
only a kernel knows (its own order of sums, streams, memory that runs out) is not seen here.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

FIRST, SECOND = "lazy:0", "lazy:1"
"""A device type that torch names and this build has no kernels for, and whose backward pass runs in its caller."""

_CROSSES = {"_to_copy", "copy_", "set_"}  # operators that are there to move between devices
_INDEXES = {"index", "index_put", "index_put_", "_index_put_impl_", "_unsafe_index", "_unsafe_index_put"}


_INSIDE: list[bool] = []


class OnCard(Tensor):
    """A tensor that says it lies on a card."""

    held: Tensor  # on the CPU

    @staticmethod
    def __new__(cls, held: Tensor, device: torch.device) -> OnCard:
        made = Tensor._make_wrapper_subclass(
            cls, held.shape, strides=held.stride(), storage_offset=held.storage_offset(), dtype=held.dtype,
            device=device,
        )  # fmt: skip
        made.held = held
        return made

    __torch_function__ = torch._C._disabled_torch_function_impl

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        return _run(func, args, dict(kwargs or {}))


class _Operators(TorchDispatchMode):
    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        return _run(func, args, dict(kwargs or {}))


class _Lists(TorchFunctionMode):
    """Lists from tensors and tensors from lists, which torch makes without an operator."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = dict(kwargs or {})
        if func is Tensor.tolist and isinstance(args[0], OnCard):
            args = (args[0].detach().cpu(),)
        if func is torch.tensor and kwargs.get("device") is not None:
            device = kwargs.pop("device")
            return func(*args, **kwargs).to(device)
        return func(*args, **kwargs)


@contextlib.contextmanager
def there() -> Iterator[None]:
    """Have cards within a block."""
    _INSIDE.append(True)
    try:
        with _Operators(), _Lists():
            yield
    finally:
        _INSIDE.pop()


def enter() -> None:
    """Have cards to the end of a worker's process; in a process that has them, change nothing."""
    if not _INSIDE:
        _INSIDE.append(True)
        _Operators().__enter__()
        _Lists().__enter__()


class SaysItsCard(nn.Linear):
    """Notes in a buffer the number of the card that it computes on, from 1."""

    def __init__(self) -> None:
        super().__init__(3, 3)
        self.register_buffer("card", torch.zeros(1))

    def forward(self, x: Tensor) -> Tensor:
        self.card.fill_(1.0 + self.weight.device.index)
        return super().forward(x)


def net() -> nn.Module:
    """A model for workers, in whose processes cards are then there too."""
    enter()
    return SaysItsCard().double().to(FIRST)


def _run(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    name = func.overloadpacket.__name__
    tensors = list(_tensors((args, list(kwargs.values()))))
    on = {one.device for one in tensors if isinstance(one, OnCard)}
    asked = kwargs.get("device")
    if not on and (asked is None or torch.device(asked).type != torch.device(FIRST).type):
        return func(*args, **kwargs)
    if asked is not None:
        kwargs["device"] = torch.device("cpu")
    if name not in _CROSSES:
        _refuse_mixed(name, args, tensors, on)
    out = func(*_held(args), **{key: _held(value) for key, value in kwargs.items()})
    to = torch.device(asked) if asked is not None else next(iter(on), torch.device("cpu"))
    if name == "copy_":
        return args[0]
    if to.type == "cpu" or name == "_local_scalar_dense":
        return out
    to = to if to.index is not None else torch.device(FIRST)
    known = {id(one.held): one for one in tensors if isinstance(one, OnCard)}
    return _wrapped(out, known, to)


def _refuse_mixed(name: str, args: tuple[Any, ...], tensors: list[Tensor], on: set[torch.device]) -> None:
    """Raise as CUDA does."""
    if name in _INDEXES:
        source, places = args[0], list(_tensors(args[1]))
        cards = {one.device for one in places if isinstance(one, OnCard)}
        if cards and cards != {source.device}:
            raise RuntimeError(f"{name}: indices should be either on cpu or on the same device as the indexed tensor")
        tensors = [one for one in tensors if all(one is not place for place in places)]
    hosts = [one for one in tensors if not isinstance(one, OnCard) and one.ndim]
    if len(on) > 1 or (on and hosts):
        raise RuntimeError(f"Expected all tensors to be on the same device, {name} got {sorted(map(str, on))} and cpu")


def _tensors(values: Any) -> Iterator[Tensor]:
    for value in values:
        if isinstance(value, Tensor):
            yield value
        elif isinstance(value, list | tuple):
            yield from _tensors(value)


def _held(value: Any) -> Any:
    if isinstance(value, list | tuple):
        return type(value)(map(_held, value))
    return value.held if isinstance(value, OnCard) else value


def _wrapped(value: Any, known: dict[int, OnCard], device: torch.device) -> Any:
    if isinstance(value, list | tuple):
        return type(value)(_wrapped(one, known, device) for one in value)
    if not isinstance(value, Tensor):
        return value
    return known[id(value)] if id(value) in known else OnCard(value, device)
