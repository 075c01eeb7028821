"""Tables that are not curves: the plan, rates by kind of layer, the cost of a step, and what became of the masks."""

from __future__ import annotations

import functools
import itertools
import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode, sdpa_backward_flop_count, sdpa_flop_count

from sparing.jobs.pretrain.state import TrainState, batch_of, summed_loss
from sparing.jobs.torch_state import device_of
from sparing.report import Record, format_number
from sparing.scaling.masks.laws import dead
from sparing.scaling.plans.entries import layer_pattern
from sparing.scaling.plans.planning import Plan
from sparing.scaling.plans.price import predict
from sparing.scaling.sparse.backends import sparse_layers
from sparing.scaling.sparse.timing import time_layer

# Columns of the full plan.
SHOWN = ("parameter", "role", "fan_in", "m_in", "m_out", "density", "std", "lr", "decay", "eps", "forward", "why")


def rate_rows(plan: Plan, groups: Iterable[Mapping[str, Any]], lr: float) -> list[dict[str, Any]]:
    """Initial scale, learning rate and decay of every kind of layer, as the optimizer's groups have them."""
    options = {name: group for group in groups for name in group["param_names"]}
    rows: dict[tuple[Any, ...], dict[str, Any]] = {}
    for name, entry in plan.entries.items():
        group = options[name]
        factor = group["lr_scale"]
        # SGD of torch adds λ W to the gradient, of which momentum sums up 1 / (1 − momentum) in the long run.
        times = 1 / (1 - group.get("momentum", 0.0)) if plan.optimizer == "sgd" else 1.0
        key = (layer_pattern(name), round(entry.density, 6), factor)
        row = rows.setdefault(key, {
            "weights": key[0], "layers": 0, "parameters": 0, "role": entry.role, "density": entry.density,
            "initial_std": entry.std, "factor": factor, "peak_rate": lr * factor,
            "decay_per_step": lr * factor * group.get("weight_decay", 0.0) * times,
        })  # fmt: skip
        row["layers"] += 1
        row["parameters"] += math.prod(entry.shape)
    return list(rows.values())


def note_plan(state: TrainState, record: Record) -> None:
    """Add the tables "plan", parameter by parameter, and "rates", by kind of layer."""
    for row in state.masks.plan.table():
        known = {column: row[column] for column in SHOWN if column in row}
        record.add("plan", **{column: None if value == "" else value for column, value in known.items()})
    for row in rate_rows(state.masks.plan, state.groups, state.settings.lr):
        record.add("rates", **row)


def note_layers(state: TrainState, record: Record) -> None:
    """Add the table "layers": what the mask of each weight leaves, and how the layer ran."""
    for name, mask in state.masks.items():
        outputs, inputs = dead(mask, **state.masks.layout(name))
        choice = state.choices.get(name)
        live = int(mask.sum())
        record.add(
            "layers", weight=name, shape=" × ".join(map(str, mask.shape)), live=live, density=live / mask.numel(),
            dead_neurons=len(outputs), unread_inputs=len(inputs), backend=choice.backend if choice else "dense",
        )  # fmt: skip


PARAMETERS, LIVE, PRODUCTS = "parameters", "live weights", "operations of the products"
WEIGHTS, GRADIENTS, STATE = "weights, masks and indices", "gradients", "optimizer state"
LAYERS, STEP = "time of the linear layers", "time of a step, median"  # rows of the table "cost"


# Products that torch's counter passes over: of experts, whose rows are sorted by expert, and of the CPU's fused
# attention, of which the backward pass computes the scores again.
_FUSED: dict[Any, Any] = {
    torch.ops.aten._grouped_mm: lambda one, other, *_, out_shape=None, **__: 2 * math.prod(one) * other[-1],
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu: lambda *given, **_: sdpa_flop_count(*given[:3]),  # type: ignore[no-untyped-call]
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward: lambda *given, **_: sdpa_backward_flop_count(
        *given[:4]
    ),  # type: ignore[no-untyped-call]
}


def note_predicted(state: TrainState, record: Record) -> None:
    """Add the table "cost": predictions, and what a forward and backward pass without a step shows."""
    # without those of layers timed on this machine, seconds are not predicted
    rates = None
    if device_of(state.model).type == "cpu":
        timed = functools.cache(functools.partial(time_layer, tokens=state.tokens))
        rates = lambda fan_in, fan_out, density: tuple(timed(fan_in, fan_out, density))  # noqa: E731
    seen, length = _rows_seen(state), state.settings.length
    price = predict(state.model, state.masks.plan, tokens=seen or {"*": state.tokens}, length=length, rates=rates)  # type: ignore[arg-type]
    # torch counts dense products only: a sparse layer's own kernel is invisible to it.
    with FlopCounterMode(display=False, custom_mapping=_FUSED) as counter:
        (summed_loss(state.model, *batch_of(state, 0)) / state.tokens).backward()  # type: ignore[no-untyped-call]
    grads = sum(p.grad.nbytes for p in state.model.parameters() if p.grad is not None)
    state.optimizer.zero_grad(set_to_none=True)
    flops = None if sparse_layers(state.model) else counter.get_total_flops()
    dense, sparse = price.bytes_dense, price.bytes_sparse
    count, sparse_now = sum(p.numel() for p in state.model.parameters()), sparse_layers(state.model)
    # Sparse layers hold no masked weight.
    live = count - sum(int((~mask).sum()) for name, mask in state.masks.items() if name not in sparse_now)
    rows: list[tuple[str, str, Any, Any, Any]] = [
        (PARAMETERS, "", price.params, price.live, count),
        (LIVE, "", price.live, price.live, live),
        (PRODUCTS, "", price.flops if seen else None, price.flops_live if seen else None, flops),
        (WEIGHTS, "B", dense.params, sparse.params, held_bytes(state)),
        (GRADIENTS, "B", dense.grads, sparse.grads, grads),
        (STATE, "B", dense.optimizer, sparse.optimizer, None),
        (LAYERS, "s", price.seconds_dense, price.seconds_sparse, None),
        (STEP, "s", None, None, None),
    ]
    for quantity, unit, one, other, found in rows:
        record.add("cost", quantity=quantity, unit=unit, dense=one, sparse=other, measured=found)


def _rows_seen(state: TrainState) -> dict[str, float]:
    """Rows that each layer sees in a step, by pattern of names; empty if how many experts see a token is not known."""
    stacks = {name: entry.shape[0] for name, entry in state.masks.plan.entries.items() if entry.stacked}
    chosen: int | None = getattr(state.model.config, "num_experts_per_tok", None)
    if chosen is None:
        return {} if stacks else {"*": state.tokens}
    return {name: state.tokens * chosen / count for name, count in stacks.items()} | {"*": state.tokens}


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
