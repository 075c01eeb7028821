"""A pool of rows of which many are worth little, the checked rows, and the training that every choice ends in."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from sparing import hypergrad as hg
from sparing.jobs.attribute.nets import Weights, logits, perceptron
from sparing.jobs.subjects.images import image_rows, inputs_of
from sparing.seeds import stream

CLASSES, WIDTH, BATCH, STEPS, MOMENTUM = 10, 64, 50, 200, 0.9
CHECKED, DEV, TEST = 100, 200, 5000
ORIGINALS, NOISE = 20, 0.3
"""Images that near-copies are made of, and the noise on each copy (in standard deviations of a pixel)."""


@dataclass(frozen=True, kw_only=True)
class Case:
    """A pool and how many of its rows are kept."""

    name: str
    data: str = "mnist"
    rows: int = 1000
    wrong: float = 0.3  # share of rows with a wrong label
    copies: float = 0.0  # share of rows that are near-copies of ORIGINALS images
    kept: tuple[int, ...] = (100, 300)


CASES = {
    case.name: case
    for case in (
        Case(name="mnist, wrong labels"),
        Case(name="mnist, wrong labels and near-copies", copies=0.4),
        Case(name="fashion-mnist, wrong labels and near-copies", data="fashion-mnist", copies=0.4),
    )
}


@dataclass(frozen=True, kw_only=True, eq=False)
class Part:
    """Rows: pixels (n, 784), of mean 0 and deviation 1 over the pool, labels (n,), weights (n,) if not all are 1."""

    x: Tensor
    y: Tensor
    weights: Tensor | None = None

    def __len__(self) -> int:
        return len(self.y)

    def at(self, rows: Tensor) -> Part:
        """Some of the rows."""
        return Part(x=self.x[rows], y=self.y[rows], weights=None if self.weights is None else self.weights[rows])

    def beside(self, other: Part) -> Part:
        """These rows and others, each with its weight."""
        x, y = torch.cat([self.x, other.x]), torch.cat([self.y, other.y])
        if self.weights is None and other.weights is None:
            return Part(x=x, y=y)
        ones = (torch.ones_like(part.x[:, 0]) if part.weights is None else part.weights for part in (self, other))
        return Part(x=x, y=y, weights=torch.cat(list(ones)))


@dataclass(frozen=True, kw_only=True, eq=False)
class Data:
    """What one seed has: no row is in two parts."""

    pool: Part
    right: Tensor  # whether the label of a row of the pool is right, (n,)
    copied: Tensor  # whether it is a near-copy, (n,)
    checked: Part  # right labels; any choice may use them
    dev: Part  # right labels; rates and settings are chosen by them
    test: Part  # looked at once, after the rate is chosen


@functools.lru_cache(maxsize=2)
def data_of(case: Case, seed: int) -> Data:
    """The parts of a seed.

    Args:
        case: The pool.
        seed: Of the rows drawn, of which are wrong or copies, and of their noise.

    Returns:
        The parts.
    """
    (images, labels), (others, truth) = image_rows(case.data, rows=10_000, calibration=60_000)
    draw = lambda name: stream(seed, "selection", name)  # noqa: E731  one stream for each thing that is drawn
    order = torch.randperm(len(images), generator=draw("rows"))
    numbers = order.split([case.rows, CHECKED, DEV, ORIGINALS, len(images) - case.rows - CHECKED - DEV - ORIGINALS])
    test = torch.randperm(len(others), generator=draw("test"))[:TEST]

    def part(pixels: Tensor, names: Tensor) -> Part:
        return Part(x=inputs_of(pixels, like=images[numbers[0]]).flatten(1), y=names)

    pool, checked, dev, originals = (part(images[rows], labels[rows]) for rows in numbers[:4])
    kinds = torch.randperm(case.rows, generator=draw("kinds"))
    wrong, copied = kinds < round(case.wrong * case.rows), kinds >= case.rows - round(case.copies * case.rows)
    moved = torch.randint(1, CLASSES, (case.rows,), generator=draw("labels"))
    source = originals.at(torch.randint(ORIGINALS, (case.rows,), generator=draw("originals")))
    noisy = source.x + NOISE * torch.randn(source.x.shape, generator=draw("noise"))
    x = torch.where(copied[:, None], noisy, pool.x)
    y = torch.where(copied, source.y, torch.where(wrong, (pool.y + moved) % CLASSES, pool.y))
    return Data(
        pool=Part(x=x, y=y), right=~wrong, copied=copied, checked=checked, dev=dev, test=part(others[test], truth[test])
    )


def initial(seed: int) -> Weights:
    """Initial weights, 784-64-10."""
    return perceptron(seed, inputs=784, width=WIDTH, classes=CLASSES)


def batches(rows: int, size: int, steps: int, *labels: str | int, seed: int) -> list[Tensor]:
    """Row numbers by step: whole passes in a new order each, so that a batch may reach over the end of one."""
    passes = -(-size * steps // rows)
    orders = [torch.randperm(rows, generator=stream(seed, "selection", *labels, at)) for at in range(passes)]
    return list(torch.cat(orders)[: size * steps].split(size))


def training(part: Part, lr: float, seed: int, *, steps: int = STEPS) -> hg.TrainingRun:
    """The training that every choice ends in: same start, steps, batch and schedule, whatever the rows."""

    def losses(theta: Weights, rows: Tensor) -> Tensor:
        found = functional.cross_entropy(logits(theta, part.x[rows], "gelu"), part.y[rows], reduction="none")
        return found if part.weights is None else found * part.weights[rows]

    return hg.TrainingRun(
        losses=losses, rows=len(part), batches=batches(len(part), BATCH, steps, "order", seed=seed), init=initial(seed),
        optimizer=hg.SGD(lr=hg.cosine(lr, steps), momentum=MOMENTUM),
    )  # fmt: skip


def trained(part: Part, lr: float, seed: int, *, steps: int = STEPS) -> Weights:
    """The end of that training, written out as a plain loop: several times as fast as ``hg.solve``."""
    run = training(part, lr, seed, steps=steps)
    theta = [weight.clone().requires_grad_() for weight in run.init.values()]
    moments = [torch.zeros_like(weight) for weight in theta]
    rate = hg.cosine(lr, steps)
    for step, rows in enumerate(run.batches):
        loss = run.losses(dict(zip(run.init, theta, strict=True)), rows).mean()
        gradients = torch.autograd.grad(loss, theta)
        with torch.no_grad():
            torch._foreach_mul_(moments, MOMENTUM)
            torch._foreach_add_(moments, gradients)
            torch._foreach_add_(theta, moments, alpha=-float(rate(step)))
    return {name: weight.detach() for name, weight in zip(run.init, theta, strict=True)}


def row_losses(theta: Weights, part: Part) -> Tensor:
    """Loss of each row, (n,)."""
    with torch.no_grad():
        return functional.cross_entropy(logits(theta, part.x, "gelu"), part.y, reduction="none")


def judged(theta: Weights, part: Part) -> tuple[float, float]:
    """Mean loss (nat) and accuracy (0 to 1)."""
    with torch.no_grad():
        scores = logits(theta, part.x, "gelu")
    return float(functional.cross_entropy(scores, part.y)), float((scores.argmax(1) == part.y).double().mean())


def numbers_of(rows: Sequence[int] | Tensor) -> Tensor:
    """Row numbers in rising order, so that a choice is a set."""
    return torch.as_tensor(rows).sort().values
