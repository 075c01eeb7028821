"""What the graph of a run saves for its backward pass, moved to a store as soon as nothing else holds it."""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.multiprocessing.reductions import StorageWeakRef
from torch.overrides import TorchFunctionMode

from sparing.hypergrad.inner.offload import Store
from sparing.hypergrad.inner.repeatability import HOOKS

# Bytes of a storage below which it stays: its record here is as large.
LEAST = 1024


class _Memory:
    """A storage that a graph saved, as elements of one dtype: in memory at first, then in the store."""

    def __init__(self, tensor: Tensor, step: int) -> None:
        self.base: Tensor | None = tensor.detach()  # shares the counter of changes in place
        self.version, self.step = tensor._version, step
        self.count, self.dtype, self.device = tensor.untyped_storage().nbytes(), tensor.dtype, tensor.device
        self.place = -1

    @property
    def changed(self) -> bool:
        """Whether something wrote into it since it was saved."""
        return self.base is not None and self.base._version != self.version

    @property
    def shared(self) -> bool:
        """Whether a tensor outside of the graph holds it, such as the user's data or the state of the run."""
        assert self.base is not None
        storage = self.base.untyped_storage()
        # one reference is that of ``storage``, one that of ``base``
        return torch._C._storage_Use_Count(storage._cdata) > 2


@dataclass(frozen=True)
class _Saved:
    """A tensor over such a storage."""

    memory: _Memory
    shape: torch.Size
    stride: tuple[int, ...]
    offset: int  # elements


class GraphStore:
    """Moves what the graph of a run saves to a store, step by step, and brings it back a step at a time."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._step = 0
        self._here: list[weakref.ref[_Memory]] = []  # not moved yet
        self._known: dict[
            tuple[int, torch.dtype], tuple[weakref.ref[_Memory], Any]
        ] = {}  # with a weak reference to the storage
        self._back: dict[int, Tensor] = {}  # of one step, during the backward pass
        self._back_step = -1

    @contextlib.contextmanager
    def step(self) -> Iterator[None]:
        """Watch the graph of a step, and move what it alone holds when it is over."""
        with saved_tensors_hooks(self._pack, self._unpack), _OwnHooks():
            yield
        self._back.clear()
        left = []
        for reference in self._here:
            memory = reference()
            if memory is None:
                continue
            if memory.changed or memory.shared:
                left.append(reference)
                continue
            assert memory.base is not None
            whole = memory.base.as_strided((memory.count // memory.base.element_size(),), (1,), 0)
            memory.place = self._store.put(whole.view(torch.uint8))
            weakref.finalize(memory, self._store.drop, memory.place, memory.count).atexit = False
            memory.base = None
            del whole
        self._here = left
        self._step += 1

    def _pack(self, tensor: Tensor) -> Any:
        if tensor.is_conj() or tensor.is_neg():
            # bits of a view, which a memory does not have
            with torch.no_grad():
                tensor = tensor.resolve_conj().resolve_neg()
        storage = tensor.untyped_storage() if tensor.layout is torch.strided else None
        if storage is None or storage.nbytes() < LEAST or storage.nbytes() % tensor.element_size():
            return tensor, tensor._version
        # what many operations or steps save, such as weights and data, is one memory
        key = storage._cdata, tensor.dtype
        known = self._known.get(key)
        memory = None if known is None or known[1].expired() else known[0]()
        if memory is None or memory.version != tensor._version:
            memory = _Memory(tensor, self._step)
            self._known[key] = weakref.ref(memory), StorageWeakRef(storage)  # type: ignore[no-untyped-call]
            self._here.append(weakref.ref(memory))
        return _Saved(memory, tensor.shape, tensor.stride(), int(tensor.storage_offset()))

    def _unpack(self, saved: Any) -> Tensor:
        if not isinstance(saved, _Saved):
            tensor, version = saved
            _refuse_change(tensor._version != version)
            return tensor  # type: ignore[no-any-return]
        memory = saved.memory
        _refuse_change(memory.changed)
        if memory.base is not None:
            return memory.base.as_strided(saved.shape, saved.stride, saved.offset)
        if memory.step != self._back_step:
            self._back.clear()
            self._back_step = memory.step
        if id(memory) not in self._back:
            part = self._store.get(memory.place, memory.count, memory.device)
            self._back[id(memory)] = part.view(memory.dtype)
        return self._back[id(memory)].as_strided(saved.shape, saved.stride, saved.offset)


def _refuse_change(changed: bool) -> None:
    if changed:
        # torch's own check, which its hooks switch off
        raise RuntimeError(
            "one of the variables needed for gradient computation has been modified by an inplace operation"
        )


class _OwnHooks(TorchFunctionMode):
    """Refuses hooks of the loss on saved tensors, which would hide these."""

    def __init__(self) -> None:
        super().__init__()
        self._own: Any = torch._C._autograd._top_saved_tensors_default_hooks(True)[0]

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        top: Any = torch._C._autograd._top_saved_tensors_default_hooks(True)
        if top is None or top[0] != self._own:
            raise RuntimeError(HOOKS)
        return func(*args, **(kwargs or {}))
