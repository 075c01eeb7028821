"""What ranks do where sharding meets another technique, and the same in one process."""

from __future__ import annotations

import math
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import zoo
from oracles.engine_ranks import counted
from sparing import scaling
from sparing import sharding as sh
from sparing.jobs.finetune.sharded import ShardedSampler
from sparing.layersample import LayerSampling, Sampler
from sparing.sharding import checkpoint

STEPS, ROWS = 6, 4
LAYERS = 4
LISA = LayerSampling(active=1, period=2, embed=False, head=False, tail=False)
BODY_ONLY = partial(torch.optim.AdamW, lr=1e-2, weight_decay=0.1, foreach=False)


def rows_of(step: int) -> dict[str, Tensor]:
    return zoo.tokens(batch=ROWS, seed=step)


def step_alone_(model: nn.Module, optimizer: torch.optim.Optimizer, step: int) -> None:
    model(**rows_of(step)).loss.backward()
    optimizer.step()
    optimizer.zero_grad()


def lisa_alone() -> tuple[list[tuple[int, ...]], dict[str, Tensor]]:
    """The sampler of one process: its draws, and the weights at the end."""
    model = zoo.llama(layers=LAYERS)
    optimizer = BODY_ONLY(model.parameters())
    sampler = Sampler(model, optimizer, LISA, seed=3)
    drawn = []
    for step in range(STEPS):
        sampler.begin_step(step)
        drawn.append(sampler.active)
        step_alone_(model, optimizer, step)
    sampler.close()
    return drawn, dict(model.state_dict())


def lisa_together(mesh: Any, plan: str) -> dict[str, Any]:
    """The same draws as blocks of an engine, one row a rank; what was sent and held on the way."""
    model = zoo.llama(layers=LAYERS)
    engine = sh.shard_(model, plan, mesh, optimizer=BODY_ONLY)
    draws = ShardedSampler(engine, LISA, seed=3)
    drawn, sent, moments = [], [], []
    for step in range(STEPS):
        draws.begin_step(step)
        drawn.append(draws.active)
        before = counted(engine)[0]
        _row_(engine, mesh, step)
        sent.append(sum(counted(engine)[0]) - sum(before))
        moments.append(sum(m.numel() for s in engine.optimizer.state.values() for m in s.values() if m.dim()))
    weights = engine.full_state_dict()
    engine.close()
    return {"drawn": drawn, "weights": weights, "sent": sent, "moments": moments}


def all_blocks(mesh: Any, plan: str) -> int:
    """Bytes that a rank sends in a step that trains all four middle blocks, and nothing else."""
    engine = sh.shard_(zoo.llama(layers=LAYERS), plan, mesh, optimizer=BODY_ONLY)
    ShardedSampler(engine, LISA, seed=3)
    engine.thaw([f"model.layers.{at}" for at in range(LAYERS)])
    _row_(engine, mesh, 0)  # plans that keep weights whole send the last update before the next forward pass
    before = counted(engine)[0]
    _row_(engine, mesh, 1)
    sent = sum(counted(engine)[0]) - sum(before)
    engine.close()
    return sent


def _row_(engine: Any, mesh: Any, step: int) -> None:
    mine = {name: value[mesh.rank : mesh.rank + 1] for name, value in rows_of(step).items()}
    engine.backward(engine.model(**mine).loss)
    engine.step()


def scaled(seed: int) -> tuple[nn.Module, Any]:
    """A GPT-2 at a quarter of its weights, twice as wide as its base."""
    model = zoo.gpt2(layers=2, width=32)
    chosen = scaling.plan(model, base=zoo.gpt2(layers=2, width=16), density=0.25)
    return model, scaling.apply_(model, chosen, seed=seed)


def masked_alone() -> dict[str, Tensor]:
    model, masks = scaled(seed=0)
    optimizer = torch.optim.AdamW(masks.plan.groups(model, lr=1e-2), foreach=False)
    for step in range(STEPS):
        step_alone_(model, optimizer, step)
    return dict(model.state_dict())


def masked_together(mesh: Any, plan: str, folder: Path) -> dict[str, Any]:
    """Another seed on every rank; half of the run, a checkpoint, and the rest from it under another plan."""
    engine, half = _sharded(mesh, plan, seed=mesh.rank), STEPS // 2
    for step in range(half):
        _row_(engine, mesh, step)
    checkpoint.save(engine, folder / plan)
    engine.close()
    engine = _sharded(mesh, "GGG" if plan != "GGG" else "NNN", seed=99)
    checkpoint.load_(engine, folder / plan)
    for step in range(half, STEPS):
        _row_(engine, mesh, step)
    weights = engine.full_state_dict()
    engine.close()
    return weights


def _sharded(mesh: Any, plan: str, seed: int) -> Any:
    model, masks = scaled(seed)
    masks.verify()
    adamw = partial(torch.optim.AdamW, foreach=False)
    return sh.shard_(model, plan, mesh, optimizer=adamw, groups=masks.plan.groups(model, lr=1e-2))


def asked(plans: Mapping[str, list[str]], folder: Path) -> dict[str, Any]:
    """All answers of one rank of 2×2."""
    with sh.make_mesh(per_group=2, groups=2) as mesh:
        found: dict[str, Any] = {plan: lisa_together(mesh, plan) for plan in plans["lisa"]}
        found |= {f"all {plan}": all_blocks(mesh, plan) for plan in plans["lisa"]}
        found |= {f"masked {plan}": masked_together(mesh, plan, folder) for plan in plans["masked"]}
    return found


def apart(a: Mapping[str, Tensor], b: Mapping[str, Tensor]) -> float:
    """Largest difference of two states, relative above 1e-3."""
    assert a.keys() == b.keys()
    return max(((a[n].double() - b[n].double()).abs() / (b[n].double().abs() + 1e-3)).max().item() for n in b)


def share(whole: int, parts: int) -> int:
    return math.ceil(whole / parts)
