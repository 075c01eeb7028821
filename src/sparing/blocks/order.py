"""The order in which a model uses its parameters, seen by running a copy of it on fake tensors."""

from __future__ import annotations

import contextlib
import copy
import logging
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves, tree_map

from sparing.blocks.names import unwrap

# what a forward raises that reads a tensor's value, gets an odd input or lacks a kernel
FAILURES = (
    RuntimeError, TypeError, ValueError, AttributeError, LookupError, ArithmeticError, AssertionError, ImportError,
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Order:
    """When each parameter was used, counted in operations from the start of a forward."""

    first: dict[int, int] = field(default_factory=dict)  # ``id(parameter)`` -> its first use
    last: dict[int, int] = field(default_factory=dict)  # ``id(parameter)`` -> its last use
    error: Exception | None = None  # what stopped the forward before its end, if anything did
    complete: bool = False  # whether the forward came to its end


def observe(model: nn.Module, example: object, blocks: Sequence[nn.Module] = ()) -> Order:
    """Run a forward in which nothing is computed or allocated, and note which parameters each operation reads.

    The model itself is not run: a copy that shares its classes and settings is, with fake tensors for weights, no
    hooks, no wrappers and in evaluation mode. Of blocks of one kind one runs, and its output stands for the others'.
    """
    seen: dict[int, Any] = {}
    recorder = _Recorder()
    error: Exception | None = None
    try:
        # with a device, because a forward that makes tensors of its own would follow the caller's default
        with isolated(), torch.no_grad(), FakeTensorMode(allow_non_fake_inputs=True), torch.device("cpu"):
            fake = fake_module(unwrap(model), seen)
            _run_once_per_kind_([seen[id(block)] for block in blocks if id(block) in seen], recorder)
            inputs = tree_map(lambda leaf: fake_tensor(leaf, {}) if isinstance(leaf, Tensor) else leaf, example)
            with recorder:
                if isinstance(inputs, Mapping):
                    fake(**inputs)
                else:
                    fake(*(inputs if isinstance(inputs, tuple) else (inputs,)))
    except FAILURES as caught:
        # without its traceback, whose frames would hold the copy alive
        error = caught.with_traceback(None)
    # the recorder saw the fakes' ids; callers know the originals'
    back = {id(fake): original for original, fake in seen.items()}
    first = {back[key]: time for key, time in recorder.first.items() if key in back}
    last = {back[key]: time for key, time in recorder.last.items() if key in back}
    return Order(first, last, error, error is None)


def example_for(model: nn.Module) -> dict[str, Tensor] | None:
    """Form an input for a Hugging Face model from its configuration."""
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


@contextlib.contextmanager
def isolated() -> Iterator[None]:
    """Hide a forward that may fail: no warnings, no log of what cannot be faked, and no dispatch mode that sees it."""
    log = logging.getLogger("torch._subclasses.fake_tensor")
    before, log.disabled = log.disabled, True
    try:
        with warnings.catch_warnings(), _disable_current_modes():
            warnings.simplefilter("ignore")
            yield
    finally:
        log.disabled = before


class _Recorder(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts operations and notes which tensors each one reads."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.clock = 0
        self.first: dict[int, int] = {}
        self.last: dict[int, int] = {}

    def note(self, leaves: Iterable[object]) -> None:
        """Note one use of every parameter among the leaves, all at one time."""
        for leaf in leaves:
            if isinstance(leaf, nn.Parameter):
                self.first.setdefault(id(leaf), self.clock)
                self.last[id(leaf)] = self.clock
        self.clock += 1

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.note(tree_leaves((args, kwargs)))
        return func(*args, **(kwargs or {}))


def _run_once_per_kind_(fakes: list[nn.Module], recorder: _Recorder) -> None:
    """Let blocks of one class, with weights and inputs of the same shapes, run once in all."""
    outputs: dict[Any, Any] = {}

    def cached(fake: nn.Module) -> Callable[..., Any]:
        whole, held = fake.forward, list(fake.parameters())
        weights = tuple(parameter.shape for parameter in held)

        def forward(*args: Any, **kwargs: Any) -> Any:
            # also when the block is not run: its parameters are used at this time
            recorder.note(held)
            inputs = tuple(leaf.shape for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor))
            key = (type(fake), weights, inputs)
            if key not in outputs:
                outputs[key] = whole(*args, **kwargs)
            return outputs[key]

        return forward

    for fake in fakes:
        fake.__dict__["forward"] = cached(fake)


def fake_module(module: nn.Module, seen: dict[int, Any]) -> nn.Module:
    """Copy a module without weights, hooks or wrappers; ``seen`` maps the id of an original to its one copy."""
    module = unwrap(module)
    if id(module) in seen:
        return seen[id(module)]  # type: ignore[no-any-return]
    # without ``__init__``, which may draw weights and ask for arguments that nobody kept
    fake: nn.Module = object.__new__(type(module))
    seen[id(module)] = fake
    for name, value in module.__dict__.items():
        if "hooks" in name and isinstance(value, dict):
            value = type(value)()
        elif isinstance(value, Tensor):
            value = fake_tensor(value, seen)
        elif isinstance(value, list | dict | set):
            # a forward that appends to its own list must not reach the original's
            value = copy.copy(value)
        fake.__dict__[name] = value
    # ``Module.compile`` leaves the original's compiled call in this attribute, and a call would take it
    fake.__dict__ |= {"training": False, "_compiled_call_impl": None}
    # one that was patched in is bound to the original
    fake.__dict__.pop("forward", None)
    fake._parameters = {name: fake_tensor(value, seen) for name, value in module._parameters.items()}
    fake._buffers = {name: fake_tensor(value, seen) for name, value in module._buffers.items()}
    fake._modules = {
        name: None if child is None else fake_module(child, seen) for name, child in module._modules.items()
    }
    return fake


def fake_tensor(value: Any, seen: dict[int, Any]) -> Any:
    """Return the fake twin of a parameter, buffer or tensor; ``None`` for ``None``."""
    if value is None:
        return None
    if id(value) not in seen:
        twin = torch.empty(value.shape, dtype=value.dtype)
        # without gradients: torch refuses them for whole numbers, as in quantized weights
        seen[id(value)] = nn.Parameter(twin, requires_grad=False) if isinstance(value, nn.Parameter) else twin
    return seen[id(value)]
