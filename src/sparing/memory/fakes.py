"""Models and batches without memory: fake tensors in the place of real or meta ones."""

from __future__ import annotations

import contextlib
import copy
import logging
import math
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, Final, Self

import torch
from torch import Tensor, nn
from torch._subclasses import fake_tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.nn import functional as F
from torch.utils._mode_utils import no_dispatch as _no_modes
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from sparing.errors import UserError, require
from sparing.memory.internals import leaves
from sparing.memory.steps import Batch

_ATEN: Final = torch.ops.aten
_GROUPED_MM: Final = _ATEN._grouped_mm.default
# operations that make a tensor out of numbers
_FACTORIES: Final = frozenset((
    _ATEN.arange.default, _ATEN.arange.start, _ATEN.arange.start_step, _ATEN.full.default, _ATEN.zeros.default,
    _ATEN.ones.default, _ATEN.scalar_tensor.default,
))  # fmt: skip
# dimensions of a table of rows: what has more, such as a mask of every pair of tokens, is too large to keep
_TABLE_DIMS: Final = 2


def fake_copy(model: nn.Module, mode: FakeTensorMode, dtype: torch.dtype | None = None) -> nn.Module:
    """Copy a module's structure with fake CPU tensors for its parameters, its buffers and its other tensors.

    Ties, flags and hooks are kept. Nothing is allocated and the module is not changed, so one on the meta device or one
    whose layers were replaced by peft will do.
    """
    found = (leaf for module in model.modules() for leaf in tree_leaves(vars(module)) if isinstance(leaf, Tensor))
    fakes: dict[int, Tensor] = {}
    with mode:
        for tensor in found:
            kind = dtype if dtype is not None and tensor.is_floating_point() else tensor.dtype
            # strides too: what is contiguous decides which operations copy
            fake = torch.empty_strided(tensor.shape, tensor.stride(), dtype=kind, device="cpu")
            if isinstance(tensor, nn.Parameter):
                fake = nn.Parameter(fake, requires_grad=tensor.requires_grad)
            fakes[id(tensor)] = fake
    # deepcopy takes the fakes as copies it has made already, so no tensor is copied
    return copy.deepcopy(model, fakes)


def empty_batch(batch: Batch) -> dict[str, Tensor]:
    """Make a batch of zeros on the CPU; under a fake mode nothing is allocated."""
    return {name: _zeros(name, entry) for name, entry in batch.items()}


def _zeros(name: str, entry: object) -> Tensor:
    if isinstance(entry, Tensor):
        return torch.zeros(entry.shape, dtype=entry.dtype, device="cpu")
    if isinstance(entry, tuple) and len(entry) == 2 and isinstance(entry[1], torch.dtype):
        return torch.zeros(tuple(entry[0]), dtype=entry[1], device="cpu")
    raise UserError(
        f"batch[{name!r}]", got=repr(entry), why="its size is unknown",
        do="pass a tensor or a pair (shape, torch.dtype)",
    )  # fmt: skip


_entered = torch.autocast.__enter__


def _enter_autocast(autocast: Any) -> object:
    """Refuse autocast for a device on which no fake lies: all would be priced in the wide dtype."""
    why, do = "a prediction runs on the CPU, where that has no effect", 'use torch.autocast("cpu", …), or measure'
    got = f"torch.autocast({autocast.device!r})"
    require(autocast.device == "cpu" or not autocast._enabled, "autocast", got, why, do)
    return _entered(autocast)  # type: ignore[no-untyped-call]


