"""Sparse products by a kernel of our own, ``panels.c``: built by the machine's C compiler at first use, then cached.

It takes float32 and bfloat16 and sums in float32, on as many threads as torch has. The order of its sums follows from
shapes and mask: one call gives the same bits on any number of threads.
"""

from __future__ import annotations

import ctypes
import functools
import os
import platform
import struct
import subprocess
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from sparing.errors import UserError
from sparing.scaling.sparse.build import load

if TYPE_CHECKING:
    from sparing.scaling.sparse.pattern import Pattern

SOURCE = Path(__file__).with_name("panels.c")
FLAGS = ("-O3", "-std=gnu11", "-ffp-contract=fast", "-fno-math-errno", "-shared", "-fPIC", "-pthread")
INSTRUCTIONS: Mapping[str, tuple[str, ...]] = {
    "AVX512": (
        "-DLANES=16",
        "-mavx512f",
        "-mavx512bw",
        "-mavx512dq",
        "-mavx512vl",
        "-mfma",
        "-mprefer-vector-width=512",
    ),
    "AVX2": ("-DLANES=8", "-mavx2", "-mfma"),
    "DEFAULT": ("-DLANES=4",),  # SSE2, NEON, or whatever the compiler makes of four floats
}
"""What torch calls the processor's vectors -> flags of the compiler."""

_DTYPES = {torch.float32, torch.bfloat16}
_LEAST = 2**20  # products of a live weight and a row that are worth a second thread (count)


# One call: the fields of ``job_t`` in ``panels.c``, eight bytes each. Packed, and no ``ctypes.Structure``, which takes
# as long to fill as a small layer to multiply.
_CALL = struct.Struct("25q")


