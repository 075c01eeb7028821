"""Forward and backward pass on fake tensors, in stretches and without an optimizer, whose state is known by itself."""

from __future__ import annotations

import contextlib
import inspect
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, Literal

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry, sdpa_flop_count

from sparing.blocks import submodule
from sparing.memory.fakes import KeptValues, cuda_kernels, fake_copy
from sparing.memory.internals import FakeMode
from sparing.memory.ledger import Ledger
from sparing.memory.sizes import Bytes
from sparing.memory.steps import Batch, Loss, Trainable, checkpoint_, freeze_, output_loss, values_read

_ATEN: Final = torch.ops.aten


def _attention(query: Tensor, key: Tensor, value: Tensor, *_: object, **__: object) -> int:
    return int(sdpa_flop_count(query.shape, key.shape, value.shape))  # type: ignore[no-untyped-call]


def _attention_backward(grad: Tensor, query: Tensor, key: Tensor, value: Tensor, *_: object, **__: object) -> int:
    return 2 * _attention(query, key, value)


def _grouped(left: Tensor, right: Tensor, *_: object, **__: object) -> int:
    """Every row meets the matrix of its own group."""
    return 2 * math.prod(left.shape[-2:]) * right.shape[-1] * (left.shape[0] if left.dim() == 3 else 1)


def _added(_: Tensor, left: Tensor, right: Tensor, *__: object, **___: object) -> int:
    return 2 * math.prod(left.shape) * right.shape[-1]


# what torch's own table of operations has no formula for: attention on the CPU, the product of sorted experts, and a
# product that is added in place
_MORE: Final[dict[Any, Callable[..., int]]] = {
    _ATEN._scaled_dot_product_flash_attention_for_cpu: _attention,
    _ATEN._scaled_dot_product_flash_attention_for_cpu_backward: _attention_backward,
    _ATEN._grouped_mm: _grouped,
    _ATEN.addmm_: _added,
}


class _CountingLedger(Ledger):  # type: ignore[no-untyped-call]
    """A ledger that also counts operations of matrix products and of attention; a multiply-add counts two."""

    flops = 0
    __torch_dispatch__ = inspect.unwrap(Ledger.__torch_dispatch__)

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Without torch's guard against being compiled, which every operation pays for: on fakes nothing compiles."""
        return False

    def _run(self, func: Any, args: Any, kwargs: Any) -> Any:
        out = super()._run(func, args, kwargs)
        packet = getattr(func, "_overloadpacket", None)
        if packet in _MORE:
            self.flops += _MORE[packet](*args)
        elif packet in flop_registry:
            self.flops += int(flop_registry[packet](*args, **kwargs, out_val=out))
        return out


@dataclass(frozen=True, kw_only=True, slots=True)
class Passes:
    """Bytes of the last micro-batch of a step, without those of an optimizer, and its operations."""

    stretches: Mapping[str, Bytes] = field(default_factory=dict)
    """Composition at the peak of each stretch: ``forward``, ``loss`` (the backward pass down to the first mark), and
    the stretch from the moment at which the gradient of each mark is there, by the mark's name."""

    forward: Bytes
    """Composition at the end of the forward pass."""

    backward: Bytes
    """Composition at the end of the backward pass."""

    flops: int
    """Operations of one micro-batch in matrix products and attention, a multiply-add counted as two."""

    @property
    def peak(self) -> Bytes:
        """Composition at the instant of the largest sum."""
        return max(self.stretches.values(), key=lambda held: held.total)


def trace(
    model: nn.Module,
    batch: Batch,
    *,
    trainable: Trainable | None = None,
    loss: Loss | None = None,
    checkpointing: bool = False,
    accumulates: bool = False,
    device: Literal["cpu", "cuda"] = "cpu",
    marks: Sequence[str] = (),
    entries: Sequence[str] = (),
) -> Passes:
    """Run forward and backward pass on fake tensors under a ledger.

    Args:
        model: A module on any device; only its shapes are read.
        batch: As of ``predict``.
        trainable: Names of the parameters that train, or a predicate; by default the flags of the model stay.
        loss: Model and batch -> scalar, shape (); by default ``model(**batch).loss``.
        checkpointing: Whether blocks recompute their activations.
        accumulates: Whether gradients of an earlier micro-batch are there.
        device: Whose habits to assume.
        marks: Dotted paths of modules; the stretch of each begins when the gradient of its result is there.
        entries: Dotted paths of modules; the stretch ``into PATH`` begins when the gradient of its input is there.

    Returns:
        Bytes by stretch.

    Raises:
        UserError: If an argument cannot work, or the step looks at the values of a tensor.
    """
    mode = FakeMode(allow_non_fake_inputs=True)
    fake = fake_copy(model, mode)
    loss_of = loss or output_loss
    kernels = cuda_kernels() if device == "cuda" else contextlib.nullcontext()
    with values_read(), mode, kernels, KeptValues(mode, batch) as values:
        if trainable is not None:
            freeze_(fake, trainable)
        if checkpointing:
            checkpoint_(fake)
        fake.train()
        given = values.batch()
        if accumulates:
            for parameter in fake.parameters():
                if parameter.requires_grad:
                    parameter.grad = torch.empty_like(parameter)
        with _CountingLedger(fake, inputs=given) as ledger, _marked(fake, marks, entries, ledger.mark):
            ledger.mark("forward")
            value = loss_of(fake, given)
            ledger.mark("loss")
            forward = ledger.now
            value.backward()  # type: ignore[no-untyped-call]
            del value
            ledger.mark("")
            backward = ledger.now
    return Passes(stretches=ledger.stretches, forward=forward, backward=backward, flops=ledger.flops)


@contextlib.contextmanager
def _marked(
    model: nn.Module, marks: Sequence[str], entries: Sequence[str], mark: Callable[[str], None]
) -> Iterator[None]:
    """Call ``mark`` when the gradients of results and of inputs are there."""
    handles = [submodule(model, path).register_forward_hook(_on_result(path, mark)) for path in marks]
    for path in entries:
        hook = _on_input(f"into {path}", mark)
        handles.append(submodule(model, path).register_forward_pre_hook(hook, with_kwargs=True))
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _on_result(name: str, mark: Callable[[str], None]) -> Callable[..., None]:
    return lambda module, inputs, result: _watch(result, name, mark)


def _on_input(name: str, mark: Callable[[str], None]) -> Callable[..., None]:
    return lambda module, inputs, named: _watch((inputs, named), name, mark)


def _watch(tensors: object, name: str, mark: Callable[[str], None]) -> None:
    """Hook onto the first tensor that a gradient will come to; a hook on a tensor keeps nothing alive."""
    found = next((leaf for leaf in tree_leaves(tensors) if isinstance(leaf, Tensor) and leaf.requires_grad), None)
    if found is not None:
        found.register_hook(lambda grad: mark(name))  # type: ignore[no-untyped-call]
