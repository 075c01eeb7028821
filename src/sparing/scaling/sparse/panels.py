"""Sparse products by a kernel of our own, ``panels.c``: built by the machine's C compiler at first use, then cached.

It takes float32 and bfloat16 and sums in float32, on as many threads as torch has. The order of its sums follows from
shapes and mask: one call gives the same bits on any number of threads.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import os
import platform
import shutil
import struct
import subprocess
import tempfile
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

if TYPE_CHECKING:
    from sparing.scaling.sparse.layers import Pattern

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
        assert library.sparing_size() == _CALL.size, "panels.c and panels.py disagree about a call's fields"
        self.panel: int = library.sparing_panel()  # rows in a panel (count)
        self.waiting: int = library.sparing_waiting()  # floats that a part of the backward pass keeps (count)
        self._forward, self._backward = library.sparing_forward, library.sparing_backward
        for function in (self._forward, self._backward):
            function.argtypes, function.restype = [ctypes.c_char_p], None
        # Threads are those of the OpenMP runtime that torch has loaded: a second pool would fight with the first.
        openmp = getattr(ctypes.CDLL(None), "GOMP_parallel", None)
        self._openmp = (openmp and ctypes.cast(openmp, ctypes.c_void_p).value) or 0

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
            tokens, into, out, x.dtype is torch.bfloat16, parts, x.data_ptr(), 0, x.stride(0), 0, y.data_ptr(), 0,
            0 if bias is None else bias.data_ptr(), values.data_ptr(), pattern.blocks, *pattern.addresses, 0, 0, 0,
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
            assert grad.shape[0] == tokens
            assert grad.dtype == x.dtype
            values = _floats(values, pattern.live)
            parts = self._parts(tokens, pattern, max(1, into // 16))
            share = self.waiting + _lines(into * self.panel)
            # One part makes each panel when it comes to it; several make all of them first and then share columns.
            panels = _lines((into + out) * self.panel * (1 if parts == 1 else -(-tokens // self.panel)))
            live = _lines(pattern.live)
            scratch = torch.empty(parts * share + panels + 2 * live)
            dots = scratch.data_ptr() + 4 * (parts * share + panels)
            call = _CALL.pack(
                tokens, into, out, x.dtype is torch.bfloat16, parts, x.data_ptr(), grad.data_ptr(), x.stride(0),
                grad.stride(0), 0, 0 if dx is None else dx.data_ptr(), 0, values.data_ptr(), pattern.blocks,
                *pattern.addresses, 0 if dvalues is None else dvalues.data_ptr(), dots, dots + 4 * live,
                scratch.data_ptr(), share, self._openmp,
            )  # fmt: skip
            self._backward(call)
        return dx, dvalues if dvalues is None or kind is torch.float32 else dvalues.to(kind)

    def _parts(self, tokens: int, pattern: Pattern, most: int) -> int:
        """Return how many threads share the work (count): one for small work, which waking another would slow."""
        threads = torch.get_num_threads()
        return threads if threads == 1 else max(1, min(threads, most, tokens * pattern.live // _LEAST))


def _rows(x: Tensor, features: int) -> Tensor:
    """Return a matrix whose rows lie one by one in memory, copied only where they do not."""
    # C reads as many numbers as it is told: these two would let it read memory that is not ours.
    assert x.dtype in _DTYPES
    assert x.shape[1] == features
    whole = x.is_contiguous() or ((x.stride(1) == 1 or features == 1) and x.stride(0) >= features)
    return x if whole else x.contiguous()


def _floats(values: Tensor, count: int) -> Tensor:
    """Return a vector as contiguous float32, itself where it is."""
    assert values.numel() == count
    return values if values.dtype is torch.float32 and values.is_contiguous() else values.float().contiguous()


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
        return Kernel(_load(wanted))
    except (OSError, subprocess.SubprocessError) as error:
        said = (getattr(error, "stderr", None) or str(error)).strip().splitlines() or [repr(error)]
        warnings.warn(
            f"sparse layers run by MKL, which is several times slower: panels.c was not built ({said[0]}); "
            "install a C compiler, or name one in CC",
            RuntimeWarning,
            stacklevel=2,
        )
        return None


def instruction_flags(instructions: str) -> tuple[str, ...]:
    """Return the compiler's flags for what torch calls a processor's vectors; other makes have one set, as ARM NEON."""
    known = instructions in INSTRUCTIONS and platform.machine().lower() in {"x86_64", "amd64"}
    return INSTRUCTIONS[instructions if known else "DEFAULT"]


def _load(instructions: str) -> ctypes.CDLL:
    """Load the library from the cache, or build it there; where the cache cannot be trusted or written, apart."""
    if os.name != "posix":
        raise OSError("it is written for POSIX threads")
    compiler = os.environ.get("CC") or next(filter(None, map(shutil.which, ("cc", "gcc", "clang"))), "")
    if not (program := shutil.which(compiler)):
        raise FileNotFoundError(f"no C compiler {compiler}".rstrip())
    flags = (*FLAGS, *instruction_flags(instructions))
    stat = Path(program).resolve().stat()
    # A new compiler may make better code, and has another size or date.
    key = repr((SOURCE.read_bytes(), flags, program, stat.st_size, stat.st_mtime_ns, platform.machine()))
    name = f"panels-{hashlib.sha256(key.encode()).hexdigest()[:16]}.so"
    root = os.environ.get("SPARING_CACHE") or Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache", "sparing")
    folder = Path(root).expanduser() / "kernels"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if not (folder / name).exists():
            _build(program, flags, folder / name)
        if (folder / name).stat().st_uid == os.getuid():  # code that another user wrote is not ours to run
            return ctypes.CDLL(str(folder / name))
    except OSError:
        pass
    with tempfile.TemporaryDirectory() as apart:
        return ctypes.CDLL(str(_build(program, flags, Path(apart) / name)))


def _build(program: str, flags: tuple[str, ...], path: Path) -> Path:
    """Compile beside the path and rename, so that no other process loads half a file."""
    handle, name = tempfile.mkstemp(dir=path.parent, suffix=".so")
    os.close(handle)
    try:
        command: list[Any] = [program, *flags, SOURCE, "-o", name]
        subprocess.run(command, check=True, capture_output=True, text=True, timeout=120)
        Path(name).replace(path)
    finally:
        Path(name).unlink(missing_ok=True)
    return path
