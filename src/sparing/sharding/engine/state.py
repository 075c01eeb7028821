"""What an engine holds, and what a change of it needs: buckets that start and stop training, values that travel."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from sparing.blocks.names import named_buffers
from sparing.errors import require
from sparing.sharding.engine.buckets import Bucket
from sparing.sharding.engine.flow import Flow
from sparing.sharding.engine.gradients import Gradients
from sparing.sharding.engine.masters import Masters, slice_of
from sparing.sharding.engine.norms import Clip
from sparing.sharding.levels import Plan
from sparing.sharding.local.config import LocalSteps
from sparing.sharding.local.outer import Outer
from sparing.sharding.lowbit.residuals import Residual
from sparing.sharding.lowbit.wires import ChangeWires, GradientWires
from sparing.sharding.network.mesh import Mesh

SUMS = (torch.float64, torch.float32, torch.bfloat16, torch.float16)  # dtypes in which gradients can be summed


@dataclass(frozen=True, kw_only=True, slots=True)
class Settings:
    """How an engine works, besides its plan."""

    accumulate: int = 1  # micro-steps per optimizer step, s
    clip: float | Clip | None = None  # largest norm; a number: of the whole gradient, Euclidean
    prefetch: int = 1  # blocks gathered ahead
    reduce_dtype: torch.dtype | None = None  # of gradients on the wire; None: the accumulator's
    masters: bool = True  # whether 16-bit parameters have 32-bit copies that the optimizer changes
    # Factor on the loss, taken out of the gradients again. With one, a step whose gradients are not finite on any
    # rank is skipped on all.
    loss_scale: float | None = None
    check_every: int | None = None  # steps between two checks that replicas are equal
    local: LocalSteps | None = None  # steps of each group alone; None: all ranks take each step together

    def __post_init__(self) -> None:
        require(self.accumulate >= 1, "accumulate", self.accumulate, "it counts micro-steps", "pass 1 or more")
        require(self.prefetch >= 0, "prefetch", self.prefetch, "it counts blocks", "pass 0 or more")
        every = self.check_every
        require(every is None or every >= 1, "check_every", every, "it counts steps", "pass 1 or more, or None")
        fits = self.reduce_dtype is None or self.reduce_dtype in SUMS
        why, do = "sums of gradients in it round to nothing", f"pass {' or '.join(str(kind) for kind in SUMS)}, or None"
        require(fits, "reduce_dtype", self.reduce_dtype, why, do)
        fits = self.loss_scale is None or (self.loss_scale > 0 and math.isfinite(self.loss_scale))
        why, do = "it is a positive size", "pass a positive number, or None"
        require(fits, "loss_scale", self.loss_scale, why, do)
        _ = self.clipping

    @property
    def clipping(self) -> Clip | None:
        """What ``clip`` says in full."""
        return self.clip if self.clip is None or isinstance(self.clip, Clip) else Clip(self.clip)

    def check_step(self, given: int, *, complete: bool) -> None:
        """Refuse a step after so many backward passes if none of them was its last."""
        do = "call engine.backward for each; of fewer, the last with last=True"
        require(complete, "step", f"{given} backward passes", f"a step has {self.accumulate}", do)

    def master_dtype(self, dtype: torch.dtype) -> torch.dtype:
        """Dtype of accumulator and optimizer: 32 bits for 16-bit parameters unless ``masters`` is off."""
        return torch.float32 if self.masters and dtype.itemsize < 4 else dtype


class EngineState:
    """Model, mesh, hooks, optimizer and plans of an engine, with the counts of its steps."""

    def __init__(
        self, model: nn.Module, mesh: Mesh, settings: Settings, flow: Flow, masters: Masters, plans: Mapping[str, Plan]
    ) -> None:
        self.model, self.settings = model, settings
        # All ranks, and those that take a step together: with local steps those of my group.
        self.mesh, self.peers = mesh, mesh if settings.local is None else mesh.group
        self.outer = None if settings.local is None else Outer(settings.local, mesh)
        self.flow, self.masters, self.plans = flow, masters, dict(plans)
        self.micro_step = 0  # backward passes since the last step
        self.complete = False  # whether the last of this step has been
        self.steps = 0  # optimizer steps so far
        self.skipped = 0  # of those, skipped because a gradient was not finite
        self.closed = False
        # What low-bit wires owe, by bucket; kept while a bucket is frozen.
        self.residuals: dict[str, Residual] = {}
        self._known = {id(p) for p in model.parameters()}
        # of all ranks; those that a model makes later, such as masks as long as its rows, are each rank's own
        self.shared_buffers = tuple(named_buffers(model))
        for bucket in self.buckets:
            if bucket.trainable:
                self.attach_(bucket)
        flow.attach_(model)

    @property
    def buckets(self) -> tuple[Bucket, ...]:
        """All buckets, those outside the body first, then block by block."""
        return (*self.flow.roots, *(bucket for stage in self.flow.stages for bucket in stage.buckets))

    @property
    def optimizer(self) -> torch.optim.Optimizer:
        """The torch optimizer: its groups are the user's, its parameters flat slices; schedulers may hold it."""
        return self.masters.optimizer

    def levels(self, bucket: Bucket) -> tuple[int, int, int]:
        """Levels of parameters, gradients and optimizer state of a bucket, from 0 (whole) to the number of tiers."""
        return self.plans[bucket.name].levels(self.mesh.tiers)

    def attach_(self, bucket: Bucket) -> None:
        """Let a bucket train, with fresh optimizer state."""
        dtype = self.settings.master_dtype(bucket.dtype)
        _, level, optimizer_level = self.levels(bucket)
        self.masters.attach_(bucket, optimizer_level, dtype, lag=self.lags(bucket))
        if self.owes:
            self.owed(bucket)
        self.flow.gradients[bucket.name] = Gradients(
            bucket,
            level=level,
            optimizer_level=optimizer_level,
            dtype=dtype,
            wire_dtype=self.settings.reduce_dtype or dtype,
            slow=self._gradient_wires(bucket),
        )
        bucket.trainable = True

    def detach_(self, bucket: Bucket) -> None:
        """Let a bucket stop training; its gradients and optimizer state are freed."""
        self.masters.detach_(bucket)
        self.flow.gradients.pop(bucket.name).reset_()
        bucket.trainable = False

    def mark_taken_(self, taken: bool) -> None:
        """Say whether the engine has gradients of a step under way, which nobody else can use then."""
        for bucket in self._trained():
            bucket.mark_taken_(taken)
            self.masters.mark_taken_(bucket, taken)

    def _trained(self) -> list[Bucket]:
        return [bucket for bucket in self.buckets if bucket in self.masters]

    def lags(self, bucket: Bucket) -> bool:
        """Whether changes of a bucket's parameters cross the outermost axis in few bits, so that they lag behind."""
        level, _, optimizer_level = self.levels(bucket)
        slow = self.mesh.wires.slow
        return slow is not None and slow.lags(level, optimizer_level, self.mesh.tiers)

    def _gradient_wires(self, bucket: Bucket) -> GradientWires | None:
        mesh, slow = self.mesh, self.mesh.wires.slow
        if slow is None or mesh.slow_ring is None:
            return None
        return GradientWires(mesh.slow_ring, slow.grads, self.residuals.get(bucket.name))

    @property
    def owes(self) -> bool:
        """Whether low-bit wires of this engine have error feedback."""
        wire = self.mesh.wires.slow if self.settings.local is None else self.settings.local.wire
        return wire is not None and wire.feedback

    def owed(self, bucket: Bucket) -> Tensor:
        """What low-bit wires owe of a bucket's gradients here, made if it is not there."""
        if bucket.name not in self.residuals:
            self.residuals[bucket.name] = Residual(
                bucket.layout.size(self.mesh.tiers - 1),
                dtype=self.settings.master_dtype(bucket.dtype),
                # no outer step is skipped
                guarded=self.settings.loss_scale is not None and self.outer is None,
            )
        return self.residuals[bucket.name].value

    def _change_wires(self, bucket: Bucket) -> ChangeWires | None:
        slow, ring = self.mesh.wires.slow, self.mesh.slow_ring
        if slow is None or slow.changes is None or ring is None or not self.lags(bucket):
            return None
        return ChangeWires(ring, slow.changes, self.masters.values(bucket))

    def publish_(self, bucket: Bucket, *, exactly: bool = False) -> None:
        """Start to send changed values of the optimizer's slice to the ranks that keep them as parameters.

        ``exactly``: whatever the wires, parameters become what the masters round to.
        """
        level, _, optimizer_level = self.levels(bucket)
        mine, values = slice_of(bucket, optimizer_level), self.masters.values(bucket)
        slow = None if exactly else self._change_wires(bucket)
        if slow is None and (mine.data_ptr() != values.data_ptr() or mine.dtype != values.dtype):
            mine.copy_(values)
        if level == optimizer_level:
            return

        def note(store: Tensor) -> Tensor:
            self.masters.note_published_(bucket, mine)
            return store

        then = note if self.lags(bucket) else None
        bucket.set_pending_(self.peers.transitions.gather_(bucket.store, optimizer_level, level, then=then, slow=slow))

    def flush(self) -> None:
        """Wait for everything that is under way between ranks."""
        for bucket in self.buckets:
            bucket.wait_pending_()
