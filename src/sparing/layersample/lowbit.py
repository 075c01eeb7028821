"""Linear layers whose weights rest in 4 or 8 bits, dequantised for each product and for training.

A layer at rest holds codes and one scale per 64 weights. Its ``weight`` stays the same ``Parameter``, so optimizers,
names and hooks go on, but has no data: every element is one NaN. Forward and backward pass each dequantise the weight
for one product, and nothing of it lives in between.

The number formats are those of bitsandbytes: NF4 (Dettmers et al. 2023, arXiv:2305.14314) and evenly spaced 8 bits.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Mapping, Sequence
from typing import Any, Final, cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from sparing.blocks import Block, submodule, tied
from sparing.errors import UserError
from sparing.layersample.config import Frozen
from sparing.layersample.state import is_sharded
from sparing.report.quiet import silently
from sparing.seeds import stream

GROUP: Final = 64  # weights that share a scale (count)
_CODES, _SCALES, _LEVELS = "resting_codes", "resting_scales", "resting_levels"  # names of the buffers

# Evenly spaced from -1 to 1; the spare code is a second zero. The default map of bitsandbytes has no -1: a group whose
# largest weight is negative would change whenever it is quantised again.
_INT8: Final = [k / 127 for k in (*range(-127, 0), 0, *range(128))]


@functools.cache
def operations() -> Any:
    """The operations of bitsandbytes, imported on first use."""
    try:
        with silently():
            import bitsandbytes  # noqa: F401
    except ImportError:
        why, do = "weights in 4 or 8 bits need it", "run pip install 'sparing[lowbit]'"
        raise UserError("bitsandbytes", got="not installed", why=why, do=do) from None
    return torch.ops.bitsandbytes


def _levels(device: torch.device) -> Tensor:
    """The 256 numbers of 8-bit codes, as the bits of floats: a buffer of floats would change with the model's type."""
    return torch.tensor(_INT8, dtype=torch.float32, device=device).view(torch.int32)


def quantise(weight: Tensor, form: Frozen) -> list[Tensor]:
    """Codes (uint8), scales (one per 64 weights) and, for 8 bits, levels of a weight."""
    narrow = weight.detach().contiguous()
    if narrow.dtype is torch.float64:
        narrow = narrow.float()
    if form == "nf4":
        codes, scales = operations().quantize_4bit(narrow, GROUP, "nf4", torch.uint8)
        more = []
    else:
        more = [_levels(weight.device)]
        codes, scales = operations().quantize_blockwise(narrow, more[0].view(torch.float32), GROUP)
    # a scale is the largest weight of its group, so that of 16-bit weights fits into their own type exactly
    return [codes, scales.to(narrow.dtype), *more]


def dequantise(stored: Sequence[Tensor], shape: torch.Size, dtype: torch.dtype) -> Tensor:
    """The weight that ``quantise`` stored."""
    codes, scales, *levels = stored
    narrow = torch.float32 if dtype is torch.float64 else dtype
    if levels:
        out = operations().dequantize_blockwise(codes, scales.float(), levels[0].view(torch.float32), GROUP, narrow)
    else:
        out = operations().dequantize_4bit(codes, scales.float(), GROUP, "nf4", shape, narrow)
    return cast("Tensor", out.to(dtype))


def round_(weight: Tensor, form: Frozen, generator: torch.Generator) -> None:
    """Round each weight to one of the two values beside it, at random, so that the mean is the weight.

    The nearest value would undo every change smaller than half the gap between two. Source: Gupta et al. 2015
    (arXiv:1502.02551), stochastic rounding.
    """
    codes = 17 * torch.arange(16, dtype=torch.uint8, device=weight.device)  # each twice in a byte
    values = dequantise([codes, torch.ones(1, device=weight.device)], torch.Size((1, 32)), torch.float32)[0, ::2]
    levels = torch.tensor(sorted(set(_INT8)), device=weight.device) if form == "int8" else values.sort().values
    _, scales, *_ = quantise(weight, form)
    scale = scales.float().repeat_interleave(GROUP)[: weight.numel()].view_as(weight)
    units = (weight.float() / scale).nan_to_num(0.0)
    above = torch.searchsorted(levels, units).clamp(1, len(levels) - 1)
    low, high = levels[above - 1], levels[above]
    up = torch.rand(weight.shape, generator=generator).to(weight.device) < (units - low) / (high - low)
    weight.copy_(torch.where(up, high, low) * scale)


