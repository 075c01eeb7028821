"""Which blocks to draw: uniformly, by gradient norm, or by an importance that hypergradients have learned before.

Every run may spend the same arithmetic, counted in FLOPs of its matrix products; learning the importance is part of
the bill of the arm that uses it. Each arm tries the same rates, the development rows choose, and the test loss of the
chosen rate is compared seed by seed.
"""

from __future__ import annotations

import argparse
import functools
import math
import time
from pathlib import Path
from statistics import fmean
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from benchmarks.composition.importance_cases import CASES, Case, Rows, batch_of, fresh, loss_on, rows_of
from benchmarks.composition.importance_learn import ACTIVE, blocks_of, learned
from benchmarks.valley import store
from sparing.jobs.lm.losses import loss_sum
from sparing.layersample import Adaptive, Fixed, LayerSampling, Sampler, Uniform, Weighted

UNIFORM, NORM, LEARNED, FREE = "uniform", "gradient norm", "learned", "learned, not billed"
ARMS = (UNIFORM, NORM, LEARNED)
"""Each pays for all that it does; ``FREE`` gets its importance for nothing, to tell its worth from its price."""


class Store(store.Store):
    """A JSON file with one row per measurement, by key."""

    def __init__(self, path: Path | None) -> None:
        """Open the committed file or another."""
        self.path = path or store.RESULTS / "composition_importance.json"
        self.command = "python -m benchmarks.composition --only importance"
        self.rows = self._read()


def sampling(case: Case, draw: Any) -> LayerSampling:
    """Nothing but drawn blocks trains, so that a draw is all that arms differ in."""
    return LayerSampling(active=ACTIVE, period=case.period, embed=False, tail=False, head=False, sampler=draw)


def one_step(model: nn.Module, optimizer: torch.optim.Optimizer, rows: Rows, batch: Tensor) -> float:
    """A step; its mean loss."""
    loss = loss_sum(model, rows.train, batch) / (len(batch) * (rows.train.length - 1))
    loss.backward()  # type: ignore[no-untyped-call]
    optimizer.step()
    optimizer.zero_grad()
    return loss.item()


@functools.cache
def costs(case: Case) -> tuple[int, ...]:
    """FLOPs of a step by the block that trains: the backward pass ends there."""
    rows, found = rows_of(case, 0), []
    for block in range(blocks_of(case)):
        model = fresh(case)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.0)
        with Sampler(model, optimizer, sampling(case, Fixed(blocks=(block,)))) as sampler:
            sampler.begin_step(0)
            with FlopCounterMode(display=False) as counter:
                one_step(model, optimizer, rows, batch_of(case, rows, 0, 0))
        found.append(counter.get_total_flops())
    return tuple(found)


def budget(case: Case) -> float:
    """FLOPs that every run may spend."""
    return case.steps * fmean(costs(case))


def trained(case: Case, seed: int, draw: Any, lr: float, bill: float) -> dict[str, Any]:
    """Train until the budget is spent; a rate that falls along half a cosine of what is left of it.

    Args:
        case: Model and pace.
        seed: Of split, order and draws.
        draw: Rule that picks the block.
        lr: First rate.
        bill: FLOPs spent before.

    Returns:
        Steps, how often each block was drawn, losses on development and test rows, FLOPs and CPU seconds.
    """
    begin, rows, model = time.process_time(), rows_of(case, seed), fresh(case)
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr, weight_decay=0.0)
    sampler = Sampler(model, optimizer, sampling(case, draw), seed=seed)
    spent, step, left = 0.0, 0, budget(case) - bill
    while True:
        sampler.begin_step(step)
        cost = costs(case)[sampler.active[0]]
        if spent + cost > left:
            break
        for group in optimizer.param_groups:
            group["lr"] = lr * (1 + math.cos(math.pi * spent / left)) / 2
        one_step(model, optimizer, rows, batch_of(case, rows, seed, step))
        spent, step = spent + cost, step + 1
    drawn = [block for _, _, (block,) in sampler.history]
    sampler.close()
    seconds = time.process_time() - begin
    losses = {"dev": loss_on(model, rows.dev), "test": loss_on(model, rows.test)}
    counts = [drawn.count(block) for block in range(len(costs(case)))]
    return {"steps": step, "drawn": counts, **losses, "flops": spent + bill, "seconds": seconds}


def importance(kept: Store, case: Case, seed: int, lr: float) -> dict[str, Any]:
    """The learned importance of a seed at a rate, measured once."""
    return kept.once(f"{case.name}, importance, {lr:g}, {seed}", lambda: {
        "table": "importance", "case": case.name, "seed": seed, "lr": lr,
        **learned(case, rows_of(case, seed), seed, lr),
    })  # fmt: skip


def run_row(kept: Store, case: Case, arm: str, seed: int, lr: float) -> dict[str, Any]:
    """One run of one arm, measured once."""

    def measure() -> dict[str, Any]:
        draw: Any = {UNIFORM: Uniform(), NORM: Adaptive()}.get(arm)
        found = importance(kept, case, seed, lr) if draw is None else {"flops": 0, "seconds": 0.0}
        draw = draw or Weighted(weights=tuple(found["weights"]))
        row = trained(case, seed, draw, lr, 0 if arm == FREE else found["flops"])
        row["seconds"] += 0 if arm == FREE else found["seconds"]
        return {"table": "runs", "case": case.name, "arm": arm, "seed": seed, "lr": lr, **row}

    return kept.once(f"{case.name}, {arm}, {lr:g}, {seed}", measure)


def chosen(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """The run of least development loss; the test loss is not looked at."""
    return min(rows, key=lambda row: math.inf if row["dev"] is None else row["dev"])


def begun(kept: Store, case: Case) -> None:
    """What all runs of a case start from."""
    kept.once(f"{case.name}, case", lambda: {
        "table": "cases", "case": case.name, "title": case.title, "budget": budget(case), "costs": list(costs(case)),
        "parameters": sum(p.numel() for p in fresh(case).parameters()), "train_rows": rows_of(case, 0).train.rows,
        **{name: getattr(case, name) for name in
           ("batch", "length", "period", "steps", "inner", "inner_batch", "rounds", "outer", "dev", "test")},
    })  # fmt: skip


def run(options: argparse.Namespace) -> None:
    """Measure what the file does not have yet."""
    kept = Store(options.out)
    for case in CASES.values():
        begun(kept, case)
        for seed in options.seeds:
            start = lambda case=case, seed=seed: loss_on(fresh(case), rows_of(case, seed).test)  # noqa: E731
            kept.once(f"{case.name}, before, {seed}", lambda case=case, seed=seed, start=start: {
                "table": "before", "case": case.name, "seed": seed, "test": start(),
            })  # fmt: skip
            for arm in ARMS:
                rows = [run_row(kept, case, arm, seed, lr) for lr in case.rates]
            run_row(kept, case, FREE, seed, chosen(rows)["lr"])
