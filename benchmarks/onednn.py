"""Products of matrices by oneDNN where MKL holds back: on AMD's processors MKL stops at AVX2, oneDNN takes AVX-512.

Both are in every build of torch, both sum in float32; on an EPYC of the Zen 5 kind oneDNN makes 220 to 280 GF/s on one
thread where MKL makes 110 to 120 (`python -m benchmarks.onednn`). Studies of losses take it for all of a run, and their
rows say so; benchmarks that compare seconds have it as an arm of its own, since users' torch takes MKL.
"""

from __future__ import annotations

import argparse
import time
import warnings
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor
from torch.library import Library

LEAST = 1 << 20
"""Multiplications from which another call through Python is paid back (count)."""
SHAPES = ((1024, 256, 256), (1024, 256, 1024), (512, 576, 1536), (512, 576, 49152))
"""Rows, inputs and outputs of layers of the studies."""

_overrides: list[Library] = []
_taken = {"oneDNN": False}


def helps() -> bool:
    """Whether this processor is one of AMD's with AVX-512."""
    info = Path("/proc/cpuinfo")
    amd = info.exists() and "AuthenticAMD" in info.read_text(encoding="utf-8")
    return amd and torch.backends.cpu.get_cpu_capability() == "AVX512" and torch.backends.mkldnn.is_available()


def use(wanted: bool = True) -> None:
    """Take oneDNN for products of float32 in this process where it helps, or MKL again."""
    _taken["oneDNN"] = wanted and helps()
    if _taken["oneDNN"] and not _overrides:
        library = Library("aten", "IMPL")
        with warnings.catch_warnings(action="ignore"):  # that a kernel is taken over, which is what is wanted
            library.impl("mm", _mm, "CPU", allow_override=True)
        _overrides.append(library)


def mark() -> dict[str, str]:
    """What a row says of it: nothing where products are by MKL."""
    return {"products": "oneDNN"} if _taken["oneDNN"] else {}


def mm(left: Tensor, right: Tensor) -> Tensor:
    """``left @ right`` by oneDNN."""
    found: Tensor = torch.ops.mkldnn._linear_pointwise(left, right.T, None, "none", [], "")
    return found


def _mm(left: Tensor, right: Tensor) -> Tensor:
    """What stands in place of torch's own: large products of float32 by oneDNN, others as before."""
    size = left.shape[0] * left.shape[1] * right.shape[1]
    large = left.dtype == right.dtype == torch.float32 and size >= LEAST
    if _taken["oneDNN"] and large and plain(left) and plain(right):
        return mm(left, right)
    return torch.addmm(left.new_zeros(()), left, right, beta=0)


def plain(matrix: Tensor) -> bool:
    """Whether a matrix lies whole in memory, by rows or by columns; for others oneDNN takes a plain loop."""
    return matrix.is_contiguous() or matrix.T.is_contiguous()


def rate(product: Callable[[], object], operations: int) -> float:
    """Arithmetic of a product (GF/s)."""
    for _ in range(3):
        product()
    turns = 1 + 10**11 // operations
    began = time.perf_counter()
    for _ in range(turns):
        product()
    return operations * turns / (time.perf_counter() - began) / 1e9


def main() -> None:
    """Print rates of both libraries on one thread."""
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    torch.set_num_threads(1)
    for rows, inputs, outputs in SHAPES:
        x, w, g = torch.randn(rows, inputs), torch.randn(outputs, inputs), torch.randn(rows, outputs)
        cells = {"y": (x, w.T), "dx": (g, w), "dw": (g.T, x)}
        found = [
            f"{name} {rate(lambda a=a, b=b: a @ b, size):.0f} {rate(lambda a=a, b=b: mm(a, b), size):.0f}"  # type: ignore[misc]
            for name, (a, b) in cells.items()
            for size in [2 * rows * inputs * outputs]
        ]
        print(f"{rows} x {inputs} x {outputs}, GF/s by MKL and by oneDNN: " + ", ".join(found))


if __name__ == "__main__":
    main()
