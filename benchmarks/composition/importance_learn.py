"""Importance of blocks by hypergradient: how the loss after a short run moves with the chance of each block to train.

Under layer sampling block b moves by its optimizer step u_b with probability π_b, by π_b·u_b on average. The relaxed
run takes that average: θ_b = θ0_b + π_b(φ)·δ_b, where δ is moved by Adam, whose step does not change with the scale of
its gradient, and π = γ·softmax(φ). The outer loss of θ_T on rows of its own then has a gradient in φ.
"""

from __future__ import annotations

import functools
import time
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from benchmarks.composition.importance_cases import Case, Rows, batch_of, fresh, rows_of
from sparing import hypergrad as hg
from sparing.blocks import find_blocks
from sparing.hypergrad import AdamW, Checkpointed

ACTIVE = 1
"""Blocks drawn at once, γ."""

Weights = dict[str, Tensor]


def relaxed(case: Case, rows: Rows, seed: int, lr: float, first: int) -> hg.Bilevel:
    """The run in which every block moves by its chance times its step.

    Args:
        case: The model.
        rows: Of the seed.
        seed: Orders the training rows.
        lr: Rate of the run.
        first: Step at which it takes up the training rows.

    Returns:
        The two-level problem in φ, of shape (blocks,).
    """
    model = fresh(case).requires_grad_(False)
    body = [block for block in find_blocks(model) if block.role == "body"]
    for block in body:
        for parameter in block.params.values():
            parameter.requires_grad_()
    place = {name: at for at, block in enumerate(body) for name in block.params}
    base, call = hg.stateless(model)

    def loss(delta: Weights, phi: Tensor, ids: Tensor) -> Tensor:
        chances = ACTIVE * phi.softmax(0)
        weights = {name: base[name] + chances[place[name]] * move for name, move in delta.items()}
        logits = call(weights, input_ids=ids, use_cache=False).logits[:, :-1]
        return F.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten())

    taken = (batch_of(case, rows, seed, first + step)[: case.inner_batch] for step in range(case.inner))
    return hg.Bilevel(
        inner=loss,
        outer=lambda delta, phi: loss(delta, phi, rows.outer.ids),
        init={name: torch.zeros_like(value) for name, value in base.items()},
        optimizer=AdamW(lr=lr, weight_decay=0.0),
        steps=case.inner,
        batches=[rows.train.ids[chosen] for chosen in taken],
    )


@functools.cache
def bill(case: Case) -> int:
    """FLOPs of all hypergradients, which do not depend on the rows."""
    problem, phi = relaxed(case, rows_of(case, 0), 0, 0.0, first=0), torch.zeros(blocks_of(case))
    with FlopCounterMode(display=False) as counter:
        hg.hypergradient(problem, phi, Checkpointed())
    return case.rounds * counter.get_total_flops()


@functools.cache
def blocks_of(case: Case) -> int:
    """Body blocks of the model (count)."""
    return sum(block.role == "body" for block in find_blocks(fresh(case)))


def learned(case: Case, rows: Rows, seed: int, lr: float) -> dict[str, Any]:
    """Chances of all blocks after some steps from uniform ones, and what they cost.

    Args:
        case: The model.
        rows: Of the seed.
        seed: Orders the training rows.
        lr: Rate of the inner run, that of the training to come.

    Returns:
        ``weights``, the outer loss before each step, FLOPs and CPU seconds.
    """
    begin, values, phi = time.process_time(), [], torch.zeros(blocks_of(case))
    for number in range(case.rounds):
        problem = relaxed(case, rows, seed, lr, first=number * case.inner)
        found = hg.hypergradient(problem, phi, Checkpointed(), seed=seed)
        phi = phi - case.step * found.grad / found.grad.norm()
        values.append(float(found.value))
    seconds = time.process_time() - begin
    return {"weights": (ACTIVE * phi.softmax(0)).tolist(), "outer": values, "flops": bill(case), "seconds": seconds}
