"""What a parameter is while it cannot be read: its class says so, as torch's own ``UninitializedParameter`` does.

Only the class changes, and only between uses: inside a forward pass parameters are what they always were.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from sparing.errors import UserError

_attribute: Any = vars(torch._C.TensorBase)
_set_grad: Callable[[Tensor, Tensor | None], None] = _attribute["grad"].__set__
_LOOKS = {
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
"""What may be asked of a parameter without its values."""


class Owed(nn.Parameter):
    """One whose gradient the engine has taken and not yet used; an optimizer's slice may be one, too."""

    @property
    def grad(self) -> Tensor | None:
        """Refuses.

        Raises:
            UserError: Always.
        """
        raise UserError(
            "gradients", got="a look at .grad between engine.backward and engine.step",
            why="they are reduced and cut, no longer with the parameters",
            do="call engine.step(), with clip= or loss_scale= of shard_; engine.abandon() drops them",
        )  # fmt: skip

    @grad.setter
    def grad(self, value: Tensor | None) -> None:
        _set_grad(self, value)


def away(bucket: str, arrive: Callable[[], bool]) -> tuple[type[nn.Parameter], type[nn.Parameter]]:
    """Classes for the parameters of one bucket while they are away.

    Args:
        bucket: Its name.
        arrive: Waits for values that are on their way to this rank anyhow; False if only all ranks together can.

    Returns:
        One for parameters whose gradients are nobody's, one for those whose gradients the engine has.
    """

    class Away(nn.Parameter):
        """Refuses to be read."""

        @classmethod
        def __torch_function__(
            cls, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
        ) -> Any:
            if func not in _LOOKS and not arrive():
                raise UserError(
                    "weights", got=f"a use of {bucket}: {getattr(func, '__name__', func)}",
                    why="they are cut over the ranks, and whole only in the forward and backward pass of their block",
                    do="call engine.full_state_dict(), or stay inside engine.gathered(), on every rank",
                )  # fmt: skip
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **kwargs or {})

    class AwayOwed(Away, Owed):
        """Both."""

    return Away, AwayOwed
