"""The price, before paying: parameters, live weights, operations, bytes and seconds of a step, dense against sparse."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase

from torch import nn

from sparing.blocks import named_parameters, tied
from sparing.errors import UserError
from sparing.memory import Bytes
from sparing.scaling.entries import Entry
from sparing.scaling.planning import Plan

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
    tokens: int | Mapping[str, int],
    length: int | None = None,
    rates: Rates | None = None,
) -> Price:
    """Predict the cost of a training step from shapes; nothing runs.

    Args:
        model: The model of the plan; meta tensors will do.
        plan: The plan, at asked or at realised densities.
        tokens: Rows that a layer sees in a step (count), or by pattern of names where layers see different numbers:
            positions of its output for a convolution.
        length: Tokens of a sequence (count), to count attention's own products; None leaves them out.
        rates: Measured seconds of a layer by (fan-in, fan-out, density), as ``timing.time_layer`` gives.

    Returns:
        The price.

    Example:
        >>> from sparing.scaling.planning import plan
        >>> mlp = nn.Sequential(nn.Linear(8, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 4))
        >>> price = predict(mlp, plan(mlp, density=1 / 8), tokens=32)
        >>> price.params, price.live, price.flops
        (4996, 1412, 901120)
    """
    weights = named_parameters(model)
    lines = list(plan.entries.values())
    element = {name: weight.element_size() for name, weight in weights.items()}
    products = [(line, 2 * _numel(line) * _rows(tokens, line.name) * _passes(line)) for line in lines if _product(line)]
    extra = _attention(lines, tokens, length) + _tied(model, plan, tokens)
    seconds = _seconds([line for line, _ in products], rates)
    return Price(
        params=sum(map(_numel, lines)),
        live=sum(map(_live, lines)),
        flops=sum(count for _, count in products) + extra,
        flops_live=round(sum(count * line.density for line, count in products)) + extra,
        bytes_dense=_total(plan, element, sparse=False),
        bytes_sparse=_total(plan, element, sparse=True),
        seconds_dense=seconds and seconds[0],
        seconds_sparse=seconds and seconds[1],
        seconds_best=seconds and seconds[2],
    )


def _numel(line: Entry) -> int:
    return math.prod(line.shape)


def _live(line: Entry) -> int:
    return round(line.density * _numel(line))


def _product(line: Entry) -> bool:
    """Say whether a parameter multiplies activations: a matrix that is not looked up."""
    looked_up = line.role == "embedding" and line.kind in {"Embedding", "EmbeddingBag", "parameter"}
    return len(line.shape) > 1 and line.role in {"hidden", "output", "depthwise", "embedding"} and not looked_up


def _passes(line: Entry) -> int:
    """Return products a step has: forward, for the weight, and for the input, which data do not need."""
    return 2 if line.role == "embedding" else 3


def _rows(tokens: int | Mapping[str, int], name: str) -> int:
    if isinstance(tokens, int):
        return tokens
    found = next((count for pattern, count in tokens.items() if fnmatchcase(name, pattern)), None)
    if found is None:
        raise UserError("tokens", got=name, why="no pattern fits it", do='add one, such as {"*": batch * length}')
    return found


def _attention(lines: list[Entry], tokens: int | Mapping[str, int], length: int | None) -> int:
    """Count scores and weighted sums, forward and backward; the causal half is computed and counted."""
    if length is None:
        return 0
    queries = [line for line in lines if line.part in {"query", "qkv"} and len(line.shape) > 1]
    packed = {line.name: 3 if line.part == "qkv" and line.kind != "MultiheadAttention" else 1 for line in queries}
    return sum(12 * _rows(tokens, line.name) * length * (line.fan_out // packed[line.name]) for line in queries)


def _tied(model: nn.Module, plan: Plan, tokens: int | Mapping[str, int]) -> int:
    """Count the product with an embedding that also reads out."""
    owner = tied(model).get(f"{plan.readout}.weight")
    line = plan.entries.get(owner or "")
    return 6 * _numel(line) * _rows(tokens, line.name) if line is not None and not _product(line) else 0


def _total(plan: Plan, element: Mapping[str, int], *, sparse: bool) -> Bytes:
    parts = [_bytes(line, element[line.name], plan, sparse=sparse) for line in plan.entries.values()]
    return sum(parts, Bytes())


def _bytes(line: Entry, element: int, plan: Plan, *, sparse: bool) -> Bytes:
    """Return what one parameter takes with its mask or indices, gradient and optimizer state."""
    adam = plan.optimizer == "adam" or (plan.optimizer == "muon" and line.role != "hidden")
    moments, step = (2, _STEP) if adam else (_MOMENTS[plan.optimizer], 0)
    if sparse and line.masked and line.kind in _CSR:
        count = _live(line)
        beside = 3 * _INDEX * count + _INDEX * (sum(line.shape) + 2)
    else:
        count, beside = _numel(line), _numel(line) if line.masked else 0
    held = count * element
    return Bytes(params=held + beside, grads=held, optimizer=moments * held + step)


def _seconds(lines: list[Entry], rates: Rates | None) -> tuple[float, float, float] | None:
    """Add up measured layers: all dense, masked ones sparse, each as is faster."""
    if rates is None:
        return None
    pairs = list(_timed([line for line in lines if line.kind in _CSR], rates))
    if any(pair is None for pair in pairs):
        return None
    known = [pair for pair in pairs if pair is not None]
    return sum(d for d, _ in known), sum(s for _, s in known), sum(min(pair) for pair in known)


def _timed(lines: list[Entry], rates: Rates) -> Iterator[tuple[float, float] | None]:
    for line in lines:
        d_out, d_in = reversed(line.shape) if line.transposed else line.shape
        pair = rates(d_in, d_out, line.density) if callable(rates) else rates.get((d_in, d_out, line.density))
        yield pair if pair is None or line.masked else (pair[0], pair[0])
