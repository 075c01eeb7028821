"""Predicted against retrained loss where 1 % of the rows are dropped: exact influences, gradients at the end, chance.

Run ``python -m benchmarks.attribution``: two hours of CPU, of which the text takes most; ``--only mnist``: ten minutes.
Seeds that the result already holds are kept, so an interrupted run goes on where it stopped. ``--only NAME`` runs the
case of that name, or those whose name holds it.
Each seed has its own rows, order, initial weights and 50 drop sets; 10 test rows are predicted, and ranks are compared
for each of them alone and for their mean. ``grad-dot`` is the product of a row's gradient with the prediction's at the
end of the run (TracIn with its last checkpoint), ``grad-cosine`` the same of unit length.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from sparing import hypergrad as hg
from sparing.jobs.attribute.checks import drop_set, retrained, spearman
from sparing.jobs.attribute.inputs import Inputs, gather
from sparing.jobs.attribute.settings import Settings
from sparing.report import Record, environment
from sparing.report.atomic import write_whole
from sparing.seeds import stream

RESULT = Path(__file__).parent / "results" / "attribution.json"

SEEDS, SETS, SHARE = 5, 50, 0.01

TESTS = tuple(range(10))


def _mnist(**changes: Any) -> Settings:
    return Settings(**{"data": "mnist", "predictions": TESTS, "lr": 0.03} | changes)


def _alice(**changes: Any) -> Settings:
    given = {"data": "alice", "predictions": TESTS, "train_rows": 400, "batch": 20, "epochs": 5.0}
    return Settings(**given | {"optimizer": "adamw", "lr": 3e-3, "width": 32} | changes)


CASES: dict[str, Settings] = {
    "mnist, SGD, 5,000 rows": _mnist(train_rows=5000, batch=250),
    "mnist, SGD": _mnist(),
    "mnist, SGD, rate 0.01": _mnist(lr=0.01),
    "mnist, SGD, rate 1": _mnist(lr=1.0),
    "mnist, SGD, rate 0.1": _mnist(lr=0.1),
    "mnist, AdamW": _mnist(optimizer="adamw", lr=1e-3),
    "alice, AdamW": _alice(),
    "alice, by default": Settings(data="alice", predictions=TESTS),
    "alice, SGD, else as AdamW": _alice(optimizer="sgd", lr=0.05),
    "mnist, SGD, ReLU": _mnist(activation="relu"),
    "mnist, SGD, rate 0.3": _mnist(lr=0.3),
    "mnist, AdamW, rate 0.01": _mnist(optimizer="adamw", lr=0.01),
    "alice, AdamW, rate 0.01": _alice(lr=0.01),
    "alice, AdamW, rate 0.001": _alice(lr=0.001),
}
"""Without a word the rate is 0.03 for SGD on MNIST, 0.001 and 0.003 for AdamW on MNIST and the text."""


def products_at_end(inputs: Inputs, theta: Any) -> tuple[Tensor, Tensor]:
    """Products of gradients at θ_T, predictions × rows (k, n): plain, and of unit length."""
    weights = {name: weight.detach().requires_grad_() for name, weight in theta.items()}
    leaves = list(weights.values())

    def flat(losses: Tensor) -> Tensor:
        rows = [torch.autograd.grad(loss, leaves, retain_graph=True) for loss in losses]
        return torch.stack([torch.cat([part.reshape(-1) for part in row]) for row in rows])

    tests = flat(inputs.target(weights))
    products, lengths = [], []
    for rows in torch.arange(inputs.run.rows).split(20):
        gradients = flat(inputs.run.losses(weights, rows))
        products.append(tests @ gradients.T)
        lengths.append(gradients.norm(dim=1))
    plain = torch.cat(products, 1)
    return plain, plain / torch.cat(lengths).clamp(min=1e-30) / tests.norm(dim=1, keepdim=True).clamp(min=1e-30)


def scores(inputs: Inputs, seed: int) -> tuple[dict[str, Tensor], Any, float]:
    """Influence of every row on every prediction by each way, (k, n); below zero helps. CPU seconds of the exact one.

    Args:
        inputs: The run.
        seed: Of the run, and of chance.

    Returns:
        Scores by way, the attribution, CPU seconds.
    """
    begin = time.process_time()
    found = hg.attribute(inputs.run, inputs.target, seed=seed, check=0)
    seconds = time.process_time() - begin
    plain, unit = products_at_end(inputs, found.theta)
    chance = torch.randn(found.influence.shape, generator=stream(seed, "attribution", "chance"))
    ways = {"exact": found.influence, "grad-dot": -plain, "grad-cosine": -unit}
    return ways | {"random": chance}, found, seconds


def measured(name: str, seed: int) -> dict[str, Any]:
    """One seed of a case.

    Args:
        name: Of the case.
        seed: Of rows, order, weights and drop sets.

    Returns:
        A row of the table "seeds".
    """
    settings = replace(CASES[name], seed=seed)
    inputs = gather(settings)
    smooth = hg.metasmoothness(inputs.run, share=SHARE, seed=seed)
    ways, found, seconds = scores(inputs, seed)
    drops = [drop_set(inputs.run.rows, SHARE, seed, number) for number in range(SETS)]
    begin = time.process_time()
    changes = torch.stack([retrained(inputs, drop, seed) - found.value for drop in drops])  # (sets, k)
    plain = (time.process_time() - begin) / SETS
    row: dict[str, Any] = {
        "case": name, "seed": seed, "rows": inputs.run.rows, "steps": len(inputs.run.batches), "sets": SETS,
        "metasmoothness": smooth.score, "bend": smooth.bend, "loss": float(found.value.mean()),
        "seconds": seconds, "plain_seconds": plain, "change": float(changes.mean(1).abs().mean()),
    }  # fmt: skip
    for way, influence in ways.items():
        predicted = torch.stack([-influence[:, drop].sum(1) for drop in drops])
        each = [spearman(predicted[:, at], changes[:, at]) for at in range(len(TESTS))]
        row[f"{way}_each"] = statistics.fmean(value for value in each if not math.isnan(value))
        row[f"{way}_least"] = min(value for value in each if not math.isnan(value))
        row[f"{way}_mean"] = spearman(predicted.mean(1), changes.mean(1))
    fitted = torch.stack([-found.influence[:, drop].sum(1) for drop in drops])
    row["error"] = float((fitted - changes).norm() / changes.norm())
    return row


def summarised(record: Record) -> None:
    """Replace the table "summary" by means and standard errors over the seeds there are."""
    record.rows[:] = [row for row in record.rows if row["table"] != "summary"]
    for name in CASES:
        rows = record.table("seeds", case=name)
        if not rows:
            continue
        cells: dict[str, Any] = {"case": name, "n": len(rows)}
        for column in [column for column in rows[0] if column not in {"case", "seed", "rows", "steps", "sets"}]:
            values = [row[column] for row in rows]
            cells[column] = statistics.fmean(values)
            cells[f"{column}_se"] = statistics.stdev(values) / math.sqrt(len(values)) if len(values) > 1 else None
        record.add("summary", **cells)


def main() -> None:
    """Measure what is missing and write the record after each seed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", default="")
    parser.add_argument("--seeds", type=int, default=SEEDS)
    given = parser.parse_args()
    record = Record(
        question="Do influences predict what dropping 1 % of the rows does to the loss of predictions?",
        settings=dict(CASES), seed=list(range(SEEDS)), environment=environment(),
        units={"seconds": "s", "plain_seconds": "s", "loss": "nat", "change": "nat"},
    )  # fmt: skip
    if RESULT.exists():
        for row in json.loads(RESULT.read_text())["tables"].get("seeds", []):
            record.add("seeds", **row)
    names = [given.only] if given.only in CASES else [name for name in CASES if given.only in name]
    for seed in range(given.seeds):
        for name in names:
            if not record.table("seeds", case=name, seed=seed):
                record.add("seeds", **measured(name, seed))
                summarised(record)
                write_whole(RESULT, json.dumps(record.document(), indent=1, allow_nan=False) + "\n")


if __name__ == "__main__":
    main()