class _Product(torch.autograd.Function):
    """A linear map by a weight at rest; codes and scales are kept for the backward pass, the weight is not."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, bias: Tensor | None, layer: Resting) -> Tensor:
        ctx.save_for_backward(*layer.stored())
        ctx.shape, ctx.transposed = layer.weight.shape, layer.transposed
        ctx.of, ctx.into = layer.weight.dtype, x.dtype
        weight = layer.dequantised()
        return F.linear(x, weight.T if layer.transposed else weight, bias)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
        (grad,) = grads
        to_input = to_bias = None
        if ctx.needs_input_grad[0]:
            # under autocast the product ran in another type than the weight has
            weight = dequantise(ctx.saved_tensors, ctx.shape, ctx.of).to(grad.dtype)
            to_input = (grad @ (weight.T if ctx.transposed else weight)).to(ctx.into)
        if ctx.needs_input_grad[1]:
            to_bias = grad.flatten(0, -2).sum(0).to(ctx.of)
        return to_input, to_bias, None


class Resting(nn.Module):
    """A linear layer at rest: ``rest_`` puts this class before the layer's own, ``wake_`` takes it away."""

    weight: nn.Parameter
    bias: nn.Parameter | None
    form: Frozen
    exact: Tensor | None  # the weight before it was rounded, in host memory; None where it is not kept
    transposed = False  # whether the weight is (in, out), as in transformers' Conv1D

    def forward(self, x: Tensor) -> Tensor:
        """Multiply by the dequantised weight."""
        return cast("Tensor", _Product.apply(x, self.bias, self))  # type: ignore[no-untyped-call]

    def stored(self) -> list[Tensor]:
        """What ``quantise`` gave."""
        return [tensor for name in (_CODES, _SCALES, _LEVELS) if (tensor := self._buffers.get(name)) is not None]

    def dequantised(self) -> Tensor:
        """The weight that the layer multiplies by."""
        return dequantise(self.stored(), self.weight.shape, self.weight.dtype)

    def latest(self) -> Tensor:
        """The exact weight where it is kept, else the dequantised one."""
        if self.exact is None:
            return self.dequantised()
        return self.exact.to(self.weight.device, self.weight.dtype)

    def _apply(self, fn: Any, recurse: bool = True) -> Any:
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        # moved to another device or type, the one NaN became as many as there are weights
        _empty_(self.weight)
        return self

    # A state dict of the model has ordinary weights, and takes them.
    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        destination[prefix + "weight"] = self.latest()

    def _load_from_state_dict(self, state_dict: Any, prefix: str, *how: Any) -> None:
        self.weight.data = self.latest().clone()
        super()._load_from_state_dict(state_dict, prefix, *how)
        if prefix + "weight" in state_dict:
            _store_(self, self.weight.data, self.form)
            self.exact = None if self.exact is None else self.weight.data.cpu()
        _empty_(self.weight)


def _store_(layer: nn.Module, weight: Tensor, form: Frozen) -> None:
    for name, tensor in zip((_CODES, _SCALES, _LEVELS), quantise(weight, form), strict=False):
        layer.register_buffer(name, tensor, persistent=False)


def _empty_(weight: nn.Parameter) -> None:
    # One NaN seen from everywhere: who reads it past the layer's forward notices, and torch refuses to write to it.
    weight.data = torch.full((), float("nan"), dtype=weight.dtype, device=weight.device).expand(weight.shape)


def kinds() -> tuple[type[nn.Module], ...]:
    """The classes of layers that can rest: torch's Linear and, where it was imported, transformers' Conv1D."""
    conv = getattr(sys.modules.get("transformers.pytorch_utils"), "Conv1D", None)
    return (nn.Linear,) if conv is None else (nn.Linear, conv)


@functools.cache
def _resting(kind: type[nn.Module]) -> type[nn.Module]:
    return type(f"Resting{kind.__name__}", (Resting, kind), {"transposed": kind is not nn.Linear})


def rest_(layer: Any, form: Frozen, *, exact: bool) -> None:
    """Put a layer to rest, with or without its exact weight in host memory."""
    weight = layer.weight.data
    _store_(layer, weight, form)
    kind: Any = type(layer)
    layer.__class__ = _resting(kind)
    # not pinned: blocks change once in many steps, and a whole model of pinned memory is more than hosts like to give
    layer.form, layer.exact = form, None
    if exact:
        layer.exact = weight if weight.is_meta else weight.cpu()
    _empty_(layer.weight)


