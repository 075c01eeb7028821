"""Steps of ranks that divide by other numbers, or whose buffers have other shapes."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

from sparing import sharding as sh
from sparing.errors import UserError
from sparing.sharding import checkpoint
from sparing.sharding.engine.state import Settings
from sparing.sharding.engine.step_facts import exchange_facts


class Masking(nn.Module):
    """Blocks behind a causal mask that grows with the rows, and perhaps one that is made by the first of them."""

    def __init__(self, *, late: bool = False) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(3, 3) for _ in range(3))
        self.register_buffer("mask", None if late else torch.ones(1, 1))

    def forward(self, x: Tensor) -> Tensor:
        if self.mask is None or len(self.mask) < len(x):
            self.mask = torch.ones(len(x), len(x)).tril()
        x = self.mask[: len(x), : len(x)] @ x
        for block in self.blocks:
            x = block(x).tanh()
        return x.square().mean()


def engine_of(mesh: Any, kind: Any, *, late: bool = False, **settings: Any) -> Any:
    torch.manual_seed(0)
    sgd = partial(torch.optim.SGD, lr=0.1)
    return sh.shard_(Masking(late=late), "IIG", mesh, optimizer=sgd, engine=kind, **settings)


def refused(engine: Any, rows: int = 1, divisor: float | None = None) -> str:
    """The words of the error of a step, which is then dropped; empty if there was none."""
    engine.backward(engine.model(torch.ones(rows, 3)))
    try:
        engine.step(divisor)
    except (ValueError, RuntimeError) as error:
        with suppress(UserError):  # ranks whose logs differ cannot go on
            engine.abandon()
        return f"{type(error).__name__}: {error}"
    return ""


def dividing(mesh: Any, kind: str) -> dict[str, Any]:
    """Divisors and loss scales that differ on the last rank, or are none."""
    last = mesh.rank == mesh.world - 1
    engine = engine_of(mesh, kind, loss_scale=2.0)
    found: dict[str, Any] = {
        "apart": refused(engine, divisor=4.0 + last),
        "zero": refused(engine, divisor=0),
        "zero on one": refused(engine, divisor=0.0 if last else 4.0),
        "negative": refused(engine, divisor=-1.0),
        "alike": refused(engine, divisor=4.0),
        "same as none": refused(engine, divisor=None if last else float(mesh.world)),
    }
    before = engine.skipped, engine.full_state_dict()
    found["no number on one"] = refused(engine, divisor=math.nan if last else 4.0)
    found["skipped"] = engine.skipped - before[0]
    found["unchanged"] = all(torch.equal(value, before[1][name]) for name, value in engine.full_state_dict().items())
    plain = engine_of(mesh, kind)
    found["nothing skips on one"] = refused(plain, divisor=math.nan if last else 4.0)
    found["nothing skips"] = refused(plain, divisor=math.nan)
    found["after it"] = refused(plain, divisor=4.0)
    engine.settings = replace(engine.settings, loss_scale=2.0 + last)
    found["loss scale"] = refused(engine)
    return found


def rated(mesh: Any, kind: str) -> dict[str, Any]:
    """A rate that one rank sets by itself, as a number and as a tensor, and one that all set."""
    found = {}
    for name, rate in {"number": 0.1, "tensor": torch.tensor(0.1)}.items():
        torch.manual_seed(0)
        adamw = partial(torch.optim.AdamW, lr=rate, weight_decay=0.0)
        engine = sh.shard_(Masking(), "IIG", mesh, optimizer=adamw, engine=kind)  # type: ignore[call-overload]
        group = engine.optimizer.param_groups[0]
        found[f"{name}, as made"] = refused(engine)
        group["lr"] = 0.5 * rate
        found[f"{name}, on all"] = refused(engine)
        before = engine.full_state_dict()
        if mesh.rank:
            group["lr"] = 0.0 * rate
        found[name] = refused(engine)
        kept = engine.full_state_dict()
        found[f"{name}, weights"] = "" if all(torch.equal(kept[n], v) for n, v in before.items()) else "changed"
        group["lr"], group["betas"] = 0.5 * rate, (0.5 if mesh.rank else 0.9, 0.999)
        found[f"{name}, betas"] = refused(engine)
    return found


def of_parts(numbers: Sequence[Sequence[float]], scale: float | None) -> list[str]:
    """What this rank is told, or its divisor, where two parts of a model, one rank each, divide by these numbers."""
    both = init_device_mesh("cpu", (1, 2), mesh_dim_names=("dp", "tp"))
    found = []
    with sh.make_mesh(within=both["dp"], tensor=both["tp"], groups=1) as mesh:
        for pair in numbers:
            divisor = pair[both["tp"].get_local_rank()]
            try:
                found.append(str(exchange_facts(mesh, Settings(loss_scale=scale), 1, divisor, {}, {}, [])().divisor))
            except UserError as error:
                found.append(str(error))
    return found


def restored(mesh: Any, kind: str, folder: Path) -> dict[str, Any]:
    """A checkpoint of ranks whose masks are of several lengths, made late, loaded where there are others; an older one
    held rank 0's; and one whose mask is everybody's."""
    length = 3 - mesh.rank
    engine, other = engine_of(mesh, kind, late=True), engine_of(mesh, kind, late=True)
    shared = engine_of(mesh, kind)
    found: dict[str, Any] = {"trained": refused(engine, length)}
    checkpoint.save(engine, folder / "new")
    other.model(torch.ones(1 + mesh.rank, 3))
    found |= {"new": loaded(other, folder / "new"), "mask": len(other.model.mask) == 1 + mesh.rank}
    found["names"] = sorted(checkpoint.weights_in(folder / "new"))
    refused(shared, 2)
    checkpoint.save(shared, folder / "old")
    found["old"] = loaded(other, folder / "old")
    shared.model(torch.ones(3 + mesh.rank, 3))
    found["apart"] = loaded(shared, folder / "old")
    for one in (engine, other, shared):
        one.close()
    return found


def loaded(engine: Any, folder: Path) -> str:
    """The words of the error; empty if there was none."""
    try:
        checkpoint.load_(engine, folder)
    except UserError as error:
        return str(error)
    return ""


def growing(mesh: Any, kind: str) -> dict[str, Any]:
    """Rows as long on one rank as on no other."""
    length = 3 - mesh.rank
    engine, late = engine_of(mesh, kind), engine_of(mesh, kind, late=True)
    found: dict[str, Any] = {"alike": refused(engine, 2), "apart": refused(engine, 2 + length)}
    found |= {"late": refused(late, length), "kept": torch.equal(late.model.mask, torch.ones(length, length).tril())}
    engine.close()
    late.close()
    return found


def growing_apart(mesh: Any, kind: str) -> dict[str, Any]:
    """The same between groups that train alone, where they meet."""
    engine = sh.shard_(
        Masking(), "NII", mesh, optimizer=partial(torch.optim.SGD, lr=0.1), engine=kind, local=sh.LocalSteps(every=2)
    )  # type: ignore[call-overload]
    return {"inside": refused(engine, 3 - mesh.rank), "meeting": refused(engine, 3 - mesh.rank)}


def wrapped_later(mesh: Any, kind: str) -> list[float]:
    """Running means of a rank's own rows after a step, in a block that was wrapped after ``shard_``."""
    torch.manual_seed(0)
    plain = Masking()
    plain.blocks = nn.ModuleList(nn.Sequential(block, nn.BatchNorm1d(3)) for block in plain.blocks)
    engine = sh.shard_(plain, "IIG", mesh, optimizer=partial(torch.optim.SGD, lr=0.1), engine=kind)  # type: ignore[call-overload]
    norm = plain.blocks[1][1]
    plain.blocks[1] = torch.compile(plain.blocks[1], backend="eager")
    engine.backward(plain(torch.eye(3) + mesh.rank))
    engine.step()
    engine.close()
    return [float(value) for value in norm.running_mean]


def asked(work: Callable[..., Any], kind: str, *more: Any) -> Any:
    """In two groups of one."""
    with sh.make_mesh(per_group=1, groups=2) as mesh:
        return work(mesh, kind, *more)
