"""What a step costs: predicted before the first one, dense beside sparse, and measured as the run goes."""

from __future__ import annotations

import functools
import itertools
import statistics
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode, sdpa_backward_flop_count, sdpa_flop_count

from sparing.jobs.live import device_of
from sparing.jobs.pretrain.state import TrainState
from sparing.jobs.pretrain.step import batch_of, mean_loss
from sparing.report import Record, format_number
from sparing.scaling.backends import sparse_layers
from sparing.scaling.price import Price, predict
from sparing.scaling.timing import time_layer

PARAMETERS, LIVE, PRODUCTS = "parameters", "live weights", "operations of the products"
WEIGHTS, GRADIENTS, STATE = "weights, masks and indices", "gradients", "optimizer state"
LAYERS, STEP = "time of the linear layers", "time of a step, median"  # rows of the table "cost"


def _forward(query: Any, key: Any, value: Any, *_: Any, **__: Any) -> int:
    return int(sdpa_flop_count(query, key, value))  # type: ignore[no-untyped-call]


def _backward(grad: Any, query: Any, key: Any, value: Any, *_: Any, **__: Any) -> int:
    return int(sdpa_backward_flop_count(grad, query, key, value))  # type: ignore[no-untyped-call]


# Fused attention of the CPU, which torch's counter passes over; its backward pass computes the scores again.
_FUSED: dict[Any, Any] = {
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu: _forward,
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward: _backward,
}


def predict_step(state: TrainState) -> Price:
    """Predict the cost of a step, with the seconds of layers timed on this machine."""
    rates = None
    if device_of(state.model).type == "cpu":
        timed = functools.cache(functools.partial(time_layer, tokens=state.tokens))
        rates = lambda fan_in, fan_out, density: tuple(timed(fan_in, fan_out, density))  # noqa: E731
    length = state.settings.context
    return predict(state.model, state.masks.plan, tokens=state.tokens, length=length, rates=rates)  # type: ignore[arg-type]


def note_predicted(state: TrainState, record: Record) -> None:
    """Add the table "cost": predictions, and what a forward and backward pass without a step shows."""
    price, (flops, grads) = predict_step(state), _trial(state)
    dense, sparse = price.bytes_dense, price.bytes_sparse
    params = list(state.model.parameters())
    live = sum(p.numel() for p in params) - sum(_masked(mask, p) for mask, p in _pairs(state))
    rows: list[tuple[str, str, Any, Any, Any]] = [
        (PARAMETERS, "", price.params, price.live, sum(p.numel() for p in params)),
        (LIVE, "", price.live, price.live, live),
        (PRODUCTS, "", price.flops, price.flops_live, flops),
        (WEIGHTS, "B", dense.params, sparse.params, held_bytes(state)),
        (GRADIENTS, "B", dense.grads, sparse.grads, grads),
        (STATE, "B", dense.optimizer, sparse.optimizer, None),
        (LAYERS, "s", price.seconds_dense, price.seconds_sparse, None),
        (STEP, "s", None, None, None),
    ]
    for quantity, unit, one, other, found in rows:
        record.add("cost", quantity=quantity, unit=unit, dense=one, sparse=other, measured=found)


def _pairs(state: TrainState) -> list[tuple[Tensor, Tensor]]:
    """Mask and weight of every layer that runs dense; sparse layers hold no masked weight."""
    sparse = sparse_layers(state.model)
    return [(mask, state.masks.parameter(name)) for name, mask in state.masks.items() if name not in sparse]


def _masked(mask: Tensor, parameter: Tensor) -> int:
    assert mask.shape == parameter.shape
    return mask.numel() - int(mask.sum())


def _trial(state: TrainState) -> tuple[int | None, int]:
    """Operations of a forward and backward pass, None where sparse products hide them, and bytes of gradients."""
    # torch counts dense products only: a sparse layer's own kernel is invisible to it.
    counter = FlopCounterMode(display=False, custom_mapping=_FUSED)
    with counter:
        mean_loss(state.model, *batch_of(state, 0)).backward()  # type: ignore[no-untyped-call]
    grads = sum(p.grad.nbytes for p in state.model.parameters() if p.grad is not None)
    state.optimizer.zero_grad(set_to_none=True)
    return None if sparse_layers(state.model) else counter.get_total_flops(), grads


def held_bytes(state: TrainState) -> int:
    """Bytes of weights, masks and indices as the model holds them; shared storage counts once."""
    model = state.model
    tensors = [*model.parameters(), *(b for name, b in model.named_buffers() if name.endswith("_mask"))]
    return sum(t.nbytes for t in tensors) + sum(layer.pattern.nbytes for layer in sparse_layers(model).values())


def fill_measured(state: TrainState, record: Record) -> None:
    """Complete the table "cost" with what only a whole run shows."""
    held = (value for kept in state.optimizer.state.values() for value in kept.values())
    found = {STATE: sum(value.nbytes for value in held if isinstance(value, Tensor)), STEP: median_step(record)}
    for row in record.rows:
        if row["table"] == "cost" and row["quantity"] in found:
            row["measured"] = found[str(row["quantity"])]


def median_step(record: Record) -> float | None:
    """Median seconds of a step; None before the second step."""
    ends: list[Any] = [row["seconds"] for row in record.table("train")]
    return statistics.median(b - a for a, b in itertools.pairwise(ends)) if len(ends) > 1 else None


def displayed(rows: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """The table "cost" for display: every number with its unit.

    Example:
        >>> displayed([{"quantity": "gradients", "unit": "B", "dense": 2048, "sparse": None, "measured": 2048}])
        [{'quantity': 'gradients', 'predicted_dense': '2.00 KiB', 'predicted_sparse': '–', 'measured': '2.00 KiB'}]
    """
    columns = {"predicted_dense": "dense", "predicted_sparse": "sparse", "measured": "measured"}
    return [
        {"quantity": row["quantity"]} | {name: format_number(row[key], row["unit"]) for name, key in columns.items()}
        for row in rows
    ]
