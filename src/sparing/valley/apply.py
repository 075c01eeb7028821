"""Perturb a live model: put it at θ + λε, again and again, and leave it at θ, to the bit.

The parameters' own storage is never written. Meanwhile they read from a flat copy of those that move, which is refilled
for every step; at the end, also after an exception, each gets its own storage back. So no arithmetic has to be undone
and the model is never deep-copied: memory holds one flat copy and one or two flat directions besides the weights.
"""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from sparing.blocks import named_parameters
from sparing.errors import UserError
from sparing.vectors import Vector


class Perturber:
    """Moves a model's parameters; made by ``perturbing``."""

    def __init__(self, model: nn.Module) -> None:
        self._params = named_parameters(model)
        self._parts: list[_FlatGroup] = []

    @torch.no_grad()
    def to(self, vector: Vector, step: float, *more: tuple[Vector, float]) -> None:
        """Set the parameters to θ + step · vector (+ ...), in the parameter's precision; names left out stay at θ.

        Earlier steps leave no trace: the same arguments give the same bits in any order, and step 0 gives θ.
        """
        pairs = [(vector, step), *more]
        for one, _ in pairs:
            self._add_parameters(one)
        for part in self._parts:
            part.reset_()
            for one, length in pairs:
                part.add_(one, length)

    def protect(self) -> None:
        """Let trainable parameters read from a copy of θ, so that whatever writes to them spares the originals."""
        params = self._params.items()
        self.to({name: one for name, one in params if one.requires_grad and one.is_floating_point()}, 0.0)

    def _add_parameters(self, vector: Vector) -> None:
        """Allocate flat copies for parameters that move for the first time."""
        known = {name for part in self._parts for name in part.params}
        fresh: dict[tuple[torch.device, torch.dtype], dict[str, nn.Parameter]] = {}
        for name, value in vector.items():
            if name in known:
                _require_shape(name, value, self._params[name])
                continue
            if name not in self._params:
                why, do = "the model has no parameter of that name", "use the names of sparing.blocks.named_parameters"
                raise UserError("direction", got=repr(name), why=why, do=do)
            parameter = self._params[name]
            _require_shape(name, value, parameter)
            fresh.setdefault((parameter.device, parameter.dtype), {})[name] = parameter
        self._parts += [_FlatGroup(params) for params in fresh.values()]

    def restore_(self) -> None:
        """Give every parameter its own storage back."""
        for part in self._parts:
            for name, parameter in part.params.items():
                parameter.data = part.originals[name]
        self._parts.clear()


class _FlatGroup:
    """Parameters of one device and dtype that read from one flat tensor."""

    def __init__(self, params: Mapping[str, nn.Parameter]) -> None:
        self.params = params
        self.originals = {name: parameter.data for name, parameter in params.items()}
        first, size = next(iter(self.originals.values())), sum(one.numel() for one in self.originals.values())
        self._flat = torch.empty(size, dtype=first.dtype, device=first.device)
        self._views = self._cut(self._flat)
        self._vectors: list[tuple[Vector, Tensor]] = []

    def _cut(self, flat: Tensor) -> dict[str, Tensor]:
        """Views of a flat tensor with the shapes and, where dense, the strides of the parameters."""
        views, start = {}, 0
        for name, one in self.originals.items():
            piece = flat[start : start + one.numel()]
            # Kernels are chosen by memory layout (channels last), and another kernel may round differently
            views[name] = piece.as_strided(one.shape, one.stride(), start) if _is_dense(one) else piece.view(one.shape)
            start += one.numel()
        return views

    def reset_(self) -> None:
        """Fill the flat tensor with θ and let the parameters read from it."""
        torch._foreach_copy_(list(self._views.values()), list(self.originals.values()))
        for name, parameter in self.params.items():
            parameter.data = self._views[name]

    def add_(self, vector: Vector, step: float) -> None:
        if step:  # 0 · ε would turn an infinite ε into NaN, and −0 into +0
            self._flat.add_(self._flattened(vector), alpha=step)

    def _flattened(self, vector: Vector) -> Tensor:
        """The vector as one flat tensor; the last two are cached, which is what a line or a plane needs."""
        for known, flat in self._vectors:
            if known is vector:
                return flat
        flat = self._vectors.pop(0)[1].zero_() if len(self._vectors) > 1 else torch.zeros_like(self._flat)
        for name, view in self._cut(flat).items():
            if name in vector:
                view.copy_(vector[name])
        self._vectors.append((vector, flat))
        return flat


