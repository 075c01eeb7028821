"""A ledger of live tensors: every storage that torch operations allocate, until the last reference goes."""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from types import TracebackType
from typing import Any, Self

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.optim import Optimizer
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.hooks import RemovableHandle

from sparing.memory.book import Book
from sparing.memory.internals import (
    fake_device,
    has_cpu_kernel,
    inside_backward,
    is_symbolic_zero,
    is_view,
    key_of,
    leaves,
    on_cpu_under,
)
from sparing.memory.sizes import PHASES, Bytes, Category, Phase, Profile

_ADD = torch.ops.aten.add.Tensor


class Ledger(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Count live bytes by category while the block runs, on real and on fake tensors alike.

    A storage is counted once, whatever number of views it has, with the size that was asked for: allocator rounding,
    workspaces inside kernels and memory that torch operations did not allocate are not seen. What counts as what:

    - ``params``: parameters and buffers of the model.
    - ``grads``: what ``.grad`` of a parameter holds, from its creation as a result of the backward pass.
    - ``optimizer``: tensors in the state of the optimizers, from their creation inside ``step``.
    - ``activations``: created outside backward pass and step, or inside a backward pass with gradients enabled
      (recomputation under activation checkpointing); the inputs given here.
    - ``transient``: everything else created inside a backward pass or a step.

    Operations run several times slower inside the block, so watch a step or two, not a training run.

    Args:
        model: The module whose parameters and buffers are counted; flags may be switched meanwhile.
        *optimizers: Optimizers whose state is counted.
        inputs: Tensors that are alive for the whole step, such as the batch; any nesting of containers.
        device: Count only tensors on this type of device ("cuda"); by default all.

    Example:
        >>> layer = nn.Linear(3, 2)
        >>> optimizer = torch.optim.SGD(layer.parameters(), lr=0.1)
        >>> with Ledger(layer, optimizer) as ledger:
        ...     layer(torch.ones(5, 3)).sum().backward()
        ...     optimizer.step()
        >>> ledger.profile().phases["step"]
        Bytes(params=32, grads=32, optimizer=0, activations=0, transient=0)
    """

    def __init__(
        self, model: nn.Module, *optimizers: Optimizer, inputs: object = (), device: str | None = None
    ) -> None:
        """Remember what to watch; counting begins on entry."""
        super().__init__()  # type: ignore[no-untyped-call]
        self._model, self._optimizers, self._inputs, self._device = model, optimizers, inputs, device
        self._book = Book()
        self._finalizers: dict[int, weakref.ref[torch.UntypedStorage]] = {}
        self._handles: list[RemovableHandle] = []
        self._phases: dict[Phase, Bytes] = {}
        self._backward = False
        self._open_steps = 0
        self._stretch = ""
        self.stretches: dict[str, Bytes] = {}
        """Composition at the peak of each stretch that ``mark`` ended, in order of time (bytes)."""

    @property
    def now(self) -> Bytes:
        """Bytes alive at this moment, or at the end of the block."""
        return self._book.now

    @property
    def peak(self) -> Bytes:
        """Bytes alive at the instant of the largest total."""
        return self._book.peak

    def profile(self) -> Profile:
        """Return the peak and the last step's phases.

        The end of the forward pass is the entry into backward, when the gradient of the loss itself exists; a phase
        that was not seen, such as the step of an optimizer that runs inside backward, has the bytes alive at the end.

        Returns:
            Bytes by category at the peak, and by phase of the last step.
        """
        peak, now = self.peak, self.now
        return Profile(
            peak.params, peak.grads, peak.optimizer, peak.activations, peak.transient,
            phases={phase: self._phases.get(phase, now) for phase in PHASES},
        )  # fmt: skip

    def reset_peak(self) -> None:
        """Forget the peak so far, for example after a first step that has no optimizer state yet."""
        self._book.reset_peak()

    def mark(self, name: str) -> None:
        """End a stretch of the block and begin another, each with a peak of its own: ``stretches``.

        Args:
            name: Name of the stretch that begins; what came before the first call belongs to none.
        """
        if self._stretch:
            self.stretches[self._stretch] = self._book.peak
        self._book.reset_peak()
        self._stretch = name

    def __enter__(self) -> Self:
        for tensor in (*self._model.parameters(), *self._model.buffers()):
            self._categorize(tensor.data, "params")
        for tensor in tree_leaves(self._inputs):
            self._categorize(tensor, "activations")
        self._categorize_gradients()
        self._categorize_state()
        self._book.reset_peak()
        self._watch_gradients()
        for optimizer in self._optimizers:
            self._handles.append(optimizer.register_step_pre_hook(self._before_step))
            self._handles.append(optimizer.register_step_post_hook(self._after_step))
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        super().__exit__(kind, error, trace)  # type: ignore[no-untyped-call]
        self._book.settle()
        self._finalizers.clear()
        for handle in self._handles:
            handle.remove()
        self._handles.clear()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run the operation and enter the storages it allocated."""
        # more often than all else
        if (device := fake_device(func, args)) is not None:
            return device
        # a tensor made of others, such as a quantized one: the operations it consists of come here in their turn
        if any(hasattr(kind, "__tensor_flatten__") for kind in types):
            return NotImplemented
        self._book.settle()
        inside = inside_backward()
        if inside and not self._backward:
            self._phases = {"forward": self._book.now}
        self._backward = inside
        out = self._run(func, args, kwargs or {})
        # Autograd sums two gradients in place of the first, but out of place under any dispatch mode. The result
        # therefore counts only once the operands are gone: what runs without a ledger never holds all three. A first
        # one that is a view, as a linear map's weight gradient is, shares its storage and is not written to.
        differentiates = self._backward and not torch.is_grad_enabled()  # recomputation under checkpointing has grad on
        in_place = func is _ADD and differentiates and not is_view(args[0])
        category: Category = "transient" if self._open_steps or differentiates else "activations"
        foreign = {key for tensor in leaves(args) if (key := _key(tensor)) is not None and key not in self._book}
        # a view of what was there before the block is nothing new
        if foreign and getattr(func, "is_view", False):
            return out
        for tensor in _tensors(out):
            if _key(tensor) not in foreign:
                self._enter(tensor, category, settle=not in_place)
        return out

    def _run(self, func: Any, args: Any, kwargs: Any) -> Any:
        if not _is_foreign(func, args):
            return func(*args, **kwargs)
        return on_cpu_under(self, func, args, kwargs)

    def _enter(self, tensor: Tensor, category: Category, *, settle: bool = True) -> None:
        if self._device is not None and tensor.device.type != self._device:
            return
        if is_symbolic_zero(tensor):
            return
        storage = tensor.untyped_storage()
        key = key_of(storage)
        if key in self._book:
            self._book.resize(key, storage.nbytes())
            return
        self._book.allocate(key, storage.nbytes(), category, settle=settle)
        # the storage itself, not a tensor: views keep it alive after the tensor that made it is gone
        self._finalizers[key] = weakref.ref(storage, lambda _: self._on_freed(key))

    def _on_freed(self, key: int) -> None:
        # after the block the finalizers are forgotten, so that the book keeps what lived at its end
        if self._finalizers.pop(key, None) is not None:
            self._book.free(key)

    def _categorize(self, tensor: Tensor | None, category: Category) -> None:
        for part in _tensors(tensor):
            self._enter(part, category)
            key = key_of(part.untyped_storage())
            if key in self._book:
                self._book.move(key, category)

    def _categorize_gradients(self) -> None:
        for parameter in self._model.parameters():
            self._categorize(parameter.grad, "grads")

    def _categorize_state(self) -> None:
        for optimizer in self._optimizers:
            for leaf in tree_leaves(list(optimizer.state.values())):
                self._categorize(leaf, "optimizer")

    def _watch_gradients(self) -> None:
        for parameter in self._model.parameters():
            if not (parameter.is_floating_point() or parameter.is_complex()):
                continue  # quantized: it cannot have a gradient
            flag = parameter.requires_grad
            # torch refuses the hook on a frozen parameter, which may be thawed while the block runs
            parameter.requires_grad_(True)
            register: Any = parameter.register_post_accumulate_grad_hook
            self._handles.append(register(lambda grown: self._categorize(grown.grad, "grads")))
            parameter.requires_grad_(flag)

    def _before_step(self, *_: object) -> None:
        self._open_steps += 1
        self._categorize_gradients()
        if not inside_backward():
            self._phases.setdefault("backward", self._book.now)

    def _after_step(self, *_: object) -> None:
        self._open_steps -= 1
        self._categorize_state()
        if not inside_backward():
            self._phases["step"] = self._book.now


def _is_foreign(func: Any, args: Any) -> bool:
    """Whether an operation is that of a library beside torch, and runs on real tensors of the CPU."""
    if func.namespace != "bitsandbytes" or not has_cpu_kernel(func):
        return False
    tensors = [leaf for leaf in tree_leaves(args) if isinstance(leaf, Tensor)]
    return bool(tensors) and all(t.device.type == "cpu" and not isinstance(t, FakeTensor) for t in tensors)


def _key(thing: object) -> int | None:
    """The storage of a dense tensor; None for anything else."""
    if not isinstance(thing, Tensor) or thing.layout is not torch.strided or is_symbolic_zero(thing):
        return None
    return key_of(thing.untyped_storage())


def _tensors(out: object) -> Iterator[Tensor]:
    """Yield the dense tensors of an operation's result, the parts of a sparse one."""
    if isinstance(out, Tensor):
        if out.layout is torch.sparse_coo:
            yield from (out._indices(), out._values())
        else:
            yield out
    elif isinstance(out, list | tuple):
        for item in out:
            yield from _tensors(item)
