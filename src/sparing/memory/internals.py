"""All that predicting memory needs of torch and that torch does not publish; written against 2.13."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Final

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode, _DispatchCacheKey
from torch.utils._python_dispatch import TorchDispatchMode, _pop_mode, _push_mode

_CPU: Final = torch._C.DispatchKey.CPU
_DEVICE: Final = torch.ops.prim.device.default
_VIEW: Final = torch.ops.aten.view.default
_UNSAFE_VIEW: Final = torch.ops.aten._unsafe_view.default
# arguments that are equal if they are of one type and have one value
_PLAIN: Final = frozenset((
    int, float, bool, str, type(None), torch.dtype, torch.device, torch.layout, torch.memory_format,
))  # fmt: skip


class FakeMode(FakeTensorMode):  # type: ignore[no-untyped-call]
    """torch's fake mode with a quicker memo of results: an operation takes half of the time.

    Most of its time went into a key to look its result up, for torch has room for sizes that are symbols. Keys here
    hold all that a result without symbols depends on; anything they do not know is left to torch's.
    """

    def dispatch(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run an operation; both kinds of view have one result, and torch remembers that of one kind."""
        return super().dispatch(_VIEW if func is _UNSAFE_VIEW else func, types, args, kwargs or {})

    def _cache_key(self, state: Any, func: Any, args: Any, kwargs: Any) -> _DispatchCacheKey:
        found = [FakeMode, func, torch.get_default_dtype(), torch._C._get_default_device()]
        known = self.shape_env is None and not torch.is_inference_mode_enabled() and self._describe(args, found)
        if known and (not kwargs or self._describe([part for item in kwargs.items() for part in item], found)):
            return _DispatchCacheKey(tuple(found))
        return super()._cache_key(state, func, args, kwargs)

    def _describe(self, args: Any, found: list[Any]) -> bool:
        """Append all that tells arguments apart; whether this knew them all."""
        found.append(len(args))
        for arg in args:
            kind = type(arg)
            if kind in _PLAIN:
                # 1, 1.0 and True are equal, and give results of different types
                found += (kind, arg)
            elif isinstance(arg, FakeTensor):
                if arg.fake_mode is not self or arg.constant is not None or arg.layout is not torch.strided:
                    return False
                found += (
                    arg.dtype, arg.shape, arg.stride(), arg.storage_offset(), arg.untyped_storage().nbytes(),
                    arg.fake_device, arg.requires_grad, arg.is_conj(), arg.is_neg(), arg.is_inference(),
                )  # fmt: skip
            elif kind is list or kind is tuple:
                found.append(kind)
                if not self._describe(arg, found):
                    return False
            else:
                return False
        return True


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
