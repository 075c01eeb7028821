"""Looks at what an optimizer is about to step, so that a loop which trains something else than was drawn is told."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from sparing.errors import UserError


class _Ran:
    """Forward hook that notes whether a block ran; an object of its own, so that a model is copied and saved with it.

    Only writes, so that compiled code need not look at what it holds.
    """

    def __init__(self) -> None:
        self.at_all = self.with_graph = self.unseen = False

    def __call__(self, module: nn.Module, args: Any, output: Any) -> None:
        self.at_all = True
        if torch.is_grad_enabled():
            self.with_graph = True

    @property
    def maybe(self) -> bool:
        """Whether the block may have run; one that takes no hook is taken to have."""
        return self.at_all or self.with_graph or self.unseen

    def forget(self) -> None:
        self.at_all = self.with_graph = False


class Guard:
    """Refuses the step of a loop that skipped ``begin_step``, called it too late, or changed flags behind its back.

    Nothing has been stepped when it refuses.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        modules: Sequence[nn.Module],
        blocks: Sequence[Mapping[str, nn.Parameter]],
        averaged: Callable[[Sequence[nn.Parameter]], None],
    ) -> None:
        # hook before anything that changes gradients or weights for the step: this must see what the loop left
        self._averaged = averaged
        self._fresh = True
        self._handles: list[RemovableHandle] = [
            optimizer.register_step_pre_hook(self._before),
            optimizer.register_step_post_hook(self._after),
        ]
        self._blocks, self._ran = blocks, [_Ran() for _ in modules]
        for module, ran in zip(modules, self._ran, strict=True):
            parts = [module, *module.children()]  # some models call a block's forward past its hooks
            hooked = [part for part in parts if not isinstance(part, torch.jit.ScriptModule)]  # those take no hooks
            self._handles += [part.register_forward_hook(ran) for part in hooked]
            ran.unseen = not hooked
        self._begun: int | None = None
        self._open = False
        self._stepped = False
        self._taken: int | None = None
        self._times = 0
        self._in_pieces = False
        self._on: Mapping[str, nn.Parameter] = {}
        self._off: Mapping[str, nn.Parameter] = {}
        self._drawn: Sequence[int] = ()
        self._written = 0
        self._used: dict[nn.Parameter, tuple[weakref.ref[Tensor], int]] = {}

    def expect(self, on: Mapping[str, nn.Parameter], off: Mapping[str, nn.Parameter], drawn: Sequence[int]) -> None:
        """Say what trains from now on."""
        self._on, self._off, self._drawn, self._fresh = on, off, drawn, True

    def begin(self, step: int) -> None:
        """Note that an optimizer step begins."""
        if not self._stepped:  # what is loaded or averaged between later steps is nobody's concern
            written = sum(p._version for p in self._on.values())
            if self._begun not in {None, step} and written != self._written:
                raise UserError(
                    "optimizer",
                    got="one that never stepped, while the weights changed",
                    why="another optimizer trains them, without the blocks that are frozen now or with their state",
                    do="build the optimizer that steps first, and give it to the Sampler",
                )
        if step == self._taken and self._times == 2:  # once more is a run that starts again
            raise UserError(
                "step",
                got=f"{step} for the third time running",
                why="the draw follows from it, so the same blocks would train for ever",
                do="pass the number of the step to begin_step",
            )
        if self._open:  # a step that raised has used nothing
            self._used.clear()
        for ran in self._ran:
            ran.at_all = False  # an evaluation between two steps has no graph
            ran.with_graph &= not self._open  # a pass before begin_step counts, that of a step nobody took does not
        self._begun, self._open = step, True

    def begun(self) -> None:
        """Note the weights with which the step begins, after blocks have changed."""
        self._written = sum(p._version for p in self._on.values()) if not self._stepped else 0

    def used(self, p: nn.Parameter) -> bool:
        """Whether an optimizer's step has used a parameter's gradient, and nothing was added since."""
        seen = self._used.get(p)
        return seen is not None and p.grad is not None and seen[0]() is p.grad and seen[1] == p.grad._version

    def restart(self) -> None:
        """Forget the step that was begun or taken: the run goes on from a saved state."""
        self._begun, self._taken, self._open = None, None, False
        for ran in self._ran:
            ran.forget()

    @contextmanager
    def piecewise(self) -> Iterator[None]:
        """One step of the loop that calls the optimizer once per parameter, as soon as it has its gradient."""
        self._check_order()
        self._check_flags()
        self._in_pieces = True
        try:
            yield
            self._end_step()
        finally:
            self._in_pieces = False

    def close(self) -> None:
        """Leave the optimizer and the blocks."""
        for handle in self._handles:
            handle.remove()

    def _before(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        if self._in_pieces:
            return
        self._check_order()
        self._check_flags()
        self._check_reached()
        grads = ((p, p.grad) for p in self._on.values())
        # weak, so that zero_grad frees them
        self._used = {p: (weakref.ref(grad), grad._version) for p, grad in grads if grad is not None}
        if self._fresh:  # once a draw: it costs a message
            self._averaged(list(self._on.values()))
            self._fresh = False

    def _after(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        if not self._in_pieces:
            self._end_step()

    def _end_step(self) -> None:
        self._open, self._stepped = False, True
        self._taken, self._times = self._begun, self._times + 1 if self._begun == self._taken else 1
        for ran in self._ran:
            ran.forget()

    def _check_order(self) -> None:
        if not self._open:
            raise UserError(
                "optimizer.step",
                got="no begin_step yet" if self._begun is None else f"a second one after begin_step({self._begun})",
                why="blocks change by the step that begin_step names, and would never change without",
                do="call sampler.begin_step(step) before the first forward pass of each optimizer step",
            )

    def _check_flags(self) -> None:
        for params, flag in ((self._on, True), (self._off, False)):
            name = next((name for name, p in params.items() if p.requires_grad is not flag), None)
            if name is not None:
                raise UserError(
                    "requires_grad",
                    got=f"{not flag} on {name}, which the draw {'trains' if flag else 'freezes'}",
                    why="the Sampler owns these flags from its construction to close()",
                    do="freeze before the Sampler is built, and leave the flags alone until close()",
                )

    def _check_reached(self) -> None:
        """Drawn blocks that ran and have no gradient, where all that is always on has one, were not in the graph."""
        # a block that did not run was skipped, as by LayerDrop or stochastic depth, and rightly has no gradient
        drawn = {p for i in self._drawn for p in self._blocks[i].values()}
        other = [p for p in self._on.values() if p not in drawn]
        used = [p for i in self._drawn if self._ran[i].maybe for p in self._blocks[i].values()]
        reached = bool(other) and all(p.grad is not None for p in other)
        if used and reached and all(p.grad is None for p in used):
            raise UserError(
                "gradients",
                got="none in any drawn block that ran",
                why="they were not in the graph of the loss: begin_step came after the forward pass, or reentrant "
                "checkpointing had no input that needs a gradient",
                do="call begin_step before the forward pass, and checkpoint with use_reentrant=False",
            )
