"""Two-of-four and block-sparse linear layers for training on CUDA, with the kernels that torch ships.

The weight stays a dense parameter that is zero off its mask, so optimizer, gate and state dict are those of the masked
dense layer; only products change. A step compresses the weight anew and computes its gradient dense, so the gain is
part of the forward pass and, for blocks and for masks that are 2:4 both ways, of the gradient of the input.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any, ClassVar, Literal, NamedTuple, cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils import _triton

from sparing.blocks import submodule
from sparing.errors import UserError
from sparing.scaling.sparse.layers import prepare, uncompiled

CudaBackend = Literal["2:4", "block"]
"""Kernels: cuSPARSELt or CUTLASS for two of four, Triton for blocks."""

_HALF = {torch.float16, torch.bfloat16}
_SIDE = 64  # sides are multiples of it: kernels need rows by 32 and columns by 64, and the transpose is compressed too


class BlockPattern(NamedTuple):
    """Which square blocks of a matrix [out, in] are live."""

    size: int  # side of a block (count)
    crow: Tensor  # live blocks before each row of blocks, shape (out / size + 1,)
    row: Tensor  # row of each live block, ascending, shape (blocks,)
    col: Tensor  # column of each live block, shape (blocks,)


def is_two_of_four(mask: Tensor) -> bool:
    """Tell whether at most two of each four neighbours in a row of [out, in] are live, as sparse tensor cores need."""
    return mask.shape[1] % 4 == 0 and int(mask.view(len(mask), -1, 4).sum(-1).max()) <= 2


def blocks_of(mask: Tensor, size: int) -> BlockPattern | None:
    """Return the live blocks of a mask [out, in], ``size`` entries a side; None unless it consists of whole blocks."""
    if mask.shape[0] % size or mask.shape[1] % size:
        return None
    tiles = mask.view(mask.shape[0] // size, size, mask.shape[1] // size, size).transpose(1, 2).flatten(2)
    live = tiles.any(-1)
    if not torch.equal(live, tiles.all(-1)):
        return None
    row, col = live.nonzero(as_tuple=True)
    return BlockPattern(size, torch.cat([row.new_zeros(1), live.sum(1).cumsum(0)]), row, col)


def transpose_pattern(pattern: BlockPattern, columns: int) -> BlockPattern:
    """Return the pattern of the transpose; ``columns`` counts columns of blocks, in / size."""
    order = torch.argsort(pattern.col, stable=True)
    counts = torch.bincount(pattern.col, minlength=columns)
    crow = torch.cat([counts.new_zeros(1), counts.cumsum(0)])
    return BlockPattern(pattern.size, crow, pattern.col[order], pattern.row[order])


def block_matrix(weight: Tensor, pattern: BlockPattern) -> Tensor:
    """Return the live blocks of a weight [out, in] as a BSR tensor of its shape."""
    size = pattern.size
    tiles = weight.view(weight.shape[0] // size, size, weight.shape[1] // size, size).transpose(1, 2)
    values = tiles[pattern.row, pattern.col].contiguous()
    prepare()
    return torch.sparse_bsr_tensor(pattern.crow, pattern.col, values, weight.shape, check_invariants=False)


class _TwoOfFour(torch.autograd.Function):
    """``X Wᵀ``, W compressed at each call; the gradient of X by the compressed transpose where that is 2:4 too."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, both: bool) -> Tensor:
        """Return Y, shape (N, out)."""
        # Saved dense and compressed anew in backward, which multiplies by the transpose.
        ctx.save_for_backward(x, weight)
        ctx.both = both
        return F.linear(x, torch.sparse.to_sparse_semi_structured(weight))

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        """Return the gradients of X and W."""
        x, weight = ctx.saved_tensors
        back = torch.sparse.to_sparse_semi_structured(weight.t().contiguous()) if ctx.both else weight.t()
        return F.linear(grad.contiguous(), back), grad.t() @ x, None


