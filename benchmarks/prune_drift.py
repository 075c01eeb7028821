"""Which factor lets the dense net's learning rate serve a net that is pruned on the way?

Run ``python -m benchmarks.prune_drift`` until it says that nothing is left; a call ends after so many minutes of
processor time. The task is that of ``transfer_tables --only dynamic`` (ReLU net of width 256 on digits, 200 steps,
gradual pruning to 1/16), whose dense runs, and those of "density" and "energy", are read from its file. New rules:

    average     density and energy are their means over the run, weighted by the schedule, from the first step on
    duration    as "energy" (or "density"), and the rate as in a run of what is left of the schedule: 1/√κ, where κ is
                a mean over the losses of density
    reset       the same with the κ of the last loss, however small it was
    budget      as "reset" with 1/κ, as if the sum of rates had to be the whole run's
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import json
import math
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from statistics import fmean
from typing import Any

from benchmarks.memory_tables import table
from benchmarks.transfer_tables import CASES, key, read
from sparing.jobs.transfer.inputs import Inputs, gather
from sparing.jobs.transfer.optimum import optimum
from sparing.jobs.transfer.settings import Cell
from sparing.jobs.transfer.train import factor, optimizer_of, prepare, summary, train_steps_
from sparing.report import environment
from sparing.report.atomic import write_whole
from sparing.scaling.masks.dynamic import GMP, retained_gaussian
from sparing.scaling.masks.evolve import Evolution
from sparing.scaling.rules import Factors

RESULT = Path(__file__).parent / "results" / "prune_drift.json"
STUDY = CASES["dynamic"].studies["gmp, energy"]
DENSITY = 0.0625
METHOD = GMP(final=DENSITY, every=STUDY.mask_updates.every)
SCHEDULE = functools.partial(factor, settings=STUDY)
Kappa = Callable[[float, float, float], float]  # κ before, share of the live weights kept, share of the schedule left


def left_of(schedule: Callable[[int], float], step: int, steps: int) -> float:
    """Return the share of a schedule's sum from a step on, at least one step's worth."""
    factors = [schedule(at) for at in range(steps)]
    return max(sum(factors[step:]), sum(factors) / steps) / sum(factors)


def mean_of_losses(kappa: float, kept: float, left: float) -> float:
    """A layer that loses nothing stays as old as it was, one that loses all begins anew."""
    return kept * kappa + (1 - kept) * left


def last_loss(kappa: float, kept: float, left: float) -> float:
    """What is left at the last loss, however small it was."""
    return left


RULES: Mapping[str, Mapping[str, Any]] = {
    "reset, energy": {"scale": "energy", "kappa": last_loss, "power": -0.5},
    "average": {"scale": "density"},
    "reset, density": {"scale": "density", "kappa": last_loss, "power": -0.5},
    "budget, energy": {"scale": "energy", "kappa": last_loss, "power": -1.0},
    "duration, energy": {"scale": "energy", "kappa": mean_of_losses, "power": -0.5},
}
KNOWN = {"fixed factors": "gmp, fixed factors", "density": "gmp, density", "energy": "gmp, energy"}


class Rest(Evolution):
    """Rates of what is left of the schedule since weights fell; the decay per step, lr · λ, stays."""

    def __init__(self, *args: Any, kappa: Kappa, power: float, **options: Any) -> None:
        """Take the law of κ and its power in the rate."""
        super().__init__(*args, **options)
        self.kappa, self.power = kappa, power
        self.left = dict.fromkeys(self._layers, 1.0)

    def factors(self, name: str) -> Factors:
        """Multiply the rate by κ to the power."""
        found, rate = super().factors(name), self.left[name] ** self.power
        return dataclasses.replace(found, lr=found.lr * rate, weight_decay=found.weight_decay / rate)

    def _update_layer_(self, name: str, step: int) -> Any:
        before = self._layers[name].density
        found = super()._update_layer_(name, step)
        kept = self._layers[name].density / before
        if kept < 1:
            self.left[name] = self.kappa(self.left[name], kept, left_of(SCHEDULE, step + 1, self.steps))
        return found


class Average(Evolution):
    """Factors of the run's mean energy, from the first step on."""

    def __init__(self, *args: Any, **options: Any) -> None:
        """Set them once."""
        super().__init__(*args, **options)
        shares = [SCHEDULE(step) for step in range(self.steps)]
        energies = [retained_gaussian(METHOD.density(step, self.steps)) for step in range(self.steps)]
        self.mean = sum(a * b for a, b in zip(shares, energies, strict=True)) / sum(shares)
        for name, layer in self._layers.items():
            layer.scale = self.mean**-0.5
            self._write_factor_(name)

    def factors(self, name: str) -> Factors:
        """Rates as at the mean density."""
        layer = self._layers[name]
        held, layer.density = layer.density, self.mean
        found = super().factors(name)
        layer.density = held
        return found

    def _rescale_(self, name: str, before: float, after: float) -> None:
        """Leave the factor as it is."""


