"""Predicted cost: parameters, live weights, operations, bytes and seconds of a step, dense against sparse."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from torch import nn

from sparing.blocks import named_parameters, tied
from sparing.errors import UserError, require
from sparing.memory import Bytes
from sparing.scaling.masks.density import by_pattern
from sparing.scaling.plans.entries import Entry
from sparing.scaling.plans.planning import Plan
from sparing.scaling.sparse.pattern import blocks_of

Rates = Mapping[tuple[int, int, float], tuple[float, float]] | Callable[[int, int, float], tuple[float, float]]
"""(fan-in, fan-out, density) -> seconds of one layer forward and backward, masked dense and sparse."""

_CSR = {"Linear", "Conv1D"}
_INDEX = 4  # bytes of an int32: column, its transpose's, and the place of the value in the transpose
_STEP = 4  # bytes of the step count that torch's Adam keeps beside each parameter
_MOMENTS = {"adam": 2, "sgd": 1, "lion": 1, "muon": 1}


@dataclass(frozen=True, kw_only=True, slots=True)
class Price:
    """What a training step costs; activations are no part of it (``sparing.memory.predict`` has them)."""

    params: int  # parameters, tied ones once (count)
    live: int  # of these, the ones that masks leave (count)
    # operations of matrix products forward and backward, masked weights computed too; multiply-adds count as two
    flops: int
    flops_live: int  # the same for live weights only
    bytes_dense: Bytes  # weights with masks, gradients and optimizer state, all dense
    bytes_sparse: Bytes  # the same where linear layers keep live weights only, with their indices by row and by column
    seconds_dense: float | None  # linear layers of a step, all masked dense (s); None if some layer was not timed
    seconds_sparse: float | None  # all masked ones sparse (s)
    seconds_best: float | None  # each as is faster (s)


def predict(
    model: nn.Module,
    plan: Plan,
    *,
    tokens: int | Mapping[str, float],
    length: int | None = None,
    rates: Rates | None = None,
) -> Price:
    """Predict the cost of a training step from shapes; nothing runs.

    Args:
        model: The model of the plan; meta tensors will do.
        plan: The plan, at requested or at realised densities.
        tokens: Rows that a layer sees in a step (count), or by pattern of names where layers see different numbers:
            positions of its output for a convolution, and the mean over its matrices, tokens · k / E, for a stack of E
            experts of which each token goes to k.
        length: Tokens of a sequence (count), to count attention's own products; None omits them.
        rates: Measured seconds of a layer by (fan-in, fan-out, density), as ``timing.time_layer`` gives.

    Returns:
        The price.

    Raises:
        UserError: If no pattern gives the rows of a layer, or one number those of a stack of experts.

    Example:
        >>> from sparing.scaling import plan
        >>> mlp = nn.Sequential(nn.Linear(8, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 4))
        >>> price = predict(mlp, plan(mlp, density=1 / 8), tokens=32)
        >>> price.params, price.live, price.flops
        (4996, 1412, 901120)
    """
    weights = named_parameters(model)
    entries = list(plan.entries.values())
    element = {name: weight.element_size() for name, weight in weights.items()}
    # Products per step: forward, weight gradient and input gradient, which data do not need.
    passes = {entry.name: 2 if entry.role == "embedding" else 3 for entry in entries}
    matrices = [entry for entry in entries if _is_product(entry)]
    counts = {e.name: 2 * _numel(e) * _rows(tokens, e.name, stacked=e.stacked) * passes[e.name] for e in matrices}
    products = [(entry, round(counts[entry.name])) for entry in matrices]
    extra = _attention_flops(entries, tokens, length)
    # The product of a readout that is tied to a table has no entry of its own.
    tied_table = plan.entries.get(tied(model).get(f"{plan.readout}.weight") or "")
    if tied_table is not None and not _is_product(tied_table):
        extra += round(6 * _numel(tied_table) * _rows(tokens, tied_table.name))
    seconds = _seconds(matrices, rates)
    return Price(
        params=sum(map(_numel, entries)),
        live=sum(map(_live, entries)),
        flops=sum(count for _, count in products) + extra,
        flops_live=round(sum(count * entry.density for entry, count in products)) + extra,
        bytes_dense=sum((_bytes(entry, element[entry.name], plan, sparse=False) for entry in entries), Bytes()),
        bytes_sparse=sum((_bytes(entry, element[entry.name], plan, sparse=True) for entry in entries), Bytes()),
        seconds_dense=seconds and seconds[0],
        seconds_sparse=seconds and seconds[1],
        seconds_best=seconds and seconds[2],
    )


def _numel(entry: Entry) -> int:
    return math.prod(entry.shape)


def _live(entry: Entry) -> int:
    return round(entry.density * _numel(entry))


def _is_product(entry: Entry) -> bool:
    """Tell whether a parameter multiplies activations: a matrix that is not looked up."""
    looked_up = entry.role == "embedding" and entry.kind in {"Embedding", "EmbeddingBag", "parameter"}
    return len(entry.shape) > 1 and entry.role in {"hidden", "output", "depthwise", "embedding"} and not looked_up


def _rows(tokens: int | Mapping[str, float], name: str, *, stacked: bool = False) -> float:
    if isinstance(tokens, int):
        do = 'pass {"*experts*": tokens * k / E, "*": tokens} where a token goes to k of E'
        require(not stacked, "tokens", f"one number for {name}", "a token need not go to each matrix of a stack", do)
        return tokens
    if not (found := by_pattern(tokens, [name])):
        raise UserError("tokens", got=name, why="no pattern fits it", do='add one, such as {"*": batch * length}')
    return found[name]


def _attention_flops(entries: list[Entry], tokens: int | Mapping[str, float], length: int | None) -> int:
    """Count scores and weighted sums, forward and backward, masked positions included: they are computed too."""
    if length is None:
        return 0
    queries = [entry for entry in entries if entry.part in {"query", "qkv"} and len(entry.shape) > 1]
    packed = {entry.name: 3 if entry.part == "qkv" and entry.kind != "MultiheadAttention" else 1 for entry in queries}
    counts = (12 * _rows(tokens, entry.name) * length * (entry.fan_out // packed[entry.name]) for entry in queries)
    return sum(map(round, counts))


def _bytes(entry: Entry, element: int, plan: Plan, *, sparse: bool) -> Bytes:
    """Return the bytes of a parameter with its mask or indices, gradient and optimizer state."""
    # Beside Muon, Adam steps what is not hidden.
    adam = plan.optimizer == "adam" or (plan.optimizer == "muon" and entry.role != "hidden")
    moments, step = (2, _STEP) if adam else (_MOMENTS[plan.optimizer], 0)
    if sparse and entry.masked and entry.kind in _CSR:
        count = _live(entry)
        out, into = reversed(entry.shape) if entry.transposed else entry.shape
        beside = _INDEX * (3 * count + out * blocks_of(out, into, count) + into + 2)
    else:
        count, beside = _numel(entry), _numel(entry) if entry.masked else 0
    held = count * element
    return Bytes(params=held + beside, grads=held, optimizer=moments * held + step)


def _seconds(entries: list[Entry], rates: Rates | None) -> tuple[float, float, float] | None:
    """Add up measured layers (s): all dense, masked ones sparse, each as is faster; None if one was not measured."""
    if rates is None:
        return None
    pairs = []
    for entry in (entry for entry in entries if entry.kind in _CSR):
        d_out, d_in = reversed(entry.shape) if entry.transposed else entry.shape
        pair = rates(d_in, d_out, entry.density) if callable(rates) else rates.get((d_in, d_out, entry.density))
        if pair is None:
            return None
        pairs.append(pair if entry.masked else (pair[0], pair[0]))
    return sum(d for d, _ in pairs), sum(s for _, s in pairs), sum(min(pair) for pair in pairs)
