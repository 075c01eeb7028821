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
    """Drop gradients where matrices of a pruned model (more than 1 % zeros, ``live_masks``) are zero."""
    # Masking gradients as they come has three effects: AdamW holds zero moments for these weights and moves them by
    # exactly nothing, decay shrinks nothing to nothing, and clipping counts live weights alone.
    params = named_parameters(model)
    live = live_masks(model, params, masks="zeros") if wanted else {}
    why, do = "no matrix has more than 1 % zeros", "pass a pruned model, or omit --keep-zeros"
    require(bool(live) or not wanted, "keep_zeros", "a dense model", why, do)
    handles = []
    for name, mask in live.items():
        # torch takes a hook only while the parameter trains, and a frozen block may be unfrozen later.
        trains = params[name].requires_grad
        handles.append(params[name].requires_grad_(True).register_hook(_ZeroMask(~mask)))  # type: ignore[no-untyped-call]
        params[name].requires_grad_(trains)
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


class _ZeroMask:
    """Zeroes a gradient where the weight is dead."""

    def __init__(self, dead: Tensor) -> None:
        self.dead = dead

    def __call__(self, grad: Tensor) -> Tensor:
        return grad.masked_fill(self.dead.to(grad.device), 0.0)