def run(rule: str, cell: Cell, data: Inputs) -> float:
    """Loss of the last tenth of a run (nat); infinite if it diverged."""
    model, masks = prepare(STUDY, data, cell)
    optimizer = optimizer_of(STUDY, model, masks, cell)
    kind = Average if rule == "average" else Rest
    evolution = kind(model, masks, optimizer, METHOD, steps=STUDY.steps, seed=cell.seed, **RULES[rule])
    losses = train_steps_(STUDY, data, cell, model, optimizer, evolution, bool)
    row = summary(losses, 0.0, STUDY.steps)
    return math.inf if row["diverged"] or row["loss"] is None else float(f"{row['loss']:.5g}")


def curves(rows: Mapping[str, float]) -> dict[str, dict[int, dict[float, float]]]:
    """Rule -> seed -> log2 rate -> loss, the dense net's and those of earlier runs with them; whole seeds only."""
    old = read("dynamic")

    def loss(study: str, cell: Cell) -> float:
        row = old[key(study, cell)]
        return math.inf if row[2] or row[0] is None else row[0]

    def known(study: str, density: float) -> dict[int, dict[float, float]]:
        return {
            seed: {rate: loss(study, Cell("supar", 256, density, rate, seed)) for rate in STUDY.log2_rates}
            for seed in STUDY.seeds
        }

    found = {"dense": known("gmp, energy", 1.0)} | {name: known(study, DENSITY) for name, study in KNOWN.items()}
    for rule in RULES:
        seeds = {s: {r: rows.get(f"{rule} {r:g} {s}") for r in STUDY.log2_rates} for s in STUDY.seeds}
        whole = {s: curve for s, curve in seeds.items() if None not in curve.values()}
        if whole:
            found[rule] = whole  # type: ignore[assignment]
    return found


def mean(by_seed: Mapping[int, Mapping[float, float]]) -> dict[float, float]:
    """Mean curve over seeds."""
    return {rate: fmean(curve[rate] for curve in by_seed.values()) for rate in STUDY.log2_rates}


def shown() -> str:
    """Drift against the dense net, and losses at its best rate and at the rule's own, as a table of the page."""
    every = curves(json.loads(RESULT.read_text())["rows"])
    dense, found = optimum(mean(every["dense"])), []
    for rule, by_seed in every.items():
        curve = mean(by_seed)
        best = optimum(curve)
        seeds = [optimum(one).x - optimum(every["dense"][seed]).x for seed, one in by_seed.items()]
        drift = f"{best.x - dense.x:+.1f} [{min(seeds):+.1f}, {max(seeds):+.1f}]" if rule != "dense" else "0"
        found.append([rule, drift, f"{curve[dense.grid]:.4f}", f"{best.loss:.4f}", len(by_seed)])
    head = ["rule", "drift, octaves [seeds]", "loss at the dense net's rate, nat", "loss at its own, nat", "n"]
    return table(head, found)


def main() -> None:
    """Do the runs that are not there, until the time is spent; then print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=60.0)
    options = parser.parse_args()
    rows: dict[str, float] = json.loads(RESULT.read_text())["rows"] if RESULT.exists() else {}
    data = gather(STUDY)
    todo = [(rule, seed, rate) for rule in RULES for seed in STUDY.seeds for rate in STUDY.log2_rates]
    left = [one for one in todo if f"{one[0]} {one[2]:g} {one[1]}" not in rows]
    head = {"command": "python -m benchmarks.prune_drift", "environment": dict(environment()), "unit": "nat"}
    for rule, seed, rate in left:
        if time.process_time() > 60 * options.minutes:
            break
        rows[f"{rule} {rate:g} {seed}"] = run(rule, Cell("supar", 256, DENSITY, rate, seed), data)
        write_whole(RESULT, json.dumps(head | {"rows": rows}, indent=1, ensure_ascii=False) + "\n")
    missing = sum(f"{rule} {rate:g} {seed}" not in rows for rule, seed, rate in todo)
    print(shown())
    print(f"{missing} runs left" if missing else "nothing is left")


if __name__ == "__main__":
    main()