class _Blocks(torch.autograd.Function):
    """``X Wᵀ`` and the gradient of X over live blocks only."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, pattern: BlockPattern) -> Tensor:
        """Return Y, shape (N, out)."""
        ctx.save_for_backward(x, weight)
        ctx.pattern = pattern
        return _product(block_matrix(weight, pattern), x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        """Return the gradients of X and W."""
        x, weight = ctx.saved_tensors
        back = transpose_pattern(ctx.pattern, weight.shape[1] // ctx.pattern.size)
        return _product(block_matrix(weight.t().contiguous(), back), grad), grad.t() @ x, None


def _product(matrix: Tensor, x: Tensor) -> Tensor:
    """Return ``X Aᵀ`` for a block matrix A, shape (N, out)."""
    from torch.sparse import _triton_ops  # imports Triton, which not every machine has

    out = x.new_zeros(matrix.shape[0], x.shape[0])
    product = _triton_ops.bsr_dense_addmm(out, matrix, x.t().contiguous(), beta=0)
    return cast("Tensor", product).t().contiguous()


class _KernelLinear(nn.Linear):
    """A linear layer whose product ``torch.compile`` leaves to its kernel."""

    _apart: ClassVar[Callable[..., Tensor]]  # ``_run``, exempt from compilation

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)  # type: ignore[no-untyped-call]
        _exempt()  # no layer may have been converted in this process

    def forward(self, x: Tensor) -> Tensor:
        """Return ``x Wᵀ + b``, shape (..., out)."""
        return type(self)._apart(self, x) if torch.compiler.is_compiling() else self._run(x)

    def _run(self, x: Tensor) -> Tensor:
        raise NotImplementedError


@functools.cache
def _exempt() -> None:
    for kind in (TwoOfFourLinear, BlockLinear):  # at the first layer: this loads the compiler
        kind._apart = uncompiled(kind._run)


class TwoOfFourLinear(_KernelLinear):
    """A linear layer whose products run on the sparse tensor cores; made by ``convert_cuda_``."""

    _both: bool  # whether the transpose is two of four as well

    def _run(self, x: Tensor) -> Tensor:
        y = _TwoOfFour.apply(x.reshape(-1, self.in_features), self.weight, self._both)  # type: ignore[no-untyped-call]
        return _with_bias(cast("Tensor", y), x, self)


class BlockLinear(_KernelLinear):
    """A linear layer whose products run over live blocks; made by ``convert_cuda_``."""

    _blocks: BlockPattern  # the live blocks

    def _run(self, x: Tensor) -> Tensor:
        y = _Blocks.apply(x.reshape(-1, self.in_features), self.weight, self._blocks)  # type: ignore[no-untyped-call]
        return _with_bias(cast("Tensor", y), x, self)


def _with_bias(y: Tensor, x: Tensor, layer: nn.Linear) -> Tensor:
    y = y if layer.bias is None else y + layer.bias
    return y.view(*x.shape[:-1], layer.out_features)


def convert_cuda_(model: nn.Module, masks: Mapping[str, Tensor], *, backend: CudaBackend, size: int = 64) -> list[str]:
    """Run masked linear layers by the GPU's sparse kernels, in place, and return their names.

    Call it again when masks have changed. ``size`` is the side of a block (count), for "block". A refusal changes
    nothing. Parameters, optimizer state and state dict stay as they are, so there is nothing to move or save.
    """
    if backend not in {"2:4", "block"}:
        raise UserError("backend", got=repr(backend), why="on CUDA there are 2:4 and block", do="see convert_ for CSR")
    layers = {name: submodule(model, name.rpartition(".")[0]) for name in masks}
    for name, layer in layers.items():
        if why := _obstacle(layer, masks[name], backend, size):
            raise UserError(f"backend of {name}", got=backend, why=why, do="leave it masked dense, or use another law")
    _exempt()
    for name, layer in layers.items():
        mask = masks[name]
        if backend == "2:4":
            # The class changes and not the module: its hooks, buffers and name are those of the masked dense layer.
            layer.__class__ = TwoOfFourLinear
            layer.__dict__["_both"] = is_two_of_four(mask.t())
        else:
            layer.__class__ = BlockLinear
            layer.__dict__["_blocks"] = blocks_of(mask, size)
    return list(layers)


def revert_cuda_(model: nn.Module) -> None:
    """Run all layers masked dense again; nothing else changes."""
    for layer in model.modules():
        if isinstance(layer, TwoOfFourLinear | BlockLinear):
            layer.__class__ = nn.Linear  # type: ignore[assignment]
            layer.__dict__.pop("_both", None)
            layer.__dict__.pop("_blocks", None)


def _obstacle(layer: nn.Module, mask: Tensor, backend: CudaBackend, size: int) -> str:
    """Say why a layer cannot run by these kernels; empty where it can."""
    if type(layer) not in {nn.Linear, TwoOfFourLinear, BlockLinear}:
        return f"{type(layer).__name__} has no such form, only Linear has"
    weight = cast("Tensor", layer.weight)
    if weight.device.type != "cuda":
        return f"the layer lies on {weight.device.type}, and these kernels are CUDA's"
    if weight.dtype not in _HALF:
        return f"its weight is {weight.dtype}, and the kernels take half precision"
    if backend == "block":
        if not _triton.has_triton():
            return "Triton is not installed"
        if size not in {16, 32, 64, 128}:
            return f"blocks of {size} do not fit the kernels, which take 16, 32, 64, 128"
        return "" if blocks_of(mask, size) is not None else f"its mask does not consist of whole blocks of {size}"
    if torch.cuda.get_device_capability(weight.device) < (8, 0):
        return "sparse tensor cores begin with compute capability 8.0"
    if weight.shape[0] % _SIDE or weight.shape[1] % _SIDE:
        return f"its shape is {tuple(weight.shape)}, and sides must be multiples of {_SIDE}"
    return "" if is_two_of_four(mask) else "its mask is not two of four along the fan-in; draw NofM(n=2, m=4)"
