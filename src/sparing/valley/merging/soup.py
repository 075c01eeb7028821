"""Model soups: the average of several models, all or those that help, with re-estimated batch-norm statistics."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn

from sparing.blocks.names import unwrap
from sparing.errors import UserError, require
from sparing.report.pairs import McNemar, PairedMean, can_bound, mcnemar, paired_bootstrap
from sparing.valley.apply import live_model, loading_states
from sparing.valley.merging.compatible import Model, State, require_compatible, state_of
from sparing.valley.merging.linear import Linear
from sparing.valley.merging.merge import merge
from sparing.valley.merging.method import check_settings, upcast
from sparing.valley.merging.model_folders import require_same_function
from sparing.valley.scans.batch_norm import Batch, Refresher, Statistics
from sparing.valley.scans.better import Better, as_cost, better_by_metric, declared_better
from sparing.valley.scans.evaluators import Evaluate, check_evaluate, require_same_metrics, run_evaluate

How = Literal["uniform", "greedy"]  # average all; or add, from the best on, those that do not make the average worse


@dataclass(frozen=True, kw_only=True, slots=True)
class Soup:
    """An average of models."""

    state: Mapping[str, Tensor]  # its weights and buffers, for ``load_state_dict``
    members: tuple[int, ...]  # which models are in it, by position, in the order in which they joined
    record: tuple[Mapping[str, Any], ...]  # one row per evaluation: ``members`` (text), ``kept``, each metric
    # By metric, the soup minus its best member, paired by rows; needs ``evaluate.each`` and 10 rows (10 that differ for
    # numbers other than 0 and 1). The same rows chose soup and member: on other rows both will be a little worse.
    beside_best: Mapping[str, PairedMean]
    mcnemar: McNemar | None  # of the soup (first) and its best member, where each row is right or wrong
    refreshed: bool  # whether batch-norm statistics were estimated for it; the members' mean is wrong for it


class WeightAverage:
    """The running mean of a model's weights over a training run, in float32 at least.

    Source: Izmailov et al. 2018, stochastic weight averaging (arXiv:1803.05407), Algorithm 1.

    Example:
        >>> layer, average = nn.Linear(1, 1, bias=False), WeightAverage()
        >>> for weight in (1.0, 2.0, 6.0):
        ...     _ = layer.weight.data.fill_(weight)
        ...     average.add_(layer)
        >>> average.state["weight"].item(), average.count
        (3.0, 3)
    """

    def __init__(self) -> None:
        self.count = 0  # models added
        self._weight = 0.0
        self._mean: dict[str, Tensor] = {}
        self._like: dict[str, torch.dtype] = {}

    @property
    def state(self) -> dict[str, Tensor]:
        """The mean so far, in the dtypes of the first model; batch-norm statistics are averaged, not estimated."""
        return {name: value.to(self._like[name], copy=True) for name, value in self._mean.items()}

    def add_(self, model: Model, weight: float = 1.0) -> None:
        """Add a model of the same architecture, or its state, with a weight > 0."""
        check_settings(weights=[weight])
        given = state_of(model)
        state = {name: upcast(value) if value.is_floating_point() else value for name, value in given.items()}
        self._like = self._like or {name: value.dtype for name, value in given.items()}
        self._mean = merge([self._mean or state, state], method=Linear((self._weight, weight)))
        self._weight += weight
        self.count += 1


def soup(
    models: Iterable[Model],
    how: How = "uniform",
    *,
    evaluate: Evaluate | None = None,
    calibrate: Iterable[Batch] | None = None,
    model: nn.Module | None = None,
    weights: Sequence[float] | None = None,
    metric: str | None = None,
    statistics: Statistics = "exact",
    better: Mapping[str, Better] | None = None,
) -> Soup:
    """Average models of one architecture.

    The greedy soup sorts the models by the metric and adds, from the best on, each one with which the average is no
    worse. It is evaluated on held-out rows, never on test rows.

    Args:
        models: Models or states, at least one.
        how: "uniform" or "greedy".
        evaluate: Model -> numbers by name; greedy needs it, uniform reports it.
        calibrate: Batches of training inputs for batch-norm statistics.
        model: A live model to evaluate in, which gets its own weights back; by default the first live one among
            ``models``.
        weights: Weights of a uniform soup, ≥ 0; equal by default.
        metric: Which number decides; "error" by default, or the first if there is none.
        statistics: "exact" or "cumulative"; "stale" averages them.
        better: "lower" or "higher" for metrics whose name does not say; default: ``evaluate.better``, if any.

    Returns:
        The soup; with a live model and ``calibrate`` its batch-norm statistics are its own.

    Raises:
        UserError: If there are no models, they do not fit, weights are wrong, or greedy lacks a live model, an
            ``evaluate`` or, with batch norm, ``calibrate``, or the better side of its metric is unknown.

    Source: Wortsman et al. 2022, "Model soups" (arXiv:2203.05482), Recipe 1 for the greedy one.
    """
    members = list(models)
    states = [state_of(one) for one in members]
    require_compatible(states)
    require_same_function([*members, *([] if model is None else [model])])
    require(how in {"uniform", "greedy"}, "how", repr(how), "there are two soups", 'pass "uniform" or "greedy"')
    method = Linear(None if weights is None else tuple(weights))
    if how == "uniform" and evaluate is None and calibrate is None:
        everyone = tuple(range(len(states)))
        return Soup(
            state=merge(states, method=method), members=everyone, record=(), beside_best={}, mcnemar=None,
            refreshed=False,
        )  # fmt: skip
    builder = _SoupBuilder(live_model(members, model), states, evaluate, calibrate, metric, statistics, better)
    if how == "uniform":
        return builder.uniform(method)
    why = "the greedy soup has equal weights"
    require(weights is None, "weights", weights, why, 'leave them out, or use how="uniform"')
    require(evaluate is not None, "evaluate", "none", "the greedy soup keeps what helps", "pass evaluate=...")
    return builder.greedy()


def greedy_members(alone: Sequence[float], score: Callable[[list[int]], float]) -> list[int]:
    """Add models to the mean, best first, while its score (lower is better) does not rise; return their indices."""
    order = sorted(range(len(alone)), key=alone.__getitem__)  # stable: of equal models the first
    kept, best = order[:1], alone[order[0]]
    for at in order[1:]:
        value = score([*kept, at])
        if value <= best:
            kept, best = [*kept, at], value
    return kept


class _SoupBuilder:
    """Evaluates states in a live model, and keeps a record of them."""

    def __init__(
        self, host: nn.Module, states: Sequence[State], evaluate: Evaluate | None, calibrate: Iterable[Batch] | None,
        metric: str | None, statistics: Statistics, better: Mapping[str, Better] | None,
    ) -> None:  # fmt: skip
        require_compatible([state_of(host), states[0]], ["the live model", "model 1"])
        self.host, self.evaluate, self.metric = host, evaluate, metric
        # Whether evaluate gives the numbers of every row, by which two models are paired
        self.paired = callable(getattr(evaluate, "each", None))
        self.better, self.first = better, dict[str, float]()
        self.beside: dict[str, PairedMean] = {}
        self.test: McNemar | None = None
        # The live model's parameters and buffers are overwritten, and a live member shares them
        self.states = [{name: value.clone() for name, value in state.items()} for state in states]
        self.refresher = Refresher(host, calibrate, statistics)
        self.record: list[dict[str, Any]] = []

    def uniform(self, method: Linear) -> Soup:
        merged = merge(self.states, method=method)
        members = list(range(len(self.states)))
        with loading_states(self.host) as load:
            alone = enumerate(self.states if self.evaluate else [])
            found = [self._evaluated(load, state, [at]) for at, state in alone]
            if self.paired:
                scores = [self._score(one) for one in found]
                self._pair(load, merged, self.states[scores.index(min(scores))])
            # Last, so that the live model's statistics are the soup's
            self._evaluated(load, merged, members)
            return self._result(merged, members)

    def greedy(self) -> Soup:
        tried: list[int] = []
        with loading_states(self.host) as load:

            def score(members: list[int]) -> float:
                tried.append(members[-1])
                return self._score(self._evaluated(load, merge([self.states[at] for at in members]), members))

            alone = [self._score(self._evaluated(load, state, [at])) for at, state in enumerate(self.states)]
            kept = greedy_members(alone, score)
            # The members were recorded first, then the candidates in the order in which they were tried
            for row, at in zip(self.record[len(alone) :], tried, strict=True):
                row["kept"] = at in kept
            merged = merge([self.states[at] for at in kept])
            if self.paired:
                self._pair(load, merged, self.states[kept[0]])
            # The last candidate may have been refused: the statistics must be those of the soup
            load(merged)
            with self.refresher.at_point():
                return self._result(merged, kept)

    def _evaluated(self, load: Any, state: State, members: list[int]) -> Mapping[str, float]:
        """Evaluate a state and record it."""
        load(state)
        with self.refresher.at_point():
            if self.evaluate is None:
                return {}
            found = run_evaluate(self.evaluate, self.host) if self.record else check_evaluate(self.evaluate, self.host)
            if self.paired and not self.record:
                self._rows()  # refuses numbers that cannot be paired before everything is evaluated
        self.first = self.first or found
        require_same_metrics(found, self.first)
        self.metric = self.metric or ("error" if "error" in found else next(iter(found)))
        require(self.metric in found, "metric", repr(self.metric), f"measured were {', '.join(found)}", "name one")
        self.record.append({"members": " + ".join(map(str, members)), "kept": True, **found})
        return found

    def _pair(self, load: Any, soup_state: State, best: State) -> None:
        """Compare the soup with its best member on the same rows."""
        rows = []
        for state in (soup_state, best):
            load(state)
            with self.refresher.at_point():
                rows.append(self._rows())
        for name, mine in rows[0].items():
            theirs = rows[1].get(name, torch.empty(0, 0))
            got, do = f"other rows of {name!r} for another model", "return the same rows of each metric for every model"
            require(mine.shape == theirs.shape, "evaluate.each", got, "pairs are of the same rows", do)
            if can_bound(mine, theirs):
                self.beside[name] = paired_bootstrap(mine, theirs)
                both = torch.cat([mine, theirs])
                if name == "error" and bool(((both == 0) | (both == 1)).all()):
                    self.test = mcnemar(mine == 0, theirs == 0)

    def _rows(self) -> dict[str, Tensor]:
        """Numbers of every row by metric, float64, of the live model as it is now."""
        try:
            found = self.evaluate.each(self.host).items()  # type: ignore[union-attr]
            rows = {name: torch.as_tensor(value).detach().to("cpu", torch.float64) for name, value in found}
            flat = all(value.ndim == 1 for value in rows.values())
        except Exception as error:
            why = "a soup and its best member are compared by the numbers of every row that it returns"
            do = 'return {"error": numbers of shape (rows,)}, or give a method that does something else another name'
            raise UserError("evaluate.each", got=f"{type(error).__name__}: {error!s:.80}", why=why, do=do) from error
        require(flat, "evaluate.each", "numbers of another shape", "there is one a row", "return shape (rows,)")
        return rows

    def _score(self, found: Mapping[str, float]) -> float:
        """The metric that decides, as a cost; NaN counts as the worst."""
        assert self.metric is not None
        better = better_by_metric(found, declared_better(self.evaluate, self.better))
        value = as_cost(found[self.metric], better[self.metric])
        return math.inf if math.isnan(value) else value

    def _result(self, merged: Mapping[str, Tensor], members: list[int]) -> Soup:
        """The soup, with the statistics that the live model has now."""
        refreshed = bool(self.refresher.layers) and self.refresher.statistics in {"exact", "cumulative"}
        buffers = dict(unwrap(self.host).named_buffers()) if refreshed else {}
        state = {name: buffers[name].detach().clone() if name in buffers else value for name, value in merged.items()}
        return Soup(
            state=state, members=tuple(members), record=tuple(self.record), beside_best=self.beside, mcnemar=self.test,
            refreshed=refreshed,
        )  # fmt: skip
