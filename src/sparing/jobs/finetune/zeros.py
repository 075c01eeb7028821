"""A pruned model stays pruned: what is exactly zero gets no gradient, so no step ever moves it."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from torch import Tensor, nn

from sparing.blocks import named_parameters
from sparing.errors import require
from sparing.valley.selection import live_masks


@contextlib.contextmanager
def keeping_zeros(model: nn.Module, wanted: bool) -> Iterator[None]:
    """Drop gradients where matrices of a pruned model are zero, whatever freezes and thaws them meanwhile.

    AdamW then holds zero moments for these weights and moves them by exactly nothing; decay shrinks nothing to
    nothing. Gradients are masked as they come, so that clipping counts live weights alone.

    Args:
        model: Whose zeros count: matrices with more than 1 % of them (``live_masks``).
        wanted: Whether to.

    Yields:
        Nothing; gradients are whole again afterwards.

    Raises:
        UserError: If no matrix has zeros to keep.
    """
    params = named_parameters(model)
    live = live_masks(model, params, masks="zeros") if wanted else {}
    why, do = "no matrix has more than 1 % zeros", "pass a pruned model, or leave --keep-zeros away"
    require(bool(live) or not wanted, "keep_zeros", "a dense model", why, do)
    handles = []
    for name, mask in live.items():
        trains = params[name].requires_grad
        handles.append(params[name].requires_grad_(True).register_hook(_Without(~mask)))  # type: ignore[no-untyped-call]
        params[name].requires_grad_(trains)
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


class _Without:
    """A gradient with zeros where something is dead."""

    def __init__(self, dead: Tensor) -> None:
        self.dead = dead

    def __call__(self, grad: Tensor) -> Tensor:
        return grad.masked_fill(self.dead.to(grad.device), 0.0)
