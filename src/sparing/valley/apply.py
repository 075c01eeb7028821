"""Walking: a live model is put at θ + λε, again and again, and ends where it began, to the bit.

The parameters' own storage is never written. While a walk lasts they read from a flat copy of those that move, which is
filled anew for every step; at the end, and also after an exception, each gets its own storage back. So there is no
arithmetic to undo and no deep copy of the model: beside the weights live one flat copy and one flat direction.
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
    """Moves a model's parameters; ``perturbing`` makes one."""

    def __init__(self, model: nn.Module) -> None:
        """Note the parameters; nothing moves yet."""
        self._params = named_parameters(model)
        self._parts: list[_FlatGroup] = []

    @torch.no_grad()
    def to(self, vector: Vector, step: float, *more: tuple[Vector, float]) -> None:
        """Put the parameters at θ + step · vector, counted from where the walk began.

        The steps before leave no trace: the same arguments give the same bits in any order of visits. At step 0 the
        parameters are θ, to the bit. The sum is taken in the parameter's precision.
        """
        pairs = [(vector, step), *more]
        for one, _ in pairs:
            self._admit(one)
        for part in self._parts:
            part.home_()
            for one, length in pairs:
                part.add_(one, length)

    def guard(self) -> None:
        """Let trainable parameters read from a copy, at θ: whatever writes to them then leaves the originals alone."""
        params = self._params.items()
        self.to({name: one for name, one in params if one.requires_grad and one.is_floating_point()}, 0.0)

    def _admit(self, vector: Vector) -> None:
        """Make flat copies for parameters that move for the first time."""
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

    def _end_(self) -> None:
        """Give every parameter its own storage back."""
        for part in self._parts:
            part.return_()
        self._parts.clear()


class _FlatGroup:
    """Parameters of one device and dtype, which read from one flat tensor."""

    def __init__(self, params: Mapping[str, nn.Parameter]) -> None:
        self.params = params
        self._own = {name: parameter.data for name, parameter in params.items()}
        first = next(iter(self._own.values()))
        self._flat = torch.empty(sum(own.numel() for own in self._own.values()), dtype=first.dtype, device=first.device)
        self._views = self._cut(self._flat)
        self._vectors: list[tuple[Vector, Tensor]] = []

    def _cut(self, flat: Tensor) -> dict[str, Tensor]:
        """Views of a flat tensor with the shapes and, where dense, the strides of the parameters."""
        views, start = {}, 0
        for name, own in self._own.items():
            piece = flat[start : start + own.numel()]
            # Kernels choose by memory layout (channels last): another layout might round another way.
            views[name] = piece.as_strided(own.shape, own.stride(), start) if _dense(own) else piece.view(own.shape)
            start += own.numel()
        return views

    def home_(self) -> None:
        """Fill the flat tensor with θ and let the parameters read from it."""
        torch._foreach_copy_(list(self._views.values()), list(self._own.values()))
        for name, parameter in self.params.items():
            parameter.data = self._views[name]

    def add_(self, vector: Vector, step: float) -> None:
        """Add a multiple of a vector to the flat tensor."""
        if step:
            self._flat.add_(self._flattened(vector), alpha=step)

    def _flattened(self, vector: Vector) -> Tensor:
        """The vector as one flat tensor; the last two are kept, which is what a line or a plane needs."""
        for known, flat in self._vectors:
            if known is vector:
                return flat
        flat = self._vectors.pop(0)[1].zero_() if len(self._vectors) > 1 else torch.zeros_like(self._flat)
        for name, view in self._cut(flat).items():
            if name in vector:
                view.copy_(vector[name])
        self._vectors.append((vector, flat))
        return flat

    def return_(self) -> None:
        for name, parameter in self.params.items():
            parameter.data = self._own[name]


def _dense(tensor: Tensor) -> bool:
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
    """Move a model's parameters within a block; afterwards all is as it was, to the bit, also after an exception.

    Restored are the parameters that moved, buffers (their contents and, where one was exchanged, the tensor itself),
    the training flags of all modules, and torch's global random state. Not restored are ``grad`` and what else the
    block changes.

    Example:
        >>> layer = nn.Linear(1, 1, bias=False)
        >>> before = layer.weight.item()
        >>> with walking(layer) as perturber:
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
            perturber._end_()


@contextlib.contextmanager
def preserve_buffers(model: nn.Module) -> Iterator[None]:
    """Restore buffers and training flags after a block, to the bit, also after an exception."""
    places = [
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
            for module, name, buffer, copy in places:
                buffer.copy_(copy)
                module._buffers[name] = buffer
        for module, flag in flags:
            module.training = flag


def state_digests(model: nn.Module) -> dict[str, Any]:
    """Return what identifies the state of a model to the bit: to be compared before and after something."""
    state: dict[str, Any] = {f"parameter {name}": _sha256(value) for name, value in named_parameters(model).items()}
    state |= {f"buffer {name}": _sha256(value) for name, value in model.named_buffers()}
    state |= {f"training flag of {name or 'the model'}": module.training for name, module in model.named_modules()}
    return state


def _sha256(tensor: Tensor) -> tuple[object, ...]:
    flat = tensor.detach().contiguous().reshape(-1)
    raw = flat.view(torch.uint8).cpu().numpy().data if flat.numel() else b""
    return tuple(tensor.shape), tensor.dtype, hashlib.sha256(raw).hexdigest()
