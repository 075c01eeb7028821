"""A forward pass as data: its operations in order, with the parameters that feed them, on tensors without numbers.

Attention is taken apart into its two products, so that what it divides logits by is an operand like any other.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from functools import wraps
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves, tree_map

from sparing.blocks.names import unwrap, walk
from sparing.blocks.order import FAILURES, fake_module, isolated

# Operations that give tensors of one number, and where that stands among their arguments.
_FILLS = {"full": 1, "full_like": 1, "new_full": 2, "scalar_tensor": 0}


@dataclass(frozen=True, slots=True)
class Ref:
    """Stands for a tensor in the arguments of an operation."""

    number: int


@dataclass(frozen=True, slots=True, eq=False)
class Operation:
    """One operation of ATen."""

    name: str  # without overload, and without the mark of one that writes in place: "mul" for "mul_.Scalar"
    module: str  # path of the innermost module whose forward pass ran
    call: Callable[..., Any]
    args: tuple[Any, ...]  # tensors replaced by ``Ref``
    kwargs: Mapping[str, Any]
    operands: tuple[int, ...]  # numbers of the tensors that it reads, in order
    results: tuple[int, ...]  # numbers of what it returns; -1 where it returns no tensor


@dataclass(eq=False)
class Trace:
    """What one forward pass did."""

    operations: list[Operation] = field(default_factory=list)
    shapes: list[tuple[int, ...]] = field(default_factory=list)  # by number of the tensor
    parameters: dict[int, str] = field(default_factory=dict)  # number -> canonical name of a parameter
    buffers: dict[int, str] = field(default_factory=dict)  # number -> path of a buffer
    values: dict[int, float] = field(default_factory=dict)  # number -> value of a tensor of one entry, where known
    inputs: set[int] = field(default_factory=set)
    outputs: set[int] = field(default_factory=set)
    # module path -> numbers of the tensors its forward pass was given, and of those it returned, at every call
    calls: dict[str, list[tuple[tuple[int, ...], tuple[int, ...]]]] = field(default_factory=dict)


class Untraceable(Exception):  # noqa: N818  (not an error of the user's: the caller turns it into one)
    """The forward pass could not be run without numbers; the message says why."""


def trace(
    model: nn.Module,
    example: Any,
    *,
    device: str = "cpu",
    edit: Callable[[Mapping[str, nn.Module]], None] | None = None,
) -> Trace:
    """Run a copy of a model on tensors without numbers and return what it did; the model is not run.

    Args:
        model: Any module, wrapped or not.
        example: Input of the model: tensor, tuple of arguments or mapping of keywords.
        device: Device that the tensors say they are on.
        edit: Changes the copy's modules, by path, before it runs.

    Raises:
        Untraceable: If the model does not accept the example, or its path hangs on numbers in tensors.
    """
    seen: dict[int, Any] = {}
    fast = torch.backends.mha.get_fastpath_enabled()
    try:
        # The fast path of torch's attention is one operation, which would hide its parts.
        torch.backends.mha.set_fastpath_enabled(False)
        with isolated(), torch.no_grad(), FakeTensorMode(allow_non_fake_inputs=True) as mode, torch.device(device):
            fake = fake_module(unwrap(model), seen)
            _run_all_experts_(seen.values())
            if edit is not None:
                edit({path: seen[id(module)] for path, module in walk(model)})
            recorder = _Recorder(mode)
            inputs = tree_map(lambda leaf: _blank(leaf) if isinstance(leaf, Tensor) else leaf, example)
            recorder.start(model, seen, inputs)
            with sdpa_kernel(SDPBackend.MATH), recorder:
                if isinstance(inputs, Mapping):
                    output = fake(**inputs)
                else:
                    output = fake(*(inputs if isinstance(inputs, tuple) else (inputs,)))
            recorder.trace.outputs = {recorder.number(leaf) for leaf in _tensors(output)}
    except FAILURES as error:
        text = str(error).strip()
        raise Untraceable(f"{type(error).__name__}: {text.splitlines()[0][:160] if text else ''}") from None
    finally:
        torch.backends.mha.set_fastpath_enabled(fast)
    return recorder.trace


class _Recorder(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Numbers tensors and notes operations."""

    def __init__(self, mode: FakeTensorMode) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.mode = mode
        self.trace = Trace()
        self.numbers: dict[int, int] = {}
        self.alive: list[Tensor] = []  # so that no id is used twice
        self.shared: dict[int, list[Tensor]] = {}  # storage -> tensors that look at it
        self.modules: list[str] = [""]

    def start(self, model: nn.Module, seen: Mapping[int, Any], inputs: Any) -> None:
        """Number parameters, buffers and inputs, and note where modules begin and end."""
        for path, module in reversed(list(walk(model))):  # a shared module keeps its first path
            fake, prefix = seen[id(module)], f"{path}." if path else ""
            fake.__dict__["forward"] = self.watched(fake, path)
            for local, parameter in fake._parameters.items():
                if parameter is not None:
                    self.trace.parameters[self.number(parameter)] = prefix + local
            for local, buffer in fake._buffers.items():
                original = module._buffers[local]
                if isinstance(buffer, Tensor) and isinstance(original, Tensor):
                    number = self.number(buffer)
                    self.trace.buffers[number] = prefix + local
                    if original.numel() == 1 and original.is_floating_point() and not original.is_meta:
                        with _disable_current_modes():
                            self.trace.values[number] = float(original)
        self.trace.inputs = {self.number(leaf) for leaf in _tensors(inputs)}

    def watched(self, fake: nn.Module, path: str) -> Callable[..., Any]:
        whole = fake.forward

        @wraps(whole)
        def forward(*args: Any, **kwargs: Any) -> Any:
            self.modules.append(path)
            given = tuple(self.number(leaf) for leaf in _tensors((args, kwargs)))
            try:
                output = whole(*args, **kwargs)
            finally:
                self.modules.pop()
            returned = tuple(self.number(leaf) for leaf in _tensors(output))
            self.trace.calls.setdefault(path, []).append((given, returned))
            return output

        return forward

    def number(self, tensor: Tensor) -> int:
        if id(tensor) not in self.numbers:
            self.renumber(tensor)
            if isinstance(tensor, FakeTensor):
                self.shared.setdefault(_storage(tensor), []).append(tensor)
        return self.numbers[id(tensor)]

    def renumber(self, tensor: Tensor) -> int:
        self.alive.append(tensor)
        self.trace.shapes.append(tuple(tensor.shape))
        number = self.numbers[id(tensor)] = len(self.trace.shapes) - 1
        value = tensor.constant if isinstance(tensor, FakeTensor) else tensor
        if value is not None and value.numel() == 1 and not value.is_meta:
            with _disable_current_modes():
                self.trace.values[number] = float(value)
        return number

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        packet = func.overloadpacket.__name__
        operands = tuple(self.number(leaf) for leaf in _tensors((args, kwargs)))
        if packet == "_local_scalar_dense" and operands[0] in self.trace.values:
            return self.trace.values[operands[0]]
        plain_args, plain_kwargs = tree_map(self.plain, (args, kwargs))
        output = func(*args, **kwargs)
        if not _tensors(output):  # questions about a tensor, such as its device
            return output
        written = [args[at] for at, one in enumerate(func._schema.arguments) if at < len(args) and _writes(one)]
        results = []
        for leaf in tree_leaves(output):
            if isinstance(leaf, Tensor):
                known = id(leaf) in self.numbers and any(leaf is one for one in written)
                results.append(self.renumber(leaf) if known else self.number(leaf))
            else:
                results.append(-1)
        name = packet.removesuffix("_") if written else packet
        done = Operation(name, self.modules[-1], func, plain_args, plain_kwargs, operands, tuple(results))
        self.trace.operations.append(done)
        if packet in _FILLS and isinstance(value := (*args, 0)[_FILLS[packet]], int | float):
            self.trace.values[results[0]] = float(value)
        self.evaluate(done)
        for tensor in written:
            self.spread(tensor)
        return output

    def plain(self, leaf: Any) -> Any:
        return Ref(self.number(leaf)) if isinstance(leaf, Tensor) else leaf

    def evaluate(self, done: Operation) -> None:
        """Compute a number from known ones, such as the root of a buffer."""
        values, single = (
            self.trace.values,
            [n for n in done.results if n >= 0 and not math.prod(self.trace.shapes[n]) > 1],
        )
        known = done.operands and all(number in values for number in done.operands)
        if not known or len(single) != 1 or single[0] in values or len(done.results) != 1:
            return
        with _disable_current_modes():
            try:
                args, kwargs = tree_map(
                    lambda leaf: (
                        torch.tensor(values[leaf.number], dtype=torch.float64) if isinstance(leaf, Ref) else leaf
                    ),
                    (done.args, dict(done.kwargs)),
                )
                kwargs.pop("device", None)
                values[single[0]] = float(done.call(*args, **kwargs))
            except FAILURES:
                return

    def spread(self, tensor: Tensor) -> None:
        """Number anew what looks at the storage of a tensor that was written to."""
        written = self.numbers[id(tensor)]
        for other in list(self.shared.get(_storage(tensor), [])) if isinstance(tensor, FakeTensor) else []:
            if other is not tensor:
                before, after = self.numbers[id(other)], self.renumber(other)
                call = torch.ops.aten.alias.default
                done = Operation(
                    "written", self.modules[-1], call, (Ref(before), Ref(written)), {}, (before, written), (after,)
                )
                self.trace.operations.append(done)


def _run_all_experts_(fakes: Iterable[Any]) -> None:
    """Let experts of transformers run in the form whose path does not hang on which of them were chosen."""
    configs: dict[int, Any] = {}
    for fake in fakes:
        config = fake.__dict__.get("config") if isinstance(fake, nn.Module) else None
        if hasattr(config, "_experts_implementation"):
            if id(config) not in configs:
                configs[id(config)] = (config, copy.copy(config))
                configs[id(config)][1]._experts_implementation = "batched_mm"
            fake.__dict__["config"] = configs[id(config)][1]


def _tensors(held: Any) -> list[Tensor]:
    found = []
    for leaf in tree_leaves(held):
        if isinstance(leaf, Tensor):
            found.append(leaf)
        elif hasattr(leaf, "__dict__") and not isinstance(leaf, nn.Module | type):
            found += [value for value in vars(leaf).values() if isinstance(value, Tensor)]
    return found


def _blank(leaf: Tensor) -> Tensor:
    return torch.empty(leaf.shape, dtype=leaf.dtype)


def _storage(tensor: Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)


def _writes(argument: Any) -> bool:
    return argument.alias_info is not None and argument.alias_info.is_write
