"""What a parameter is while it cannot be read: its class says so, as torch's own ``UninitializedParameter`` does.

Only the class changes, and only between uses: inside a forward pass parameters are what they always were. What autograd
has saved of a parameter knows no class, but the version at which it was saved: while away, it is at another.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from sparing.errors import UserError

_attribute: Any = vars(torch._C.TensorBase)
_set_grad: Callable[[Tensor, Tensor | None], None] = _attribute["grad"].__set__
# What may be asked of a parameter without its values.
_METADATA = {
    *(
        _attribute[name].__get__
        for name in (
            "shape", "dtype", "device", "layout", "ndim", "is_leaf", "requires_grad", "is_cuda", "grad",
            "grad_fn", "is_sparse", "is_quantized", "is_nested", "is_meta", "itemsize", "nbytes", "_version",
            "_post_accumulate_grad_hooks",
        )
    ),
    Tensor.size, Tensor.numel, Tensor.dim, Tensor.nelement, Tensor.element_size, Tensor.is_floating_point,
    Tensor.is_complex, Tensor.requires_grad_, _attribute["requires_grad"].__set__, Tensor.register_hook,
    Tensor.is_inference, Tensor.is_contiguous, Tensor.stride, Tensor.storage_offset, Tensor.get_device,
    Tensor.__hash__, Tensor.register_post_accumulate_grad_hook, _set_grad, torch.is_floating_point, torch.is_complex,
    torch.autograd.grad,
}  # fmt: skip

FREED_VERSION = 2**31  # of freed parameters; nobody writes that often into one that is here
# Views that autograd saved of the flat tensor know no class. Without another version, backward through them would read
# what the next gather has not filled yet, and train on it silently.
_set_versions: Callable[[tuple[Tensor, ...], tuple[int, ...]], None] = torch._C._autograd._unsafe_set_version_counter


def swap_versions_(parameters: Sequence[Tensor], versions: Sequence[int]) -> list[int]:
    """Set the version counters that autograd checks saved tensors against; return the previous ones."""
    were = [parameter._version for parameter in parameters]
    _set_versions(tuple(parameters), tuple(versions))
    return were


@contextmanager
def explain_freed_uses() -> Iterator[None]:
    """Turn autograd's complaint about a version of freed parameters into one that says what to do."""
    try:
        yield
    except RuntimeError as error:
        if f"is at version {FREED_VERSION};" not in str(error):
            raise
        raise UserError(
            "loss", got="a gradient inside a block before that of what the block returned, whose weights are away",
            why="a tensor left the block beside what it returned, made of its weights without a module",
            do="return that tensor too, or compute it in a module of its own inside the block",
        ) from error  # fmt: skip


class GradientTaken(nn.Parameter):
    """A parameter, or a slice of the optimizer, whose gradient the engine has taken and not yet used."""

    @property
    def grad(self) -> Tensor | None:
        """Refuses: the gradient is reduced and cut by now."""
        raise gradient_taken()

    @grad.setter
    def grad(self, value: Tensor | None) -> None:
        _set_grad(self, value)


def gradient_taken() -> UserError:
    """What a look at a gradient says that the engine has taken."""
    return UserError(
        "gradients", got="a look at .grad between engine.backward and engine.step",
        why="they are reduced and cut, no longer with the parameters",
        do="call engine.step(), with clip= (a number, or Clip) or loss_scale= of shard_; engine.abandon() drops them",
    )  # fmt: skip


def freed_classes(bucket: str, arrive: Callable[[], bool]) -> tuple[type[nn.Parameter], type[nn.Parameter]]:
    """Classes for the parameters of a freed bucket: one for ordinary ones, one for those with gradients in the engine.

    ``arrive`` waits for values that are on their way to this rank anyway; False if that takes all ranks together.
    """

    class Freed(nn.Parameter):
        """Refuses to be read."""

        # read by other packages that would write into the weights, such as masks of ``scaling``
        numbers_are_away = True

        @classmethod
        def __torch_function__(
            cls, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
        ) -> Any:
            if func not in _METADATA and not arrive():
                raise UserError(
                    "weights", got=f"a use of {bucket}: {getattr(func, '__name__', func)}",
                    why="they are cut over the ranks, and whole only in the forward and backward pass of their block",
                    do="call engine.full_state_dict(), or stay inside engine.gathered(), on every rank",
                )  # fmt: skip
            # as ``Parameter`` does: what an allowed function returns is an ordinary tensor
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **kwargs or {})

    class FreedGradientTaken(Freed, GradientTaken):
        """Both."""

    return Freed, FreedGradientTaken
