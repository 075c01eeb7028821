"""bergson 2.5.1, which has MAGIC for Hugging Face language models: its trainer, run as its own worker runs it."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

Run = Callable[[], Tensor]


def _optimizer(task: Any) -> Any:
    import torchopt

    if task.optimizer == "sgd":
        return torchopt.sgd(task.rate, momentum=0.9)
    return torchopt.adamw(task.rate, betas=task.betas, eps=task.eps, eps_root=task.eps_root, weight_decay=0.01)


def _streams(task: Any) -> tuple[Any, Any]:
    """Rows in their order, and (queries) -> a stream of them in one batch."""
    from bergson.magic.data_stream import DataStream
    from datasets import Dataset

    order = torch.cat(task.batches).tolist()
    numbers = [[row] * task.length for row in order]
    ordered = Dataset.from_dict({"input_ids": [task.rows[row].tolist() for row in order], "doc_ids": numbers})
    rows = DataStream(ordered, task.batch, weight_shape=(len(task.rows),))
    return rows, lambda part: DataStream(Dataset.from_dict({"input_ids": part.tolist()}), len(part))


def _trainer(task: Any) -> tuple[Any, Any, Any]:
    """Model, trainer and first state, as ``prepare_trainer`` makes them."""
    from bergson.magic.trainer import Trainer
    from bergson.utils.math import weighted_causal_lm_ce

    model = task.fresh()
    model.loss_function = partial(weighted_causal_lm_ce, reduction="mean")
    return model, *Trainer.initialize(model, _optimizer(task))


def prepare(task: Any, *, save_mode: str = "sqrt", each: bool = False) -> Run:
    """What does one attribution: train with checkpoints on disk, gradients of the queries, and the way back.

    Args:
        task: Model, rows, order, queries and optimizer; see ``benchmarks.attribution_peers``.
        save_mode: Which states are kept: "sqrt", which is its default, or "log", as in the paper.
        each: Whether every query is attributed by itself, with a way back each, as ``compute_per_query_magic_scores``
            does it; else their mean.

    Returns:
        () -> influences, (n,), or (k, n) with ``each``.
    """
    from bergson.magic.cli import compute_query_gradients
    from bergson.magic.trainer import BackwardState
    from torchopt.pytree import tree_iter

    rows, queries = _streams(task)
    asked = [queries(part) for part in task.queries.split(1 if each else len(task.queries))]

    def run() -> Tensor:
        model, trainer, state = _trainer(task)
        found = []
        with tempfile.TemporaryDirectory(dir=task.folder) as folder:
            state = trainer.train(state, rows, inplace=True, save_dir=folder, save_mode=save_mode)
            ends = [compute_query_gradients(state, model, part, "mean")[0] for part in asked]
            for at, gradient in enumerate(ends):
                state.detach_()
                rows.requires_grad, rows.weights.grad = True, None
                leaves = [leaf for leaf in tree_iter(state.opt_state) if isinstance(leaf, Tensor)]
                zeros = [torch.zeros_like(leaf) for leaf in leaves if leaf.is_floating_point()]
                back = trainer.backward(
                    folder, rows, BackwardState(gradient, zeros, torch.zeros_like(rows.weights)), state,
                    inplace=True, save_mode=save_mode, cleanup=at == len(ends) - 1,
                )  # fmt: skip
                found.append(back.weight_grads.detach())
        return torch.stack(found) if each else found[0]

    return run


def loss_after(task: Any, weights: Tensor) -> float:
    """Mean loss of the queries after its own training with these weights of rows."""
    from bergson.magic.cli import compute_query_gradients

    rows, queries = _streams(task)
    rows.weights.data.copy_(weights)
    model, trainer, state = _trainer(task)
    state = trainer.train(state, rows, inplace=True, save_mode="final")
    return float(compute_query_gradients(state, model, queries(task.queries), "mean")[1])
