"""Every choice in every case, seed by seed: trained alike, its rate chosen on rows of its own, judged on test rows."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from benchmarks.data_selection import choose
from benchmarks.data_selection.cases import (
    CHECKED,
    DEV,
    STEPS,
    TEST,
    Case,
    Data,
    Part,
    data_of,
    judged,
    row_losses,
    trained,
)
from benchmarks.valley import store
from sparing import hypergrad as hg
from sparing.jobs.attribute.nets import Weights
from sparing.seeds import stream

RATES = (0.001, 0.003, 0.01, 0.03)
"""Rates that every training tries; while the best is the lowest or the highest, one more beyond it is tried."""
SHARE = 0.05

META, INFLUENCE, RANDOM, BEST, AGREED = "metagradients", "influence, one step", "random", "best random", "agreed"
ALONE, FULL, CLEAN = "checked alone", "whole pool", "right and distinct"
WITH = "checked + "

Choice = tuple[Tensor, dict[str, Any]]


class Store(store.Store):
    """A JSON file with one row per measurement, by key."""

    def __init__(self) -> None:
        """Open the committed file."""
        self.path = store.RESULTS / "data_selection.json"
        self.command = "python -m benchmarks.data_selection"
        self.rows = self._read()


def swept(part: Part, data: Data, seed: int) -> tuple[float, dict[float, float]]:
    """The rate of least loss on the development rows, and the loss of each rate tried; the best is inside the sweep."""
    losses: dict[float, float] = {}

    def attempt(lr: float) -> None:
        losses[lr], _ = judged(trained(part, lr, seed), data.dev)

    for lr in RATES:
        attempt(lr)
    while (best := min(losses, key=losses.__getitem__)) in (min(losses), max(losses)) and len(losses) < 10:
        attempt(float(f"{best / 3 if best == min(losses) else best * 3:.1g}"))
    return best, losses


def measured(kept: Store, case: Case, seed: int, arm: str, count: int, choice: Callable[[], Choice]) -> dict[str, Any]:
    """One choice, its sweep, and its one look at the test rows; ``count`` rows of the pool are kept."""

    def measure() -> dict[str, Any]:
        data, begin = data_of(case, seed), time.process_time()
        rows, more = choice()
        seconds = time.process_time() - begin
        part = data.pool.at(rows)
        if arm.startswith(WITH) or arm == ALONE:
            part = part.beside(data.checked)
        lr, losses = swept(part, data, seed)
        theta = trained(part, lr, seed)
        loss, accuracy = judged(theta, data.test)
        return {
            "table": "runs", "case": case.name, "seed": seed, "kept": count, "arm": arm, "trained_on": len(part),
            "test": loss, "accuracy": accuracy, "checked": judged(theta, data.checked)[0], "lr": lr,
            "dev": losses[lr], "sweep": {f"{rate:g}": value for rate, value in sorted(losses.items())},
            "right": _share(data.right, rows), "copied": _share(data.copied, rows), "seconds": seconds, **more,
            "rows": " ".join(map(str, rows.tolist())) if arm == META else None,  # the only ones that take long to find
        }  # fmt: skip

    return kept.once(f"{case.name}, {arm}, {count}, {seed}", measure)


def _share(marks: Tensor, rows: Tensor) -> float | None:
    return float(marks[rows].double().mean()) if len(rows) else None


def references(kept: Store, case: Case, seed: int) -> tuple[Weights, Weights]:
    """The whole pool and the checked rows alone; the nets that both end in, which other choices look at."""
    data = data_of(case, seed)
    everything, none = torch.arange(case.rows), torch.arange(0)
    whole = measured(kept, case, seed, FULL, case.rows, lambda: (everything, {}))
    alone = measured(kept, case, seed, ALONE, 0, lambda: (none, {}))
    measured(kept, case, seed, WITH + FULL, case.rows, lambda: (everything, {}))
    return trained(data.pool, whole["lr"], seed), trained(data.checked, alone["lr"], seed)


def choices(case: Case, seed: int, count: int, whole: Weights, alone: Weights) -> dict[str, Callable[[], Choice]]:
    """Choices of ``count`` rows that cost a run or a few; each is a function, as a row that is there costs nothing."""
    data = data_of(case, seed)

    def plain(choice: Callable[[], Tensor]) -> Callable[[], Choice]:
        return lambda: (choice(), {})

    def distinct() -> Tensor:
        good = torch.nonzero(data.right & ~data.copied)[:, 0]
        order = torch.randperm(len(good), generator=stream(seed, "selection", "distinct"))
        return choose.numbers_of(good[order[:count]])

    lowest = lambda theta: choose.by_score(row_losses(theta, data.pool), count)  # noqa: E731
    return {
        RANDOM: plain(lambda: choose.at_random(data, count, seed)),
        "lowest loss": plain(lambda: lowest(whole)),
        "highest loss": plain(lambda: choose.by_score(row_losses(whole, data.pool), count, largest=True)),
        "highest EL2N": plain(lambda: choose.by_score(choose.early_errors(data, seed), count, largest=True)),
        "lowest EL2N": plain(lambda: choose.by_score(choose.early_errors(data, seed), count)),
        "lowest loss of checked": plain(lambda: lowest(alone)),
        AGREED: plain(lambda: choose.agreed(alone, data, count, seed)),
        INFLUENCE: plain(lambda: choose.by_influence(data, count, seed)),
        META: plain(lambda: choose.by_metagradients(data, count, seed)),
        CLEAN: plain(distinct),
    }


def one_size(kept: Store, case: Case, seed: int, count: int, whole: Weights, alone: Weights) -> None:
    """All choices of so many rows, and some of them beside the checked rows."""
    data = data_of(case, seed)
    ways = choices(case, seed, count, whole, alone)
    rows = {arm: measured(kept, case, seed, arm, count, choice) for arm, choice in ways.items()}

    def equal_time() -> Choice:
        lr, seconds = rows[RANDOM]["lr"], rows[META]["seconds"]
        found, tried = choose.best_random(data, count, seed, lr=lr, seconds=seconds)
        return found, {"tried": tried}

    measured(kept, case, seed, BEST, count, equal_time)
    found = [int(row) for row in rows[META]["rows"].split()]
    for arm, choice in (
        (RANDOM, ways[RANDOM]), (AGREED, ways[AGREED]), (META, lambda: (torch.tensor(found), {})),
    ):  # fmt: skip
        measured(kept, case, seed, WITH + arm, count, choice)


def smoothness(kept: Store, case: Case, seed: int) -> None:
    """Whether the differentiated run is smooth, before any gradient is taken."""

    def measure() -> dict[str, Any]:
        found = hg.metasmoothness(choose.weighted_run(data_of(case, seed).pool, seed, 0), share=SHARE, seed=seed)
        return {"table": "smoothness", "case": case.name, "seed": seed, "score": found.score, "bend": found.bend}

    kept.once(f"{case.name}, smoothness, {seed}", measure)


def about(kept: Store) -> None:
    """What is the same for all."""
    kept.once("settings", lambda: {
        "table": "settings", "steps": STEPS, "checked": CHECKED, "dev": DEV, "test": TEST, "rounds": choose.ROUNDS,
        "outer_steps": choose.STEPS, "outer_lr": choose.RATE, "share": SHARE,
    })  # fmt: skip
