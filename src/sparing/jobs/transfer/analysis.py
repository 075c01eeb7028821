"""From the runs of a study to its tables: best rates, drift, regret, collapse, and both ways of choosing a rate."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from sparing.jobs.lm.controls import ngram_losses, rows_of
from sparing.jobs.transfer.inputs import Digits, Inputs, Tokens
from sparing.jobs.transfer.optimum import Optimum, bootstrap, collapse, mean_curve, optimum, regret, slope_of
from sparing.jobs.transfer.settings import Cell, Line, Transfer, lines, places
from sparing.jobs.transfer.train import KINDS, LAWS, build, rule_of
from sparing.report import Record
from sparing.scaling.check.coordinate import Check, coordinate_check

Results = Mapping[Cell, Mapping[str, Any]]
Place = tuple[int, float]


@dataclass(frozen=True, slots=True)
class Sweeps:
    """Losses by run, ready to be averaged over any choice of seeds."""

    settings: Transfer
    results: Results

    def curve(self, rule: str, place: Place, seed: int) -> dict[float, float]:
        """Loss (nat) by log2 of what is swept, of one seed; infinite where it diverged; those not done are missing."""
        found = {}
        for x in self.settings.swept:
            cell = Cell(rule, place[0], float(place[1]), float(x), seed)  # type: ignore[arg-type]
            if (result := self.results.get(cell)) is not None:
                found[float(x)] = math.inf if result["diverged"] else result["loss"]
        return found

    def mean(self, rule: str, place: Place, seeds: Sequence[int] | None = None) -> dict[float, float]:
        """The mean over seeds."""
        chosen = self.settings.seeds if seeds is None else seeds
        return mean_curve([self.curve(rule, place, seed) for seed in chosen])

    def best(self, rule: str, place: Place, seeds: Sequence[int] | None = None) -> Optimum:
        """The best rate of the mean curve."""
        return optimum(self.mean(rule, place, seeds))

    def drift(self, rule: str, place: Place, reference: Place, seeds: Sequence[int]) -> float | None:
        """log2 best rate less the reference's; None where one of the two is not known."""
        here, there = self.best(rule, place, seeds), self.best(rule, reference, seeds)
        return None if here.kind == "none" or there.kind == "none" else here.x - there.x

    def diverged(self, rule: str, place: Place) -> tuple[int, int]:
        """Runs that diverged, and runs done."""
        mine = [
            result["diverged"] for cell, result in self.results.items()
            if (cell.rule, cell.width, cell.density) == (rule, place[0], float(place[1]))
        ]  # fmt: skip
        return sum(mine), len(mine)


def add_optima(record: Record, sweeps: Sweeps) -> None:
    """Put the best rate of every rule, width and density into the record."""
    settings = sweeps.settings
    for rule in settings.rules:
        for place in places(settings):
            best = sweeps.best(rule, place)
            if best.kind == "none" and not sweeps.mean(rule, place):
                continue

            def at(seeds: Sequence[int], rule: str = rule, place: Place = place) -> float:
                return sweeps.best(rule, place, seeds).x

            low, high = bootstrap(at, settings.seeds) or (None, None)
            diverged, runs = sweeps.diverged(rule, place)
            record.add(
                "optima", rule=rule, width=place[0], density=place[1], best=_known(best.x), best_low=low,
                best_high=high, n=len(settings.seeds), found=best.kind, best_tried=_known(best.grid),
                loss=_known(best.loss), diverged=diverged, runs=runs,
            )  # fmt: skip


def _transfer(sweeps: Sweeps, line: Line, place: Place) -> dict[str, Any]:
    """Drift and the price of the reference's rate at one place of a line."""
    reference, rule = line.places[0], line.rule
    seeds = sweeps.settings.seeds
    here, there = sweeps.mean(rule, place), sweeps.mean(rule, reference)
    best, theirs = optimum(here), optimum(there)
    low, high = bootstrap(lambda some: sweeps.drift(rule, place, reference, some), seeds) or (None, None)
    costs = bootstrap(
        lambda some: regret(sweeps.mean(rule, place, some), sweeps.best(rule, reference, some).grid), seeds
    ) or (None, None)
    return {
        "rule": rule, "along": line.along, "line": line.name, "width": place[0], "density": place[1],
        "drift": _known(best.x - theirs.x), "drift_low": low, "drift_high": high,
        "censored": best.censored or theirs.censored, "regret": _known(regret(here, theirs.grid)),
        "regret_low": costs[0], "regret_high": costs[1], "collapse": _known(collapse(here, there)),
        "loss_transferred": _known(here.get(theirs.grid, math.nan)), "loss_retuned": _known(best.loss),
        "diverged_at_transfer": here.get(theirs.grid) == math.inf, "n": len(seeds),
    }  # fmt: skip


