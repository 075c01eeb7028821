"""What the optimizer sees: one flat parameter for every bucket and parameter group, this rank's slice of it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from sparing.sharding.buckets import Bucket

OptimizerFactory = Callable[[Any], torch.optim.Optimizer]
"""Parameters, or parameter groups, in; a torch optimizer out."""


def master_of(bucket: Bucket, level: int, dtype: torch.dtype) -> Tensor:
    """The values that the optimizer changes: a view of the store where the dtypes agree, else a copy.

    Args:
        bucket: Whose values; nothing may be writing into its store.
        level: Of the optimizer, at least that of the parameters.
        dtype: Of the optimizer's arithmetic.

    Returns:
        My slice at ``level``.
    """
    bucket.settle_()
    own = own_slice(bucket, level)
    return own if dtype == bucket.dtype else own.to(dtype)


def own_slice(bucket: Bucket, level: int) -> Tensor:
    """View of my slice of a level inside the store.

    Args:
        bucket: Whose store.
        level: At least that of the parameters.

    Returns:
        The view.
    """
    offset, length = bucket.layout.within(level, bucket.level, bucket.mesh.coords)
    return bucket.store.narrow(0, offset, length)


class Masters:
    """The optimizer, and which of its parameters belong to which bucket."""

    def __init__(self, factory: OptimizerFactory, options: Sequence[Mapping[str, Any]]) -> None:
        """Make the optimizer, over nothing yet.

        Args:
            factory: Makes it from parameter groups.
            options: Of each parameter group, without its parameters.
        """
        self.optimizer = factory([{"params": [], **given} for given in options])
        self._values: dict[str, Tensor] = {}
        self._segments: dict[str, list[tuple[int, nn.Parameter]]] = {}

    def __contains__(self, bucket: Bucket) -> bool:
        """Whether a bucket trains."""
        return bucket.name in self._values

    def attach_(self, bucket: Bucket, level: int, dtype: torch.dtype) -> None:
        """Give the optimizer a bucket, without state.

        Args:
            bucket: Any that is not attached.
            level: Of the optimizer's slice.
            dtype: Of its arithmetic.
        """
        values = master_of(bucket, level, dtype)
        self._values[bucket.name] = values
        made = []
        for group, offset, length in bucket.ranges(level):
            segment = nn.Parameter(values.narrow(0, offset, length))
            self.optimizer.param_groups[group]["params"].append(segment)
            made.append((group, segment))
        self._segments[bucket.name] = made

    def detach_(self, bucket: Bucket) -> None:
        """Take a bucket from the optimizer; its state is dropped.

        Args:
            bucket: An attached one.
        """
        for group, segment in self._segments.pop(bucket.name):
            held = self.optimizer.param_groups[group]["params"]
            held[:] = [other for other in held if other is not segment]
            self.optimizer.state.pop(segment, None)
        del self._values[bucket.name]

    def values(self, bucket: Bucket) -> Tensor:
        """The flat slice that the optimizer changes.

        Args:
            bucket: An attached one.

        Returns:
            The live tensor.
        """
        return self._values[bucket.name]

    def set_gradient_(self, bucket: Bucket, grad: Tensor | None) -> None:
        """Hand a gradient over.

        Args:
            bucket: An attached one.
            grad: Flat, of the length of the slice; None takes it away.
        """
        offset = 0
        for _, segment in self._segments[bucket.name]:
            segment.grad = None if grad is None else grad.narrow(0, offset, segment.numel())
            offset += segment.numel()

    def state(self, bucket: Bucket) -> dict[str, Tensor]:
        """The optimizer's state of a bucket, by name: flat slices, and one value for what is a scalar.

        Args:
            bucket: An attached one.

        Returns:
            Name -> tensor; empty before the first step.
        """
        segments = [segment for _, segment in self._segments[bucket.name]]
        states = [self.optimizer.state.get(segment, {}) for segment in segments]
        names = {name: value for state in states for name, value in state.items() if isinstance(value, Tensor)}
        found = {}
        for name, example in names.items():
            if example.ndim == 0:
                found[name] = example.clone()
            else:
                parts = [state.get(name, torch.zeros_like(seg)) for state, seg in zip(states, segments, strict=True)]
                found[name] = torch.cat([part.detach() for part in parts])
        return found

    def put_state_(self, bucket: Bucket, state: Mapping[str, Tensor]) -> None:
        """Give the optimizer the state that ``state`` returned, perhaps of another slicing.

        Args:
            bucket: An attached one.
            state: Name -> flat slice, or a value.
        """
        offset = 0
        for _, segment in self._segments[bucket.name]:
            held = self.optimizer.state[segment] if state else {}
            for name, value in state.items():
                own = value if value.ndim == 0 else value.narrow(0, offset, segment.numel())
                held[name] = own.clone()
            offset += segment.numel()