def wake_(layer: Any) -> None:
    """Give a layer at rest its weight and its class back; any other is left as it is."""
    if not isinstance(layer, Resting):
        return
    layer.weight.data = layer.latest()
    for name in (_CODES, _SCALES, _LEVELS):
        if name in layer._buffers:
            delattr(layer, name)
    del layer.form, layer.exact
    layer.__class__ = type(layer).__mro__[2]


def wake_all_(model: nn.Module) -> None:
    """Give every layer of a model its weight back."""
    for module in list(model.modules()):
        wake_(module)


def layers_of(model: nn.Module, block: Block, what: str) -> dict[str, nn.Module]:
    """Layers of a block that can rest, by the canonical name of their weight; refuses a block with other matrices."""
    names, shared = {p: name for name, p in block.params.items()}, set(tied(model).values())
    found: dict[str, nn.Module] = {}
    tables: set[Tensor] = set()
    for module in submodule(model, block.name).modules():
        if type(module) in kinds() and module.weight in names:
            found[names[module.weight]] = module  # type: ignore[index]
        elif isinstance(module, nn.Embedding):
            tables.add(module.weight)
    for name, p in block.params.items():
        reasons = {
            "it is the weight of no linear layer, so nothing says how its codes are used":
                name not in found and p.dim() > 1 and p not in tables,
            "it is tied to another weight, which would not be stored with it": name in found and name in shared,
            "another forward was put over that of its layer": "forward" in vars(found.get(name, object)),
            "it is sharded": is_sharded(p),
        }  # fmt: skip
        for why, holds in reasons.items():
            if holds:
                raise UserError(what, got=f"a model with {name}", why=why, do=f"omit {what}")
    return found


class RestingBlocks:
    """The body blocks of a model, at rest but for those that train."""

    def __init__(
        self,
        model: nn.Module,
        blocks: Sequence[Block],
        may_train: Sequence[Mapping[str, nn.Parameter]],
        form: Frozen,
        *,
        exact: bool,
        seed: int,
    ) -> None:
        """Check all blocks, then put them to rest."""
        operations()
        found = [layers_of(model, block, "LayerSampling.frozen") for block in blocks]
        self._form, self._exact, self._seed = form, exact, seed
        self._all = [layer for layers in found for layer in layers.values()]
        # a weight that the user froze never trains, so its layer rests throughout
        self._layers = [
            {name: layer for name, layer in layers.items() if name in trains}
            for layers, trains in zip(found, may_train, strict=True)
        ]
        self._awake: set[int] = set()
        self._ever: set[int] = set()
        try:
            for layer in self._all:
                rest_(layer, form, exact=exact)
        except BaseException:
            self.close()  # memory may end half-way
            raise

    def set_(self, active: Sequence[int], interval: int) -> None:
        """Put to rest what leaves after the ``interval`` that ends, and then wake what enters."""
        for i in sorted(self._awake.difference(active)):
            for name, layer in self._layers[i].items():
                if not self._exact:
                    round_(cast("Tensor", layer.weight).data, self._form, stream(self._seed, "round", interval, name))
                rest_(layer, self._form, exact=self._exact)
        for i in active:
            for layer in self._layers[i].values():
                wake_(layer)
        self._awake = set(active)
        self._ever |= self._awake

    def weights(self) -> dict[str, Tensor]:
        """The weights of all layers that ever trained, by name."""
        trained = {name: layer for i in sorted(self._ever) for name, layer in self._layers[i].items()}
        return {
            name: layer.latest() if isinstance(layer, Resting) else cast("Tensor", layer.weight).detach()
            for name, layer in trained.items()
        }

    def load_(self, weights: Mapping[str, Tensor]) -> None:
        """Take weights of layers that trained in a saved run."""
        for i, layers in enumerate(self._layers):
            for name, layer in layers.items():
                if name not in weights:
                    continue
                self._ever.add(i)
                wake_(layer)
                with torch.no_grad():
                    cast("Tensor", layer.weight).copy_(weights[name])
                if i not in self._awake:
                    rest_(layer, self._form, exact=self._exact)

    def close(self) -> None:
        """Give all layers their weights back."""
        for layer in self._all:
            wake_(layer)
