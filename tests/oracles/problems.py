"""Small two-level problems, one for each way in which φ can steer a run; float64, each with its φ."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from sparing import hypergrad as hg

STEPS = 4


class Case(NamedTuple):
    problem: hg.Bilevel
    phi: Any


def draw(*shape: int, seed: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


X, Y = draw(6, 2, seed=1), draw(6, seed=2)
VALID_X, VALID_Y = draw(5, 2, seed=3), draw(5, seed=4)


def start() -> dict[str, Tensor]:
    return {"hidden": draw(2, 3, seed=5), "out": draw(3, seed=6)}


def predict(theta: dict[str, Tensor], x: Tensor) -> Tensor:
    return torch.tanh(x @ theta["hidden"]) @ theta["out"]


def valid(theta: dict[str, Tensor], phi: Any) -> Tensor:
    return (predict(theta, VALID_X) - VALID_Y).square().mean()


def weighted(theta: dict[str, Tensor], weight: Tensor, x: Tensor = X, y: Tensor = Y) -> Tensor:
    return (torch.sigmoid(weight) * (predict(theta, x) - y).square()).mean()


def bilevel(optimizer: Any, **changes: Any) -> hg.Bilevel:
    fields = {
        "inner": lambda theta, phi, batch: weighted(theta, phi["weight"]),
        "outer": valid,
        "init": start(),
        "optimizer": optimizer,
        "steps": STEPS,
    }
    return hg.Bilevel(**(fields | changes))


MOMENTUM = hg.SGD(lr=0.2, momentum=0.9)


def example_weights(optimizer: Any = MOMENTUM) -> Case:
    """Hyper-data-cleaning, with φ outside too."""

    def outer(theta: Any, phi: Any) -> Tensor:
        return valid(theta, phi) + 0.1 * phi["weight"].square().sum()

    return Case(bilevel(optimizer, outer=outer), {"weight": draw(6, seed=7)})


def data(optimizer: Any = MOMENTUM) -> Case:
    """Condensation: φ is what is trained on."""

    def inner(theta: Any, phi: Any, batch: Any) -> Tensor:
        return (predict(theta, phi["x"]) - Y[:3]).square().mean()

    return Case(bilevel(optimizer, inner=inner), {"x": draw(3, 2, seed=8)})


def learning_rates(optimizer: Any = None) -> Case:
    """One rate a step, and nothing else: the inner loss does not see φ."""

    def rate(step: int, phi: Any) -> Tensor:
        return phi["log_rate"][step].exp()

    made = hg.SGD(lr=rate, momentum=0.9) if optimizer is None else optimizer
    inner = lambda theta, phi, batch: weighted(theta, torch.zeros(6, dtype=torch.float64))  # noqa: E731
    return Case(bilevel(made, inner=inner), {"log_rate": draw(STEPS, seed=9) * 0.3 - 2})


def maml(optimizer: Any = MOMENTUM) -> Case:
    """φ is the initialisation."""
    inner = lambda theta, phi, batch: (predict(theta, X) - Y).square().mean()  # noqa: E731
    return Case(bilevel(optimizer, inner=inner, init=lambda phi: phi), start())


def nested(optimizer: Any = MOMENTUM) -> Case:
    """Trees of tuples, lists and dicts, a leaf of shape (), a leaf of θ that the inner loss leaves alone."""

    def inner(theta: Any, phi: Any, batch: Any) -> Tensor:
        (first, [scale]), shift = theta["net"], phi[1]["shift"]
        guess = torch.tanh(X @ first) * scale.exp() + shift[0]
        return (guess - Y).square().mul(torch.sigmoid(phi[0])).mean()

    def outer(theta: Any, phi: Any) -> Tensor:
        (first, [scale]), spare = theta["net"], theta["spare"]
        return ((VALID_X @ first) * scale - VALID_Y + spare * phi[1]["shift"][0]).square().mean()

    one = torch.ones((), dtype=torch.float64)
    theta = {"net": (draw(2, seed=10), [0.5 * one]), "spare": 0.3 * one}
    phi = [draw(6, seed=11), {"shift": (0.2 * one,)}]
    return Case(bilevel(optimizer, inner=inner, outer=outer, init=theta), phi)


def bottleneck(optimizer: Any = MOMENTUM) -> Case:
    """A network of φ gives a weight to each example; the outer loss sees φ too."""
    features = draw(6, 2, seed=12)

    def through(phi: Any) -> Tensor:
        return torch.tanh(features @ phi["up"]) @ phi["down"]

    def outer(theta: Any, phi: Any) -> Tensor:
        return valid(theta, phi) + 0.1 * phi["up"].square().sum()

    phi = {"up": draw(2, 4, seed=13), "down": draw(4, seed=14)}
    inner = lambda theta, psi, batch: weighted(theta, psi)  # noqa: E731
    return Case(bilevel(optimizer, inner=inner, outer=outer, through=through), phi)


def dropout(optimizer: Any = MOMENTUM) -> Case:
    """Masks from torch's global generator, in the run and outside of it."""

    def inner(theta: Any, phi: Any, batch: Any) -> Tensor:
        guess = F.dropout(torch.tanh(X @ theta["hidden"]), 0.5) @ theta["out"]
        return (torch.sigmoid(phi["weight"]) * (guess - Y).square()).mean()

    def outer(theta: Any, phi: Any) -> Tensor:
        return (F.dropout(predict(theta, VALID_X), 0.3) - VALID_Y).square().mean()

    return Case(bilevel(optimizer, inner=inner, outer=outer), {"weight": draw(6, seed=7)})


