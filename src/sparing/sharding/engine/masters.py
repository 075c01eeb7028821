"""What the optimizer sees: one flat parameter for every bucket and parameter group, this rank's slice of it."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from sparing.errors import require
from sparing.sharding.engine.buckets import Bucket
from sparing.sharding.engine.freed import GradientTaken

# Parameters, or parameter groups, in; a torch optimizer out.
OptimizerFactory = Callable[[Any], torch.optim.Optimizer]
Value = TypeVar("Value")
_OF_GROUP = " of group "  # between name and group of a scalar that the groups of a bucket do not share


def slice_of(bucket: Bucket, level: int) -> Tensor:
    """View of my slice of a level, at least that of the parameters, inside the store."""
    offset, length = bucket.layout.within(level, bucket.level, bucket.mesh.coords)
    return bucket.store.narrow(0, offset, length)


def of_group(state: Mapping[str, Value], group: int) -> dict[str, Value]:
    """What ``Masters.state`` gives, for one parameter group, by the optimizer's own names."""
    split = [(*name.partition(_OF_GROUP), value) for name, value in state.items()]
    return {name: value for name, _, place, value in split if place in {"", str(group)}}


def tensor_of(number: Tensor | float) -> Tensor:
    """A plain number as a tensor of the same value; tensors stay."""
    return torch.tensor(number, dtype=torch.float64) if isinstance(number, float) else torch.as_tensor(number)


