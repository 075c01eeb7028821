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
from torch.utils._pytree import tree_flatten, tree_map, tree_unflatten

from sparing import hypergrad as hg
from sparing.seeds import number, stream


def call(function: Any, *arguments: Any) -> Any:
    """The function with as many of the arguments as it names."""
    return function(*arguments[: len(inspect.signature(function).parameters)])


def sgd(rule: hg.SGD, at: Any, w: Tensor, g: Tensor, moments: tuple[Tensor, ...], t: int) -> Any:
    """m ← μm + (1 − τ)g, θ ← θ − ηm; the first moment is g."""
    mu = at(rule.momentum)
    g = g + at(rule.weight_decay) * w
    m = g if t == 1 else mu * moments[0] + (1 - rule.dampening) * g
    if isinstance(mu, float) and mu == 0:
        m = g
    return w - at(rule.lr) * (g + mu * m if rule.nesterov else m), (m,)


def adam(rule: hg.Adam, at: Any, w: Tensor, g: Tensor, moments: tuple[Tensor, ...], t: int) -> Any:
    """Kingma & Ba, Algorithm 1; decay in the gradient, or on the weights for AdamW."""
    lr, decay, one, two = at(rule.lr), at(rule.weight_decay), at(rule.betas[0]), at(rule.betas[1])
    if isinstance(rule, hg.AdamW):
        w = w - lr * decay * w
    else:
        g = g + decay * w
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
        rule: Any = problem.optimizer
        own = not isinstance(rule, hg.SGD | hg.Adam)
        state = rule.start(weights, psi) if own else ()
        along: Any = 0.0
        for t in range(1, problem.steps + 1):
            data = problem.batches
            batch = call(data, t - 1, stream(seed, "batch", t - 1)) if callable(data) else data and data[t - 1]
            torch.manual_seed(number(seed, "dropout", "step", t - 1))
            loss = problem.inner(tree_unflatten(weights, nesting), psi, batch)
            grads = torch.autograd.grad(loss, weights, create_graph=True, materialize_grads=True)
            if own:
                weights, state = rule.update(weights, list(grads), state, t - 1, psi)
            else:
                update = sgd if isinstance(rule, hg.SGD) else adam
                grads = clipped(list(grads), rule.clip)
                moved = []
                for place, (w, g, m) in enumerate(zip(weights, grads, moments, strict=True)):

                    def at(setting: Any, place: int = place, t: int = t, psi: Any = psi) -> Any:
                        value = call(setting, t - 1, psi) if callable(setting) else setting
                        return list(value.values())[place] if isinstance(value, dict) else value

                    moved.append(update(rule, at, w, g, m, t))
                weights, moments = [w for w, _ in moved], [m for _, m in moved]
            if problem.path is not None:
                along = along + problem.path(t, tree_unflatten(weights, nesting), psi)
            if t == cut:
                weights = [w.detach().requires_grad_() for w in weights]
                moments = [tuple(part.detach() for part in m) for m in moments]
                state, along = tree_map(lambda leaf: leaf.detach(), (state, torch.as_tensor(along)))
        torch.manual_seed(number(seed, "dropout", "outer"))
        value = problem.outer(tree_unflatten(weights, nesting), watched) + along
    found = torch.autograd.grad(value, given, materialize_grads=True)
    return list(found), value.detach(), [w.detach() for w in weights]


def vector(tree: Any) -> Tensor:
    """All leaves as one vector."""
    return torch.cat([leaf.detach().reshape(-1) for leaf in tree_flatten(tree)[0]])