class KeptValues(TorchDispatchMode):
    """Let small tensors of whole numbers keep their values beside their shapes, inside a fake mode.

    Models read them to choose what they run: whether a row holds several texts, whether anything is padded, where a
    document ends. With values the fakes take the branch that the real tensors take; what depends on numbers that a
    prediction does not have stays unknown.
    """

    def __init__(self, mode: FakeTensorMode, batch: Batch) -> None:
        """Find how long a tensor may be whose values are kept: twice the longest row table of the batch."""
        super().__init__()  # type: ignore[no-untyped-call]
        self._mode = mode
        with _no_modes():
            self._given = empty_batch(batch) | {
                # a copy on the CPU, for the fakes lie there; meta tensors and fakes have no values to copy
                name: entry.detach().cpu().contiguous()
                for name, entry in batch.items()
                if isinstance(entry, Tensor)
                and not (entry.is_meta or isinstance(entry, FakeTensor))
                and _is_integer(entry)
            }
        sizes = [t.numel() for t in self._given.values() if _is_integer(t) and t.dim() <= _TABLE_DIMS]
        self._limit = 2 * max(sizes, default=0)
        self._stack = contextlib.ExitStack()

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Without torch's guard against being compiled, which every operation pays for: on fakes nothing compiles."""
        return False

    def batch(self) -> dict[str, Tensor]:
        """The batch as fakes; whole numbers have their values."""
        return {name: self._with_value(tensor) for name, tensor in self._given.items()}

    def __enter__(self) -> Self:
        self._stack.enter_context(_patched(fake_tensor, "CONSTANT_NUMEL_LIMIT", max(self._limit, 1)))
        # a dispatch mode cannot see the flag
        self._stack.enter_context(_patched(torch.autocast, "__enter__", _enter_autocast))
        # its log would print the whole trace of an operation that fails; the error says what it is
        self._stack.enter_context(_patched(logging.getLogger(fake_tensor.__name__), "disabled", True))
        library: Any = sys.modules.get("transformers.utils.import_utils")
        if library is not None and hasattr(library, "is_fake_tensor"):
            # transformers takes a fake for a compiler's trace, where no value may be read, and then builds every mask
            is_fake = library.is_fake_tensor
            unknown = lambda x: is_fake(x) and getattr(x, "constant", None) is None  # noqa: E731
            self._stack.enter_context(_patched(library, "is_fake_tensor", unknown))
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, *about: Any) -> None:
        super().__exit__(*about)  # type: ignore[no-untyped-call]
        self._stack.close()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run the operation; one that brings whole numbers out of nothing runs for real as well."""
        if func is _GROUPED_MM and args[0].dtype is not torch.bfloat16:
            return _fake_grouped_mm(*args, **(kwargs or {}))
        known = [leaf for leaf in leaves(args) if isinstance(leaf, FakeTensor) and leaf.constant is not None]
        # values whose combination, such as a mask of every pair of tokens, fakes would compute for real
        if len(known) > 1 and math.prod(_broadcast(known)) > max(self._limit, 1):
            with _forgotten(known):
                out = func(*args, **(kwargs or {}))
        else:
            out = func(*args, **(kwargs or {}))
        if func not in _FACTORIES or not self._keeps(out) or out.device.type != "cpu":
            return out
        with _no_modes():
            real = func(*args, **(kwargs or {}))
        return self._with_value(real)

    def _with_value(self, real: Tensor) -> Tensor:
        keeps = self._keeps(real)
        return self._mode.fake_tensor_converter.from_real_tensor(self._mode, real, make_constant=keeps)

    def _keeps(self, tensor: Tensor) -> bool:
        """Whether values are kept: of short tables of whole numbers, and of single numbers such as a count of steps."""
        return tensor.dim() == 0 or (_is_integer(tensor) and tensor.numel() <= self._limit)


@contextmanager
def _forgotten(known: Sequence[FakeTensor]) -> Iterator[None]:
    values = [leaf.constant for leaf in known]
    for leaf in known:
        leaf.constant = None
    try:
        yield
    finally:
        for leaf, value in zip(known, values, strict=True):
            leaf.constant = value


def _broadcast(tensors: Sequence[Tensor]) -> Sequence[int]:
    """The shape of an elementwise result; empty where there is none."""
    try:
        return tuple(torch.broadcast_shapes(*(t.shape for t in tensors)))  # type: ignore[no-untyped-call]
    except RuntimeError:
        return ()


def _is_integer(tensor: Tensor) -> bool:
    return not (tensor.is_floating_point() or tensor.is_complex())


def _fake_grouped_mm(left: Tensor, right: Tensor, offs: Tensor | None = None, *_: object, **__: object) -> Tensor:
    """The result of a grouped product of any type; torch's own rule for fakes (2.13) takes bfloat16 alone."""
    if left.dim() == right.dim():
        count = left.shape[:1] if left.dim() == 3 else offs.shape[:1] if offs is not None else ()
        return left.new_empty((*count, left.shape[-2], right.shape[-1]))
    return left.new_empty((left.shape[-2], right.shape[-1]))


@contextmanager
def _patched(owner: Any, name: str, value: object) -> Iterator[None]:
    before = getattr(owner, name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        setattr(owner, name, before)


@contextmanager
def cuda_kernels() -> Iterator[None]:
    """Let operations on the CPU keep what their CUDA kernels keep for the backward pass.

    Dropout keeps a mask of one byte per element there instead of one element, and attention can drop weights without
    leaving the fused kernel, which on the CPU falls back to one that keeps the whole attention matrix.
    """
    functional: Any = F
    dropout, attention = functional.dropout, functional.scaled_dot_product_attention
    # exchanged, because a mode for torch functions is off while torch goes backward, where checkpoints recompute
    functional.dropout = partial(_dropout, dropout)
    functional.scaled_dot_product_attention = partial(_attention, attention)
    try:
        yield
    finally:
        functional.dropout, functional.scaled_dot_product_attention = dropout, attention


def _attention(func: Any, *args: Any, **kwargs: Any) -> Any:
    """Attention that drops nothing, whether ``dropout_p`` came by place or by name."""
    if len(args) > 4:
        return func(*args[:4], 0.0, *args[5:], **kwargs)
    return func(*args, **(kwargs | {"dropout_p": 0.0}))


def _dropout(
    func: Any,
    input: Tensor,  # noqa: A002
    p: float = 0.5,
    training: bool = True,
    inplace: bool = False,
) -> Tensor:
    """Dropout as on CUDA: the mask is boolean and nothing is kept when nothing is dropped."""
    if not training or p == 0.0:
        same: Tensor = func(input, p, training, inplace)
        return same
    dropped: Tensor = torch.native_dropout(input, p, True)[0]
    return input.copy_(dropped) if inplace else dropped
