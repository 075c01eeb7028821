"""Every method, each with an answer that shares no code with it."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.distributed import HashStore
from torch.utils._pytree import tree_flatten, tree_unflatten

from oracles.unrolled import call, unrolled, vector
from sparing import hypergrad as hg
from sparing.errors import RunError
from sparing.hypergrad.spread import Spread
from sparing.seeds import number, stream

SEED = 3
MU = 1e-4
DAMPING = 3.0
"""Makes every inner Hessian here positive definite, so that conjugate gradients run to their end."""

Made = Callable[[], hg.Bilevel]


@dataclass(frozen=True)
class Way:
    """A method, its answer, and how far rounding may take the two apart, relative to the answer."""

    estimate: Callable[[hg.Bilevel, Any], Tensor]
    truth: Callable[[hg.Bilevel, Any], Tensor]
    error: float
    once: bool = False
    """Whether it makes each inner step once and at one φ alone: a run that cannot be made again is still its run."""


def by(method: Any) -> Callable[[hg.Bilevel, Any], Tensor]:
    return lambda problem, phi: vector(hg.hypergradient(problem, phi, method, seed=SEED).grad)


def frame(**settings: Any) -> Callable[[hg.Bilevel, Any], Tensor]:
    """(FG)²U along a whole orthonormal frame, which is exact."""

    def estimate(problem: hg.Bilevel, phi: Any) -> Tensor:
        method = hg.ForwardGradient(directions=vector(phi).numel(), law=hg.Orthonormal(), **settings)
        return vector(hg.hypergradient(problem, phi, method, seed=SEED).grad)

    return estimate


def streamed(problem: hg.Bilevel, phi: Any) -> Tensor:
    run = hg.Stream(problem, phi, hg.ForwardGradient(directions=vector(phi).numel(), law=hg.Orthonormal()), seed=SEED)
    for _ in range(problem.steps):
        run.step()
    return vector(run.peek().grad)


def spread(problem: hg.Bilevel, phi: Any) -> Tensor:
    """Two ranks in turn: the second leaves its weights and is not waited for, the first takes them up."""
    store, count = HashStore(), vector(phi).numel()

    def rank(this: int, wait: float) -> Tensor:
        shared = Spread(store=store, rank=this, size=2, timeout=wait)
        method = hg.ForwardGradient(directions=count, law=hg.Orthonormal(), spread=shared)
        return vector(hg.hypergradient(problem, phi, method, seed=SEED).grad)

    with contextlib.suppress(RunError):
        rank(1, 0.01)
    return rank(0, 5.0)


def differences(step: float, *, exact_outer: bool) -> Callable[[hg.Bilevel, Any], Tensor]:
    def estimate(problem: hg.Bilevel, phi: Any) -> Tensor:
        method = hg.ZerothOrder(
            directions=vector(phi).numel(), law=hg.Orthonormal(), step=step, exact_outer=exact_outer
        )
        return vector(hg.hypergradient(problem, phi, method, seed=SEED).grad)

    return estimate


def exact(problem: hg.Bilevel, phi: Any) -> Tensor:
    return vector(unrolled(problem, phi, SEED)[0])


def tail(problem: hg.Bilevel, phi: Any) -> Tensor:
    return vector(unrolled(problem, phi, SEED, cut=problem.steps - 2)[0])


def quotients(problem: hg.Bilevel, phi: Any) -> Tensor:
    """Central differences of the outer loss at the end of a plain run, along each coordinate."""
    flat, shape = tree_flatten(phi)
    found = []
    for place, leaf in enumerate(flat):
        for element in range(leaf.numel()):
            ends = []
            for sign in (1, -1):
                moved = leaf.clone()
                moved.view(-1)[element] += sign * MU
                there = tree_unflatten([*flat[:place], moved, *flat[place + 1 :]], shape)
                ends.append(float(unrolled(problem, there, SEED)[1]))
            found.append((ends[0] - ends[1]) / (2 * MU))
    return torch.tensor(found, dtype=torch.float64)


def place(problem: hg.Bilevel, phi: Any) -> tuple[Tensor, Tensor, Callable[[Tensor, Tensor], Tensor], list[Tensor]]:
    """θ_T and φ as vectors, g as a function of them on the batch and the masks of the last step, and [d, c]."""
    _, _, theta = unrolled(problem, phi, SEED)
    start = problem.init
    nest = tree_flatten(call(start, phi, stream(SEED, "init")) if callable(start) else start)[1]
    flat, shape = tree_flatten(phi)
    last = problem.steps - 1
    data = problem.batches
    batch = call(data, last, stream(SEED, "batch", last)) if callable(data) else data and data[last]

    def cut(whole: Tensor, like: list[Tensor], nesting: Any) -> Any:
        parts = whole.split([part.numel() for part in like])
        return tree_unflatten([p.reshape(q.shape).to(q.dtype) for p, q in zip(parts, like, strict=True)], nesting)

    def inner(weights: Tensor, given: Tensor) -> Tensor:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(number(SEED, "dropout", "step", last))
            loss = problem.inner(cut(weights, theta, nest), cut(given, flat, shape), batch)
        return loss + quadratic(problem, tree_flatten(cut(weights, theta, nest))[0], cut(given, flat, shape))

    w, p = (vector(parts).double().requires_grad_() for parts in (theta, flat))
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(number(SEED, "dropout", "outer"))
        slopes = torch.autograd.grad(
            problem.outer(cut(w, theta, nest), cut(p, flat, shape)), (w, p), materialize_grads=True
        )
    return w, p, inner, list(slopes)


def quadratic(problem: hg.Bilevel, weights: list[Tensor], phi: Any) -> Any:
    """½λ‖θ‖² of an optimizer that adds λθ to the gradient, with the λ of the last step."""
    rule = problem.optimizer
    if isinstance(rule, hg.AdamW) or not isinstance(rule, hg.SGD | hg.Adam):
        return 0.0
    found = rule.weight_decay
    found = call(found, problem.steps - 1, phi) if callable(found) else found
    each = list(found.values()) if isinstance(found, dict) else [found] * len(weights)
    return sum(0.5 * value * weight.square().sum() for value, weight in zip(each, weights, strict=True))


def implicit(inverse: Callable[[Tensor, Tensor], Tensor]) -> Callable[[hg.Bilevel, Any], Tensor]:
    """c − x·Y with x from a dense Hessian."""

    def truth(problem: hg.Bilevel, phi: Any) -> Tensor:
        w, p, inner, (d, c) = place(problem, phi)
        slopes = torch.autograd.grad(inner(w, p), w, create_graph=True)[0]
        rows = [torch.autograd.grad(one, (w, p), retain_graph=True, materialize_grads=True) for one in slopes]
        hessian, mixed = torch.stack([row[0] for row in rows]), torch.stack([row[1] for row in rows])
        return c - inverse(hessian, d) @ mixed

    return truth


def darts(problem: hg.Bilevel, phi: Any) -> Tensor:
    """Liu et al. 2019: ε = 0.01/‖d‖, and the gradients of g with respect to φ on both sides."""
    w, p, inner, (d, c) = place(problem, phi)
    step = 0.01 / d.norm()
    up, down = (
        torch.autograd.grad(inner((w + sign * step * d).detach(), p), p, materialize_grads=True)[0] for sign in (1, -1)
    )
    return c - (up - down) / (2 * step)


def neumann(hessian: Tensor, d: Tensor) -> Tensor:
    total = term = d
    for _ in range(8):
        term = term - 0.05 * hessian @ term
        total = total + term
    return 0.05 * total


ROUNDING = 1e-11
"""Float64 over four steps, and the Hessian once more: below 1e-13 in the norm."""

WAYS: dict[str, Way] = {
    "Reverse": Way(by(hg.Reverse()), exact, ROUNDING, once=True),
    "Truncated": Way(by(hg.Truncated(steps=2)), tail, ROUNDING, once=True),
    "Checkpointed √T": Way(by(hg.Checkpointed()), exact, ROUNDING),
    "Checkpointed, no state": Way(by(hg.Checkpointed(states=0)), exact, ROUNDING),
    "Checkpointed in bytes": Way(by(hg.Checkpointed(memory="1MB")), exact, ROUNDING),
    "Forward": Way(by(hg.Forward()), exact, ROUNDING, once=True),
    "Forward in chunks": Way(by(hg.Forward(chunk=2)), exact, ROUNDING),
    "ForwardGradient": Way(frame(), exact, ROUNDING, once=True),
    "ForwardGradient in chunks": Way(frame(chunk=2), exact, ROUNDING),
    "ForwardGradient in pieces": Way(frame(width=2), exact, ROUNDING),
    "ForwardGradient with a tail": Way(frame(tail=2), exact, ROUNDING, once=True),
    "ForwardGradient with guides": Way(frame(guides=(hg.HessianFree(), hg.Truncated(steps=1))), exact, ROUNDING),
    "ForwardGradient over ranks": Way(spread, exact, ROUNDING),
    "Stream": Way(streamed, exact, ROUNDING, once=True),
    "HessianFree": Way(by(hg.HessianFree()), implicit(lambda hessian, d: d), ROUNDING),
    "Neumann": Way(by(hg.Neumann(step=0.05, terms=8)), implicit(neumann), ROUNDING),
    "ConjugateGradient": Way(
        by(hg.ConjugateGradient(terms=60, damping=DAMPING, tolerance=1e-13)),
        implicit(lambda hessian, d: torch.linalg.solve(hessian + DAMPING * torch.eye(len(d), dtype=d.dtype), d)),
        1e-9,  # sixty iterations at a tolerance of 1e-13, times the condition of the damped Hessian
    ),
    "FiniteDifference": Way(by(hg.FiniteDifference()), darts, 1e-10),  # a difference of gradients, 1e-16 over 1e-2
    # both are central differences, of θ_T or of the outer loss: errors of µ² = 1e-8 each, and of ε/µ = 1e-12
    "ZerothOrder": Way(differences(MU, exact_outer=True), quotients, 1e-6),
    "ZerothOrder, outer too": Way(differences(MU, exact_outer=False), quotients, 1e-6),
}
