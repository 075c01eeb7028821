"""Optimizers that users bring, settings that are φ, losses along the run; a net of thirteen weights."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.func import functional_call

from idioms.hypergrad.problems import STEPS, Net, bilevel
from oracles.problems import VALID_X, VALID_Y, X, Y, draw
from sparing import hypergrad as hg

DOUBLE = torch.float64
NET = Net()
SHAPES = {name: weight.shape for name, weight in NET.named_parameters()}


class RmsProp:
    """Written by hand; its accumulators start at a number that is φ, and every leaf has its own decay."""

    def start(self, theta: Any, phi: Any) -> Any:
        return {"square": [torch.ones_like(w) * phi["weight"][0].exp() for w in theta]}

    def update(self, theta: Any, grads: Any, state: Any, step: int, phi: Any) -> Any:
        beta = torch.sigmoid(phi["weight"])
        pairs = zip(state["square"], grads, beta, strict=False)
        square = [b * s + (1 - b) * g.square() for s, g, b in pairs]
        moved = [w - 0.1 * g / (s.sqrt() + 1e-3) for w, g, s in zip(theta, grads, square, strict=True)]
        return moved, {"square": square}


class Factored:
    """Rows and columns of second moments, as Adafactor: a state of other shapes than the weights."""

    def start(self, theta: Any, phi: Any) -> Any:
        return [(w.new_zeros(w.shape[0]), w.new_zeros(w.shape[1])) if w.dim() == 2 else w * 0 for w in theta]

    def update(self, theta: Any, grads: Any, state: Any, step: int, phi: Any) -> Any:
        moved, kept = [], []
        for w, g, s in zip(theta, grads, state, strict=True):
            square = g.square() + 1e-3
            if isinstance(s, tuple):
                rows, columns = 0.9 * s[0] + 0.1 * square.mean(1), 0.9 * s[1] + 0.1 * square.mean(0)
                kept.append((rows, columns))
                scale = (rows[:, None] * columns[None] / rows.mean()).sqrt()
            else:
                kept.append(0.9 * s + 0.1 * square)
                scale = kept[-1].sqrt()
            moved.append(w - 0.05 * g / scale)
        return moved, kept


class Orthogonal:
    """Matrices by Newton and Schulz, as Muon, with a rate that is φ; other leaves by their gradient."""

    def start(self, theta: Any, phi: Any) -> Any:
        return ()

    def update(self, theta: Any, grads: Any, state: Any, step: int, phi: Any) -> Any:
        moved = []
        for w, g in zip(theta, grads, strict=True):
            x = g / g.norm() if g.dim() == 2 else g
            for _ in range(2 * (g.dim() == 2)):
                x = 1.5 * x - 0.5 * x @ (x.T @ x)
            moved.append(w - 0.1 * torch.sigmoid(phi["weight"][step]) * x)
        return moved, state


class Learned:
    """A net of φ reads gradient and momentum of each weight and writes its step (Andrychowicz et al. 2016)."""

    def start(self, theta: Any, phi: Any) -> Any:
        return [torch.zeros_like(w) for w in theta]

    def update(self, theta: Any, grads: Any, state: Any, step: int, phi: Any) -> Any:
        state = [0.8 * m + g for m, g in zip(state, grads, strict=True)]
        up, down = phi["weight"][:4].view(2, 2), phi["weight"][4:]
        seen = [torch.stack([g, m], -1) for g, m in zip(grads, state, strict=True)]
        return [w - 0.1 * (torch.tanh(x @ up) @ down) for w, x in zip(theta, seen, strict=True)], state


def sigmoid(*places: int, scale: float = 1.0) -> Callable[..., Tensor]:
    """A setting between 0 and ``scale``, of some elements of φ in turn."""
    return lambda step, phi: scale * torch.sigmoid(phi["weight"][places[step % len(places)]])


def by_leaf(scale: float) -> Callable[..., dict[str, Tensor]]:
    """One for each leaf."""
    return lambda step, phi: {name: scale * torch.sigmoid(phi["weight"][place]) for place, name in enumerate(SHAPES)}


def by_weight(step: int, phi: Any) -> dict[str, Tensor]:
    """A rate for each weight of each leaf."""
    return {name: 0.3 * torch.sigmoid(phi["weight"].sum() * draw(*shape, seed=3)) for name, shape in SHAPES.items()}


def path(step: int, theta: Any, phi: Any) -> Tensor:
    """Loss on held-out rows all along, heavier late, and a term of φ alone."""
    miss = functional_call(NET, theta, (VALID_X,)) - VALID_Y
    return 0.1 * step * miss.square().mean() + 0.01 * phi["weight"].square().sum()


def along(**changes: Any) -> hg.Bilevel:
    return bilevel(path=path, **changes)


def behind_a_bottleneck() -> hg.Bilevel:
    through = lambda phi: {"weight": phi["weight"].cumsum(0).sin()}  # noqa: E731
    return bilevel(path=path, through=through, optimizer=RmsProp())


OPTIMIZERS: dict[str, Callable[[], hg.Bilevel]] = {
    "RMSprop written by hand": lambda: bilevel(optimizer=RmsProp()),
    "factored second moments": lambda: bilevel(optimizer=Factored()),
    "Newton-Schulz steps": lambda: bilevel(optimizer=Orthogonal()),
    "a learned optimizer": lambda: bilevel(optimizer=Learned()),
    "a rate for each leaf as φ": lambda: bilevel(optimizer=hg.SGD(lr=by_leaf(0.5), momentum=0.9)),
    "a rate for each weight as φ": lambda: bilevel(optimizer=hg.SGD(lr=by_weight, momentum=0.9)),
    "a rate for each leaf as φ, Adam": lambda: bilevel(optimizer=hg.Adam(lr=by_leaf(0.2))),
    "momentum as φ": lambda: bilevel(optimizer=hg.SGD(lr=0.2, momentum=sigmoid(0, 1), nesterov=True)),
    "momentum and decay of each leaf as φ": lambda: bilevel(
        optimizer=hg.SGD(lr=0.2, momentum=by_leaf(0.9), weight_decay=by_leaf(0.2))
    ),
    "β as φ, Adam": lambda: bilevel(
        optimizer=hg.Adam(lr=0.1, betas=(sigmoid(0, 1, 2), sigmoid(3)), weight_decay=sigmoid(4, 5, scale=0.3))
    ),
    "β and decay of each leaf as φ, AdamW": lambda: bilevel(
        optimizer=hg.AdamW(lr=0.1, betas=(by_leaf(0.9), 0.99), weight_decay=by_leaf(0.5), clip=0.5)
    ),
}  # fmt: skip
"""On one method of each algorithm."""

ALONG: dict[str, Callable[[], hg.Bilevel]] = {
    "an outer loss along the run": along,
    "an outer loss along the run, Adam": lambda: along(optimizer=hg.Adam(lr=0.1)),
    "an outer loss along the run, hand-written optimizer": lambda: along(optimizer=RmsProp()),
}
"""On every method that unrolls; the others refuse."""

IMPLICIT = ("HessianFree", "Neumann", "ConjugateGradient", "FiniteDifference", "ForwardGradient with guides")
"""One of the guides is implicit."""


def half(*, autocast: bool) -> hg.Bilevel:
    """Weights in float32 and products in bfloat16; or all of it in float64, as the answer."""
    dtype = torch.float32 if autocast else DOUBLE

    def guess(theta: Any, x: Tensor) -> Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=autocast):
            return functional_call(NET, theta, (x.to(dtype),)).to(dtype)

    def inner(theta: Any, phi: Any, batch: Any) -> Tensor:
        return (torch.sigmoid(phi["weight"]).to(dtype) * (guess(theta, X) - Y.to(dtype)).square()).mean()

    def outer(theta: Any, phi: Any) -> Tensor:
        return (guess(theta, VALID_X) - VALID_Y.to(dtype)).square().mean()

    theta = {name: weight.detach().to(dtype) for name, weight in NET.named_parameters()}
    return bilevel(inner=inner, outer=outer, init=theta, optimizer=hg.AdamW(lr=0.05, eps=0.1))


MIXED = "products in bfloat16, weights in float32"
MIXED_ERROR = 0.03
"""Eight bits of mantissa, 2⁻⁹ a rounding, in some ten products one after the other."""


def in_place() -> hg.Bilevel:
    class Once(Learned):
        def update(self, theta: Any, grads: Any, state: Any, step: int, phi: Any) -> Any:
            for m, g in zip(state, grads, strict=True):
                m.mul_(0.8).add_(g)
            return [w - 0.1 * m for w, m in zip(theta, state, strict=True)], state

    return bilevel(optimizer=Once())


def counting() -> hg.Bilevel:
    class Once(Learned):
        calls = 0

        def update(self, theta: Any, grads: Any, state: Any, step: int, phi: Any) -> Any:
            self.calls += 1
            return [w - 0.1 / self.calls * g for w, g in zip(theta, grads, strict=True)], state

    return bilevel(optimizer=Once())


def other_shapes() -> hg.Bilevel:
    class Once(Learned):
        def update(self, theta: Any, grads: Any, state: Any, step: int, phi: Any) -> Any:
            return [w - 0.1 * g for w, g in zip(theta, grads, strict=True)], grads[:1]

    return bilevel(optimizer=Once())


def of_torch() -> hg.Bilevel:
    return bilevel(optimizer=torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=0.1))


def other_order() -> hg.Bilevel:
    rates = dict.fromkeys(reversed(list(SHAPES)), 0.1)
    return bilevel(optimizer=hg.SGD(lr=lambda step: rates))


def random_path() -> hg.Bilevel:
    generator = torch.Generator().manual_seed(3)

    def loss(step: int, theta: Any, phi: Any) -> Tensor:
        return theta["last.weight"].sum() * torch.rand((), generator=generator, dtype=DOUBLE)

    return bilevel(path=loss, steps=STEPS)


REFUSED_OPTIMIZERS: dict[str, tuple[Callable[[], hg.Bilevel], str]] = {
    "an optimizer that works in place": (in_place, r"optimizer: got aten::mul_.* on a tensor that it did not make"),
    "an optimizer that counts its calls": (counting, "optimizer.update: got another step when asked again"),
    "an optimizer that returns another state": (other_shapes, "optimizer.update: got weights or state of another"),
    "an optimizer of torch": (of_torch, "optimizer: got SGD; a step must be a pure function"),
    "rates in another order than the leaves": (other_order, "optimizer.lr: got values in another nesting or order"),
}
"""On one method of each algorithm."""
