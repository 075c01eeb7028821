"""The order in which a model uses its parameters, seen by running a weightless copy on the meta device."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

from sparing.blocks.names import unwrap
from sparing.errors import UserError

# What a forward that asks for a tensor's value, an odd input or a missing kernel raises on the meta device.
_FAILURES = (
    RuntimeError,
    TypeError,
    ValueError,
    AttributeError,
    LookupError,
    ArithmeticError,
    AssertionError,
    ImportError,
)


@dataclass(frozen=True, slots=True)
class Order:
    """When each parameter was used, counted in operations from the start of a forward."""

    first: dict[int, int] = field(default_factory=dict)
    """``id(parameter)`` -> its first use."""

    last: dict[int, int] = field(default_factory=dict)
    """``id(parameter)`` -> its last use."""

    complete: bool = False
    """Whether the forward came to its end."""


def observe(model: nn.Module, example: object) -> Order:
    """Run a forward in which nothing is computed or allocated, and note which parameter each operation reads.

    The model itself is not run: a copy that shares its classes and settings, with meta tensors for parameters, no
    hooks, no wrappers and in evaluation mode, is.

    Args:
        model: Any module.
        example: A tensor, a tuple of positional or a mapping of keyword arguments; only shapes and dtypes matter.

    Returns:
        The order of use, up to the first operation that the meta device cannot do.
    """
    order, _ = _observe(model, example)
    return order


def observe_or_raise(model: nn.Module, example: object) -> Order:
    """Observe as ``observe`` does, for an example that the user gave.

    Args:
        model: Any module.
        example: As for ``observe``.

    Returns:
        The complete order of use.

    Raises:
        UserError: If the model does not accept the example, or needs the values of tensors to decide what to run.
    """
    order, error = _observe(model, example)
    if error is not None:
        raise UserError(
            "example",
            got=f"{type(error).__name__}: {str(error)[:200]}",
            why="the model could not run on it without data",
            do="pass what the model's forward accepts, or leave example out to go by the order of registration",
        ) from error
    return order


def example_for(model: nn.Module) -> dict[str, Tensor] | None:
    """Form an input for a Hugging Face model from its configuration.

    Args:
        model: A Hugging Face model of text or of pictures.

    Returns:
        Meta tensors by argument name, or ``None`` for other kinds of input.
    """
    config: Any = model.config
    name = getattr(model, "main_input_name", None)
    if name == "input_ids":
        names = ["input_ids", "decoder_input_ids"] if getattr(config, "is_encoder_decoder", False) else ["input_ids"]
        return {name: torch.empty(1, 4, dtype=torch.long, device="meta") for name in names}
    if name == "pixel_values" and isinstance(channels := getattr(config, "num_channels", None), int):
        size = getattr(config, "image_size", 64)
        height, width = size if isinstance(size, list | tuple) else (size, size)
        dtype = next((p.dtype for p in model.parameters() if p.is_floating_point()), torch.float32)
        return {name: torch.empty(1, channels, height, width, dtype=dtype, device="meta")}
    return None


class _Recorder(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts operations and notes which tensors each one reads."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.clock = 0
        self.first: dict[int, int] = {}
        self.last: dict[int, int] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        for leaf in tree_leaves((args, kwargs)):
            if isinstance(leaf, nn.Parameter):
                self.first.setdefault(id(leaf), self.clock)
                self.last[id(leaf)] = self.clock
        self.clock += 1
        return func(*args, **(kwargs or {}))


def _observe(model: nn.Module, example: object) -> tuple[Order, Exception | None]:
    """Run the copy and translate its parameters back; the error that stopped it is the second answer."""
    seen: dict[int, Any] = {}
    error: Exception | None = None
    recorder = _Recorder()
    try:
        ghost = _ghost(unwrap(model), seen)
        inputs = tree_map(lambda leaf: leaf.to("meta") if isinstance(leaf, Tensor) else leaf, example)
        with warnings.catch_warnings(), torch.no_grad(), recorder:
            warnings.simplefilter("ignore")
            if isinstance(inputs, Mapping):
                ghost(**inputs)
            else:
                ghost(*(inputs if isinstance(inputs, tuple) else (inputs,)))
    except _FAILURES as caught:
        error = caught
    back = {id(ghost): original for original, ghost in seen.items()}
    first = {back[key]: time for key, time in recorder.first.items() if key in back}
    last = {back[key]: time for key, time in recorder.last.items() if key in back}
    return Order(first, last, error is None), error


def _ghost(module: nn.Module, seen: dict[int, Any]) -> nn.Module:
    """Copy a module without weights, hooks or wrappers; ``seen`` maps the id of an original to its one copy."""
    module = unwrap(module)
    if id(module) in seen:
        return seen[id(module)]  # type: ignore[no-any-return]
    ghost: nn.Module = object.__new__(type(module))
    seen[id(module)] = ghost
    for name, value in module.__dict__.items():
        if "hooks" in name and isinstance(value, dict):
            value = type(value)()
        elif isinstance(value, Tensor):
            value = _weightless(value, seen)
        elif isinstance(value, list | dict | set):
            value = copy.copy(value)  # a forward that appends to its own list must not reach the original's
        ghost.__dict__[name] = value
    ghost.__dict__ |= {"training": False, "_compiled_call_impl": None}
    ghost.__dict__.pop("forward", None)  # one that was patched in is bound to the original
    ghost._parameters = {name: _weightless(value, seen) for name, value in module._parameters.items()}
    ghost._buffers = {name: _weightless(value, seen) for name, value in module._buffers.items()}
    ghost._modules = {name: child and _ghost(child, seen) for name, child in module._modules.items()}
    return ghost


def _weightless(value: Any, seen: dict[int, Any]) -> Any:
    """Return the meta twin of a parameter, buffer or tensor; ``None`` for ``None``."""
    if value is None:
        return None
    if id(value) not in seen:
        twin = torch.empty(value.shape, dtype=value.dtype, device="meta")
        seen[id(value)] = nn.Parameter(twin, requires_grad=False) if isinstance(value, nn.Parameter) else twin
    return seen[id(value)]
