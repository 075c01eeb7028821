"""LISA written out by hand: flags set from the draws, AdamW by its formula, state dropped when a block leaves."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from sparing.layersample import Uniform


def block_names(model: nn.Module, lists: Sequence[str]) -> list[str]:
    """Paths of the blocks, in order."""
    return [f"{path}.{index}." for path in lists for index, _ in enumerate(model.get_submodule(path))]


def drawn(count: int, step: int, *, active: int, period: int, seed: int) -> tuple[int, ...]:
    return Uniform().draw(count, active, seed=seed, interval=step // period)


def adamw_(
    p: Tensor, grad: Tensor, state: dict[str, Any], *, lr: float, decay: float, betas=(0.9, 0.999), eps: float = 1e-4
) -> None:
    """Loshchilov and Hutter 2019, algorithm 2.

    ε is large: a gradient that is zero in exact arithmetic, as of the bias of keys, is rounding noise of 1e-17 in
    float64 and of 1e-9 where a model computes its softmax in float32; g / (|g| + 1e-8) would make a step of it.
    """
    state["t"] = state.get("t", 0) + 1
    state["m"] = betas[0] * state.get("m", 0.0) + (1 - betas[0]) * grad
    state["v"] = betas[1] * state.get("v", 0.0) + (1 - betas[1]) * grad * grad
    m, v = state["m"] / (1 - betas[0] ** state["t"]), state["v"] / (1 - betas[1] ** state["t"])
    p.copy_(p - lr * decay * p - lr * m / (v.sqrt() + eps))


def train_by_hand_(
    model: nn.Module,
    lists: Sequence[str],
    windows: Sequence[Sequence[Mapping[str, Any]]],
    *,
    loss: Callable[[nn.Module, Mapping[str, Any]], Tensor],
    active: int = 1,
    period: int = 2,
    seed: int = 0,
    lr: Callable[[int], float] = lambda step: 1e-2,
    decay: Callable[[str], float] = lambda name: 0.0,
    clip: float | None = 1.0,
    off: Sequence[str] = (),
    at: Sequence[int] | None = None,
) -> None:
    """Train a model in place: one step per window, the mean loss of its micro-batches.

    ``off`` holds beginnings of names that never train, ``at`` the indices of the steps where they do not count up.
    """
    blocks, state = block_names(model, lists), {}
    may = {n: p for n, p in model.named_parameters() if p.requires_grad and not any(n.startswith(o) for o in off)}
    for step, window in zip(at or range(len(windows)), windows, strict=True):
        now = [blocks[i] for i in drawn(len(blocks), step, active=active, period=period, seed=seed)]
        for name, p in model.named_parameters():
            body = any(name.startswith(block) for block in blocks)
            p.requires_grad_(name in may and (not body or any(name.startswith(block) for block in now)))
            p.grad = None
        state = {name: own for name, own in state.items() if may[name].requires_grad}
        for micro in window:
            (loss(model, micro) / len(window)).backward()
        grads = {name: p.grad for name, p in may.items() if p.grad is not None}
        norm = torch.stack([g.square().sum() for g in grads.values()]).sum().sqrt()
        scale = 1.0 if clip is None else min(1.0, clip / (norm.item() + 1e-6))
        with torch.no_grad():
            for name, grad in grads.items():
                adamw_(may[name], scale * grad, state.setdefault(name, {}), lr=lr(step), decay=decay(name))
    for p in may.values():
        p.requires_grad_(True)
        p.grad = None


def apart(model: nn.Module, other: nn.Module) -> float:
    """Largest difference of any weight; a step is 1e-2 long."""
    pairs = zip(model.parameters(), other.parameters(), strict=True)
    return max((a - b).abs().max().item() for a, b in pairs)
