"""What an engine holds, and what a change of it needs: buckets that start and stop training, values that travel."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import nn

from sparing.sharding.buckets import Bucket
from sparing.sharding.flow import Flow
from sparing.sharding.gradients import Gradients
from sparing.sharding.levels import Plan
from sparing.sharding.masters import Masters, own_slice
from sparing.sharding.mesh import Mesh
from sparing.sharding.settings import Settings


class EngineState:
    """Model, mesh, hooks, optimizer and plans of an engine, with the counts of its steps."""

    def __init__(
        self, model: nn.Module, mesh: Mesh, settings: Settings, flow: Flow, masters: Masters, plans: Mapping[str, Plan]
    ) -> None:
        self.model, self.mesh, self.settings = model, mesh, settings
        self.flow, self.masters, self.plans = flow, masters, dict(plans)
        self.micro_step = 0  # backward passes since the last step
        self.steps = 0  # optimizer steps so far
        self.skipped = 0  # of those, skipped because a gradient was not finite
        self.closed = False
        self._known = {id(p) for p in model.parameters()}
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
        self.masters.attach_(bucket, optimizer_level, dtype)
        self.flow.gradients[bucket.name] = Gradients(
            bucket,
            level=level,
            optimizer_level=optimizer_level,
            dtype=dtype,
            wire_dtype=self.settings.reduce_dtype or dtype,
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

    def publish_(self, bucket: Bucket) -> None:
        """Start to send changed values of the optimizer's slice to the ranks that keep them as parameters."""
        level, _, optimizer_level = self.levels(bucket)
        mine, values = own_slice(bucket, optimizer_level), self.masters.values(bucket)
        if mine.data_ptr() != values.data_ptr() or mine.dtype != values.dtype:
            mine.copy_(values)
        if level != optimizer_level:
            bucket.set_pending_(self.mesh.transitions.gather_(bucket.store, optimizer_level, level))

    def flush(self) -> None:
        """Wait for everything that is under way between ranks."""
        for bucket in self.buckets:
            bucket.wait_pending_()
