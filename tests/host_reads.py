"""Counts the times at which the host asks a device for a number, with a CPU standing in for the device."""

from __future__ import annotations

import inspect

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

# these read memory on the CPU without an operator that the dispatcher would show
_READS = {torch.Tensor.tolist, torch.Tensor.numpy, torch.Tensor.cpu}


def _ours() -> bool:
    """Whether a read is not one of transformers, which looks in every forward pass whether rows hold documents."""
    frame = inspect.currentframe()
    while frame is not None:
        if frame.f_code.co_filename.endswith("transformers/masking_utils.py"):
            return False
        frame = frame.f_back
    return True


def _counts(value: torch.Tensor) -> bool:
    # token ids and label counts are in host memory whatever the device
    return value.is_floating_point() or value.dtype is torch.bool


class _Operators(TorchDispatchMode):
    def __init__(self, seen: list[str]) -> None:
        super().__init__()
        self._seen = seen

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func.overloadpacket.__name__
        if name in {"_local_scalar_dense", "is_nonzero", "nonzero"} and _counts(args[0]) and _ours():
            self._seen.append(name)
        return func(*args, **(kwargs or {}))


class HostReads(TorchFunctionMode):
    """Inside the ``with`` block, ``seen`` grows by a name for each read of a floating-point or boolean tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []
        self._operators = _Operators(self.seen)

    def __enter__(self):
        self._operators.__enter__()
        return super().__enter__()

    def __exit__(self, *error):
        super().__exit__(*error)
        self._operators.__exit__(*error)

    def __torch_function__(self, func, types, args=(), kwargs=None):
        if func in _READS and _counts(args[0]):
            self.seen.append(func.__name__)
        return func(*args, **(kwargs or {}))
