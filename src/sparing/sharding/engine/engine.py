"""The engine: a micro-step backward, a step of the optimizer, and the weights as an ordinary state dict."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from sparing.errors import UserError, require
from sparing.sharding.engine import moves, weights
from sparing.sharding.engine.buckets import Bucket
from sparing.sharding.engine.freed import explain_freed_uses
from sparing.sharding.engine.masters import slice_of
from sparing.sharding.engine.norms import Norms, power, whole_norms
from sparing.sharding.engine.outer_step import begin_interval_, outer_step_
from sparing.sharding.engine.state import EngineState
from sparing.sharding.engine.step_facts import buffers_of, exchange_facts, sync_buffers_
from sparing.sharding.levels import Plan
from sparing.sharding.network.consistency import check_replicas, check_same


class Engine(EngineState):
    """A model whose parameters, gradients and optimizer state are split over ranks by a plan.

    ``shard_`` makes it. The forward pass stays the model's own; ``backward`` takes the place of ``loss.backward()``
    and ``step`` that of the optimizer's step. Gradients are means over ranks and micro-steps.
    """

    def backward(self, loss: Tensor, *, last: bool = False) -> None:
        """Run the backward pass of a micro-step and start to reduce its gradients.

        ``loss`` is the mean over this rank's rows, unless ``step`` is given a divisor. ``last`` ends a step of fewer
        micro-steps than ``accumulate``, such as that of the rows that an epoch leaves, on all ranks.
        """
        why, do = "parameters must come and go as a step needs them", "step outside gathered() and before close()"
        busy = self.closed or any(bucket.pinned for bucket in self.buckets)
        require(not busy, "backward", "closed" if self.closed else "inside gathered()", why, do)
        got = f"call {self.micro_step + 1} since the last step"
        require(not self.complete, "backward", got, "all micro-steps of the step have been", "call step() first")
        why, do = "nothing that it depends on trains", "thaw a block, or do not freeze all"
        require(loss.requires_grad, "loss", "one without a gradient", why, do)
        scaled = loss if self.settings.loss_scale is None else loss * self.settings.loss_scale
        self.mark_taken_(False)
        last = last or self.micro_step == self.settings.accumulate - 1
        with self.flow.backward_pass(last=last), explain_freed_uses():
            scaled.backward()  # type: ignore[no-untyped-call]
        self.mark_taken_(True)
        self.micro_step, self.complete = self.micro_step + 1, last

    def pipeline(self, schedule: object) -> AbstractContextManager[None]:
        """Refuses a schedule of ``torch.distributed.pipelining``, which the engine on ``fully_shard`` takes."""
        raise UserError(
            "engine", got=f"sparing, with {type(schedule).__name__}", why="a schedule runs backward passes by itself",
            do="pass engine='fsdp2', or send activations yourself and call engine.backward in each stage",
        )  # fmt: skip

    def step(self, divisor: float | None = None) -> float:
        """Update the weights; return the norm of the whole gradient before clipping, the same on every rank.

        It is the Euclidean one, or of the type that ``Clip`` says, also where each parameter is clipped by its own.

        The sum of all losses' gradients is divided by ``divisor``, the same on every rank; None: ranks × micro-steps of
        this step. One that is not a number, on any rank, is for a step that ``loss_scale`` skips on all. With local
        steps all this is of the group: its losses, its ranks, its norm.
        """
        given, complete = self.micro_step, self.complete
        # The exchange takes its time behind the last reductions.
        self._require_same_parameters()
        used = {name: (held.used, len(held.bucket.slots)) for name, held in self.flow.gradients.items()}
        buffers = buffers_of(self.model, self.shared_buffers)
        facts = exchange_facts(self.peers, self.settings, given, divisor, used, buffers, self.optimizer.param_groups)
        trained = self._trained() if complete else []
        # Queued after all reductions: on the inner lane, the gathers that bring sums back would otherwise hold up the
        # reductions of later buckets while they wait for the outer axis.
        for bucket in reversed(trained):
            self.flow.gradients[bucket.name].complete_()
        agreed = facts()
        self.settings.check_step(given, complete=complete)
        self.mark_taken_(False)
        grads, norms = self._means(trained, 1 / (agreed.divisor * (self.settings.loss_scale or 1.0)))
        begin_interval_(self, trained)
        finite = self.settings.loss_scale is None or math.isfinite(norms().whole)
        if finite:
            # Without clipping nothing waits for the norms, which may be on their way.
            if (clip := self.settings.clipping) is not None:
                norms().clip_((part for bucket, grad in grads.items() for part in self._parts(bucket, grad)), clip)
            self._apply_(grads, agreed.used)
        else:
            self.skipped += 1
        sync_buffers_(self.peers, self.model, agreed.differing)
        for bucket in trained:
            self.masters.drop_gradient_(bucket)
            self.flow.gradients[bucket.name].reset_()
        for residual in self.residuals.values():
            residual.end_(applied=finite)
        self.flow.reset_()
        self.micro_step, self.complete, self.steps = 0, False, self.steps + 1
        if self.outer is not None:
            self.outer.inner += 1
            if self.outer.inner >= self.outer.settings.every:
                self.outer_step()
        if self.settings.check_every and self.steps % self.settings.check_every == 0:
            self.check()
        return norms().whole

    def outer_step(self) -> None:
        """Let all groups meet now, as they do after every ``LocalSteps.every`` steps; call on every rank.

        For the end of training, and before what takes weights that all groups have. Nothing is done right after one.
        """
        why, do = "gradients of a step under way are of weights that would change", "call step() first"
        require(not self.micro_step, "outer_step", f"after {self.micro_step} micro-steps", why, do)
        outer_step_(self, self._trained())

    def check(self) -> None:
        """Compare checksums of everything that several ranks hold, and what they have sent; call on every rank.

        With local steps those are the ranks of a group; right after an outer step weights are compared over all.
        """
        self._require_same_order()
        self.flush()
        held: dict[str, tuple[Tensor, int]] = {}
        own: dict[str, tuple[Tensor, int]] = {}  # what each group has for itself, under local steps
        for bucket in self.buckets:
            held[f"parameters of {bucket.name}"] = (bucket.store, bucket.level)
            if bucket in self.masters:
                level = self.levels(bucket)[2]
                held[f"masters of {bucket.name}"] = (self.masters.values(bucket), level)
                for name, value in self.masters.state(bucket).items():
                    own[f"{name} of {bucket.name}"] = (value, 0 if value.ndim == 0 else level)
        if self.outer is not None and not self.outer.inner:
            check_replicas(self.mesh, held)
        check_replicas(self.peers, held | own)

    def abandon(self) -> None:
        """Drop the gradients of an unfinished step; call on every rank, after an error on all of them."""
        self._require_open("abandon")
        self._require_same_order()
        self.peers.drain()
        for bucket in self.buckets:
            bucket.note_kept_()
        for gradients in self.flow.gradients.values():
            gradients.reset_()
            gradients.flushed = False
        for residual in self.residuals.values():
            residual.end_(applied=False)
        self.flow.reset_()
        self.mark_taken_(False)
        self.micro_step, self.complete = 0, False

    def _require_same_order(self) -> None:
        log = self.peers.transitions.log
        check_same(self.peers, {"count": log.length, "order": log.digest}, "collectives")

    def _require_same_parameters(self) -> None:
        added = [name for name, p in self.model.named_parameters() if id(p) not in self._known]
        why, do = (
            "parameters made after shard_ are on no plan",
            "add them before shard_, or close the engine and shard again",
        )
        require(not added, "model", f"new parameter {', '.join(added[:3])}", why, do)
        for bucket in self.buckets:
            do = "change values in place (p.copy_), or model.to before shard_"
            require(not bucket.moved, bucket.name, "a parameter with other memory", "no step would change it", do)
            thawed = bucket not in self.masters and any(p.requires_grad for p in bucket.params)
            why, do = "it was frozen by shard_ or freeze, and has no optimizer", "unfreeze before shard_, or call thaw"
            require(not thawed, bucket.name, "requires_grad_(True)", why, do)

    def _apply_(self, grads: Mapping[Bucket, Tensor], used: Mapping[str, Collection[int]]) -> None:
        self.flow.release_()
        for bucket, grad in grads.items():
            bucket.wait_pending_()
            level = self.levels(bucket)[2]
            self.masters.take_edits_(bucket, level)
            self.masters.set_gradient_(bucket, level, grad, used[bucket.name])
        self.optimizer.step()
        for bucket in grads:
            self.publish_(bucket)
            bucket.raise_versions_(used[bucket.name])

    def _means(self, trained: Sequence[Bucket], scale: float) -> tuple[dict[Bucket, Tensor], Callable[[], Norms]]:
        """Scaled gradients, and a function that waits for their norms."""
        clip = self.settings.clipping
        order = 2.0 if clip is None else clip.norm_type
        # In the order in which they arrive, so that scaling and squaring one hides the arrival of the next.
        grads: dict[Bucket, Tensor] = {}
        powers: dict[Bucket, list[float]] = {}
        for bucket in reversed(trained):
            grads[bucket] = self.flow.gradients[bucket.name].take().mul_(scale)
            powers[bucket] = [power(part, order) for part in self._parts(bucket, grads[bucket])]
        slices = [(self.levels(bucket)[2], held) for bucket in trained for held in powers[bucket]]
        return {bucket: grads[bucket] for bucket in trained}, whole_norms(self.peers, slices, order)

    def _parts(self, bucket: Bucket, grad: Tensor) -> list[Tensor]:
        """What of a gradient's slice has a norm of its own: all of it, or where each is clipped every parameter."""
        clip = self.settings.clipping
        if clip is None or not clip.each:
            return [grad]
        mine = {index: grad.narrow(0, at, length) for index, _, at, length in bucket.overlaps(self.levels(bucket)[2])}
        return [mine.get(index, grad[:0]) for index in range(len(bucket.slots))]

    @contextmanager
    def gathered(self) -> Iterator[nn.Module]:
        """Keep every parameter whole for a while; in-place changes stay, if every rank makes the same."""
        self._require_open("gathered()", "use the model as it is")
        if self.micro_step:
            raise UserError(
                "gathered()", got=f"micro-step {self.micro_step}", why="a step is under way", do="call step()"
            )
        for bucket in self.buckets:
            bucket.unshard_()
            bucket.wait_unsharded_()
            bucket.pinned = True
        try:
            yield self.model
        finally:
            for bucket in self.buckets:
                bucket.store_edits_()
                bucket.pinned = False
            self.flow.release_()

    def full_state_dict(self, *, masters: bool = False) -> dict[str, Tensor]:
        """The whole weights as the model's own ``state_dict`` would have them, on every rank and on its device.

        ``masters`` takes the optimizer's 32-bit values where there are some; tied weights appear under each name.
        """
        self._require_open("full_state_dict", "take model.state_dict()")
        self._require_together("full_state_dict")
        return weights.full_state_dict(self.model, self.buckets, self._masters_of if masters else None)

    def _require_open(self, what: str, do: str = "shard the model again, or call it before close()") -> None:
        require(not self.closed, what, "a closed engine", "the model has whole weights that it no longer knows", do)

    def _require_together(self, what: str) -> None:
        if self.outer is not None:
            self.outer.require_together(what)

    def _masters_of(self, bucket: Bucket) -> tuple[Tensor, int] | None:
        if bucket not in self.masters:
            return None
        level = self.levels(bucket)[2]
        self.masters.take_edits_(bucket, level)
        return self.masters.values(bucket), level

    def load_full_state_dict_(self, state: Mapping[str, Any]) -> None:
        """Take weights from an ordinary state dict, the same on every rank; the optimizer's state stays."""
        what, why = "load_full_state_dict_", "gradients of a step under way are of other weights"
        self._require_open(what, "call model.load_state_dict")
        do = "call step() or abandon() first"
        require(not self.micro_step, what, f"after {self.micro_step} micro-steps", why, do)
        self._require_together(what)
        self.flow.release_()
        with torch.no_grad():
            weights.load_full_state_dict_(self.model, self.buckets, state, self._masters_of)
        for bucket in self.buckets:
            bucket.raise_versions_()
        for bucket in self._trained():
            self.masters.note_published_(bucket, slice_of(bucket, self.levels(bucket)[2]))

    def set_plan(self, plan: Plan | str | Mapping[str, Plan | str]) -> None:
        """Change the plan, for all or by block, between two steps; weights and optimizer state stay to the bit."""
        self._require_open("set_plan")
        moves.set_plan_(self, plan)

    def freeze(self, blocks: Sequence[str]) -> None:
        """Stop training blocks between two steps: gradients and optimizer state are freed, and they send nothing."""
        self._require_open("freeze")
        moves.freeze_(self, blocks)

    def thaw(self, blocks: Sequence[str]) -> None:
        """Train blocks again, with optimizer state from zero; what ``shard_`` found frozen in them stays frozen."""
        self._require_open("thaw")
        moves.thaw_(self, blocks)

    def close(self) -> None:
        """Give the model its whole parameters back and remove all hooks."""
        self._require_together("close")
        self.flush()
        self.flow.detach_()
        self.closed = True
        self.mark_taken_(False)
        for bucket in self.buckets:
            bucket.unshard_()
            bucket.wait_unsharded_()
