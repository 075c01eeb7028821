"""The engine of plans on ``fully_shard``: a micro-step backward, a step of the optimizer, and ordinary weights."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from sparing.errors import UserError, require
from sparing.sharding.engine.norms import whole_norms
from sparing.sharding.engine.step_facts import buffers_of, exchange_facts, sync_buffers_
from sparing.sharding.fsdp.pipelines import check_handed, factor_of
from sparing.sharding.fsdp.state import FsdpState
from sparing.sharding.fsdp.units import Unit
from sparing.sharding.levels import Plan, as_plan, effective
from sparing.sharding.network.consistency import check_replicas, check_same
from sparing.sharding.planner.fsdp import shard_level

if TYPE_CHECKING:
    from torch.distributed.pipelining.schedules import _PipelineSchedule


class FsdpEngine(FsdpState):
    """A model that ``fully_shard`` gathers and frees, with gradients and optimizer state split by a plan.

    ``shard_(..., engine="fsdp2")`` makes it. ``backward`` takes the place of ``loss.backward()`` and ``step`` that of
    the optimizer's step; gradients are means over ranks and micro-steps. Parameters are DTensors between steps.
    """

    if not TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any:
            """Say why what our other engine has is not here."""
            raise AttributeError(
                f"engine: got {name}; our own engine has it, this one is fully_shard's, whose checkpoints go through "
                'engine.state_dict(); pass engine="sparing" to have it'
            )

    def backward(self, loss: Tensor, *, last: bool = False) -> None:
        """Run the backward pass of a micro-step and start to reduce its gradients.

        ``loss`` is the mean over this rank's rows, unless ``step`` is given a divisor. ``last`` ends a step of fewer
        micro-steps than ``accumulate``, such as that of the rows that an epoch leaves, on all ranks.
        """
        why = "nothing that it depends on trains"
        require(loss.requires_grad, "loss", "one without a gradient", why, "do not freeze all")
        last = self._begin_micro_step("backward", last)
        scaled = loss if self.settings.loss_scale is None else loss * self.settings.loss_scale
        # whole gradients stay on the ranks until the last micro-step, where the plan says so
        sent = last or self.plan.grads != "N"
        self._root.set_requires_gradient_sync(sent)
        self._now.enter_(last, holding=not sent)
        try:
            scaled.backward()  # type: ignore[no-untyped-call]
        except RuntimeError as error:
            if "storage of size 0" not in str(error):
                raise
            raise UserError(
                "loss", got="a gradient inside a block whose weights are away",
                why="a tensor left the block beside what it returned, or a gradient is differentiated again",
                do='return that tensor from the block, take a plan that begins with N, or pass engine="sparing"',
            ) from error  # fmt: skip
        finally:
            self._now.leave_()
        self._end_micro_step(last, sent)

    @contextmanager
    def pipeline(self, schedule: _PipelineSchedule, *, last: bool = False) -> Iterator[None]:
        """Take the gradients of one ``schedule.step(…)`` of ``torch.distributed.pipelining`` inside, as a micro-step.

        The model is the stage's, the mesh ``make_mesh(within=…, stages=…)``. As in torch the gradient is the mean over
        the schedule's micro-batches, or their sum with ``scale_grads=False``. Norm and clipping are over all stages.
        """
        factor = factor_of(schedule, self.model, self.mesh, self.settings, self._now)
        self._prepare_()
        last = self._begin_micro_step("pipeline", last)
        # torch finds shapes by passes of its own, which would send zeros
        self._root.set_requires_gradient_sync(False)
        self._now.enter_(last, holding=True, schedule=factor)
        try:
            yield
            check_handed(self.units, self._now)
        finally:
            self._now.leave_()
            for unit in self.units:
                # the schedule has left what torch begins with
                unit.module.set_reshard_after_backward(unit.cut, recurse=False)
        self._now.holding = False
        self._end_micro_step(last, sent=True)

    def _begin_micro_step(self, what: str, last: bool) -> bool:
        """Refuse one that cannot be; whether it is the step's last."""
        require(not self.closed, what, "closed", "the engine has ended", "shard another model")
        got = f"call {self.micro_step + 1} since the last step"
        require(not self.complete, what, got, "all micro-steps of the step have been", "call step() first")
        self._require_same_parameters()
        for unit in self.units:
            unit.check_hooks()
            unit.mark_taken_(False)
        return last or self.micro_step == self.settings.accumulate - 1

    def _end_micro_step(self, last: bool, sent: bool) -> None:
        lost = [unit.name for unit in self.units if sent and unit.waiting]
        why, do = "torch ends a backward pass where a block's output had a gradient", "let the loss depend on one"
        require(not lost, "loss", f"gradients of {lost[:1]} alone", why, do)
        for unit in reversed(self.units):
            unit.entered = 0
            if last:
                unit.sums.sync_()
            unit.mark_taken_(True)
        self.micro_step, self.complete = self.micro_step + 1, last

    def step(self, divisor: float | None = None) -> float:
        """Update the weights; return the norm of the whole gradient before clipping, the same on every rank.

        It is the Euclidean one, or of the type that ``Clip`` says, also where each parameter is clipped by its own.

        The sum of all losses' gradients is divided by ``divisor``, the same on every rank; None: ranks × micro-steps of
        this step. One that is not a number, on any rank, is for a step that ``loss_scale`` skips on all.
        """
        given = self.micro_step
        used = {unit.name: (unit.used, len(unit.names)) for unit in self.units}
        clip = self.settings.clipping
        buffers = buffers_of(self.model, self.shared_buffers)
        groups = self.optimizer.param_groups if self.armed else []
        agreed = exchange_facts(self.mesh, self.settings, given, divisor, used, buffers, groups)()
        self.settings.check_step(given, complete=self.complete)
        self._require_same_parameters()
        for unit in self.units:
            unit.mark_taken_(False)
        scale = 1 / (agreed.divisor * (self.settings.loss_scale or 1.0))
        order = 2.0 if clip is None else clip.norm_type
        sums: dict[Unit, Tensor] = {}
        parts: list[Tensor] = []
        slices: list[tuple[int, float]] = []
        # in the order in which they arrive
        for unit in reversed(self.units):
            found = unit.sums.result()
            if found is None:
                continue
            sums[unit] = found.mul_(scale)
            each = clip is not None and clip.each
            parts += unit.sums.views(found) if each else [found]
            slices += [(unit.sums.optimizer_level, share) for share in unit.powers(found, order, each=each)]
        norms = whole_norms(self.mesh, slices, order)
        if self.settings.loss_scale is None or math.isfinite(norms().whole):
            if clip is not None:
                norms().clip_(parts, clip)
            self._apply_(sums, agreed.used)
        else:
            self.skipped += 1
        sync_buffers_(self.mesh, self.model, agreed.differing)
        self._forget_step_()
        self.steps += 1
        if self.settings.check_every and self.steps % self.settings.check_every == 0:
            self.check()
        return norms().whole

    @torch.no_grad()
    def _apply_(self, sums: Mapping[Unit, Tensor], used: Mapping[str, Collection[int]]) -> None:
        optimizer = self.optimizer
        for unit, flat in sums.items():
            # what is whole would be of the step before; a frozen block may stay
            unit.module.reshard()
            unit.check_kinds()
            unit.take_edits_()
            unit.set_gradients_(flat, used[unit.name])
        optimizer.step()
        for store in [unit.publish_() for unit in self.units if unit in sums]:
            store()

    def _forget_step_(self) -> None:
        for unit in self.units:
            unit.mark_taken_(False)
            unit.reset_()
        self._root.set_requires_gradient_sync(True)
        self._now.reduction, self._now.holding = None, False
        self.micro_step, self.complete = 0, False

    def _require_same_parameters(self) -> None:
        held = self._flags()
        changed = [name for name in {**self._trains, **held} if self._trains.get(name) != held.get(name)]
        got = f"{changed[0]}, which is new, gone, frozen or thawed" if changed else ""
        why = "a step has one set of parameters, of those that shard_ found trainable"
        do = "freeze and thaw after engine.step() and before the next forward pass"
        require(not changed, "model", got, why, do)

    def check(self) -> None:
        """Compare checksums of everything that several ranks hold, and what they have sent; call on every rank."""
        log = self.mesh.transitions.log
        check_same(self.mesh, {"count": log.length, "order": log.digest}, "collectives")
        held: dict[str, tuple[Tensor, int]] = {}
        optimizer = self.optimizer
        alike: dict[str, Tensor] = {}  # on all ranks of tensor parallelism
        for unit in self.units:
            for name, shard, value, sliced in zip(unit.names, unit.local(), unit.values, unit.sliced, strict=True):
                alike |= {} if sliced else {f"parameter {name}": shard}
                held[f"parameter {name}"] = (shard, unit.sums.shard_level)
                for key, state in optimizer.state.get(value, {}).items():
                    if isinstance(state, DTensor):
                        held[f"{key} of {name}"] = (state.to_local(), unit.sums.optimizer_level)
        check_replicas(self.mesh, held)
        if self.mesh.tensor is not None:
            check_replicas(self.mesh.tensor, {name: (shard, 0) for name, shard in alike.items()})

    def abandon(self) -> None:
        """Drop the gradients of an unfinished step; call on every rank, after an error on all of them."""
        log = self.mesh.transitions.log
        check_same(self.mesh, {"count": log.length, "order": log.digest}, "collectives")
        self.mesh.drain()
        wide = self._now.holding and any(unit.wide for unit in self.units)
        why, do = "torch has added whole gradients up in 32 bits, and keeps them", "start again from a checkpoint"
        require(not wide, "abandon", f"{self.plan.name} with 16-bit parameters inside a step", why, do)
        for unit in self.units:
            unit.mark_taken_(False)
        self.reshard_()
        self._forget_step_()

    def set_plan(self, plan: Plan | str) -> None:
        """Change what is kept whole between steps, parameters or gradients; every rank calls it. Nothing travels.

        Where ``fully_shard`` cuts, and where the optimizer's rows lie, is fixed: a plan that cuts elsewhere is refused.
        """
        new, tiers = as_plan(plan), self.mesh.tiers
        self._require_open("set_plan")
        require(not self.micro_step, "set_plan", f"micro-step {self.micro_step}", "a step is under way", "call step()")
        check_same(self.mesh, new.name, "set_plan")
        place = _place(self.plan, tiers)
        alike = " or ".join(other.name for other in effective() if _place(other, tiers) == place)
        why = f"rows stay where {self.plan.name} has them"
        do = f"take {alike}, or shard a new model and hand it engine.state_dict()"
        require(_place(new, tiers) == place, "set_plan", new.name, why, do)
        self.reshard_()
        self.plan = new
        p, g, _ = new.levels(tiers)
        for unit in self.units:
            unit.free_after_use_(p > 0)
            unit.sum_at_(g)

    def freeze(self, blocks: Sequence[str]) -> None:
        """Stop training blocks between two steps: optimizer state is freed, and they send nothing."""
        self._train_(blocks, "freeze", on=False)

    def thaw(self, blocks: Sequence[str]) -> None:
        """Train blocks again, with optimizer state from zero; what ``shard_`` found frozen in them stays frozen."""
        self._train_(blocks, "thaw", on=True)

    def _require_open(self, what: str) -> None:
        require(not self.closed, what, "a closed engine", "it trains no more", "shard another model")

    def _train_(self, blocks: Sequence[str], what: str, *, on: bool) -> None:
        self._require_open(what)
        require(not self.micro_step, what, f"micro-step {self.micro_step}", "a step is under way", "call step()")
        check_same(self.mesh, list(blocks), what)
        optimizer = self.optimizer
        for name in blocks:
            do = f"name some of {', '.join(self.blocks)}"
            require(name in self.blocks, "block", name, "the model has no such block", do)
            for unit in self.units:
                # as in our engine: what trains already keeps its state
                places = {at for at, block in enumerate(unit.blocks) if block == name and (at in unit.on) != on}
                if places:
                    unit.train_(places ^ set(unit.on))
                for at in places:
                    optimizer.state.pop(unit.values[at], None)
                    # exact values go, what is kept stays
                    unit.forget_exact_(at)
        self._trains = self._flags()

    def close(self) -> None:
        """Wait for what is under way and train no more; the model stays what ``fully_shard`` made of it."""
        self.mesh.drain()
        self._forget_step_()
        self.closed = True


def _place(plan: Plan, tiers: int) -> tuple[int, int]:
    """Levels at which ``fully_shard`` cuts and at which the optimizer has its rows."""
    return shard_level(plan, tiers), plan.levels(tiers)[2]
