"""The order of a micro-step: which buckets are whole when, and when their gradients leave.

Forward walks the stages (body blocks) up, backward walks them down. A stage is gathered just before it is used, the
next ``prefetch`` ones are on their way meanwhile, and it is freed when the walk has left it; the last stage stays
whole between forward and backward. Everything outside the body is whole from the first forward to the end of the
backward. The gradients of a stage leave when the backward of the stage before it begins: by then autograd has visited
every node of the stage, because it takes nodes in the reverse order of their making. So every rank submits the same
collectives in the same order, whichever parameters got a gradient.

Autograd may pass for somebody else, too: for the gradient of an input, or for another engine whose loss goes through
this model. Stages are then gathered and freed as usual, but nothing is flushed: that belongs to ``backward`` alone.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from sparing.errors import RunError, UserError, require
from sparing.sharding.buckets import Bucket
from sparing.sharding.gradients import Gradients
from sparing.sharding.hooks import Before, Collect, Enter, Inside, Leave, learning, look, parts, recomputing, under_way
from sparing.sharding.lanes import Handle


@dataclass(slots=True, eq=False)
class Stage:
    """A body block under way."""

    name: str
    module: nn.Module
    index: int  # position in the forward order
    buckets: list[Bucket]
    entered: int = 0  # forward passes since the last backward ended
    differentiated: bool = False  # whether an output asked for a gradient since the last backward
    backward: bool = False  # whether backward is inside it
    running: bool = False  # whether a forward pass is inside it


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
    torn: bool = False  # whether such a pass raised and left part of its gradients here
    _outer: nn.Module | None = None
    _foreign: int = -1
    _furthest: int = -1
    _lowest: int = 0
    _left_out: list[Stage] = field(default_factory=list)
    _recording: bool = False
    _awaited: bool = False
    _entered: list[int] = field(default_factory=list)
    _submitted: int = 0
    _reducing: Handle[Tensor] | None = None
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
            keep(module.register_load_state_dict_pre_hook(look))  # type: ignore[no-untyped-call]
        for module in _around(model, self.stages):
            keep(module.register_forward_pre_hook(self._begin, prepend=True))
            keep(module.register_forward_hook(self._end))
        for stage in self.stages:
            keep(stage.module.register_forward_pre_hook(Enter(self, stage), prepend=True))
            keep(stage.module.register_forward_hook(Leave(self, stage), with_kwargs=True))
            for part in parts(stage):
                keep(part.register_forward_hook(Inside(self, stage)))
            self.watch_(stage.buckets)
        self.watch_(self.roots)

    def watch_(self, buckets: Sequence[Bucket]) -> None:
        """Take the gradient of every parameter as it comes."""
        for bucket in buckets:
            for index, parameter in enumerate(bucket.params):
                if parameter.requires_grad:
                    hook = Collect(self, bucket.name, index)
                    self._handles.append(parameter.register_post_accumulate_grad_hook(hook))  # type: ignore[no-untyped-call]

    def detach_(self) -> None:
        """Remove all hooks."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()

    # ---- forward

    def _begin(self, module: nn.Module, inputs: Any) -> None:
        del inputs
        if recomputing():
            self._whole_roots_()
            return
        if self._outer is module:
            self._retry_()
        if self._outer is None:
            self._outer, self._recording = module, torch.is_grad_enabled()
            self._furthest = -1
            self._awaited |= self._recording
            self._entered, self._submitted = [stage.entered for stage in self.stages], self._log_length()
        for bucket in self.roots:
            bucket.gather_()
        self._ahead(self.stages[: self.prefetch])
        for bucket in self.roots:
            bucket.ready_()

    def _end(self, module: nn.Module, inputs: Any, output: Any) -> None:
        del inputs
        if recomputing() or self._outer is not module:
            return
        self._outer = None
        if not self._awaited:
            _free_(self.roots)
        for tensor in learning(output):  # this graph may be passed after another one has freed them
            tensor.register_hook(self._whole_roots_)  # type: ignore[no-untyped-call]

    def _whole_roots_(self, grad: Tensor | None = None) -> None:
        del grad
        for bucket in self.roots:
            bucket.gather_()
        for bucket in self.roots:
            bucket.ready_()

    def _retry_(self) -> None:
        """The forward pass before this one raised on this rank; harmless unless other ranks wait for its share."""
        if self._log_length() != self._submitted:
            raise RunError(
                "a forward pass of this rank raised after it had sent or awaited weights: the order of collectives is "
                "no longer that of the other ranks; call engine.abandon() on every rank, or restart from a checkpoint"
            )
        for stage, entered in zip(self.stages, self._entered, strict=True):
            stage.entered = entered
        self._outer = None

    def _log_length(self) -> int:
        return self._buckets()[0].mesh.transitions.log.length

    def _buckets(self) -> list[Bucket]:
        return [*self.roots, *(bucket for stage in self.stages for bucket in stage.buckets)]

    def enter_(self, stage: Stage) -> None:
        """Before the forward of a stage; a recomputation inside its backward finds it whole."""
        if stage.backward:
            return
        if recomputing():  # its backward begins later: of several blocks of a checkpoint, the last one's comes first
            self._visit_()
            self._use_(stage, ())
            return
        stage.entered += 1
        self._left_out += self.stages[self._furthest + 1 : stage.index]  # by this rank; others may wait for its share
        self._furthest = max(self._furthest, stage.index)
        self._ahead(self._left_out)
        self._use_(stage, self.stages[stage.index + 1 : stage.index + 1 + self.prefetch])

    def leave_(self, stage: Stage, inputs: Any, output: Any) -> None:
        """After the forward of a stage."""
        if stage.backward:
            return
        given = {id(tensor): tensor for tensor in learning(inputs)}
        awaited = [tensor for tensor in learning(output) if id(tensor) not in given]
        replayed = self._recording and not torch.is_grad_enabled() and bool(given)  # by a reentrant checkpoint
        for tensor in awaited:
            tensor.register_hook(Before(self, stage))  # type: ignore[no-untyped-call]
        if recomputing():
            return
        kept = bool(awaited) or replayed
        stage.differentiated |= kept
        if not kept or stage.index != len(self.stages) - 1:
            _free_(stage.buckets)
        while self._left_out:
            _free_(self._left_out.pop().buckets)

    def _use_(self, stage: Stage, following: Sequence[Stage]) -> None:
        self._ahead([stage])
        self._ahead(following)
        for bucket in stage.buckets:
            bucket.ready_()

    def _ahead(self, stages: Sequence[Stage]) -> None:
        for stage in stages:
            for bucket in stage.buckets:
                bucket.gather_()

    # ---- backward

    def before_backward_(self, stage: Stage) -> None:
        """When the gradient of a stage's output is known."""
        if stage.backward:
            return
        self._visit_()
        if self.stepping:
            self._pass_left_out_(stage.index + 1)
            self._lowest = min(self._lowest, stage.index)
        for other in reversed(self.stages):
            if other.backward:
                self._finish_(other)
        stage.backward = True
        below = self.stages[max(0, stage.index - self.prefetch) : stage.index]
        self._use_(stage, [other for other in reversed(below) if other.differentiated or not other.entered])

    def _pass_left_out_(self, end: int) -> None:
        """Submit the collectives of stages down to ``end`` that this rank has skipped, as ranks do that ran them."""
        for other in reversed(self.stages[end : self._lowest]):
            if not other.entered:
                self.before_backward_(other)

    def _visit_(self) -> None:
        """Note that autograd is here; where it runs for somebody else, leave nothing whole behind."""
        task = torch._C._current_graph_task_id()
        if not self.stepping and task != self._foreign:
            self._foreign = task
            torch.autograd.Variable._execution_engine.queue_callback(self._rest_of_stages_)

    def _rest_of_stages_(self) -> None:
        for stage in self.stages:
            stage.backward = False
            _free_(stage.buckets)

    def _finish_(self, stage: Stage) -> None:
        stage.backward = False
        if self.stepping:
            for bucket in stage.buckets:
                self._flush_(bucket, sync=self.last and stage.entered <= 1)
        _free_(stage.buckets)

    def _flush_(self, bucket: Bucket, *, sync: bool) -> None:
        """Send a bucket's gradients, once the ones before have arrived: at most two buffers are alive."""
        gradients = self.gradients.get(bucket.name)
        if gradients is None:
            return
        if self._reducing is not None:
            self._reducing.wait()
        self._reducing = gradients.flush_()
        if sync:
            gradients.sync_()

    @contextmanager
    def pass_(self, *, last: bool) -> Iterator[None]:
        """Around a backward pass of this engine: at its end all gradients leave, and a missing one counts as zero."""
        why, do = "part of its gradients is still here", "call engine.abandon() on every rank"
        require(not self.torn, "backward", "a call after one that raised", why, do)
        if self._reducing is not None:
            self._reducing.wait()  # or a third buffer would be alive
        for stage in self.stages:
            stage.backward = stage.running = False  # another pass may have raised
        for bucket in self._buckets():
            for parameter in bucket.params:
                hooks: dict[int, Any] = parameter._post_accumulate_grad_hooks or {}
                if len(hooks) > 1:  # what users do with a gradient comes first
                    for key in [key for key, hook in hooks.items() if isinstance(hook, Collect)]:
                        hooks[key] = hooks.pop(key)
        self._whole_roots_()
        self.last, self.stepping, self.torn, self._lowest = last, True, True, len(self.stages)
        under_way.append(self)
        try:
            yield
            self._finish_pass_()
            self.torn = False
        finally:
            self.stepping = False
            under_way.remove(self)

    def _finish_pass_(self) -> None:
        self._pass_left_out_(0)
        for stage in reversed(self.stages):
            if stage.backward:
                self._finish_(stage)
        self._flush_rest_()
        for stage in self.stages:
            stage.entered, stage.differentiated = 0, False
        for gradients in self.gradients.values():
            gradients.flushed = False
        self._awaited = False
        self.release_()

    def rest_(self) -> None:
        """Forget whatever a step left behind."""
        self._outer = self._reducing = None
        self._awaited = self.torn = False
        for stage in self.stages:
            stage.entered, stage.differentiated = 0, False
        self.release_()

    def _flush_rest_(self) -> None:
        """Buckets that backward did not pass, or passed several times; then those outside the body."""
        for stage in reversed(self.stages):
            for bucket in stage.buckets:
                self._flush_late_(bucket)
        for bucket in self.roots:
            self._flush_late_(bucket)

    def _flush_late_(self, bucket: Bucket) -> None:
        gradients = self.gradients.get(bucket.name)
        if gradients is None or gradients.synced:
            return
        if gradients.fired or not gradients.flushed:
            self._flush_(bucket, sync=self.last)
        elif self.last:
            gradients.sync_()

    def release_(self) -> None:
        """Free every whole tensor that is not a store."""
        self._rest_of_stages_()
        _free_(self.roots)


def _around(model: nn.Module, stages: Sequence[Stage]) -> list[nn.Module]:
    """The model and every module in it that holds all stages: a forward pass may begin at any of them."""
    inside = {id(stage.module) for stage in stages}
    holders = [m for m in model.modules() if id(m) not in inside and inside <= {id(part) for part in m.modules()}]
    return holders if inside else [model]


def _free_(buckets: Sequence[Bucket]) -> None:
    for bucket in buckets:
        bucket.free_()
