"""Looks at what an optimizer is about to step, so that a loop which trains something else than was drawn is told."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from sparing.errors import UserError


class Guard:
    """Refuses the step of a loop that skipped ``begin_step``, called it too late, or changed flags behind its back.

    Nothing has been stepped when it refuses.
    """

    def __init__(
        self, model: nn.Module, optimizer: torch.optim.Optimizer, averaged: Callable[[Sequence[nn.Parameter]], None]
    ) -> None:
        """Hook into the optimizer, before anything that changes gradients or weights for the step.

        Args:
            model: The model.
            optimizer: The optimizer.
            averaged: Refuses gradients of these parameters that are not the mean over the processes.
        """
        self._averaged = averaged
        self._fresh = True
        self._handles = [
            optimizer.register_step_pre_hook(self._before),
            optimizer.register_step_post_hook(self._after),
        ]
        self._drops = any(getattr(module, "layerdrop", 0) for module in model.modules())
        self._begun: int | None = None
        self._stepped: int | None = None
        self._in_pieces = False
        self._on: Mapping[str, nn.Parameter] = {}
        self._off: Mapping[str, nn.Parameter] = {}
        self._drawn: Sequence[nn.Parameter] = ()
        self._written = 0

    def expect(
        self, on: Mapping[str, nn.Parameter], off: Mapping[str, nn.Parameter], drawn: Sequence[nn.Parameter]
    ) -> None:
        """Say what trains from now on.

        Args:
            on: Canonical name -> parameter, of all that trains.
            off: Of all that does not.
            drawn: Those of ``on`` that belong to drawn blocks.
        """
        self._on, self._off, self._drawn, self._fresh = on, off, drawn, True

    def begin(self, step: int) -> None:
        """Note that an optimizer step begins.

        Args:
            step: Its index.

        Raises:
            UserError: If weights changed since the last one though this optimizer has never stepped.
        """
        if self._stepped is None:  # what is loaded or averaged between later steps is nobody's concern
            written = sum(p._version for p in self._on.values())
            if self._begun not in {None, step} and written != self._written:
                raise UserError(
                    "optimizer",
                    got="one that never stepped, while the weights changed",
                    why="another optimizer trains them, without the blocks that are frozen now or with their state",
                    do="build the optimizer that steps first, and give it to the Sampler",
                )
        self._begun = step

    def begun(self) -> None:
        """Note the weights with which the step begins, after blocks have changed."""
        self._written = sum(p._version for p in self._on.values()) if self._stepped is None else 0

    @contextmanager
    def piecewise(self) -> Iterator[None]:
        """One step of the loop that calls the optimizer once per parameter, as soon as it has its gradient."""
        self._check_order()
        self._check_flags()
        self._in_pieces = True
        try:
            yield
            self._stepped = self._begun
        finally:
            self._in_pieces = False

    def close(self) -> None:
        """Leave the optimizer."""
        for handle in self._handles:
            handle.remove()

    def _before(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        if self._in_pieces:
            return
        self._check_order()
        self._check_flags()
        self._check_reached()
        if self._fresh:  # once a draw: it costs a message
            self._averaged(list(self._on.values()))
            self._fresh = False

    def _after(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        self._stepped = self._begun if not self._in_pieces else self._stepped

    def _check_order(self) -> None:
        if self._begun is None or self._begun == self._stepped:
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
        """Drawn blocks without any gradient, where all that is always on has one, were not in the graph."""
        drawn = {id(p) for p in self._drawn}
        other = [p for p in self._on.values() if id(p) not in drawn]
        reached = bool(other) and all(p.grad is not None for p in other)
        if drawn and reached and all(p.grad is None for p in self._drawn) and not self._drops:
            raise UserError(
                "gradients",
                got="none in any drawn block",
                why="they were not in the graph of the loss: begin_step came after the forward pass, or reentrant "
                "checkpointing had no input that needs a gradient",
                do="call begin_step before the forward pass, and checkpoint with use_reentrant=False",
            )
