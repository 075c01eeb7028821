"""Ways to weigh the rows of the pool, each at its best setting, alone and beside the checked rows."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from benchmarks.data_selection import choose
from benchmarks.data_selection.cases import Case, Data, Part, data_of, judged, row_losses, trained
from benchmarks.data_selection.study import ALONE, CLEAN, FULL, META, WITH, Store, measured, swept
from sparing import hypergrad as hg
from sparing.errors import RunError
from sparing.jobs.attribute.nets import Weights
from sparing.jobs.sweeps import inside
from sparing.seeds import stream

OUTER_RATES = (0.1, 0.3, 0.9)
"""Rates of Adam on the logits of the weights that are tried at first."""
POWERS = (0.5, 1.0, 2.0)
"""Powers of a probability that are tried at first."""
BY_META, BY_POOL, BY_CHECKED = f"by {META}", "by loss of the net of all", "by loss of the net of the checked rows"
RANDOM, BEST, GOOD = "at random", "best at random", f"on {CLEAN} alone"

Weigh = Callable[[float], Tensor]  # a setting -> weights of the pool's rows, (n,)


def evened(weights: Tensor) -> Tensor:
    """The same weights with a mean of 1."""
    return weights * len(weights) / weights.sum()


def by_metagradients(data: Data, seed: int, rate: float, *, rounds: int = choose.ROUNDS) -> Tensor:
    """Weights learnt by Adam on exact gradients of the checked rows' loss; a new start and order at each step."""
    raw = torch.zeros_like(data.pool.x[:, 0]).requires_grad_()
    adam = torch.optim.Adam([raw], lr=rate)
    for turn in range(rounds):
        weights = evened(torch.sigmoid(raw))
        problem = choose.weighted_run(data.pool, seed, turn).problem(choose.loss_on(data.checked))
        adam.zero_grad()
        weights.backward(hg.hypergradient(problem, weights.detach(), hg.Checkpointed()).grad)  # type: ignore[no-untyped-call]
        adam.step()
    return evened(torch.sigmoid(raw)).detach()


def by_loss(theta: Weights, pool: Part, power: float) -> Tensor:
    """Weights that fall with a row's loss: a power of the probability that a net gives its label."""
    return evened(torch.exp(-power * row_losses(theta, pool)))


def at_random(data: Data, seed: int, number: int = 0) -> Tensor:
    """Weights of an exponential law; each number is another draw."""
    return evened(-torch.log1p(-torch.rand(len(data.pool), generator=stream(seed, "selection", "weights", number))))


def best_at_random(data: Data, seed: int, *, lr: float, seconds: float) -> Tensor:
    """The draw whose training leaves the checked rows the least loss, of as many as fit the CPU seconds."""
    begin, number, best, least = time.process_time(), 0, at_random(data, seed), math.inf
    while time.process_time() - begin < seconds:
        weights = at_random(data, seed, number)
        loss, _ = judged(trained(replace(data.pool, weights=weights), lr, seed), data.checked)
        number += 1
        if loss < least:
            best, least = weights, loss
    return best


def weighed(
    kept: Store, case: Case, seed: int, arm: str, find: Weigh, settings: Sequence[float], *, checked: bool
) -> dict[str, Any]:
    """One way at the setting, and the rate, of least loss on the development rows; one look at the test rows."""

    def measure() -> dict[str, Any]:
        data, begin = data_of(case, seed), time.process_time()
        tried: dict[float, tuple[Part, float]] = {}

        def missed(setting: float) -> float:
            try:
                part = replace(data.pool, weights=find(setting))
            except RunError:  # a replay that overflows teaches nothing
                return math.inf
            part = part.beside(data.checked) if checked else part
            lr, losses = swept(part, data, seed)
            tried[setting] = (part, lr)
            return losses[lr]

        if len(settings) > 1:
            best, looks = inside(settings, missed)
        else:
            best, looks = settings[0], {f"{settings[0]:g}": missed(settings[0])}
        seconds = time.process_time() - begin
        part, lr = tried[best]
        theta = trained(part, lr, seed)
        loss, accuracy = judged(theta, data.test)
        weights, good = part.weights[: case.rows], (data.right & ~data.copied)  # type: ignore[index]
        return {
            "table": "weights", "case": case.name, "seed": seed, "arm": WITH * checked + arm, "test": loss,
            "accuracy": accuracy, "checked": judged(theta, data.checked)[0], "lr": lr, "setting": best,
            "settings": looks, "on_good": float(weights[good].sum() / weights.sum()), "seconds": seconds,
        }  # fmt: skip

    return kept.once(f"{case.name}, {WITH * checked}weights {arm}, {seed}", measure)


def about(kept: Store) -> None:
    """What is the same for all weights."""
    kept.once("weights, settings", lambda: {
        "table": "settings", "rounds": choose.ROUNDS, "rates of Adam": OUTER_RATES, "powers": POWERS,
    })  # fmt: skip


def all_ways(kept: Store, case: Case, seed: int) -> None:
    """Every way alone, and once more beside the checked rows."""
    data, known = data_of(case, seed), {}

    def net(part: Part, arm: str) -> Weights:
        count = 0 if arm == ALONE else case.rows
        lr = measured(kept, case, seed, arm, count, lambda: (torch.arange(count), {}))["lr"]
        return trained(part, lr, seed)

    def learnt(rate: float) -> Tensor:
        if rate not in known:  # alone and beside the checked rows they are the same
            known[rate] = by_metagradients(data, seed, rate)
        return known[rate]

    of_checked = net(data.checked, ALONE)
    good = evened((data.right & ~data.copied).to(data.pool.x.dtype))
    for checked in (False, True):
        of_all = net(data.pool.beside(data.checked), WITH + FULL) if checked else net(data.pool, FULL)
        ways: dict[str, tuple[Weigh, Sequence[float]]] = {
            BY_META: (learnt, OUTER_RATES),
            BY_POOL: (lambda power, of_all=of_all: by_loss(of_all, data.pool, power), POWERS),
            BY_CHECKED: (lambda power: by_loss(of_checked, data.pool, power), POWERS),
            RANDOM: (lambda _: at_random(data, seed), (0.0,)),
            GOOD: (lambda _: good, (0.0,)),
        }
        rows = {arm: weighed(kept, case, seed, arm, *way, checked=checked) for arm, way in ways.items()}
        if not checked:
            lr, seconds = rows[RANDOM]["lr"], rows[BY_META]["seconds"]
            drawn = lambda _, lr=lr, seconds=seconds: best_at_random(data, seed, lr=lr, seconds=seconds)  # noqa: E731
            weighed(kept, case, seed, BEST, drawn, (0.0,), checked=False)
