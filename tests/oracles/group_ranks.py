"""Two parameter groups with options of their own, under the engines and in one process."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from sparing import sharding as sh
from sparing.sharding import checkpoint

Case = tuple[Any, tuple[dict[str, Any], dict[str, Any]]]
"""An optimizer, and the options of matrices and of vectors."""

NADAM: Case = partial(torch.optim.NAdam, lr=1e-2), ({"betas": (0.9, 0.99)}, {"betas": (0.5, 0.9)})
ASGD: Case = partial(torch.optim.ASGD, lr=1e-2, lambd=0.5, t0=2), ({"lr": 0.1}, {"lr": 0.01})


def made() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(3, 3, dtype=torch.float64) for _ in range(4)))


def grouped(model: nn.Module, options: tuple[Mapping[str, Any], Mapping[str, Any]]) -> list[dict[str, Any]]:
    params = list(model.parameters())
    kinds = [[p for p in params if p.ndim > 1], [p for p in params if p.ndim <= 1]]
    return [{"params": held, **more} for held, more in zip(kinds, options, strict=True)]


def engine_of(case: Case, plan: str, mesh: Any, kind: Any = "sparing") -> Any:
    model = made()
    return sh.shard_(model, plan, mesh, optimizer=case[0], groups=grouped(model, case[1]), engine=kind)


def loss_of(model: Any, step: int, rank: int, *, biased: bool = True) -> Tensor:
    """Perhaps without the last bias, which then has no gradient."""
    generator = torch.Generator().manual_seed(10 * step + rank)
    x = torch.randn(2, 3, generator=generator, dtype=torch.float64)
    out = model(x) if biased else nn.functional.linear(model[:3](x), model[3].weight)
    return out.square().mean()


def trained_(engine: Any, steps: Iterable[int], unused: Collection[int] = ()) -> None:
    for step in steps:
        engine.backward(loss_of(engine.model, step, engine.mesh.rank, biased=step not in unused))
        engine.step()


def train_(model: Any, optimizer: Any, steps: Iterable[int], world: int, unused: Collection[int] = ()) -> None:
    for step in steps:
        optimizer.zero_grad()
        for rank in range(world):
            (loss_of(model, step, rank, biased=step not in unused) / world).backward()
        optimizer.step()


def one_process(case: Case, steps: Iterable[int], world: int, unused: Collection[int] = ()) -> dict[str, Tensor]:
    model = made()
    train_(model, case[0](grouped(model, case[1])), steps, world, unused)
    return dict(model.state_dict())


def apart(found: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> float:
    assert list(found) == list(expected)
    return max(float((found[name] - value).abs().max()) for name, value in expected.items())


def continued(folder: Path) -> dict[str, float]:
    """How far each run of six steps is from that of one process, where it goes on after three."""
    found = {}
    with sh.make_mesh(groups=2) as mesh:
        for name, case in {"nadam": NADAM, "asgd": ASGD}.items():
            expected = one_process(case, range(6), mesh.world)
            engine = engine_of(case, "GGG", mesh)
            trained_(engine, range(3))
            checkpoint.save(engine, folder / name)
            engine.set_plan("NNG")
            runs = {"another plan": engine}
            for kind in ("sparing", "fsdp2"):
                runs[kind] = engine_of(case, "GGG", mesh, kind)
                checkpoint.load_(runs[kind], folder / name)
            for what, run in runs.items():
                trained_(run, range(3, 6))
                found[f"{name}, {what}"] = apart(run.full_state_dict(), expected)
    return found
