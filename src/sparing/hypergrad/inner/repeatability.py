"""Checks that a run is repeatable: later passes are compared with the first, and side effects of a loss are refused."""

from __future__ import annotations

import contextlib
import math
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode

from sparing.errors import UserError
from sparing.seeds import number as number_of

Key = tuple[str, int]

# Passes by different kernels are compared by the losses of this many first steps: rounding has not grown by then.
EARLY_STEPS = 2

# Elements of each leaf of θ that are compared where a run ends; the loss of every step is compared too.
SAMPLE = 16

# Kind of comparison -> the argument at fault, and what differed.
_MISMATCHES = {
    "loss": ("inner", "another loss at step {step} when the run was repeated"),
    "end": ("inner or optimizer", "other weights before step {step} when the run was repeated"),
    "path": ("path", "another value after step {step} when the run was repeated"),
    "psi": ("through", "another ψ when it was asked again"),
    "outer": ("outer", "another value at the same θ and φ"),
}


class FirstPass:
    """Losses and weights recorded in the first pass over a run; every later pass is compared with them."""

    def __init__(self) -> None:
        self._first: dict[Key, Any] = {}
        self._later: list[tuple[Key, Tensor]] = []
        self._highest: dict[str, float] = {}
        self._graph_checked = False
        self.eps = 0.0  # of the coarsest dtype recorded

    def first_graph(self) -> bool:
        """True on the first call only: the graph of one step is checked, for all steps."""
        first, self._graph_checked = not self._graph_checked, True
        return first

    def check_same(self, kind: str, step: int, value: Tensor) -> None:
        """Record the first value of (kind, step), and compare later ones with it."""
        key, now = (kind, step), value.detach().clone()
        self.eps = max(self.eps, torch.finfo(now.dtype).eps)
        # on a device, reading a value would stop the queue at each step: those wait for ``compare_pending``
        if now.device.type != "cpu":
            if key in self._first:
                self._later.append((key, now))
            else:
                self._first[key] = now
            return
        numbers = _to_list(now)
        if key in self._first:
            self._compare(key, self._first[key], numbers)
        else:
            self._first[key] = numbers
            self._highest[kind] = max(self._highest.get(kind, 0.0), _max_abs(numbers))

    def adopt_early_losses(self, other: FirstPass) -> None:
        """Compare this pass with one by other kernels too, by its first losses: later ones differ by grown rounding."""
        self._highest.setdefault("loss", 0.0)
        for step in range(EARLY_STEPS):
            key = ("loss", step)
            if key in other._first and key not in self._first:
                self._first[key] = other._first[key]

    def compare_pending(self) -> None:
        """Compare the values that are still on a device."""
        for key, now in self._later:
            numbers = _to_list(self._first[key])
            self._highest[key[0]] = max(self._highest.get(key[0], 0.0), _max_abs(numbers))
            self._compare(key, numbers, _to_list(now))
        self._later.clear()

    def signature(self, label: str, seed: int) -> tuple[float, float, float]:
        """What identifies this run: a hash of (label, seed), a weighted sum of recorded values, its rounding."""
        held = [x if isinstance(x, list) else _to_list(x) for x in self._first.values()]
        finite = [number for values in held for number in values if math.isfinite(number)]
        total = math.fsum(number * math.cos(place) for place, number in enumerate(finite))
        name = float(number_of(seed, label) % 2**52)
        return name, total, self.eps ** (2 / 3) * math.fsum(abs(number) for number in finite)

    def _compare(self, key: Key, first: Sequence[float], now: Sequence[float]) -> None:
        pair = first_difference(first, now, self.eps, self._highest[key[0]])
        if pair is not None:
            what, got = _MISMATCHES[key[0]]
            raise UserError(
                what, got=got.format(step=key[1]) + f" ({pair[0]:.9g}, then {pair[1]:.9g})",
                why="every pass must see the same run, or the gradient is of none",
                do="draw from torch's global generators or from the generator that batches and init are given, and "
                "keep counters, iterators and statistics out of it",
            )  # fmt: skip


def first_difference(
    first: Sequence[float], now: Sequence[float], eps: float, highest: float = 0.0
) -> tuple[float, float] | None:
    """The first pair of values that differ by more than rounding; ``highest``: the largest of their kind in the run."""
    # Two kernels for one formula differ by a few ε of the values, and later steps carry that on; another mask or batch
    # differs by per cents. ε^(2/3) lies between: 2e-5 in float32, 4e-11 in float64. A value near zero is known only to
    # the rounding of the largest one.
    tolerance = eps ** (2 / 3) * _max_abs(first) + 10 * eps * highest
    for a, b in zip(first, now, strict=True):
        if not (a == b or abs(a - b) <= tolerance or not (math.isfinite(a) or math.isfinite(b))):
            return a, b
    return None


def _to_list(value: Tensor) -> list[float]:
    values: list[float] = value.double().reshape(-1).tolist()
    return values


def _max_abs(numbers: Sequence[float]) -> float:
    return max((abs(number) for number in numbers if math.isfinite(number)), default=0.0)


