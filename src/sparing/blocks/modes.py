"""Training flags and batch-norm statistics of a model within a block: changed for a purpose, and given back."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Iterator, Sequence

from torch import nn
from torch.nn.modules.batchnorm import _NormBase
from torch.nn.modules.instancenorm import _InstanceNorm


@contextlib.contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Put a model into evaluation mode within a block; every module gets its own training flag back."""
    # Flag by flag: restoring by train() would wake modules that the caller has frozen in evaluation mode
    flags = [(module, module.training) for module in model.modules()]
    try:
        model.eval()
        yield
    finally:
        for module, flag in flags:
            module.training = flag


@contextlib.contextmanager
def estimating(model: nn.Module, layers: Sequence[_NormBase]) -> Iterator[None]:
    """Clear the running statistics of norms; every batch run within the block counts the same in the new ones."""
    momenta, counters = [layer.momentum for layer in layers], []
    try:
        # The rest stays in evaluation mode: dropout would change the statistics of all layers after it
        with evaluating(model):
            for layer in layers:
                layer.reset_running_stats()
                layer.momentum = None  # torch's setting for a cumulative mean
                if isinstance(layer, _InstanceNorm):
                    # which takes it for 0, so that nothing would be counted
                    counters.append(layer.register_forward_pre_hook(_cumulative()))
                # Not train(): a subclass may hold children that must stay in evaluation mode
                layer.training = True
            yield
    finally:
        for handle in counters:
            handle.remove()
        for layer, momentum in zip(layers, momenta, strict=True):
            layer.momentum = momentum


def _cumulative() -> Callable[[nn.Module, object], None]:
    """A hook that gives the n-th batch a share of 1/n."""
    batches = itertools.count(1)

    def before(layer: nn.Module, inputs: object) -> None:
        layer.momentum = 1 / next(batches)  # type: ignore[assignment]  # a module's attributes are declared as modules

    return before
