"""The order of a micro-step: which buckets are whole when, and when their gradients leave.

Forward walks the stages (body blocks) up, backward walks them down. A stage is gathered just before it is used, the
next ``prefetch`` ones are on their way meanwhile, and it is freed when the walk has left it; the last stage stays
whole between forward and backward. Everything outside the body is whole from the first forward to the end of the
backward. The gradients of a stage leave when the backward of the stage before it begins: by then autograd has visited
every node of the stage, because it takes nodes in the reverse order of their making. So every rank submits the same
collectives in the same order, whichever parameters got a gradient.

Autograd may also run for other purposes: for the gradient of an input, or for another engine whose loss goes through
this model. Stages are then gathered and freed as usual, but nothing is flushed: that belongs to ``backward`` alone.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from sparing.errors import RunError, UserError, require
from sparing.sharding.engine.buckets import Bucket
from sparing.sharding.engine.gradients import Gradients
from sparing.sharding.engine.hooks import (
    CollectGradient,
    Stage,
    active_flows,
    after_forward,
    after_inner,
    before_backward,
    before_forward,
    collect_gradient,
    differentiated,
    inner_modules,
    recomputing,
    requiring_grad,
    touch_parameters,
)
from sparing.sharding.network.lanes import Handle


@dataclass(slots=True, eq=False)
class Flow:
    """Hooks of a live model, and the state of its walk."""

    stages: Sequence[Stage]  # body blocks in forward order
    roots: Sequence[Bucket]  # buckets outside the body
    # Of the trainable buckets, by name; the engine changes it as blocks freeze and thaw.
    gradients: dict[str, Gradients]
    prefetch: int = 1  # stages that are gathered ahead
    last: bool = True  # whether this micro-step is the step's last, after which gradients are completed
    stepping: bool = False  # whether autograd runs for this engine's ``backward``
    failed: bool = False  # whether such a pass raised and left part of its gradients here
    _outermost: nn.Module | None = None  # module whose forward began the pass
    _foreign_task: int = -1  # last autograd task that was not this engine's
    _furthest: int = -1  # last stage that this forward has entered
    _lowest: int = 0  # first stage that this backward has reached
    _skipped: list[Stage] = field(default_factory=list)  # by this forward
    _with_grad: bool = False
    _counted: bool = False  # whether this forward is part of a step, which evaluation is not
    _expects_backward: bool = False
    _entered: list[int] = field(default_factory=list)  # of each stage, before this forward
    _log_length_at_entry: int = 0
    _reduction: Handle[Tensor] | None = None  # the one under way
    _handles: list[RemovableHandle] = field(default_factory=list)

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Refuse to be copied or pickled with the model whose hooks hold it."""
        raise UserError(
            "model", got="a copy or a pickle of a sharded model", why="its hooks belong to the engine of the first",
            do="copy it before shard_, or load engine.full_state_dict() into a new one",
        )  # fmt: skip

    def attach_(self, model: nn.Module) -> None:
        """Register all hooks on the live model."""
        keep = self._handles.append
        for module in model.modules():
            keep(module.register_load_state_dict_pre_hook(touch_parameters))  # type: ignore[no-untyped-call]
        # A forward pass may begin at the model or at any module in it that holds all stages.
        inside = {id(stage.module) for stage in self.stages}
        parts = {m: {id(part) for part in m.modules()} for m in model.modules() if id(m) not in inside}
        for module in [m for m, held in parts.items() if inside <= held] if inside else [model]:
            keep(module.register_forward_pre_hook(self._enter_model, prepend=True))
            keep(module.register_forward_hook(self._leave_model))
        for stage in self.stages:
            keep(stage.module.register_forward_pre_hook(partial(before_forward, self, stage), prepend=True))
            keep(stage.module.register_forward_hook(partial(after_forward, self, stage), with_kwargs=True))
            for part in inner_modules(stage):
                keep(part.register_forward_hook(partial(after_inner, self, stage)))
            self.watch_(stage.buckets)
        self.watch_(self.roots)

    def watch_(self, buckets: Sequence[Bucket]) -> None:
        """Take the gradient of every parameter as it comes."""
        for bucket in buckets:
            for index, parameter in enumerate(bucket.params):
                if parameter.requires_grad:
                    hook = CollectGradient(collect_gradient, self, bucket.name, index)
                    self._handles.append(parameter.register_post_accumulate_grad_hook(hook))  # type: ignore[no-untyped-call]

    def detach_(self) -> None:
        """Remove all hooks."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()

    # ---- forward

    def _enter_model(self, module: nn.Module, inputs: Any) -> None:
        if recomputing():
            self._unshard_roots_()
            return
        # still set: the forward before this one raised before its post hook could run
        if self._outermost is module:
            self._forget_failed_forward_()
        if self._outermost is None:
            self._outermost, self._with_grad = module, torch.is_grad_enabled()
            self._counted = differentiated(inputs)
            self._furthest = -1
            self._expects_backward |= self._with_grad
            self._entered, self._log_length_at_entry = [stage.entered for stage in self.stages], self._log_length()
        # The first stages are submitted before the roots are awaited, so that they travel meanwhile.
        for bucket in self.roots:
            bucket.unshard_()
        self._unshard_(self.stages[: self.prefetch])
        for bucket in self.roots:
            bucket.wait_unsharded_()

    def _leave_model(self, module: nn.Module, inputs: Any, output: Any) -> None:
        del inputs
        if recomputing() or self._outermost is not module:
            return
        self._outermost = None
        if not self._expects_backward:
            _reshard_(self.roots)
        # This graph may run backward after another one has freed the roots.
        for tensor in requiring_grad(output):
            tensor.register_hook(self._unshard_roots_)  # type: ignore[no-untyped-call]

    def _unshard_roots_(self, grad: Tensor | None = None) -> None:
        del grad
        for bucket in self.roots:
            bucket.unshard_()
        for bucket in self.roots:
            bucket.wait_unsharded_()

    def _forget_failed_forward_(self) -> None:
        """The forward pass before this one raised on this rank; harmless unless other ranks wait for its share."""
        if self._log_length() != self._log_length_at_entry:
            raise RunError(
                "a forward pass of this rank raised after it had sent or awaited weights: the order of collectives is "
                "no longer that of the other ranks; call engine.abandon() on every rank, or restart from a checkpoint"
            )
        for stage, entered in zip(self.stages, self._entered, strict=True):
            stage.entered = entered
        self._outermost = None

    def _log_length(self) -> int:
        return self._buckets()[0].mesh.transitions.log.length

    def _buckets(self) -> list[Bucket]:
        return [*self.roots, *(bucket for stage in self.stages for bucket in stage.buckets)]

    def before_forward_(self, stage: Stage, inputs: Any) -> None:
        """Before the forward of a stage; a recomputation inside its backward finds it whole."""
        if stage.backward:
            return
        # Its backward begins later: where one checkpoint holds several blocks, that of the last comes first.
        if recomputing():
            self._note_autograd_()
            self._use_now_(stage, ())
            return
        # Ranks may evaluate alone, or other stages than they train: what follows the backward pass must not differ.
        stage.entered += differentiated(inputs) if self._outermost is None else self._counted
        # Other ranks may run the stages that this one skips (stochastic depth), and wait for its slice of them.
        self._skipped += self.stages[self._furthest + 1 : stage.index]
        self._furthest = max(self._furthest, stage.index)
        self._unshard_(self._skipped)
        self._use_now_(stage, self.stages[stage.index + 1 : stage.index + 1 + self.prefetch])

    def after_forward_(self, stage: Stage, inputs: Any, output: Any) -> None:
        """After the forward of a stage."""
        if stage.backward:
            return
        # What a stage passes through unchanged is watched by whoever computed it.
        given = {id(tensor): tensor for tensor in requiring_grad(inputs)}
        awaited = [tensor for tensor in requiring_grad(output) if id(tensor) not in given]
        # A reentrant checkpoint runs the forward without grad, and again inside backward.
        replayed = self._with_grad and not torch.is_grad_enabled() and bool(given)
        for tensor in awaited:
            tensor.register_hook(partial(before_backward, self, stage))  # type: ignore[no-untyped-call]
        if recomputing():
            return
        kept = bool(awaited) or replayed
        stage.differentiated |= kept
        # Backward begins with the last stage, so gathering it twice would only cost.
        if not kept or stage.index != len(self.stages) - 1:
            _reshard_(stage.buckets)
        while self._skipped:
            _reshard_(self._skipped.pop().buckets)

    def _use_now_(self, stage: Stage, following: Sequence[Stage]) -> None:
        self._unshard_([stage])
        self._unshard_(following)
        for bucket in stage.buckets:
            bucket.wait_unsharded_()

    def _unshard_(self, stages: Sequence[Stage]) -> None:
        for stage in stages:
            for bucket in stage.buckets:
                bucket.unshard_()

    # ---- backward

    def before_backward_(self, stage: Stage) -> None:
        """When the gradient of a stage's output is known."""
        if stage.backward:
            return
        self._note_autograd_()
        if self.stepping:
            self._submit_skipped_(stage.index + 1)
            self._lowest = min(self._lowest, stage.index)
        # By now autograd has visited every node of the stages above, so their gradients are whole.
        for other in reversed(self.stages):
            if other.backward:
                self._finish_stage_(other)
        stage.backward = True
        below = self.stages[max(0, stage.index - self.prefetch) : stage.index]
        self._use_now_(stage, [other for other in reversed(below) if other.differentiated or not other.entered])

    def _submit_skipped_(self, end: int) -> None:
        """Submit the collectives of stages down to ``end`` that this rank has skipped, as ranks do that ran them."""
        for other in reversed(self.stages[end : self._lowest]):
            if not other.entered:
                self.before_backward_(other)

    def _note_autograd_(self) -> None:
        """Note that autograd is here; where it runs for other purposes, leave nothing whole behind."""
        # once for each run of autograd: the callback is called when that run ends
        task = torch._C._current_graph_task_id()
        if not self.stepping and task != self._foreign_task:
            self._foreign_task = task
            torch.autograd.Variable._execution_engine.queue_callback(self._reshard_stages_)

    def _reshard_stages_(self) -> None:
        for stage in self.stages:
            stage.backward = False
            _reshard_(stage.buckets)

    def _finish_stage_(self, stage: Stage) -> None:
        stage.backward = False
        if self.stepping:
            # A stage that ran forward several times gets more gradients; it is completed when the pass ends.
            for bucket in stage.buckets:
                self._flush_(bucket, sync=self.last and stage.entered <= 1)
        _reshard_(stage.buckets)

    def _flush_(self, bucket: Bucket, *, sync: bool) -> None:
        """Send a bucket's gradients, once the ones before have arrived: at most two buffers are alive."""
        gradients = self.gradients.get(bucket.name)
        if gradients is None:
            return
        if self._reduction is not None:
            self._reduction.wait()
        self._reduction = gradients.flush_()
        if sync:
            gradients.sync_()

    @contextmanager
    def backward_pass(self, *, last: bool) -> Iterator[None]:
        """Around a backward pass of this engine: at its end all gradients leave, and a missing one counts as zero."""
        why, do = "part of its gradients is still here", "call engine.abandon() on every rank"
        require(not self.failed, "backward", "a call after one that raised", why, do)
        # or the first gradients of this pass would be a third buffer
        if self._reduction is not None:
            self._reduction.wait()
        # another pass may have raised
        for stage in self.stages:
            stage.backward = stage.running = False
        for bucket in self._buckets():
            for parameter in bucket.params:
                hooks: dict[int, Any] = parameter._post_accumulate_grad_hooks or {}
                # Hooks of users come first: ours takes the gradient away.
                if len(hooks) > 1:
                    for key in [key for key, hook in hooks.items() if isinstance(hook, CollectGradient)]:
                        hooks[key] = hooks.pop(key)
        self._unshard_roots_()
        self.last, self.stepping, self.failed, self._lowest = last, True, True, len(self.stages)
        active_flows.append(self)
        try:
            yield
            self._finish_pass_()
            self.failed = False
        finally:
            self.stepping = False
            active_flows.remove(self)

    def _finish_pass_(self) -> None:
        self._submit_skipped_(0)
        for stage in reversed(self.stages):
            if stage.backward:
                self._finish_stage_(stage)
        # Buckets that backward did not pass, or passed several times; then those outside the body.
        for bucket in [b for stage in reversed(self.stages) for b in stage.buckets] + list(self.roots):
            found = self.gradients.get(bucket.name)
            if found is None or found.synced:
                continue
            if found.received or not found.flushed:
                self._flush_(bucket, sync=self.last)
            elif self.last:
                found.sync_()
        for stage in self.stages:
            stage.entered, stage.differentiated = 0, False
        for gradients in self.gradients.values():
            gradients.flushed = False
        self._expects_backward = False
        self.release_()

    def reset_(self) -> None:
        """Forget whatever a step left behind."""
        self._outermost = self._reduction = None
        self._expects_backward = self.failed = False
        for stage in self.stages:
            stage.entered, stage.differentiated = 0, False
        self.release_()

    def release_(self) -> None:
        """Free every whole tensor that is not a store."""
        self._reshard_stages_()
        _reshard_(self.roots)


def _reshard_(buckets: Sequence[Bucket]) -> None:
    for bucket in buckets:
        bucket.reshard_()
