"""The inner run as pure steps: state in, state out, with the randomness of a step fixed by (seed, step)."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.func import grad_and_value
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.overrides import TorchFunctionMode

from sparing.hypergrad.losses import REPLACEMENTS
from sparing.hypergrad.problem import Bilevel, check_scalar
from sparing.hypergrad.refusals import refuse_missing_derivatives
from sparing.hypergrad.trees import Tree, detach_tree, leaves, materialize, rebuild
from sparing.hypergrad.witness import FirstPass, no_recomputation, observe_only, refuse_once_differentiable, sample
from sparing.seeds import number


class State(NamedTuple):
    """The whole inner state: everything that a step reads and the next one writes."""

    theta: list[Tensor]  # leaves of θ
    slots: tuple[list[Tensor], ...]  # moments of the optimizer, each as the leaves of θ


@dataclass(frozen=True, slots=True)
class Unroll:
    """An inner run bound to a seed and to the nesting of θ."""

    problem: Bilevel  # what is run
    seed: int  # seed of batches, initial weights and dropout
    theta: Tree  # gives the nesting of θ; its values are not read
    # Whether the first inner loss draws random numbers. One that begins to draw later is run twice where it does.
    draws: bool = False
    first_pass: FirstPass | None = None  # what the first pass saw; None: nothing is compared

    @property
    def steps(self) -> int:
        """Unroll depth T."""
        return self.problem.steps

    def start(self, psi: Tree, generator: torch.Generator | None = None) -> State:
        """Ω₀: weights that may depend on ψ, moments of zero."""
        with reproducible(self.seed, "init"):
            theta = [materialize(weight) for weight in leaves(self.problem.start(psi, self.seed, generator))]
        zeros = tuple([torch.zeros_like(weight) for weight in theta] for _ in range(self.problem.optimizer.slots))
        return State(theta, zeros)

    def unchecked(self) -> Unroll:
        """The same run for another ψ, which the first pass says nothing about."""
        return replace(self, first_pass=None)

    def check_same(self, kind: str, step: int, value: Tensor) -> None:
        """Compare with what the first pass saw, if that is watched."""
        if self.first_pass is not None:
            self.first_pass.check_same(kind, step, value)

    def check_end(self, step: int, state: State) -> State:
        """The state before a step, compared with that of the first pass."""
        if self.first_pass is not None:
            self.first_pass.check_same("end", step, sample(state.theta))
        return state

    @contextlib.contextmanager
    def at(self, step: int, *, ignore_outer_hooks: bool = False) -> Iterator[Any]:
        """The batch and the randomness of a step.

        Attention runs by its plain formula meanwhile: the fused kernels have neither forward mode nor a second
        derivative on the CPU.
        """
        batch = self.problem.batch(step, self.seed)
        no_hooks = no_recomputation("inner", first=step == 0, ignore_outer_hooks=ignore_outer_hooks)
        with (
            reproducible(self.seed, "step", step),
            sdpa_kernel(SDPBackend.MATH),
            no_hooks,
            refuse_missing_derivatives("inner"),
        ):
            yield batch

    def loss(self, theta: Sequence[Tensor], psi: Tree, batch: Any) -> Tensor:
        """Inner loss g at leaves of θ, outside of torch.func.

        The mode that makes masks the same takes 6 to 17 % of a step of a small net, so it is entered only where random
        numbers are drawn: by the first step, or, as the generators tell, by this very call.
        """
        if not self.draws:
            before = rng_states()
            loss = self.problem.inner(rebuild(self.theta, theta), psi, batch)
            if same_rng_states(rng_states(), before):
                return loss
            del loss  # its graph goes before the next one comes
            _restore_rng(before)
        return self.transformable_loss(theta, psi, batch)

    def transformable_loss(self, theta: Sequence[Tensor], psi: Tree, batch: Any) -> Tensor:
        """The same with its masks those of torch.func, inside of it or not."""
        with ModeParity():
            return self.problem.inner(rebuild(self.theta, theta), psi, batch)

    def step(self, step: int, state: State, psi: Tree, batch: Any) -> tuple[State, Tensor]:
        """Ω_{t+1} in a form that torch.func can transform (forward mode, vmap)."""
        grads, loss = self.inner_gradient(batch, state.theta, psi)
        return State(*self.problem.optimizer.update(state.theta, grads, state.slots, step, psi)), loss

    def inner_gradient(self, batch: Any, theta: Sequence[Tensor], psi: Tree) -> tuple[list[Tensor], Tensor]:
        """∇_θ g, and g, in a form that torch.func can transform."""
        found: tuple[list[Tensor], Tensor] = grad_and_value(self.transformable_loss)(list(theta), psi, batch)
        return found

    def graph_step(self, step: int, state: State, psi: Tree, batch: Any) -> State:
        """The same step with its graph kept, for reverse mode; the weights must require gradients."""
        with torch.enable_grad():
            loss = self.loss(state.theta, psi, batch)
            self.check_same("loss", step, loss)
            grads = torch.autograd.grad(loss, state.theta, create_graph=True, materialize_grads=True)
            if self.first_pass is not None and self.first_pass.first_graph():
                refuse_once_differentiable(grads)
            return State(*self.problem.optimizer.update(state.theta, grads, state.slots, step, psi))

    def plain_step(self, step: int, state: State, psi: Tree, batch: Any) -> State:
        """The same step with no graph left behind."""
        with torch.enable_grad():
            watched = [weight.detach().requires_grad_() for weight in state.theta]
            loss = self.loss(watched, psi, batch)
            self.check_same("loss", step, loss)
            grads = torch.autograd.grad(loss, watched, materialize_grads=True)
        with torch.no_grad():
            return State(*self.problem.optimizer.update(state.theta, grads, state.slots, step, psi))

    def run(
        self, psi: Tree, *, state: State | None = None, first: int = 0, last: int | None = None, repeat_every: int = 0
    ) -> State:
        """Run steps ``first`` … ``last`` − 1 without a graph."""
        psi = detach_tree(psi)
        with torch.no_grad():
            state = self.start(psi) if state is None else state
        last = self.steps if last is None else last
        for step in range(first, last):
            before = state
            with self.at(step) as batch:
                state = self.plain_step(step, before, psi, batch)
            if repeat_every and (step == last - 1 or (step + 1) % repeat_every == 0):
                self.check_end(step + 1, state)
                with self.at(step) as batch:
                    self.check_end(step + 1, self.plain_step(step, before, psi, batch))
        return self.check_end(last, state)

    def outer(self, state: State, phi: Tree) -> Tensor:
        """Outer loss f at a state, shape ()."""
        no_hooks = no_recomputation("outer")
        with reproducible(self.seed, "outer"), sdpa_kernel(SDPBackend.MATH), ModeParity(), no_hooks:
            return check_scalar("outer", self.problem.outer(rebuild(self.theta, state.theta), phi))

    def outer_gradients(self, state: State, phi: Tree) -> tuple[Tensor, list[Tensor], list[Tensor]]:
        """f, d = ∂f/∂θ_T and c = ∂f/∂φ by one backward pass."""
        with torch.enable_grad():
            theta = [weight.detach().requires_grad_() for weight in state.theta]
            given = [leaf.detach().requires_grad_() for leaf in leaves(phi)]
            with refuse_missing_derivatives("outer"):
                value = self.outer(State(theta, state.slots), rebuild(phi, given))
        grads = vjp(value, [*theta, *given], name="outer")
        return value.detach(), grads[: len(theta)], grads[len(theta) :]


def vjp(
    outputs: Tensor | Sequence[Tensor],
    inputs: Sequence[Tensor],
    cotangents: Any = None,
    *,
    keep: bool = False,
    name: str = "inner",
) -> list[Tensor]:
    """Cotangents of the inputs, zero where nothing reaches them."""
    listed = [outputs] if isinstance(outputs, Tensor) else list(outputs)
    weights = [None] * len(listed) if cotangents is None else list(cotangents)
    kept = [(out, weight) for out, weight in zip(listed, weights, strict=True) if out.requires_grad]
    if not kept:
        return [torch.zeros_like(leaf) for leaf in inputs]
    outs, ws = zip(*kept, strict=True)
    with refuse_missing_derivatives(name):
        found = torch.autograd.grad(outs, inputs, ws, retain_graph=keep, allow_unused=True)
    return [torch.zeros_like(leaf) if got is None else got for leaf, got in zip(inputs, found, strict=True)]


_DRAWS = {
    F.dropout, torch.dropout, F.dropout1d, F.dropout2d, F.dropout3d, F.alpha_dropout, F.feature_alpha_dropout,
    torch.rand_like, torch.randn_like, torch.bernoulli,
}  # fmt: skip


class ModeParity(TorchFunctionMode):
    """Random masks are drawn for contiguous tensors, and what no_grad holds constant is so in forward mode too.

    Plain torch fills a mask in the order of memory, torch.func in that of the indices: a transposed activation would
    get other masks in forward mode than in the run itself. Forward mode also goes on inside ``torch.no_grad()``, and
    lacks a rule for some losses, which are written out.
    """

    has_hooks = False
    """Whether a hook was put on a tensor meanwhile."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch._C._set_grad_enabled:
            torch._C._set_fwd_grad_enabled(args[0])
        elif func is torch.Tensor.register_hook:
            self.has_hooks, args = True, (args[0], observe_only(args[1]), *args[2:])
        elif getattr(func, "__self__", None) is torch.Tensor.data:  # torch.func would look through it
            return args[0].detach()
        elif func in _DRAWS and args:
            args = (args[0].contiguous(), *args[1:])
        elif func in REPLACEMENTS:
            func = REPLACEMENTS[func]
        return func(*args, **(kwargs or {}))


@contextlib.contextmanager
def reproducible(seed: int, *labels: str | int) -> Iterator[None]:
    """Inside, torch's global generators stand where (seed, labels) put them; afterwards they are as before.

    Dropout has no generator of its own, so this is the one place where the global one is set.
    """
    before = rng_states()
    for generator in _generators():
        generator.manual_seed(number(seed, "dropout", *labels))
    try:
        yield
    finally:
        _restore_rng(before)


def rng_states() -> list[Tensor]:
    """Where torch's global generators stand: those that dropout draws from on the CPU and on the current device."""
    return [generator.get_state() for generator in _generators()]


def same_rng_states(a: Sequence[Tensor], b: Sequence[Tensor]) -> bool:
    """Whether nothing was drawn between two looks; by bytes, since every torch operation has modes to pass through."""
    return all(x.numpy().tobytes() == y.numpy().tobytes() for x, y in zip(a, b, strict=True))


def _restore_rng(states: Sequence[Tensor]) -> None:
    for generator, state in zip(_generators(), states, strict=True):
        generator.set_state(state)


def _generators() -> list[torch.Generator]:
    if not torch.cuda.is_available():
        return [torch.default_generator]
    return [torch.default_generator, torch.cuda.default_generators[torch.cuda.current_device()]]
