"""Perturb a live model: put it at θ + λε, again and again, and leave it at θ, to the bit.

The parameters' own storage is never written. Meanwhile they read from a flat copy of those that move, which is refilled
for every step; at the end, also after an exception, each gets its own storage back. So no arithmetic has to be undone
and the model is never deep-copied: memory holds one flat copy and one or two flat directions besides the weights.
"""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from sparing.blocks import named_parameters, tied
from sparing.blocks.names import unwrap
from sparing.errors import UserError, require
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
            part.set_(pairs)

    def protect(self) -> None:
        """Let trainable parameters read from a copy of θ, so that whatever writes to them spares the originals."""
        params = self._params.items()
        self.to({name: one for name, one in params if one.requires_grad and one.is_floating_point()}, 0.0)

    def _add_parameters(self, vector: Vector) -> None:
        """Allocate flat copies for parameters that move for the first time."""
        known = {name for part in self._parts for name in part.params}
        fresh: dict[tuple[torch.device, torch.dtype], dict[str, nn.Parameter]] = {}
        for name, value in vector.items():
            why, do = "the model has no parameter of that name", "use the names of sparing.blocks.named_parameters"
            require(name in self._params, "direction", repr(name), why, do)
            parameter = self._params[name]
            if value.shape != parameter.shape:
                got, do = f"shapes {tuple(value.shape)} and {tuple(parameter.shape)}", "pass a vector of this model"
                raise UserError(f"direction at {name!r}", got=got, why="nothing is broadcast", do=do)
            fine = value.is_floating_point() and parameter.is_floating_point()
            got, why = f"{value.dtype} and {parameter.dtype}", "only floating numbers move"
            require(fine, f"direction at {name!r}", got, why, "leave it out")
            if name not in known:
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

    def set_(self, steps: Sequence[tuple[Vector, float]]) -> None:
        """Fill the flat tensor with θ + Σ step · vector, and let the parameters read from it."""
        torch._foreach_copy_(list(self._views.values()), list(self.originals.values()))
        for name, parameter in self.params.items():
            parameter.data = self._views[name]
        for vector, step in steps:
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
    flags = {module: module.training for module in model.modules()}
    try:
        yield
    finally:
        with torch.no_grad():
            for module, name, buffer, copy in saved:
                buffer.copy_(copy)
                # The block may have replaced the tensor itself, as "batch" statistics do
                module._buffers[name] = buffer
        for module, flag in flags.items():
            module.training = flag


@contextlib.contextmanager
def loading_states(model: nn.Module) -> Iterator[Callable[[Mapping[str, Tensor]], None]]:
    """Yield a function that copies a state into the model, in evaluation mode; entries the model lacks are ignored.

    Parameters, buffers, training flags and torch's random state are restored to the bit, also after an exception.
    """
    params, aliases = named_parameters(model), tied(model)
    buffers = dict(unwrap(model).named_buffers())

    def load(state: Mapping[str, Tensor]) -> None:
        for name, parameter in params.items():
            do = "pass states of this model"
            require(name in state, f"state at {name!r}", "nothing", "the model has this parameter", do)
            got = f"{state[name].dtype} for a model in {parameter.dtype}"
            holds = torch.promote_types(state[name].dtype, parameter.dtype) == parameter.dtype
            do = "pass the widest model as the live one, such as model.float()"
            require(holds, f"state at {name!r}", got, "its numbers would be rounded before they are measured", do)
            parameter.data.copy_(state[name])
        for alias, name in aliases.items():
            same = alias not in state or torch.equal(state[alias], state[name])
            why, do = "in the live model they are one tensor", "pass a live model that does not tie them"
            require(same, f"state at {alias!r}", f"other numbers than at {name!r}", why, do)
        for name, buffer in buffers.items():
            if name in state:
                buffer.copy_(state[name])

    with perturbing(model) as perturber, torch.no_grad():
        # A step of length 0 lets every parameter, frozen ones too, read from a copy: the originals are never written
        perturber.to({name: parameter.detach() for name, parameter in params.items()}, 0.0)
        model.eval()
        yield load


def live_model(models: Sequence[nn.Module | Mapping[str, Tensor]], model: nn.Module | None = None) -> nn.Module:
    """Return a live model to evaluate in: the given one, or the first among the models."""
    found = model or next((one for one in models if isinstance(one, nn.Module)), None)
    require(found is not None, "model", "states only", "weights are evaluated in a live model", "pass model=...")
    assert found is not None
    return found


def state_digests(model: nn.Module) -> dict[str, Any]:
    """Return digests of all parameters, buffers and training flags, to compare before and after something."""
    tensors = {f"parameter {name}": value for name, value in named_parameters(model).items()}
    state: dict[str, Any] = {}
    for name, tensor in {**tensors, **{f"buffer {name}": value for name, value in model.named_buffers()}}.items():
        flat = tensor.detach().contiguous().reshape(-1)
        raw = flat.view(torch.uint8).cpu().numpy().data if flat.numel() else b""
        state[name] = (tuple(tensor.shape), tensor.dtype, hashlib.sha256(raw).hexdigest())
    state |= {f"training flag of {name or 'the model'}": module.training for name, module in model.named_modules()}
    return state