def sample(theta: Sequence[Tensor]) -> Tensor:
    """A few elements of each leaf (at most 2·SAMPLE), spread evenly, so that the weights are not read whole."""
    flat = [leaf.detach().reshape(-1) for leaf in theta]
    return torch.cat([leaf[:: max(1, leaf.numel() // SAMPLE)] for leaf in flat])


class NoForeignWrites(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Refuses a function that writes into a tensor it did not create: weights, batches, statistics, module buffers."""

    def __init__(self, name: str = "inner") -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._name = name  # of the argument at fault
        self._created: set[StorageWeakRef] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        for target in _write_targets(func, args, kwargs):
            if target.numel() and _memory(target) not in self._created:
                raise UserError(
                    self._name, got=f"{func.name()} on a tensor that it did not make, {tuple(target.shape)}",
                    why="it must be a function of what it is given, and change nothing else",
                    do="write into a new tensor; batch norm: GroupNorm, track_running_stats=False or model.eval()",
                )  # fmt: skip
        result = func(*args, **kwargs)
        # views return memory of their arguments; lift_fresh is declared as a view of a tensor that nobody else holds
        if func is torch.ops.aten.lift_fresh.default or not any(one.alias_info for one in func._schema.returns):
            created = result if isinstance(result, list | tuple) else [result]
            self._created.update(_memory(one) for one in created if isinstance(one, Tensor))
        return result


def _memory(tensor: Tensor) -> StorageWeakRef:
    return StorageWeakRef(tensor.untyped_storage())  # type: ignore[no-untyped-call]


def _write_targets(func: Any, args: Any, kwargs: Any) -> Iterator[Tensor]:
    """The tensors that an operation writes into."""
    for place, argument in enumerate(func._schema.arguments):
        value = args[place] if place < len(args) else kwargs.get(argument.name)
        # the schemas of fused batch norms do not declare that they write their running statistics
        hidden = argument.name in {"running_mean", "running_var"} and _is_training(func, args, kwargs)
        if hidden or (argument.alias_info is not None and argument.alias_info.is_write):
            values = value if isinstance(value, list | tuple) else [value]
            yield from (one for one in values if isinstance(one, Tensor))


def _is_training(func: Any, args: Any, kwargs: Any) -> bool:
    """Whether a batch norm takes its statistics from the batch, and so updates those it keeps."""
    names = {argument.name: place for place, argument in enumerate(func._schema.arguments)}
    place = names.get("training", names.get("train", names.get("use_input_stats")))
    return place is not None and bool(args[place] if place < len(args) else kwargs.get("training", True))


HOOKS = "hooks on saved tensors inside a hypergradient"


def observe_only(hook: Callable[[Tensor], Any]) -> Callable[[Tensor], None]:
    """A tensor hook that may read a gradient but not change it."""
    # a hook fires again in the backward pass through the run, where what it gets is not a gradient of the inner loss

    def watched(gradient: Tensor) -> None:
        if hook(gradient) is not None:
            raise UserError(
                "inner", got="register_hook on a tensor, by a hook that changes its gradient",
                why="it would also change what is pulled back through the run",
                do="scale or reverse gradients by x * s + (x - x * s).detach()",
            )  # fmt: skip

    return watched


def refuse_once_differentiable(grads: Sequence[Tensor]) -> None:
    """Refuse an inner gradient whose graph contains a Function marked ``once_differentiable``."""
    # torch.autograd.grad with explicit inputs skips the node that would raise, and returns zero for it
    seen: set[Any] = set()
    waiting = [grad.grad_fn for grad in grads if grad.grad_fn is not None]
    while waiting:
        node = waiting.pop()
        if node in seen:
            continue
        seen.add(node)
        if node.name() == "torch::autograd::Error":
            raise UserError(
                "inner", got="an autograd.Function marked once_differentiable", why="a hypergradient is a second "
                "derivative, and torch takes that of this Function for zero",
                do="write its backward in differentiable operations, or use ZerothOrder",
            )  # fmt: skip
        waiting.extend(following for following, _ in node.next_functions if following is not None)


@contextlib.contextmanager
def _disable_hooks() -> Iterator[None]:
    """Disable hooks on saved tensors."""
    # torch's own ``disable_saved_tensors_hooks`` raises where hooks are active already
    api: Any = torch._C._autograd
    before = api._saved_tensors_hooks_get_disabled_error_message()
    api._saved_tensors_hooks_disable(HOOKS, False)
    try:
        yield
    finally:
        if before is None:
            api._saved_tensors_hooks_enable()
        else:
            api._saved_tensors_hooks_disable(before, False)


@contextlib.contextmanager
def no_recomputation(name: str, *, check_warning: bool = True, ignore_outer_hooks: bool = False) -> Iterator[None]:
    """Refuse a loss ("inner" or "outer") that recomputes activations or offloads them."""
    # Recomputation reads the module's own weights: by then ``functional_call`` has restored them. torch.func does not
    # support such hooks either.
    try:
        with contextlib.ExitStack() as stack:
            # hooks of the caller, who may measure what a graph saves, hide those of the loss: then nothing is refused
            if ignore_outer_hooks or torch._C._autograd._top_saved_tensors_default_hooks(True) is None:
                stack.enter_context(_disable_hooks())
            # each change of the filters makes Python forget which warnings it has shown, so this is done for one step
            if check_warning:
                stack.enter_context(warnings.catch_warnings())
                warnings.filterwarnings("error", message="None of the inputs have requires_grad")
            yield
    except (RuntimeError, UserWarning) as failure:
        message = str(failure)
        signs = (HOOKS, "support saved tensor hooks", "use_reentrant=True", "None of the inputs have requires_grad")
        if not any(sign in message for sign in signs):
            raise
        raise UserError(
            name, got="gradient checkpointing, or other hooks on saved tensors",
            why="what is computed again would see the module's own weights in place of those of the step",
            do="switch it off (model.gradient_checkpointing_disable()); Checkpointed() holds few steps at once instead",
        ) from failure  # fmt: skip
