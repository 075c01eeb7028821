"""Ways to choose rows of the pool; each may use the checked rows, none sees the rows that choices are judged by."""

from __future__ import annotations

import time
from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional

from benchmarks.data_selection.cases import (
    MOMENTUM,
    Data,
    Part,
    batches,
    initial,
    judged,
    numbers_of,
    row_losses,
    trained,
)
from sparing import hypergrad as hg
from sparing.jobs.attribute.nets import Weights, logits
from sparing.seeds import stream

ROUNDS, STEPS, BATCH, RATE = 20, 100, 100, 0.01
"""Outer steps; steps, batch and first rate of the run that is differentiated."""
SWAPPED, MEMORY = 0.3, 0.5
"""Share of the kept rows that the first swap may replace, falling to 0; weight of the gradients before the last."""
EARLY, NETS = 20, 3
"""Steps of training before EL2N scores are taken, and nets that they are averaged over."""

Loss = Callable[[Weights], Tensor]


def weighted_run(pool: Part, seed: int, turn: int) -> hg.TrainingRun:
    """A run over the whole pool whose rows have weights; order and start belong to the turn."""

    def losses(theta: Weights, rows: Tensor) -> Tensor:
        return functional.cross_entropy(logits(theta, pool.x[rows], "gelu"), pool.y[rows], reduction="none")

    order = batches(len(pool), BATCH, STEPS, "weighted", turn, seed=seed)
    start = initial(1000 * seed + turn)
    optimizer = hg.SGD(lr=hg.cosine(RATE, STEPS), momentum=MOMENTUM)
    return hg.TrainingRun(losses=losses, rows=len(pool), batches=order, init=start, optimizer=optimizer)


def loss_on(part: Part) -> Loss:
    """θ -> the mean loss of rows."""
    return lambda theta: functional.cross_entropy(logits(theta, part.x, "gelu"), part.y)


def by_metagradients(data: Data, kept: int, seed: int, *, rounds: int = ROUNDS) -> Tensor:
    """Swap rows by the sign of exact gradients of the checked rows' loss in the rows' weights.

    The gradient at equal weights picks the first ``kept`` rows; each further step replaces the worst of them by the
    best outside, whose weight is zero but whose derivative is not. Every step has its own order and start, so that
    what is chosen is good for training as such, not for one run.
    """
    rows = len(data.pool)
    chosen, mean = torch.ones(rows, dtype=torch.bool), torch.zeros_like(data.pool.x[:, 0])
    for turn in range(rounds):
        # a step then has the mean loss of the chosen rows, however few they are
        weights = chosen.to(mean.dtype) * rows / chosen.sum()
        problem = weighted_run(data.pool, seed, turn).problem(loss_on(data.checked))
        gradient = hg.hypergradient(problem, weights, hg.Checkpointed()).grad
        if turn == 0:
            chosen = torch.zeros_like(chosen)
            chosen[gradient.topk(kept, largest=False).indices] = True
        else:
            mean = MEMORY * mean + gradient / gradient.norm()
            chosen = swapped(chosen, mean, round(SWAPPED * kept * (1 - turn / rounds)))
    return torch.nonzero(chosen)[:, 0]


def swapped(chosen: Tensor, gradient: Tensor, most: int) -> Tensor:
    """Up to ``most`` chosen rows of the largest gradient replaced by those outside of the smallest, if it is smaller.

    Args:
        chosen: Which rows are chosen, bool, (n,).
        gradient: Of a loss in the rows' weights, (n,).
        most: Rows that may be replaced, at least one is.

    Returns:
        As many chosen rows as before.
    """
    inside, outside = torch.nonzero(chosen)[:, 0], torch.nonzero(~chosen)[:, 0]
    count = min(max(most, 1), len(inside), len(outside))
    worst = inside[gradient[inside].topk(count).indices]
    best = outside[gradient[outside].topk(count, largest=False).indices]
    better = gradient[best] < gradient[worst]
    after = chosen.clone()
    after[worst[better]], after[best[better]] = False, True
    return after


def by_influence(data: Data, kept: int, seed: int) -> Tensor:
    """The rows of most helpful influence on the checked rows' loss, in one attribution of a run over the pool."""
    found = hg.attribute(weighted_run(data.pool, seed, 0), loss_on(data.checked), check=0)
    return numbers_of(found.helpful(kept))


def at_random(data: Data, kept: int, seed: int, number: int = 0) -> Tensor:
    """A random choice; each number is another one."""
    order = torch.randperm(len(data.pool), generator=stream(seed, "selection", "random", number))
    return numbers_of(order[:kept])


def best_random(data: Data, kept: int, seed: int, *, lr: float, seconds: float) -> tuple[Tensor, int]:
    """The random choice whose training leaves the checked rows the least loss, of as many as fit the CPU seconds.

    Args:
        data: The parts.
        kept: Rows to choose.
        seed: Of the choices.
        lr: Rate of the training that judges them.
        seconds: CPU seconds to spend.

    Returns:
        The rows, and how many choices were tried.
    """
    begin, tried, best, least = time.process_time(), 0, at_random(data, kept, seed), float("inf")
    while time.process_time() - begin < seconds:
        rows = at_random(data, kept, seed, tried)
        loss, _ = judged(trained(data.pool.at(rows), lr, seed), data.checked)
        tried += 1
        if loss < least:
            best, least = rows, loss
    return best, tried


def by_score(scores: Tensor, kept: int, *, largest: bool = False) -> Tensor:
    """The rows of lowest score, or of the highest."""
    return numbers_of(scores.topk(kept, largest=largest).indices)


def early_errors(data: Data, seed: int) -> Tensor:
    """EL2N scores, (n,): the distance of probabilities from the label early in training, averaged over nets.

    Source: Paul, Ganguli & Dziugaite 2021 (arXiv:2107.07075), which keeps the highest.
    """
    truth = functional.one_hot(data.pool.y, 10)
    found = []
    for net in range(NETS):
        theta = trained(data.pool, RATE, 1000 * seed + 500 + net, steps=EARLY)
        found.append((logits(theta, data.pool.x, "gelu").softmax(1) - truth).norm(dim=1))
    return torch.stack(found).mean(0)


def agreed(theta: Weights, data: Data, kept: int, seed: int) -> Tensor:
    """Random rows among those whose label this net predicts; where there are too few, the next by loss."""
    right = logits(theta, data.pool.x, "gelu").argmax(1) == data.pool.y
    chance = torch.rand(len(right), generator=stream(seed, "selection", "agreed"))
    order = torch.where(right, chance - 1, row_losses(theta, data.pool))  # those that agree come first
    return numbers_of(order.topk(kept, largest=False).indices)
