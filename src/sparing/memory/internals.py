"""All that predicting memory needs of torch and that torch does not publish; written against 2.13."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Final

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import TorchDispatchMode, _pop_mode, _push_mode

_CPU: Final = torch._C.DispatchKey.CPU
_DEVICE: Final = torch.ops.prim.device.default


def fake_device(func: Any, args: Any) -> torch.device | None:
    """Where a fake lies, if an operation asks for just this; it allocates nothing."""
    return args[0].fake_device if func is _DEVICE and isinstance(args[0], FakeTensor) else None


def inside_backward() -> bool:
    """Whether autograd is going backward in this thread."""
    return torch._C._current_graph_task_id() != -1


def is_view(tensor: Tensor) -> bool:
    """Whether autograd knows the tensor as a view."""
    return tensor._is_view()


def is_symbolic_zero(tensor: Tensor) -> bool:
    """Whether this is forward mode's zero: a size without memory behind it."""
    return tensor._is_zerotensor()


def key_of(storage: torch.UntypedStorage) -> int:
    """What names a storage as long as it lives."""
    return int(storage._cdata)


def has_cpu_kernel(func: Any) -> bool:
    """Whether an operation runs on the CPU."""
    return bool(func.has_kernel_for_dispatch_key(_CPU))


def on_cpu_under(mode: TorchDispatchMode, func: Any, args: Any, kwargs: Any) -> Any:
    """Run an operation's CPU kernel, which may be Python that calls torch in turn, with those calls under a mode."""
    _push_mode(mode)
    try:
        return func._op_dk(_CPU, *args, **kwargs)
    finally:
        _pop_mode()


def leaves(nested: object) -> Iterator[object]:
    """What lists, tuples and dictionaries hold; several times as fast as torch's own for what operations take."""
    if isinstance(nested, list | tuple):
        for item in nested:
            yield from leaves(item)
    elif isinstance(nested, dict):
        yield from leaves(list(nested.values()))
    else:
        yield nested