class Masters:
    """The optimizer, and which of its parameters belong to which bucket."""

    def __init__(self, factory: OptimizerFactory, options: Sequence[Mapping[str, Any]]) -> None:
        """Make the optimizer, over nothing yet; ``options`` are those of each parameter group."""
        # torch optimizers refuse an empty list of parameters, but not groups without parameters
        self.optimizer = factory([{"params": [], **given} for given in options])
        self.optimizer.register_state_dict_pre_hook(self._refuse_state)
        self._values: dict[str, Tensor] = {}
        self._segments: dict[str, list[tuple[int, nn.Parameter]]] = {}
        self._cut: set[str] = set()  # buckets of which the optimizer has a slice
        # My slice of the parameters as all ranks have them, of buckets whose parameters lag behind the masters.
        self._published: dict[str, Tensor] = {}
        self.plain: set[str] = set()  # of the state, what the optimizer keeps as numbers, not as tensors
        # Buckets with a segment for each parameter, because one had no gradient in a step.
        self._per_parameter: set[str] = set()

    def _refuse_state(self, optimizer: torch.optim.Optimizer) -> None:
        held = type(optimizer).__name__
        why, do = (
            "it is this rank's slices, which no other rank or plan could take",
            "call checkpoint.save(engine, folder)",
        )
        require(not self._cut, "optimizer.state_dict()", f"{held} under a plan that cuts its state", why, do)

    @property
    def options(self) -> list[dict[str, Any]]:
        """Of each parameter group, defaults included."""
        return [{k: v for k, v in group.items() if k != "params"} for group in self.optimizer.param_groups]

    def __contains__(self, bucket: Bucket) -> bool:
        """Whether a bucket trains."""
        return bucket.name in self._values

    def attach_(self, bucket: Bucket, level: int, dtype: torch.dtype, *, lag: bool = False) -> None:
        """Give the optimizer a bucket, without state; ``dtype`` is that of its arithmetic.

        ``lag``: parameters are not what masters round to, and ``note_published_`` says what they are.
        """
        bucket.wait_pending_()
        mine = slice_of(bucket, level)
        # A view of the store where the dtypes agree, else a copy.
        self._values[bucket.name] = mine if dtype == bucket.dtype and not lag else mine.to(dtype, copy=True)
        if lag:
            self._published[bucket.name] = mine.clone()
        if bucket.layout.size(level) < bucket.layout.padded:
            self._cut.add(bucket.name)
        self._segment_(bucket, bucket.ranges(level))

    def _segment_(self, bucket: Bucket, ranges: Sequence[tuple[int, int, int]]) -> None:
        made = []
        for group, offset, length in ranges:
            segment = nn.Parameter(self._values[bucket.name].narrow(0, offset, length))
            self.optimizer.param_groups[group]["params"].append(segment)
            made.append((group, segment))
        self._segments[bucket.name] = made

    def detach_(self, bucket: Bucket) -> None:
        """Take a bucket from the optimizer; its state is dropped."""
        self._drop_(bucket)
        self._per_parameter.discard(bucket.name)
        self._cut.discard(bucket.name)
        self._published.pop(bucket.name, None)
        del self._values[bucket.name]

    def _drop_(self, bucket: Bucket) -> None:
        for group, segment in self._segments.pop(bucket.name):
            # by identity: == of tensors compares elements
            held = self.optimizer.param_groups[group]["params"]
            held[:] = [other for other in held if other is not segment]
            self.optimizer.state.pop(segment, None)

    def values(self, bucket: Bucket) -> Tensor:
        """The live flat slice that the optimizer changes."""
        return self._values[bucket.name]

    def held(self, bucket: Bucket) -> list[Tensor]:
        """Masters of a bucket, and what was last published of it where its parameters lag behind."""
        known = (self._values.get(bucket.name), self._published.get(bucket.name))
        return [tensor for tensor in known if tensor is not None]

    def note_published_(self, bucket: Bucket, mine: Tensor) -> None:
        """Take note of my slice of the parameters as they are now; nothing where they are what masters round to."""
        if bucket.name in self._published:
            self._published[bucket.name].copy_(mine)

    def set_gradient_(self, bucket: Bucket, level: int, grad: Tensor, used: Collection[int]) -> None:
        """Hand over the flat gradient of my slice; parameters at places not in ``used`` had none on any rank."""
        # Parameters without a gradient are hidden from the optimizer, as with grad None under DDP: no weight decay, no
        # momentum, a step count of their own. Only buckets that have one pay for a segment per parameter.
        if len(used) < len(bucket.slots):
            self._split_by_parameter_(bucket, level)
        offset, fine = 0, bucket.name in self._per_parameter
        for index, (_, segment) in enumerate(self._segments[bucket.name]):
            segment.grad = grad.narrow(0, offset, segment.numel()) if not fine or index in used else None
            offset += segment.numel()

    def _split_by_parameter_(self, bucket: Bucket, level: int) -> None:
        """Give each parameter of a bucket a segment of its own, with its part of the state so far."""
        if bucket.name in self._per_parameter:
            return
        state = self.state(bucket)
        self._drop_(bucket)
        self._per_parameter.add(bucket.name)
        self._segment_(bucket, bucket.ranges(level, fine=True))
        if state:
            self.load_state_(bucket, state)

    def unused(self, bucket: Bucket) -> tuple[str, ...]:
        """Names of parameters that never had a gradient, so have no state; the same on every rank."""
        if bucket.name not in self._per_parameter:
            return ()
        segments = self._segments[bucket.name]
        states = [self.optimizer.state.get(segment) for _, segment in segments]
        # scalars of other groups may differ from the first step on, such as those that hold a product of betas
        ages: dict[int, set[str]] = {}
        for (group, _), state in zip(segments, states, strict=True):
            if state:
                ages.setdefault(group, set()).add(str(_scalars(state)))
        why, do = (
            "some had a gradient in steps where others had none",
            "save weights alone, by engine.full_state_dict()",
        )
        several = any(len(each) > 1 for each in ages.values())
        require(not several, "optimizer", f"states of several ages in {bucket.name}", why, do)
        return tuple(slot.name for slot, state in zip(bucket.slots, states, strict=True) if not state) if ages else ()

    def drop_state_(self, bucket: Bucket, level: int, names: Collection[str]) -> None:
        """Drop the optimizer's state of parameters that ``unused`` named."""
        if names:
            self._split_by_parameter_(bucket, level)
            for slot, (_, segment) in zip(bucket.slots, self._segments[bucket.name], strict=True):
                if slot.name in names:
                    self.optimizer.state.pop(segment, None)

    def drop_gradient_(self, bucket: Bucket) -> None:
        """Set the gradients of a bucket to None."""
        for _, segment in self._segments[bucket.name]:
            segment.grad = None

    def mark_taken_(self, bucket: Bucket, taken: bool) -> None:
        """Let the optimizer's own step refuse while the engine holds gradients for it, or no longer."""
        for _, segment in self._segments[bucket.name]:
            segment.__class__ = GradientTaken if taken else nn.Parameter

    def take_edits_(self, bucket: Bucket, level: int) -> None:
        """Where the user has changed the parameters since the last step, that change counts, not the master copy."""
        values, params = self._values[bucket.name], slice_of(bucket, level)
        # A master is left alone where the parameter is what it rounds to, or what was last published; elsewhere the
        # user wrote the parameter.
        if (seen := self._published.get(bucket.name)) is None and params.dtype != values.dtype:
            seen = values.to(params.dtype)
        if seen is not None:
            torch.where(params != seen, params.to(values.dtype), values, out=values)

    def state(self, bucket: Bucket) -> dict[str, Tensor]:
        """The optimizer's state of a bucket, by name: flat slices, 0-d for scalars; empty before the first step.

        A scalar that parameter groups do not share has a name for each of them, which ``of_group`` takes apart.
        """
        segments = [segment for _, segment in self._segments[bucket.name]]
        states = [self.optimizer.state.get(segment, {}) for segment in segments]
        names = {k: v for state in states for k, v in state.items() if isinstance(v, Tensor | int | float)}
        found = {}
        for name, example in names.items():
            if isinstance(example, Tensor) and example.ndim:
                parts = [state.get(name, torch.zeros_like(seg)) for state, seg in zip(states, segments, strict=True)]
                found[name] = torch.cat([part.detach() for part in parts])
                continue
            held = zip(self._segments[bucket.name], states, strict=True)
            by_group = {group: tensor_of(state[name]) for (group, _), state in held if name in state}
            shared = len({value.item() for value in by_group.values()}) == 1
            for group, value in by_group.items():
                key = name if shared else f"{name}{_OF_GROUP}{group}"
                found[key] = value.clone()
                if not isinstance(example, Tensor):
                    self.plain.add(key)
        return found

    def load_state_(self, bucket: Bucket, state: Mapping[str, Tensor]) -> None:
        """Give the optimizer what ``state`` returned, perhaps of another slicing."""
        offset = 0
        for group, segment in self._segments[bucket.name]:
            held = self.optimizer.state[segment] if state else {}
            for name, key in of_group({key: key for key in state}, group).items():
                value = state[key]
                part = value if value.ndim == 0 else value.narrow(0, offset, segment.numel())
                held[name] = value.item() if key in self.plain else part.clone()
            offset += segment.numel()


def _scalars(state: Mapping[str, Any]) -> dict[str, Any]:
    return {k: v for k, v in state.items() if isinstance(v, Tensor | int | float) and not getattr(v, "ndim", 0)}
