"""Checks what an optimizer is about to step, so that a loop that trains something other than was drawn is refused."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from sparing.errors import UserError


class _RunFlag:
    """Forward hook that notes whether a block ran; an object of its own, so that a model is copied and saved with it.

    Only writes, so that compiled code need not look at what it holds.
    """

    def __init__(self) -> None:
        self.ran = self.with_graph = self.unhooked = False
        self.since_draw = False  # whether the block has run since the blocks last changed

    def __call__(self, module: nn.Module, args: Any, output: Any) -> None:
        self.ran = self.since_draw = True
        if torch.is_grad_enabled():
            self.with_graph = True

    @property
    def may_have_run(self) -> bool:
        """Whether the block may have run; one that takes no hook is taken to have."""
        return self.ran or self.with_graph or self.unhooked

    def reset(self) -> None:
        self.ran = self.with_graph = False


class Guard:
    """Refuses the step of a loop that skipped ``begin_step``, called it too late, or changed flags behind its back.

    Nothing has been stepped when it refuses.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        modules: Sequence[nn.Module],
        blocks: Sequence[Mapping[str, nn.Parameter]],
        check_averaged: Callable[[Sequence[nn.Parameter]], None],
    ) -> None:
        # hook before anything that changes gradients or weights for the step: this must see what the loop left
        self._check_averaged = check_averaged
        self._new_draw = True
        self._handles: list[RemovableHandle] = [
            optimizer.register_step_pre_hook(self._before),
            optimizer.register_step_post_hook(self._after),
        ]
        self._blocks, self._run_flags = blocks, [_RunFlag() for _ in modules]
        for module, flag in zip(modules, self._run_flags, strict=True):
            # children as well: some models call a block's forward directly, past its hooks
            parts = [module, *module.children()]
            hooked = [part for part in parts if not isinstance(part, torch.jit.ScriptModule)]  # those take no hooks
            self._handles += [part.register_forward_hook(flag) for part in hooked]
            flag.unhooked = not hooked
        self._step: int | None = None
        self._in_step = False
        self._ever_stepped = False
        self._last_stepped: int | None = None
        self._repeats = 0
        self._stepwise = False
        self._trained: Mapping[str, nn.Parameter] = {}
        self._frozen: Mapping[str, nn.Parameter] = {}
        self._drawn: Sequence[int] = ()
        self._versions = 0
        self._rises = 0  # steps running that were begun, never taken, and changed weights
        self._entered: Sequence[int] = ()  # blocks that the last draw has thawed, before their first step
        self._ahead = False  # whether a forward pass with a graph came after the last step and before that draw
        self._used: dict[nn.Parameter, tuple[weakref.ref[Tensor], int]] = {}

    def set_trained(
        self, trained: Mapping[str, nn.Parameter], frozen: Mapping[str, nn.Parameter], drawn: Sequence[int]
    ) -> None:
        """Say what trains from now on, by canonical name, and which blocks were drawn."""
        self._entered = [i for i in drawn if i not in self._drawn]
        self._ahead = any(flag.with_graph for flag in self._run_flags)
        for flag in self._run_flags:
            flag.since_draw = False
        self._trained, self._frozen, self._drawn, self._new_draw = trained, frozen, drawn, True

    def begin_step(self, step: int) -> None:
        """Note that an optimizer step begins; refuse if others trained the weights, or the step number stands still."""
        if self._in_step and self._step not in {None, step}:
            rose = sum(p._version for p in self._trained.values()) != self._versions
            self._rises = self._rises + 1 if rose else 0
            # once the optimizer has stepped, weights may rightly be loaded or averaged in a step that is skipped
            if self._rises > self._ever_stepped:
                raise UserError(
                    "optimizer", got="one that does not step, while the weights change",
                    why="another optimizer trains them, without the blocks that are frozen now or with their state",
                    do="build the optimizer that steps first, and give it to the Sampler",
                )  # fmt: skip
        # the same step twice is a run that starts again; three times is a loop that never counts up
        if step == self._last_stepped and self._repeats == 2:
            raise UserError(
                "step", got=f"{step} for the third time running",
                why="the draw follows from it, so the same blocks would train for ever",
                do="pass the number of the step to begin_step",
            )  # fmt: skip
        if self._in_step:  # a step that raised has used nothing
            self._used.clear()
        for flag in self._run_flags:
            flag.ran = False  # an evaluation between two steps has no graph
            # a forward pass before begin_step counts; one of a step that was begun and never taken does not
            flag.with_graph &= not self._in_step
        self._step, self._in_step = step, True

    def note_weights(self) -> None:
        """Note the weights with which the step begins, after blocks have changed."""
        self._versions = sum(p._version for p in self._trained.values())

    def used(self, p: nn.Parameter) -> bool:
        """Whether an optimizer's step has used a parameter's gradient, and nothing was added since."""
        seen = self._used.get(p)
        return seen is not None and p.grad is not None and seen[0]() is p.grad and seen[1] == p.grad._version

    def restart(self) -> None:
        """Forget the step that was begun or taken: the run goes on from a saved state."""
        self._step, self._last_stepped, self._in_step = None, None, False
        self._rises, self._ahead = 0, False
        for flag in self._run_flags:
            flag.reset()

    @contextmanager
    def stepwise(self) -> Iterator[None]:
        """One step of the loop that calls the optimizer once per block, as soon as it has its gradients."""
        self._check_order()
        self._check_flags()
        self._check_late()
        self._stepwise = True
        try:
            yield
            self._end_step()
        finally:
            self._stepwise = False

    def close(self) -> None:
        """Leave the optimizer and the blocks."""
        for handle in self._handles:
            handle.remove()

    def _before(
        self, optimizer: torch.optim.Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        if self._stepwise:
            return None
        changed = self._run_closure(args, kwargs)
        self._check_order()
        self._check_flags()
        self._check_reached()
        self._check_late()
        grads = ((p, p.grad) for p in self._trained.values())
        # the references are weak, so that zero_grad frees the gradients
        self._used = {p: (weakref.ref(grad), grad._version) for p, grad in grads if grad is not None}
        if self._new_draw:  # once per draw: it costs a collective
            self._check_averaged(list(self._trained.values()))
            self._new_draw = False
        return changed

    def _run_closure(
        self, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        """Run the closure of ``step(closure)``; returns arguments with one in its place that gives its loss."""
        # ``step`` itself runs it after all hooks: this one and those that follow it would see no gradient
        given = kwargs.get("closure", args[1] if len(args) > 1 else None)
        if not callable(given):
            return None
        with torch.enable_grad():
            loss = given()
        written = [p._version for p in self._trained.values()]

        def known_loss() -> Any:
            if [p._version for p in self._trained.values()] != written:
                raise UserError(
                    "optimizer", got="one that calls the closure after weights have moved",
                    why="the loss is computed once, before the step", do="use one such as torch.optim.AdamW",
                )  # fmt: skip
            return loss

        if "closure" in kwargs:
            return args, kwargs | {"closure": known_loss}
        return (args[0], known_loss, *args[2:]), kwargs

    def _after(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        if not self._stepwise:
            self._end_step()

    def _end_step(self) -> None:
        self._in_step, self._ever_stepped, self._ahead, self._rises = False, True, False, 0
        self._last_stepped, self._repeats = self._step, self._repeats + 1 if self._step == self._last_stepped else 1
        for flag in self._run_flags:
            flag.reset()

    def _check_order(self) -> None:
        if not self._in_step:
            raise UserError(
                "optimizer.step",
                got="no begin_step yet" if self._step is None else f"a second one after begin_step({self._step})",
                why="blocks change by the step that begin_step names, and would never change without",
                do="call sampler.begin_step(step) before the first forward pass of each optimizer step",
            )

    def _check_flags(self) -> None:
        for params, flag in ((self._trained, True), (self._frozen, False)):
            name = next((name for name, p in params.items() if p.requires_grad is not flag), None)
            if name is not None:
                raise UserError(
                    "requires_grad", got=f"{not flag} on {name}, which the draw {'trains' if flag else 'freezes'}",
                    why="the Sampler owns these flags from its construction to close()",
                    do="freeze before the Sampler is built, and leave the flags alone until close()",
                )  # fmt: skip

    def _check_late(self) -> None:
        """Refuse blocks that were thawed after the forward pass: none has run since, and they have no gradient."""
        if not self._ahead or any(flag.since_draw for flag in self._run_flags):
            return
        late = [p for i in self._entered if not self._run_flags[i].unhooked for p in self._blocks[i].values()]
        if late and all(p.grad is None for p in late):
            raise _not_reached("none in a block that was drawn anew")

    def _check_reached(self) -> None:
        """Refuse drawn blocks that ran and have no gradient though everything that is always on has one."""
        # a block that did not run was skipped, as by LayerDrop or stochastic depth, and rightly has no gradient
        drawn = {p for i in self._drawn for p in self._blocks[i].values()}
        other = [p for p in self._trained.values() if p not in drawn]
        used = [p for i in self._drawn if self._run_flags[i].may_have_run for p in self._blocks[i].values()]
        reached = bool(other) and all(p.grad is not None for p in other)
        if used and reached and all(p.grad is None for p in used):
            raise _not_reached("none in any drawn block that ran")


def _not_reached(got: str) -> UserError:
    return UserError(
        "gradients", got=got,
        why="they were not in the graph of the loss: begin_step came after the forward pass, or reentrant "
        "checkpointing had no input that needs a gradient",
        do="call begin_step before the forward pass, and checkpoint with use_reentrant=False",
    )  # fmt: skip
