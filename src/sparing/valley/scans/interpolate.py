"""The straight line between two models: loss and error along it, and the gap of their average."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from sparing.errors import require
from sparing.report import Figure, plots
from sparing.report.frames import as_frame
from sparing.valley.apply import live_model, loading_states
from sparing.valley.forecast.agreement import Agreement, sign_agreement
from sparing.valley.merging.compatible import Model, is_statistic, require_compatible, state_of
from sparing.valley.merging.merge import warn_of_factors
from sparing.valley.merging.method import upcast
from sparing.valley.merging.model_folders import require_same_function
from sparing.valley.scans.batch_norm import Batch, Refresher, Statistics
from sparing.valley.scans.better import Better, ByMetric, as_cost, better_by_metric, declared_better
from sparing.valley.scans.evaluators import Evaluate, check_evaluate, require_same_metrics, run_evaluate


@dataclass(frozen=True, kw_only=True, slots=True)
class Interpolation:
    """Values measured at (1 − λ) a + λ b."""

    lambdas: tuple[float, ...]  # positions, rising; 0 is a, 1 is b; ½ is always among them
    values: Mapping[str, tuple[float, ...]]  # values by metric, one for each position
    agreement: Agreement  # agreement of the signs of a and b
    statistics: Statistics  # where the batch-norm statistics came from
    senses: ByMetric[Better]  # whether lower or higher is better, by metric

    @property
    def gap(self) -> ByMetric[float]:
        """How much worse the average is than the mean of the two ends, by metric; below zero it is the better model.

        Source: Li et al. 2024, §5, there for accuracy and so with the other sign.
        """
        return self.senses.map(lambda metric: self._above(metric, 0.5))

    @property
    def barrier(self) -> ByMetric[float]:
        """Largest excess over the straight line between the ends, λ in [0, 1], by metric; ≥ 0, NaN if a value is."""
        inside = [at for at in self.lambdas if 0 <= at <= 1]
        return self.senses.map(lambda metric: float(np.max([self._above(metric, at) for at in inside])))

    def _above(self, metric: str, at: float) -> float:
        """Excess over the straight line between the ends; exactly 0 at both ends."""
        here, start, end = (as_cost(self.at(metric, where), self.senses[metric]) for where in (at, 0.0, 1.0))
        return here - ((1 - at) * start + at * end)

    def at(self, metric: str, position: float) -> float:
        """Return the value at a position that was measured."""
        return self.values[metric][self.lambdas.index(position)]

    def rows_of(self) -> list[dict[str, Any]]:
        """Return one row for each position, for a record."""
        return [
            {"lambda": at, **{metric: values[n] for metric, values in self.values.items()}}
            for n, at in enumerate(self.lambdas)
        ]

    def table(self) -> Any:
        """Return ``rows_of`` as a pandas DataFrame, or as they are where pandas is not installed."""
        return as_frame(self.rows_of())

    def plot(self, metric: str = "error") -> Figure:
        """Draw one metric along the line."""
        require(metric in self.values, "metric", repr(metric), f"measured were {', '.join(self.values)}", "name one")
        gap = self.gap[metric]
        verdict = f"{abs(gap):.3g} {'worse' if gap > 0 else 'better'} in {metric} than its members' mean"
        if not math.isfinite(gap):
            verdict = f"not to be compared with its members: its {metric}, or theirs, is not finite"
        ends = plots.Series("the two ends", [0.0, 1.0], [self.at(metric, 0.0), self.at(metric, 1.0)], "baseline")
        line = plots.Series("along the line", self.lambdas, self.values[metric], "ours")
        return plots.lines(
            [line, ends],
            title=f"The average is {verdict}",
            x=plots.Axis("position λ: 0 is the first model, 1 the second"),
            y=plots.Axis(metric),
            caption=f"Signs agree in {self.agreement.element:.1%} of the weights, by chance in "
            f"{self.agreement.chance:.1%}. Batch-norm statistics: {self.statistics}.",
        )


def interpolate(
    a: Model,
    b: Model,
    evaluate: Evaluate,
    *,
    lambdas: Sequence[float] | None = None,
    calibrate: Iterable[Batch] | None = None,
    statistics: Statistics = "exact",
    better: Mapping[str, Better] | None = None,
) -> Interpolation:
    """Measure a model on the straight line between two.

    Batch-norm statistics are re-estimated at every point, ends included. The live one of the two models (the first, if
    both are) is used for it and gets its weights back, to the bit.

    Args:
        a: Model at λ = 0, live or a state.
        b: Model at λ = 1; one of the two must be live.
        evaluate: Model -> numbers by name.
        lambdas: Positions, also outside [0, 1]; 21 in [0, 1] by default. 0, ½ and 1 are added.
        calibrate: Batches of training inputs, needed where there are batch norms.
        statistics: "exact", "cumulative", "stale" (those of the ends, interpolated) or "batch".
        better: "lower" or "higher" for metrics whose name does not say; default: ``evaluate.better``, if any.

    Returns:
        Values, gap and sign agreement.

    Raises:
        UserError: If the models are of different architectures or settings, neither is live, batches are missing, a
            position is not finite, ``evaluate`` cannot be trusted, or ``better`` names a metric that it does not
            return.
    """
    host, states = live_model([a, b]), [state_of(a), state_of(b)]
    require_compatible(states)
    require_same_function([a, b])
    warn_of_factors(states[0])
    wanted = [at / 20 for at in range(21)] if lambdas is None else [float(at) for at in lambdas]
    fine, do = bool(wanted) and all(map(math.isfinite, wanted)), "pass some, such as [0, 0.25, 0.5, 0.75, 1]"
    require(fine, "lambdas", wanted, "positions on a line are numbers", do)
    # The gap is read at these three, and a barrier needs both ends
    positions = tuple(sorted({*wanted, 0.0, 0.5, 1.0}))
    agreement = sign_agreement(a, b)
    refresher = Refresher(host, calibrate, statistics)
    # The live model's parameters and buffers are overwritten, and a live end shares them
    ends = [{name: value.clone() for name, value in state.items()} for state in states]
    values: dict[str, list[float]] = {}
    with loading_states(host) as load:
        for end in reversed(ends):  # refuses an end that the live model cannot hold without loss
            load(end)
        with refresher.at_point():
            first = check_evaluate(evaluate, host)
        known = better_by_metric(first, declared_better(evaluate, better))
        for at in positions:
            load({name: interpolate_tensor(name, value, ends[1][name], at) for name, value in ends[0].items()})
            with refresher.at_point():
                found = run_evaluate(evaluate, host)
            require_same_metrics(found, first)
            for metric, value in found.items():
                values.setdefault(metric, []).append(value)
    curves = {metric: tuple(found) for metric, found in values.items()}
    return Interpolation(lambdas=positions, values=curves, agreement=agreement, statistics=statistics, senses=known)


def interpolate_tensor(name: str, a: Tensor, b: Tensor, at: float) -> Tensor:
    """Return (1 − λ) a + λ b for the tensors of one name, in the dtype of a; exact at both ends."""
    if not a.is_floating_point():
        return torch.maximum(a, b.to(a))  # counters
    # Statistics are not extrapolated: a variance must not become negative
    share = min(max(at, 0.0), 1.0) if is_statistic(name) else at
    first, second = upcast(a, b), upcast(b, a)
    return torch.lerp(first, second.to(first.device), share).to(a.dtype)
