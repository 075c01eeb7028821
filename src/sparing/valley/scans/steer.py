"""Steering to the flat side: a line search from an average, compared with plain scaling of its norm.

A step along the signs of the weights leads to the flat side of their valley (Li et al. 2024, arXiv:2405.12489, §4), so
an average on the steep side might gain by one. With batch norm such a step is little more than a larger norm, and a
longer θ is a smoother function whatever its signs. So the plain θ (1 + l) is searched too, and both are judged on rows
that no search has seen.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn

from sparing.blocks import named_parameters
from sparing.errors import require
from sparing.valley.apply import perturbing
from sparing.valley.directions.norms import scaled
from sparing.valley.merging.compatible import Model, state_of, vectors_of
from sparing.valley.scans.batch_norm import Batch, Refresher, Statistics
from sparing.valley.scans.better import Better, ByMetric, as_cost, better_by_metric, declared_better
from sparing.valley.scans.evaluators import Evaluate, check_evaluate, require_same_metrics, run_evaluate
from sparing.vectors import Vector, norm

# the signs of the weights, each tensor with its root mean square; away from another model; the weights themselves
Along = Literal["sign", "difference", "self"]

# steps tried by default, in lengths of ‖θ‖; both sides, since the flat one may not be the better one
STEPS = (-0.1, -0.05, -0.02, -0.01, 0.0, 0.01, 0.02, 0.05, 0.1, 0.2, 0.3)


@dataclass(frozen=True, kw_only=True, slots=True)
class SearchPath:
    """One line search: its values, the chosen step, and its gain on rows the search has not seen."""

    along: Along  # direction, with the length ‖θ‖
    steps: tuple[float, ...]  # steps l of θ + l · direction (dimensionless), rising; 0 is among them
    searched: Mapping[str, tuple[float, ...]]  # values by metric on the searched rows, one for each step
    step: float  # the step chosen: the best value on the searched rows, and of equals the shortest
    # by metric, how much better the chosen step is than θ on the test rows, in its unit; above zero it helped
    gain: ByMetric[float]


@dataclass(frozen=True, kw_only=True, slots=True)
class Steered:
    """The chosen step, beside plain norm scaling."""

    path: SearchPath  # along the direction asked for
    scaling: SearchPath  # along θ itself: the flat move that needs no signs
    state: Mapping[str, Tensor]  # weights and buffers at the chosen step of ``path``, for ``load_state_dict``

    @property
    def beyond(self) -> ByMetric[float]:
        """Gain minus that of plain norm scaling, by metric, on the test rows; above zero the direction helps."""
        return self.path.gain.map(lambda metric: self.path.gain[metric] - self.scaling.gain[metric])

    def rows_of(self) -> list[dict[str, Any]]:
        """Return one row for each searched step of both paths, for a record."""
        return [
            {
                "along": path.along,
                "step": step,
                "chosen": step == path.step,
                **{metric: values[at] for metric, values in path.searched.items()},
            }
            for path in (self.path, self.scaling)
            for at, step in enumerate(path.steps)
        ]


def steer(
    model: nn.Module,
    evaluate: Evaluate,
    *,
    test: Evaluate,
    calibrate: Iterable[Batch] | None = None,
    along: Along = "sign",
    other: Model | None = None,
    steps: Sequence[float] = STEPS,
    metric: str = "loss",
    statistics: Statistics = "exact",
    better: Mapping[str, Better] | None = None,
) -> Steered:
    """Search for a step that improves a metric on held-out rows, and report its gain on others.

    Only trainable parameters move, and exact zeros have no sign. The model is restored, to the bit.

    Args:
        model: Live model at θ, such as one that has loaded a soup.
        evaluate: Model -> numbers by name, on the rows to search by.
        test: The same numbers on other rows, from which the gains are reported.
        calibrate: Batches of training inputs, where there are batch norms.
        along: "sign" for sign(θ) · rms of each tensor, "difference" for ``model − other``, "self" for θ; all with the
            length ‖θ‖.
        other: The model to move away from: a member of the soup.
        steps: Steps to try, in lengths of ‖θ‖; 0 is added.
        metric: Which number is searched.
        statistics: As in ``Refresher``.
        better: "lower" or "higher" for metrics whose name does not say; default: ``evaluate.better``, if any.

    Returns:
        The chosen step and its gain beside those of plain norm scaling, and the state there.

    Raises:
        UserError: If ``evaluate`` and ``test`` are the same, a step is not finite, ``other`` is missing or of another
            architecture or equal to the model, ``evaluate`` is not deterministic or changes the model, it and ``test``
            return other metrics, or the metric's better side is unknown.
    """
    why = "a gain on the searched rows is partly luck"
    require(test is not evaluate, "test", "the searched rows", why, "pass an evaluate on rows of their own")
    fine = all(map(math.isfinite, steps))
    require(fine, "steps", tuple(steps), "lengths are finite numbers", "pass numbers such as (-0.05, 0.05)")
    lengths = tuple(sorted({0.0, *map(float, steps)}))
    declared, refresher = declared_better(evaluate, better), Refresher(model, calibrate, statistics)

    def search(along: Along, vector: Vector) -> SearchPath:
        return _search_line(model, evaluate, test, refresher, metric, declared, along, vector, lengths)

    direction = steering_direction(model, along, other)
    path = search(along, direction)
    scaling = path if along == "self" else search("self", steering_direction(model, "self"))
    with perturbing(model) as perturber:
        perturber.to(direction, path.step)
        with refresher.at_point():
            state = {name: value.clone() for name, value in state_of(model).items()}
    return Steered(path=path, scaling=scaling, state=state)


def steering_direction(model: nn.Module, along: Along, other: Model | None = None) -> dict[str, Tensor]:
    """Return what a step of 1 adds to the trainable parameters: a vector of length ‖θ‖."""
    theta = {name: value.detach() for name, value in named_parameters(model).items() if value.requires_grad}
    do = "unfreeze what should be steered"
    require(bool(theta), "model", "no trainable parameters", "frozen ones do not move", do)
    if along == "self":
        return {name: value.clone() for name, value in theta.items()}
    if along == "sign":
        wide = {name: value.to(torch.promote_types(value.dtype, torch.float32)) for name, value in theta.items()}
        return scaled({n: value.sign() * wide[n].square().mean().sqrt() for n, value in theta.items()}, theta)
    require(along == "difference", "along", repr(along), "no such direction", 'pass "sign", "difference" or "self"')
    require(other is not None, "other", "none", "a difference needs two models", "pass other=..., a member of the soup")
    assert other is not None
    mine, theirs = vectors_of(model, other)
    away = {name: mine[name] - theirs[name].to(mine[name]) for name in theta}
    require(float(norm(away)) > 0, "other", "the same weights", "there is no direction between them", "pass a member")
    return scaled(away, theta)


def _search_line(
    model: nn.Module, evaluate: Evaluate, test: Evaluate, refresher: Refresher, metric: str,
    declared: Mapping[str, Better] | None, along: Along, vector: Vector, lengths: tuple[float, ...],
) -> SearchPath:  # fmt: skip
    """Choose the step at which ``metric`` is best, and compare it with no step on the rows of ``test``."""
    with perturbing(model) as perturber:
        model.eval()
        perturber.to(vector, 0.0)
        with refresher.at_point():
            start, before = check_evaluate(evaluate, model), check_evaluate(test, model)
        require(metric in start, "metric", repr(metric), f"measured were {', '.join(start)}", "name one of them")
        require_same_metrics(before, start)
        better, found = better_by_metric(start, declared), []
        for length in lengths:
            perturber.to(vector, length)
            with refresher.at_point():
                found.append(run_evaluate(evaluate, model))
            require_same_metrics(found[-1], start)
        costs = [as_cost(one[metric], better[metric]) for one in found]
        # Of equal costs the shortest step; NaN is never chosen, and θ itself, at step 0, is finite
        step = min((cost, abs(at), at) for cost, at in zip(costs, lengths, strict=True) if not math.isnan(cost))[-1]
        perturber.to(vector, step)
        with refresher.at_point():
            after = run_evaluate(test, model)
        require_same_metrics(after, start)
    return SearchPath(
        along=along, steps=lengths, searched={name: tuple(one[name] for one in found) for name in start}, step=step,
        gain=better.map(lambda name: as_cost(before[name] - after[name], better[name])),
    )  # fmt: skip