class Kernel:
    """The compiled file."""

    def __init__(self, library: ctypes.CDLL) -> None:
        """Bind the functions of a loaded library."""
        library.sparing_panel.restype = library.sparing_waiting.restype = library.sparing_size.restype = ctypes.c_int64
        if library.sparing_size() != _CALL.size:
            raise OSError("pointers have eight bytes in it, and others here")
        self.panel: int = library.sparing_panel()  # rows in a panel (count)
        self.waiting: int = library.sparing_waiting()  # floats that a part of the backward pass keeps (count)
        self._forward, self._backward = library.sparing_forward, library.sparing_backward
        for function in (self._forward, self._backward):
            function.argtypes, function.restype = [ctypes.c_char_p], None
        # Threads are those of the OpenMP runtime that torch has loaded: a second pool would fight with the first.
        openmp = getattr(ctypes.CDLL(None), "GOMP_parallel", None)
        self._openmp = (openmp and ctypes.cast(openmp, ctypes.c_void_p).value) or 0
        # A child has none of its parent's threads, which OpenMP would wait for; there each call starts its own.
        os.register_at_fork(after_in_child=self._leave_openmp)

    def forward(self, x: Tensor, values: Tensor, bias: Tensor | None, pattern: Pattern) -> Tensor:
        """Return ``X Wᵀ + b``, shape (N, out), from X, shape (N, in), and the live values of W, shape (live,)."""
        (out, into), tokens = pattern.shape, x.shape[0]
        x, y = _rows(x, into), x.new_empty(tokens, out)
        if isinstance(x, FakeTensor):
            return y
        values, bias = _floats(values, pattern.live), None if bias is None else _floats(bias, out)
        parts = self._parts(tokens, pattern, -(-tokens // self.panel))
        share = _lines((into + out) * self.panel)
        scratch = torch.empty(parts * share)
        call = _CALL.pack(
            tokens, into, out, x.dtype is torch.bfloat16, parts, _address(x), 0, x.stride(0), 0, y.data_ptr(), 0,
            0 if bias is None else _address(bias), _address(values), pattern.blocks, *pattern.addresses, 0, 0, 0,
            scratch.data_ptr(), share, self._openmp,
        )  # fmt: skip
        self._forward(call)
        return y

    def backward(
        self, x: Tensor, grad: Tensor, values: Tensor, pattern: Pattern, *, of_x: bool, of_values: bool
    ) -> tuple[Tensor | None, Tensor | None]:
        """Return ``∂L/∂X``, shape (N, in), and ``∂L/∂values``, shape (live,), each where it is asked for."""
        (out, into), kind, tokens = pattern.shape, values.dtype, x.shape[0]
        x, grad = _rows(x, into), _rows(grad, out)
        dx = x.new_empty(tokens, into) if of_x else None
        dvalues = x.new_empty(pattern.live, dtype=torch.float32) if of_values else None
        if not isinstance(x, FakeTensor) and (of_x or of_values):
            if grad.shape[0] != tokens or grad.dtype is not x.dtype:
                _refuse("gradient", grad, f"the input is {x.dtype} of shape {tuple(x.shape)}")
            values = _floats(values, pattern.live)
            parts = self._parts(tokens, pattern, max(1, into // 16))
            share = self.waiting + _lines(into * self.panel)
            # One part makes each panel when it comes to it; several make all of them first and then share columns.
            panels = _lines((into + out) * self.panel * (1 if parts == 1 else -(-tokens // self.panel)))
            live = _lines(pattern.live)
            scratch = torch.empty(parts * share + panels + 2 * live)
            dots = scratch.data_ptr() + 4 * (parts * share + panels)
            call = _CALL.pack(
                tokens, into, out, x.dtype is torch.bfloat16, parts, _address(x), _address(grad), x.stride(0),
                grad.stride(0), 0, 0 if dx is None else dx.data_ptr(), 0, _address(values), pattern.blocks,
                *pattern.addresses, 0 if dvalues is None else dvalues.data_ptr(), dots, dots + 4 * live,
                scratch.data_ptr(), share, self._openmp,
            )  # fmt: skip
            self._backward(call)
        return dx, dvalues if dvalues is None or kind is torch.float32 else dvalues.to(kind)

    def _leave_openmp(self) -> None:
        self._openmp = 0

    def _parts(self, tokens: int, pattern: Pattern, most: int) -> int:
        """Return how many threads share the work (count): one for small work, which waking another would slow."""
        threads = torch.get_num_threads()
        return threads if threads == 1 else max(1, min(threads, most, tokens * pattern.live // _LEAST))


def _refuse(what: str, got: Tensor, why: str) -> NoReturn:
    """Refuse a tensor: C reads as many numbers as it is told. Raised, since ``python -O`` takes assertions away."""
    shown = f"{got.dtype} of shape {tuple(got.shape)} on {got.device}"
    raise UserError(f"{what} of a sparse layer", got=shown, why=why, do="give ordinary tensors of the layer's sizes")


def _rows(x: Tensor, features: int) -> Tensor:
    """Return a matrix whose rows lie one by one in memory, copied only where they do not."""
    if not x.is_cpu or x.dtype not in _DTYPES or x.shape[1] != features:
        _refuse("input or gradient", x, f"the kernel reads {features} numbers a row, of float32 or bfloat16 on the CPU")
    x = _resolved(x)
    whole = x.is_contiguous() or ((x.stride(1) == 1 or features == 1) and x.stride(0) >= features)
    return x if whole else x.contiguous()


def _floats(values: Tensor, count: int) -> Tensor:
    """Return a vector as contiguous float32, itself where it is."""
    if not values.is_cpu or values.numel() != count:
        _refuse("weight or bias", values, f"the kernel reads {count} numbers of it on the CPU")
    values = _resolved(values)
    return values if values.dtype is torch.float32 and values.is_contiguous() else values.float().contiguous()


def _resolved(x: Tensor) -> Tensor:
    """Return a tensor whose memory holds its numbers: torch negates some only where they are read."""
    return x.resolve_neg() if x.is_neg() else x


def _address(x: Tensor) -> int:
    """Return where a tensor's numbers lie; some have none, such as those that wrap others."""
    at = x.data_ptr()
    if not at and x.numel():
        _refuse("tensor", x, "it has no memory of its own")
    return at


def _lines(floats: int) -> int:
    """Round up to whole cache lines, so that no two threads write to one."""
    return -(-floats // 16) * 16


def supports(weight: Tensor, pattern: Pattern | None = None) -> bool:
    """Tell whether the kernel can run a weight: on the CPU, float32 or bfloat16, four-byte indices, a C compiler."""
    fits = weight.is_cpu and weight.dtype in _DTYPES and (pattern is None or pattern.col.dtype is torch.int32)
    return fits and kernel() is not None


@functools.cache
def kernel(instructions: str | None = None) -> Kernel | None:
    """Return the kernel for this processor, built if need be; None, said once in a warning, where it cannot be."""
    wanted = instructions or torch.backends.cpu.get_cpu_capability()
    try:
        return Kernel(load(SOURCE, (*FLAGS, *instruction_flags(wanted))))
    except (OSError, subprocess.SubprocessError) as error:
        said = (getattr(error, "stderr", None) or str(error)).strip().splitlines() or [repr(error)]
        do = "install a C compiler, or name one in CC" if os.name == "posix" else "run on Linux or macOS"
        warnings.warn(
            f"sparse layers run by MKL, which is several times slower: panels.c was not built ({said[0]}); {do}",
            RuntimeWarning,
            stacklevel=2,
        )
        return None


def instruction_flags(instructions: str) -> tuple[str, ...]:
    """Return the compiler's flags for what torch calls a processor's vectors; other makes have one set, as ARM NEON."""
    known = instructions in INSTRUCTIONS and platform.machine().lower() in {"x86_64", "amd64"}
    return INSTRUCTIONS[instructions if known else "DEFAULT"]
