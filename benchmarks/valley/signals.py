"""Signals that are said to tell which models merge, on the pairs whose averages were measured.

After "Demystifying Mergeability" (arXiv:2601.22285), whose code was not published when this was written: cosine,
distance and ratio of lengths of the task vectors, overlap of their leading singular directions, distance and angle of
features, of gradients by the weights and of gradients by the inputs. Features and gradients are those of 256 validation
rows with their labels, which the forecast from rows does without; batch norm of every model is re-estimated first.
"""

from __future__ import annotations

import time
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.valley.cases import Case, rows_of
from benchmarks.valley.pairs import base_of, half_of
from benchmarks.valley.soft import ROWS, pairs
from benchmarks.valley.store import Store
from sparing.blocks import named_parameters
from sparing.valley.forecast.predict import predict_merge
from sparing.valley.scans.batch_norm import Refresher

LEADING = 4
"""Singular directions of a matrix whose overlap is taken."""


def signals() -> None:
    """Every pair's signals."""
    store = Store("signals")
    for case, seed, start, epoch in pairs():
        store.once(f"{case.name} {seed} {start} {epoch}", lambda at=(case, seed, start, epoch): _row(*at))


def _row(case: Case, seed: int, start: str, epoch: int) -> dict[str, Any]:
    rows, models = rows_of(case.data), [half_of(case, seed, start, half, epoch) for half in (0, 1)]
    # Strangers have a start each
    bases = [base_of(case, (seed + half) % 5 if start == "strangers" else seed, start) for half in (0, 1)]
    begun = time.process_time()
    found = of_weights(models, bases) | of_rows(models, *(each[:ROWS] for each in rows.validation), rows.calibration)
    seconds = time.process_time() - begun
    score = predict_merge(*models).score
    return {
        "case": case.name, "seed": seed, "start": start, "epoch": epoch, "seconds": seconds, "score": score,
        "signals": found,
    }  # fmt: skip


def of_weights(models: list[nn.Module], bases: list[nn.Module]) -> dict[str, float]:
    """Geometry of the two task vectors."""
    tasks = []
    for model, base in zip(models, bases, strict=True):
        start = named_parameters(base)
        tasks.append({name: (each - start[name]).detach() for name, each in named_parameters(model).items()})
    first, second = (torch.cat([each.flatten() for each in task.values()]) for task in tasks)
    small, large = sorted((float(first.norm()), float(second.norm())))
    matrices = [
        (tasks[0][name].flatten(1), tasks[1][name].flatten(1)) for name, each in tasks[0].items() if each.ndim > 1
    ]
    overlaps = [_overlap(*pair) for pair in matrices]
    return {
        "task cosine": _cosine(first, second), "task distance": float((first - second).norm()),
        "task ratio": small / large,
        "left overlap": sum(left for left, _ in overlaps) / len(overlaps),
        "right overlap": sum(right for _, right in overlaps) / len(overlaps),
    }  # fmt: skip


def of_rows(models: list[nn.Module], inputs: Tensor, targets: Tensor, calibration: list[Tensor]) -> dict[str, float]:
    """Features and gradients of the two on the same rows."""
    first, second = (_on_rows(model, inputs, targets, calibration) for model in models)
    found = {}
    for name, one in first.items():
        other = second[name]
        cosines = [_cosine(*two) for two in zip(one, other, strict=True)]
        found[f"{name} cosine"] = sum(cosines) / len(cosines)
        found[f"{name} distance"] = float((one - other).norm(dim=1).mean())
    return found


def _on_rows(model: nn.Module, inputs: Tensor, targets: Tensor, calibration: list[Tensor]) -> dict[str, Tensor]:
    """Features and input gradients by row, shape (rows, numbers); the weights' gradient, shape (1, parameters)."""
    seen: list[Tensor] = []
    head = next(layer for layer in reversed(list(model.modules())) if isinstance(layer, nn.Linear))
    hook = head.register_forward_pre_hook(lambda layer, args: seen.append(args[0].detach()))
    weights = list(named_parameters(model).values())
    with Refresher(model.eval(), calibration).at_point():
        seen.clear()
        asked = inputs.clone().requires_grad_()
        loss = F.cross_entropy(model(asked), targets)
    hook.remove()
    *by_weights, by_inputs = torch.autograd.grad(loss, [*weights, asked])
    return {
        "feature": seen[0].flatten(1), "input gradient": by_inputs.flatten(1),
        "gradient": torch.cat([each.flatten() for each in by_weights])[None],
    }  # fmt: skip


def _cosine(a: Tensor, b: Tensor) -> float:
    return float(F.cosine_similarity(a.double(), b.double(), dim=0))


def _overlap(a: Tensor, b: Tensor) -> tuple[float, float]:
    """Shares of the leading left and right directions that two matrices have in common, 0 to 1."""
    (left, _, right), (left_b, _, right_b) = (torch.linalg.svd(one.double(), full_matrices=False) for one in (a, b))
    k = min(LEADING, left.shape[1])
    shared = ((left[:, :k].T @ left_b[:, :k]).square().sum() / k, (right[:k] @ right_b[:k].T).square().sum() / k)
    return float(shared[0]), float(shared[1])