def add_summary(record: Record, sweeps: Sweeps) -> None:
    """Put one row per line into the record: slope of the best rate, largest drift, regret and collapse."""
    for line in lines(sweeps.settings):
        others = record.table("transfer", rule=line.rule, along=line.along, line=line.name)[1:]
        diverged = [sweeps.diverged(line.rule, place) for place in line.places]
        record.add(
            "summary", rule=line.rule, along=line.along, line=line.name, places=len(line.places),
            slope=slope(sweeps, line), drift=_largest(others, "drift"), regret=_largest(others, "regret"),
            collapse=_largest(others, "collapse"), censored=sum(row["censored"] for row in others),
            diverged_at_transfer=sum(row["diverged_at_transfer"] for row in others),
            diverged=sum(count for count, _ in diverged), runs=sum(runs for _, runs in diverged),
        )  # fmt: skip


def slope(sweeps: Sweeps, line: Line) -> float | None:
    """Slope of log2 of the best rate over log2 of density or width, over places that are not censored."""
    found = [
        (math.log2(place[0 if line.along == "width" else 1]), sweeps.best(line.rule, place)) for place in line.places
    ]
    # a censored best rate is a bound, not a point on the line
    return slope_of((at, best.x) for at, best in found if not best.censored)


def _largest(rows: Sequence[Mapping[str, Any]], name: str) -> float | None:
    """The value of largest size, with its sign; None where none is known."""
    known = [row[name] for row in rows if row[name] is not None]
    return max(known, key=abs, default=None)


def _known(value: float) -> float | None:
    """A number that a table can hold, or None."""
    # JSON has no NaN; infinity is a finding and stays
    return None if math.isnan(value) else value


def analyse(record: Record, settings: Transfer, results: Results) -> None:
    """Fill a record with the runs and all that follows from them: tables "runs", "optima", "transfer", "summary"."""
    sweeps = Sweeps(settings, results)
    for cell, result in results.items():
        record.add("runs", **cell.params, **result)
    add_optima(record, sweeps)
    for line in lines(settings):
        for place in line.places:
            record.add("transfer", **_transfer(sweeps, line, place))
    add_summary(record, sweeps)


def add_controls(record: Record, settings: Transfer, inputs: Inputs, bare: Results) -> None:
    """Put into the table "controls" what n-grams and the model without its blocks reach on the held-out text.

    The model beside them is the widest of the densest ones at its best rate, on the first seed, under the best rule.
    """
    if not isinstance(inputs, Tokens):
        return
    seed, (width, density) = settings.seeds[0], max(places(settings), key=lambda place: (place[1], place[0]))
    own = [
        row for row in record.table("runs")
        if (row["width"], row["density"], row["seed"]) == (width, density, seed) and not row["diverged"]
    ]  # fmt: skip
    model = min(own, key=lambda row: row["loss"], default=None)
    before, after = inputs.held_out[:, :-1], inputs.held_out[:, 1:]
    found: dict[str, float | None] = dict(ngram_losses(inputs.train, before, after, vocabulary=inputs.outputs))
    if bare:
        done = [row for row in bare.values() if not row["diverged"]]
        found["no body"] = min(done, key=lambda row: row["loss"])["held_out_loss"] if done else None
    for row in rows_of(found, model["held_out_loss"] if model else None):
        record.add("controls", **row)


STEPS, LR, EXAMPLES = 5, 2**-8, 128  # optimizer steps, learning rate and examples of the check


def check_rule(settings: Transfer, inputs: Digits, rule: str) -> Check | None:
    """Check one rule over the densities of the study at its largest width; None with fewer than two densities."""
    known = places(settings)
    densities = sorted({density for _, density in known}, reverse=True)
    if len(densities) < 2:
        return None

    def make(size: int) -> Any:
        # The check has seeded torch for one of its seeds; ``build`` seeds it anew.
        return build(settings, inputs.features, inputs.outputs, width=size, seed=torch.initial_seed())

    batch = (inputs.train[:EXAMPLES], inputs.labels[:EXAMPLES])
    return coordinate_check(
        make, (max(known)[0],), densities, rule=rule_of(settings, rule), optimizer=KINDS[settings.optimizer],  # type: ignore[arg-type]
        lr=LR, steps=STEPS, batch=batch, base_width=settings.base_width, masks=LAWS[settings.masks],
    )  # fmt: skip


def add_coordinates(record: Record, settings: Transfer, inputs: Inputs) -> None:
    """Put layer sizes after the last step, and their slopes over density, into the record, rule by rule."""
    if not (settings.coordinates and isinstance(inputs, Digits)):
        return
    for rule in settings.rules:
        found = check_rule(settings, inputs, rule)
        for row in found.rows if found else ():
            if row["step"] == STEPS - 1:
                names = ("module", "role", "width", "density", "live", "forward", "gradient", "update")
                record.add("coordinates", rule=rule, **{name: row[name] for name in names})
        for one in found.slopes if found else ():
            cells = {name: getattr(one, name) for name in ("module", "stat", "slope", "points", "limit")}
            record.add("slopes", rule=rule, **cells, passed=one.passed)