def minibatches(optimizer: Any = MOMENTUM) -> Case:
    """Three examples a step, drawn by the generator of the step."""

    def batches(step: int, generator: torch.Generator) -> dict[str, Any]:
        return {"rows": torch.randperm(6, generator=generator)[:3]}

    def inner(theta: Any, phi: Any, batch: Any) -> Tensor:
        rows = batch["rows"]
        return weighted(theta, phi["weight"][rows], X[rows], Y[rows])

    return Case(bilevel(optimizer, inner=inner, batches=batches), {"weight": draw(6, seed=7)})


def listed(optimizer: Any = MOMENTUM) -> Case:
    """Batches from a list, of unequal sizes."""
    inner = lambda theta, phi, rows: weighted(theta, phi["weight"][rows], X[rows], Y[rows])  # noqa: E731
    batches = [slice(0, 2), slice(1, 6), slice(4, 6), slice(0, 6)]
    return Case(bilevel(optimizer, inner=inner, batches=batches), {"weight": draw(6, seed=7)})


def fresh_start(optimizer: Any = MOMENTUM) -> Case:
    """Random initial weights whose scale is φ, behind a bottleneck."""

    def init(psi: Any, generator: torch.Generator) -> dict[str, Tensor]:
        noise = torch.randn(2, 3, generator=generator, dtype=torch.float64)
        return {"hidden": noise * psi["scale"], "out": draw(3, seed=6)}

    inner = lambda theta, psi, batch: weighted(theta, psi["weight"])  # noqa: E731
    through = lambda phi: {"scale": phi["raw"][0].exp(), "weight": phi["raw"][1:].repeat(3)}  # noqa: E731
    return Case(bilevel(optimizer, inner=inner, init=init, through=through), {"raw": draw(3, seed=15)})


def explicit_only(optimizer: Any = MOMENTUM) -> Case:
    """The outer loss sees φ alone."""
    outer = lambda theta, phi: phi["weight"].square().sum()  # noqa: E731
    return Case(bilevel(optimizer, outer=outer), {"weight": draw(6, seed=7)})


PROBLEMS: list[Callable[..., Case]] = [
    example_weights, data, learning_rates, maml, nested, bottleneck, dropout, minibatches, listed, fresh_start,
    explicit_only,
]  # fmt: skip

OPTIMIZERS: dict[str, Any] = {
    "sgd": hg.SGD(lr=0.2),
    "momentum": MOMENTUM,
    "nesterov": hg.SGD(lr=0.1, momentum=0.9, nesterov=True),
    "dampening": hg.SGD(lr=0.2, momentum=0.8, dampening=0.5),
    "l2": hg.SGD(lr=0.2, momentum=0.9, weight_decay=0.1),
    "clipping at work": hg.SGD(lr=0.5, momentum=0.9, weight_decay=0.1, clip=0.05),
    "clipping idle": hg.SGD(lr=0.2, clip=1e3),
    "cosine": hg.SGD(lr=hg.cosine(0.3, STEPS, floor=0.01), momentum=0.9),
    "rate of phi": hg.SGD(lr=lambda step, phi: 0.1 * torch.sigmoid(phi["weight"]).mean() / (step + 1), momentum=0.5),
    "adam": hg.Adam(lr=0.1),
    "adam l2 clipped": hg.Adam(lr=0.1, betas=(0.5, 0.9), eps=1e-3, weight_decay=0.1, clip=0.05),
    "adamw": hg.AdamW(lr=0.1, weight_decay=0.2),
    "adamw schedule": hg.AdamW(lr=hg.cosine(0.1, STEPS), betas=(0.8, 0.95)),
    "adamw rate of phi": hg.AdamW(lr=lambda step, phi: 0.1 * torch.sigmoid(phi["weight"]).mean(), weight_decay=0.3),
}
