"""Oracle of the hypergradient: textbook recursions in a plain loop, one graph, one ``torch.autograd.grad``.

It shares nothing with the library but the meaning of a problem's fields and of a seed: which generator draws a batch
or an initial weight, and where torch's own generator stands in a step.
"""

from __future__ import annotations

import inspect
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._pytree import tree_flatten, tree_unflatten

from sparing import hypergrad as hg
from sparing.seeds import number, stream


def call(function: Any, *arguments: Any) -> Any:
    """The function with as many of the arguments as it names."""
    return function(*arguments[: len(inspect.signature(function).parameters)])


def sgd(rule: hg.SGD, lr: Any, w: Tensor, g: Tensor, moments: tuple[Tensor, ...], t: int) -> Any:
    """m ← μm + (1 − τ)g, θ ← θ − ηm; the first moment is g."""
    g = g + rule.weight_decay * w
    m = g if t == 1 else rule.momentum * moments[0] + (1 - rule.dampening) * g
    if rule.momentum == 0:
        m = g
    return w - lr * (g + rule.momentum * m if rule.nesterov else m), (m,)


def adam(rule: hg.Adam, lr: Any, w: Tensor, g: Tensor, moments: tuple[Tensor, ...], t: int) -> Any:
    """Kingma & Ba, Algorithm 1; decay in the gradient, or on the weights for AdamW."""
    if isinstance(rule, hg.AdamW):
        w = w - lr * rule.weight_decay * w
    else:
        g = g + rule.weight_decay * w
    one, two = rule.betas
    m, s = moments or (torch.zeros_like(w), torch.zeros_like(w))
    m, s = one * m + (1 - one) * g, two * s + (1 - two) * g**2
    return w - lr * (m / (1 - one**t)) / ((s / (1 - two**t)).sqrt() + rule.eps), (m, s)


def clipped(grads: list[Tensor], limit: float | None) -> list[Tensor]:
    """Gradients scaled down to a global norm of ``limit``."""
    if limit is None:
        return grads
    norm = torch.cat([grad.reshape(-1) for grad in grads]).square().sum().sqrt()
    return [grad * (limit / (norm + 1e-6)) for grad in grads] if norm + 1e-6 > limit else grads


def unrolled(
    problem: hg.Bilevel, phi: Any, seed: int = 0, *, cut: int = 0
) -> tuple[list[Tensor], Tensor, list[Tensor]]:
    """Hypergradient (leaves as of φ; the state before step ``cut`` held constant), value and leaves of θ_T."""
    flat, shape = tree_flatten(phi)
    given = [leaf.detach().clone().requires_grad_() for leaf in flat]
    watched = tree_unflatten(given, shape)
    psi = problem.through(watched) if problem.through else watched
    with torch.random.fork_rng(devices=[]), sdpa_kernel(SDPBackend.MATH):
        theta = problem.init
        if callable(theta):
            torch.manual_seed(number(seed, "dropout", "init"))
            theta = call(theta, psi, stream(seed, "init"))
        weights, nesting = tree_flatten(theta)
        weights = [w if w.requires_grad else w.clone().requires_grad_() for w in weights]
        moments: list[tuple[Tensor, ...]] = [()] * len(weights)
        rule = problem.optimizer
        for t in range(1, problem.steps + 1):
            data = problem.batches
            batch = call(data, t - 1, stream(seed, "batch", t - 1)) if callable(data) else data and data[t - 1]
            torch.manual_seed(number(seed, "dropout", "step", t - 1))
            loss = problem.inner(tree_unflatten(weights, nesting), psi, batch)
            grads = torch.autograd.grad(loss, weights, create_graph=True, materialize_grads=True)
            lr = call(rule.lr, t - 1, psi) if callable(rule.lr) else rule.lr
            update = sgd if isinstance(rule, hg.SGD) else adam
            grads = clipped(list(grads), rule.clip)
            moved = [update(rule, lr, w, g, m, t) for w, g, m in zip(weights, grads, moments, strict=True)]
            weights, moments = [w for w, _ in moved], [m for _, m in moved]
            if t == cut:
                weights = [w.detach().requires_grad_() for w in weights]
                moments = [tuple(part.detach() for part in m) for m in moments]
        torch.manual_seed(number(seed, "dropout", "outer"))
        value = problem.outer(tree_unflatten(weights, nesting), watched)
    found = torch.autograd.grad(value, given, materialize_grads=True)
    return list(found), value.detach(), [w.detach() for w in weights]


def vector(tree: Any) -> Tensor:
    """All leaves as one vector."""
    return torch.cat([leaf.detach().reshape(-1) for leaf in tree_flatten(tree)[0]])
