"""The two-level problem: an inner run of T optimizer steps that φ steers, and an outer loss of where it ends."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.utils._pytree import tree_flatten

from sparing.errors import UserError, require
from sparing.hypergrad.optimizers import accepts_positional, ours, settings_of, steers
from sparing.hypergrad.protocol import Composed, Optimizer
from sparing.hypergrad.trees import Tree
from sparing.seeds import stream


@dataclass(frozen=True, kw_only=True, eq=False)
class Bilevel:
    """min over φ of h(φ) = f(θ_T(φ), φ), where θ_T is the end of T optimizer steps on g(θ, φ).

    θ and φ are trees of floating tensors: φ may be data, a weight per example, a network, learning rates or an
    initialisation. What is differentiated is this run, moments and all, not an ideal minimiser.

    Source: Shen et al. 2024, eq. 1 and 2.

    Example:
        >>> from sparing import hypergrad as hg
        >>> problem = hg.Bilevel(
        ...     inner=lambda theta, phi, batch: ((theta["w"] - phi["target"]) ** 2).sum(),
        ...     outer=lambda theta, phi: theta["w"].sum(),
        ...     init={"w": torch.zeros(2)},
        ...     optimizer=hg.SGD(lr=0.25),
        ...     steps=2,
        ... )
        >>> hg.hypergradient(problem, {"target": torch.ones(2)}, hg.Reverse()).grad["target"]
        tensor([0.7500, 0.7500])
    """

    inner: Callable[[Tree, Tree, Any], Tensor]
    """g: (θ, ψ, batch) -> scalar; ψ is φ itself unless ``through`` is given. It may depend only on these and on torch's
    global generators: a loss that draws, counts or writes elsewhere, or uses activation checkpointing, is refused. What
    it detaches is constant for all methods except differences."""

    outer: Callable[[Tree, Tree], Tensor]
    """f: (θ, φ) -> scalar; what depends on φ here directly is the explicit part of the hypergradient. It writes into
    nothing that it did not make: a batch norm that keeps statistics is refused."""

    init: Tree | Callable[..., Tree]
    """θ₀ (or Ω₀): a tree, or a function of ψ, or of (ψ, generator) with a generator that belongs to the seed."""

    optimizer: Optimizer
    """The inner optimizer: ``SGD``, ``Adam``, ``AdamW``, or any object with ``start`` and ``update``, hand-written or
    learned (``protocol.Optimizer``); its state is unrolled with the weights."""

    steps: int
    """Unroll depth T (count)."""

    batches: Sequence[Any] | Callable[..., Any] | None = None
    """Data of step t = 0 … T−1: a sequence of T, or a function of (t) or (t, generator) with a generator that belongs
    to (seed, t); None where the inner loss needs none."""

    through: Callable[[Tree], Tree] | None = None
    """Bottleneck ψ(φ): everything but ``outer`` sees φ only through it. It is evaluated once, before the run, and
    every method then works in the space of ψ, with one backward pass from ψ to φ at the end."""

    path: Callable[[int, Tree, Tree], Tensor] | None = None
    """Outer loss along the run: (t, θ_t, ψ) -> scalar for t = 1 … T, each added to ``outer``, so that
    h(φ) = f(θ_T, φ) + Σ f_t(θ_t, ψ). It draws nothing. Not for implicit methods, which use only the end."""

    group: ProcessGroup | None = None
    """Processes that share this run, each with its own part of every batch (data parallelism): g and f are the means
    over ranks of what ``inner`` and ``outer`` return there. φ, θ₀, seed and steps are the same on all ranks, and so is
    the result. For ``Reverse``, ``Truncated`` and ``Checkpointed``; None: this process alone."""

    def __post_init__(self) -> None:
        if not isinstance(self.steps, int) or self.steps < 1:
            raise UserError("steps", got=self.steps, why="an inner run takes at least one", do="pass steps >= 1")
        for name in ("inner", "outer"):
            if not callable(getattr(self, name)):
                raise UserError(name, got=getattr(self, name), why="it is called", do="pass a function")
        if self.path is not None and not callable(self.path):
            raise UserError("path", got=self.path, why="it is called", do="pass a function of (t, theta, psi)")
        # what `new_group` gives a process outside of the group is a number, and collectives over it do nothing
        if not (self.group is None or isinstance(self.group, ProcessGroup)):
            raise UserError(
                "group", got=repr(self.group), why="gradients are averaged over a process group",
                do="pass dist.group.WORLD, mesh.get_group() or dist.new_group(...), on its own ranks only",
            )  # fmt: skip
        if isinstance(self.optimizer, type | torch.optim.Optimizer) or not isinstance(self.optimizer, Optimizer):
            name = self.optimizer.__name__ if isinstance(self.optimizer, type) else type(self.optimizer).__name__
            raise UserError(
                "optimizer", got=name, why="a step must be a pure function of weights, gradients, state and φ",
                do="pass hg.SGD(...), hg.Adam(...), or an object with start and update (docs/api/hypergrad.md)",
            )  # fmt: skip
        listed = self.batches is not None and not callable(self.batches)
        # a DataLoader has a length but no items by index, and gives each batch once
        if listed and not (hasattr(self.batches, "__len__") and hasattr(self.batches, "__getitem__")):
            raise UserError(
                "batches", got=type(self.batches).__name__, why="a run is repeated, so its data must be there again",
                do="list() it, or pass a function of the step",
            )  # fmt: skip
        if listed and len(self.batches) < self.steps:  # type: ignore[arg-type]
            raise UserError(
                "batches", got=f"{len(self.batches)} for {self.steps} steps",  # type: ignore[arg-type]
                why="each step takes its own", do="give one batch a step, or a function of the step",
            )  # fmt: skip

    def composed(self) -> Bilevel:
        """The same problem with ψ(φ) evaluated inside every inner step: directions then live in the space of φ."""
        through = self.through
        if through is None:
            return self
        init = start = self.init
        if callable(init) and accepts_positional(init, 2):
            start = lambda phi, generator: init(through(phi), generator)  # noqa: E731
        elif callable(init):
            start = lambda phi: init(through(phi))  # noqa: E731
        optimizer, settings, path = self.optimizer, settings_of(self.optimizer), self.path
        if not ours(optimizer) or any(steers(setting) for setting in settings.values()):
            optimizer = Composed(optimizer, through)
        return replace(
            self,
            inner=lambda theta, phi, batch: self.inner(theta, through(phi), batch),
            init=start,
            optimizer=optimizer,
            through=None,
            path=None if path is None else lambda step, theta, phi: path(step, theta, through(phi)),
        )

    def batch(self, step: int, seed: int) -> Any:
        """The data of a step, a function of (seed, step) only.

        Args:
            step: From 0.
            seed: Seed of the run.

        Returns:
            Whatever ``batches`` gives.
        """
        if self.batches is None:
            return None
        if not callable(self.batches):
            return self.batches[step]
        if accepts_positional(self.batches, 2):
            return self.batches(step, stream(seed, "batch", step))
        return self.batches(step)

    def start(self, psi: Tree, seed: int, generator: torch.Generator | None = None) -> Tree:
        """θ₀, a function of (ψ, seed) only.

        Args:
            psi: φ or ψ(φ).
            seed: Seed of the run.
            generator: That of (seed, "init"), if it is made already.

        Returns:
            The tree of weights.
        """
        if not callable(self.init):
            return self.init
        return self.init(psi, generator or stream(seed, "init")) if accepts_positional(self.init, 2) else self.init(psi)


@dataclass(frozen=True, kw_only=True, eq=False)
class BlackBox:
    """min over φ of f(u(φ), φ), where u comes from a solver that cannot be differentiated.

    Only ``ZerothOrder`` takes it: the solver's part by central differences, the outer loss exactly.

    Source: Sow, Ji & Liang 2022 (PZOBO); Shen et al. 2024, eq. 16.
    """

    solve: Callable[[Tree], Tree]
    """φ -> u, a tree of floating tensors; called with φ ± µv, so φ must be allowed to move by µ."""

    outer: Callable[[Tree, Tree], Tensor]
    """f: (u, φ) -> scalar."""


def check_scalar(name: str, value: Any) -> Tensor:
    """The value of a loss; UserError unless it is a floating tensor of shape ()."""
    if not isinstance(value, Tensor) or value.shape != ():
        got = tuple(value.shape) if isinstance(value, Tensor) else type(value).__name__
        raise UserError(
            name, got=got, why="a loss is one number", do="return a tensor of shape (), for instance a mean"
        )
    require(value.is_floating_point(), name, value.dtype, "a loss has derivatives", "return a floating tensor")
    return value


def refuse_constant(value: Tensor, *, beside: bool = False) -> None:
    """Refuse an outer loss whose gradient would be zero and look like an optimum; ``beside``: there are others."""
    if not (value.requires_grad or beside):
        raise UserError(
            "outer", got="a loss that depends on neither theta nor phi", why="the hypergradient would be zero",
            do="compute it from theta, without no_grad, detach or item",
        )  # fmt: skip


def same_data(a: Any, b: Any) -> bool:
    """Whether two trees hold the same data, NaNs included."""
    (left, shape), (right, other) = tree_flatten(a), tree_flatten(b)
    return shape == other and all(_equal(x, y) for x, y in zip(left, right, strict=True))


def _equal(x: Any, y: Any) -> bool:
    if isinstance(x, Tensor) and isinstance(y, Tensor):
        if x.shape != y.shape or x.dtype != y.dtype:
            return False
        return bool(torch.equal(x, y)) or (x.is_floating_point() and torch.equal(x.nan_to_num(), y.nan_to_num()))
    try:
        return bool(x == y)
    # arrays of other libraries have no single truth value; nothing can be said about them
    except (RuntimeError, ValueError):
        return True
