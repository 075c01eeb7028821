"""The inner run as pure steps: state in, state out, with the randomness of a step fixed by (seed, step)."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, Self

import torch
from torch import Tensor
from torch.func import grad_and_value
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.overrides import TorchFunctionMode

from sparing.errors import require
from sparing.hypergrad.inner.losses import REPLACEMENTS
from sparing.hypergrad.inner.packing import Packing
from sparing.hypergrad.inner.ranks import differentiable_mean, mean
from sparing.hypergrad.inner.refusals import refuse_missing_derivatives
from sparing.hypergrad.inner.repeatability import (
    FirstPass,
    NoForeignWrites,
    no_recomputation,
    observe_only,
    refuse_once_differentiable,
    sample,
)
from sparing.hypergrad.optimizers import ours
from sparing.hypergrad.problem import Bilevel, check_scalar, refuse_constant
from sparing.hypergrad.trees import Tree, detach_tree, differentiable, leaves, materialize, rebuild, zeros_like
from sparing.seeds import number


class State(NamedTuple):
    """The whole inner state: everything that a step reads and the next one writes."""

    theta: list[Tensor]  # leaves of θ
    slots: Any  # state of the optimizer, a tree
    path: tuple[Tensor, ...] = ()  # sum of the outer losses along the run so far, shape (); empty where there are none


@dataclass(frozen=True, slots=True)
class Unroll:
    """An inner run bound to a seed and to the nesting of θ."""

    problem: Bilevel
    seed: int  # seed of batches, initial weights and dropout
    theta: Tree  # gives the nesting of θ; its values are not read
    # whether the first inner loss draws random numbers; a loss that starts drawing later runs twice at those steps
    draws: bool = False
    first_pass: FirstPass | None = None  # None: nothing is compared

    @property
    def steps(self) -> int:
        """Unroll depth T."""
        return self.problem.steps

    def start(self, psi: Tree, generator: torch.Generator | None = None) -> State:
        """Ω₀: weights that may depend on ψ, moments of zero."""
        with reproducible(self.seed, "init"):
            theta = [materialize(weight) for weight in leaves(self.problem.start(psi, self.seed, generator))]
        slots = self.problem.optimizer.start(theta, psi)
        slots = rebuild(slots, [materialize(leaf) for leaf in leaves(slots)])
        if self.problem.path is None:
            return State(theta, slots)
        return State(theta, slots, (theta[0].new_zeros((), dtype=_sum_dtype(theta)),))

    @property
    def constant_start(self) -> bool:
        """Whether Ω₀ does not depend on ψ."""
        return not callable(self.problem.init) and ours(self.problem.optimizer)

    def observed(self, step: int, state: State, psi: Tree) -> Tensor:
        """Outer loss f_t of the state after a step, ``step`` from 0, shape ()."""
        assert self.problem.path is not None
        no_hooks = no_recomputation("path", check_warning=False)
        no_writes = NoForeignWrites("path") if step == 0 else contextlib.nullcontext()
        with reproducible(self.seed, "path", step), sdpa_kernel(SDPBackend.MATH), ModeParity(), no_hooks, no_writes:
            value = self.problem.path(step + 1, rebuild(self.theta, state.theta), psi)
        self.check_same("path", step, check_scalar("path", value))
        return value.to(_sum_dtype(state.theta))

    def along(self, step: int, before: State, state: State, psi: Tree) -> State:
        """The state after a step with the outer loss along the run added to that of the state before it."""
        return state._replace(path=(before.path[0] + self.observed(step, state, psi),)) if before.path else state

    def unchecked(self) -> Unroll:
        """The same run for another ψ, which the first pass says nothing about."""
        return replace(self, first_pass=None)

    def check_same(self, kind: str, step: int, value: Tensor) -> None:
        """Compare a value with that of the first pass, where one is recorded."""
        if self.first_pass is not None:
            self.first_pass.check_same(kind, step, value)

    def check_end(self, step: int, state: State) -> State:
        """The state before a step, compared with that of the first pass."""
        if self.first_pass is not None:
            self.first_pass.check_same("end", step, sample(state.theta))
        return state

    @contextlib.contextmanager
    def at(self, step: int, *, ignore_outer_hooks: bool = False) -> Iterator[Any]:
        """Yield the batch of a step, with the random generators set to that step."""
        batch = self.problem.batch(step, self.seed)
        no_hooks = no_recomputation("inner", check_warning=step == 0, ignore_outer_hooks=ignore_outer_hooks)
        # fused attention kernels have neither forward mode nor, on the CPU, a second derivative
        rng, derivatives = reproducible(self.seed, "step", step), refuse_missing_derivatives("inner")
        with rng, sdpa_kernel(SDPBackend.MATH), no_hooks, derivatives:
            yield batch

    def loss(self, theta: Sequence[Tensor], psi: Tree, batch: Any) -> Tensor:
        """Inner loss g at leaves of θ, shape (), outside of torch.func."""
        # ModeParity takes 6 to 17 % of a step of a small net, so it is entered only where random numbers are drawn: in
        # the first step, or in this very call, as a move of the generators shows
        if not self.draws:
            before = rng_states()
            loss = self.problem.inner(rebuild(self.theta, theta), psi, batch)
            if same_rng_states(rng_states(), before):
                return loss
            del loss  # free its graph before the next one is built
            _restore_rng(before)
        return self.transformable_loss(theta, psi, batch)

    def transformable_loss(self, theta: Sequence[Tensor], psi: Tree, batch: Any) -> Tensor:
        """Inner loss g with the random masks of torch.func, inside or outside of it."""
        with ModeParity():
            return self.problem.inner(rebuild(self.theta, theta), psi, batch)

    def inner_gradient(self, batch: Any, theta: Sequence[Tensor], psi: Tree) -> tuple[list[Tensor], Tensor]:
        """∇_θ g, and g, in a form that torch.func can transform."""
        grads, loss = grad_and_value(self.transformable_loss)(list(theta), psi, batch)
        # in torch 2.13 the tangent of a gradient of shape () may be float64 beside float32; a cast and back mends it
        return [grad.double().to(grad.dtype) if grad.dim() == 0 else grad for grad in grads], loss

    def graph_step(self, step: int, state: State, psi: Tree, batch: Any, packing: Packing | None = None) -> State:
        """Ω_{t+1} with its graph, for reverse mode; the weights must require gradients, and may be packed."""
        optimizer = self.problem.optimizer
        with torch.enable_grad():
            loss = self.loss(packing.split(state.theta) if packing else state.theta, psi, batch)
            self.check_same("loss", step, loss)
            grads: Sequence[Tensor] = inner_slopes(loss, state.theta, create_graph=True)
            if loss.requires_grad and self.first_pass is not None and self.first_pass.first_graph():
                refuse_once_differentiable(grads)
            if self.problem.group is not None:
                grads = differentiable_mean(grads, self.problem.group, [*state.theta, *leaves(psi)])
            if packing is None:
                following = State(*optimizer.update(state.theta, grads, state.slots, step, psi))
                return self.along(step, state, following, psi)
            following = State(*packing.update(optimizer, state.theta, grads, state.slots, step, psi))
            apart = self.along(step, state, following._replace(theta=packing.split(following.theta)), psi)
            return following._replace(path=apart.path)

    def plain_step(self, step: int, state: State, psi: Tree, batch: Any) -> State:
        """Ω_{t+1} without a graph."""
        with torch.enable_grad():
            weights = differentiable(state.theta)
            loss = self.loss(weights, psi, batch)
            self.check_same("loss", step, loss)
            grads: Sequence[Tensor] = inner_slopes(loss, weights)
        with torch.no_grad():
            if self.problem.group is not None:
                grads = mean(grads, self.problem.group)
            following = State(*self.problem.optimizer.update(state.theta, grads, state.slots, step, psi))
            return self.along(step, state, following, psi)

    def run(
        self, psi: Tree, *, state: State | None = None, first: int = 0, last: int | None = None, repeat_every: int = 0
    ) -> State:
        """Run steps ``first`` … ``last`` − 1 without a graph; each ``repeat_every``-th step, and the last, twice."""
        psi = detach_tree(psi)
        with torch.no_grad():
            state = self.start(psi) if state is None else state
        last = self.steps if last is None else last
        for step in range(first, last):
            before = state
            with self.at(step) as batch:
                state = self.plain_step(step, before, psi, batch)
            # runs at other φ have no first pass to compare with, so some of their steps are repeated instead
            if repeat_every and (step == last - 1 or (step + 1) % repeat_every == 0):
                self.check_end(step + 1, state)
                with self.at(step) as batch:
                    self.check_end(step + 1, self.plain_step(step, before, psi, batch))
        return self.check_end(last, state)

    def outer(self, state: State, phi: Tree) -> Tensor:
        """Outer loss h of a run that ends in a state, shape (): f, and what was added along the run."""
        no_hooks = no_recomputation("outer")
        with reproducible(self.seed, "outer"), sdpa_kernel(SDPBackend.MATH), ModeParity(), no_hooks:
            value = check_scalar("outer", self.problem.outer(rebuild(self.theta, state.theta), phi))
        return value + state.path[0].detach().to(value.dtype) if state.path else value

    def outer_gradients(self, state: State, phi: Tree) -> tuple[Tensor, State, list[Tensor]]:
        """h, its cotangent at the last state and c = ∂f/∂φ by one backward pass; zero where f ignores a leaf."""
        with torch.enable_grad():
            theta = differentiable(state.theta)
            phi_leaves = differentiable(phi)
            with refuse_missing_derivatives("outer"), NoForeignWrites("outer"):
                value = self.outer(state._replace(theta=theta), rebuild(phi, phi_leaves))
        # beside losses along the run it may be a constant
        refuse_constant(value, beside=bool(state.path))
        grads = vjp(value, [*theta, *phi_leaves], name="outer")
        one = tuple(torch.ones_like(total) for total in state.path)
        cotangent = State(grads[: len(theta)], zeros_like(state.slots), one)
        return value.detach(), cotangent, grads[len(theta) :]


def inner_slopes(loss: Tensor, weights: Sequence[Tensor], *, create_graph: bool = False) -> list[Tensor]:
    """∇_θ g at leaves of θ; zero at a step whose loss does not depend on θ."""
    if not loss.requires_grad:
        return [torch.zeros_like(weight) for weight in weights]
    return list(torch.autograd.grad(loss, weights, create_graph=create_graph, materialize_grads=True))


def _sum_dtype(theta: Sequence[Tensor]) -> torch.dtype:
    """In which losses along the run are summed: bfloat16 would stop counting at 256."""
    return functools.reduce(torch.promote_types, (weight.dtype for weight in theta), torch.float32)


def vjp(
    outputs: Any, inputs: Sequence[Tensor], cotangents: Any = None, *, keep: bool = False, name: str = "inner"
) -> list[Tensor]:
    """Vector-Jacobian product: cotangents of the inputs, zero where no path reaches them."""
    tensors = [outputs] if isinstance(outputs, Tensor) else list(outputs)
    weights = [None] * len(tensors) if cotangents is None else list(cotangents)
    # torch raises for an output without a graph, such as a loss that ignores φ; its derivative is zero
    kept = [(out, weight) for out, weight in zip(tensors, weights, strict=True) if out.requires_grad]
    if not kept:
        return [torch.zeros_like(leaf) for leaf in inputs]
    outs, ws = zip(*kept, strict=True)
    with refuse_missing_derivatives(name):
        grads = torch.autograd.grad(outs, inputs, ws, retain_graph=keep, allow_unused=True)
    return [torch.zeros_like(leaf) if got is None else got for leaf, got in zip(inputs, grads, strict=True)]


_DRAWS = {
    F.dropout, torch.dropout, F.dropout1d, F.dropout2d, F.dropout3d, F.alpha_dropout, F.feature_alpha_dropout,
    torch.rand_like, torch.randn_like, torch.bernoulli,
}  # fmt: skip


class ModeParity(TorchFunctionMode):
    """Makes a loss compute the same function in plain torch, reverse mode and forward mode."""

    has_hooks = False  # whether the loss registered a hook on a tensor

    def __enter__(self) -> Self:
        """Note whether forward mode is on."""
        self._forward = torch._C._is_fwd_grad_enabled()
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, *error: object) -> None:
        """Put forward mode back: a loss that leaves its own ``no_grad`` leaves the mode as grad mode was outside."""
        super().__exit__(*error)  # type: ignore[no-untyped-call]
        torch._C._set_fwd_grad_enabled(self._forward)

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        # forward mode goes on inside torch.no_grad()
        if func is torch._C._set_grad_enabled:
            torch._C._set_fwd_grad_enabled(args[0])
        elif func is torch.Tensor.register_hook:
            self.has_hooks, args = True, (args[0], observe_only(args[1]), *args[2:])
        # torch.func differentiates through .data
        elif getattr(func, "__self__", None) is torch.Tensor.data:
            return args[0].detach()
        # Plain torch fills a mask in memory order, torch.func in index order: a transposed activation would get another
        # mask in forward mode than in the run itself.
        elif func in _DRAWS and args:
            args = (args[0].contiguous(), *args[1:])
        # losses whose forward-mode rule is wrong or missing in torch 2.13
        elif func in REPLACEMENTS:
            func = REPLACEMENTS[func]
        return func(*args, **(kwargs or {}))


@contextlib.contextmanager
def reproducible(seed: int, *labels: str | int) -> Iterator[None]:
    """Seed torch's global generators from (seed, labels), and restore them afterwards."""
    # dropout takes no generator, so the global one is set; nothing else in the package does so
    before = rng_states()
    for generator in _generators():
        generator.manual_seed(number(seed, "dropout", *labels))
    try:
        yield
    finally:
        _restore_rng(before)
    require(
        len(_generators()) == len(before), "inner", "a loss that is the first to touch a CUDA device",
        "what it draws there cannot be drawn again", "call `torch.cuda.init()` first, or keep theta on that device",
    )  # fmt: skip


def rng_states() -> list[Tensor]:
    """States of the global generators that dropout draws from: the CPU's and those of all devices in use."""
    return [generator.get_state() for generator in _generators()]


def same_rng_states(a: Sequence[Tensor], b: Sequence[Tensor]) -> bool:
    """Whether nothing was drawn between two calls of ``rng_states``."""
    # by bytes: torch.equal would go through every active mode
    return len(a) == len(b) and all(x.numpy().tobytes() == y.numpy().tobytes() for x, y in zip(a, b, strict=True))


def _restore_rng(states: Sequence[Tensor]) -> None:
    # a device that was touched since has a generator more
    for generator, state in zip(_generators(), states, strict=False):
        generator.set_state(state)


def _generators() -> list[torch.Generator]:
    # Empty until a device is in use; to ask for the current one would take memory of it. Tensors may lie on any.
    return [torch.default_generator, *torch.cuda.default_generators]