def _is_dense(tensor: Tensor) -> bool:
    """Whether the elements fill their storage without gap or overlap, in any order of dimensions."""
    expected = 1
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size != 1 and stride != expected:
            return False
        expected *= size
    return True


def _require_shape(name: str, value: Tensor, parameter: Tensor) -> None:
    if value.shape != parameter.shape:
        got = f"shapes {tuple(value.shape)} and {tuple(parameter.shape)}"
        raise UserError(f"direction at {name!r}", got=got, why="nothing is broadcast", do="pass a vector of this model")
    if not (value.is_floating_point() and parameter.is_floating_point()):
        got = f"{value.dtype} and {parameter.dtype}"
        raise UserError(f"direction at {name!r}", got=got, why="only floating numbers move", do="leave it out")


@contextlib.contextmanager
def perturbing(model: nn.Module) -> Iterator[Perturber]:
    """Move a model's parameters within a block and restore it afterwards, to the bit, also after an exception.

    Restored are the parameters that moved, buffers (contents and, where one was replaced, the tensor itself), training
    flags and torch's global random state; ``grad`` and anything else is not. FSDP's sharded parameters cannot move.

    Example:
        >>> layer = nn.Linear(1, 1, bias=False)
        >>> before = layer.weight.item()
        >>> with perturbing(layer) as perturber:
        ...     perturber.to({"weight": torch.ones(1, 1)}, 0.5)
        ...     moved = layer.weight.item() - before
        >>> round(moved, 6), layer.weight.item() == before
        (0.5, True)
    """
    perturber = Perturber(model)
    devices = sorted({tensor.device.index or 0 for tensor in model.parameters() if tensor.device.type == "cuda"})
    with torch.random.fork_rng(devices=devices), preserve_buffers(model):
        try:
            yield perturber
        finally:
            perturber.restore_()


@contextlib.contextmanager
def preserve_buffers(model: nn.Module) -> Iterator[None]:
    """Restore buffers and training flags after a block, to the bit, also after an exception."""
    saved = [
        (module, name, buffer, buffer.detach().clone())
        for module in model.modules()
        for name, buffer in module._buffers.items()
        if buffer is not None
    ]
    flags = [(module, module.training) for module in model.modules()]
    try:
        yield
    finally:
        with torch.no_grad():
            for module, name, buffer, copy in saved:
                buffer.copy_(copy)
                # The block may have replaced the tensor itself, as "batch" statistics do
                module._buffers[name] = buffer
        for module, flag in flags:
            module.training = flag


def state_digests(model: nn.Module) -> dict[str, Any]:
    """Return digests of all parameters, buffers and training flags, to compare before and after something."""
    state: dict[str, Any] = {f"parameter {name}": _sha256(value) for name, value in named_parameters(model).items()}
    state |= {f"buffer {name}": _sha256(value) for name, value in model.named_buffers()}
    state |= {f"training flag of {name or 'the model'}": module.training for name, module in model.named_modules()}
    return state


def _sha256(tensor: Tensor) -> tuple[object, ...]:
    flat = tensor.detach().contiguous().reshape(-1)
    raw = flat.view(torch.uint8).cpu().numpy().data if flat.numel() else b""
    return tuple(tensor.shape), tensor.dtype, hashlib.sha256(raw).hexdigest()
