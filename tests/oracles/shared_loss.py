"""What each of two processes does in ``composition/test_hypergrad_data_parallel.py``, and the same in one."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from oracles.problems import draw, predict, start
from sparing import hypergrad as hg
from sparing.errors import RunError, UserError

WORLD = 2
ROWS, STEPS = 8, 5
X, Y = draw(STEPS, ROWS, 2, seed=31), draw(STEPS, ROWS, seed=32)
VALID_X, VALID_Y = draw(6, 2, seed=33), draw(6, seed=34)
PHI = {"weight": draw(ROWS, seed=35), "scale": draw(2, 3, seed=36)}
MOMENTUM = hg.SGD(lr=0.2, momentum=0.9)

METHODS: dict[str, Any] = {
    "reverse": hg.Reverse(),
    "truncated": hg.Truncated(steps=3),
    "square root": hg.Checkpointed(),
    "one state": hg.Checkpointed(states=1),
    "no state": hg.Checkpointed(states=0),
}
LONG = {"reverse": hg.Reverse(), "truncated": hg.Truncated(steps=900), "square root": hg.Checkpointed()}


def problem(rows: slice = slice(None), valid: slice = slice(None), **changes: Any) -> hg.Bilevel:
    """Rows with weights; the losses are means over the rows of this process."""

    def inner(theta: Any, phi: Any, batch: tuple[Tensor, Tensor]) -> Tensor:
        x, y = batch
        return (torch.sigmoid(phi["weight"][rows]) * (predict(theta, x) - y).square()).mean()

    def outer(theta: Any, phi: Any) -> Tensor:
        misfit = (predict(theta, VALID_X[valid]) - VALID_Y[valid]).square().mean()
        return misfit + 0.1 * phi["weight"][rows].square().mean()

    fields = {"inner": inner, "outer": outer, "init": start(), "optimizer": MOMENTUM, "steps": STEPS,
        "batches": lambda step: (X[step, rows], Y[step, rows])}  # fmt: skip
    return hg.Bilevel(**(fields | changes))


def along(step: int, theta: Any, psi: Any) -> Tensor:
    """A loss along the run, which all ranks see whole."""
    return step * theta["out"].square().sum() * psi["scale"].square().sum() / 100


RUNS: dict[str, dict[str, Any]] = {
    "momentum": {},
    "Adam": {"optimizer": hg.AdamW(lr=0.1, weight_decay=0.01)},
    "clipped": {"optimizer": hg.SGD(lr=0.2, clip=0.1)},
    "many small tensors": {"optimizer": hg.Adam(lr=lambda step, phi: torch.sigmoid(phi["scale"][0, step % 3]) / 5)},
    "initial weights": {"init": lambda phi: start() | {"hidden": phi["scale"]}},
    "along the run": {"path": along},
    "bottleneck": {"through": lambda phi: {"weight": phi["weight"].tanh(), "scale": phi["scale"]}},
}


def told(problem: hg.Bilevel, method: Any) -> dict[str, Any]:
    found = hg.hypergradient(problem, PHI, method)
    return {"grad": found.grad, "value": found.value, "theta": found.theta}


def parted(rank: int, **changes: Any) -> hg.Bilevel:
    """The part of a rank: half of the training rows and half of the others."""
    rows, valid = slice(4 * rank, 4 * rank + 4), slice(3 * rank, 3 * rank + 3)
    return problem(rows, valid, group=dist.group.WORLD, **changes)


def refusal(work: Callable[[], Any]) -> str:
    try:
        return f"ran: {work()}"
    except (UserError, RunError, ZeroDivisionError) as error:
        return str(error)


def failing(*_: Any) -> Tensor:
    """A loss that no part of the library has raised."""
    raise ZeroDivisionError("no rows")


def sums_in_16_bits(rank: int, method: Any) -> Tensor:
    """The gradient for a φ of bfloat16 after 900 steps that each add 0.5/1024 on one rank and 1.5/1024 on the other."""
    made = hg.Bilevel(
        inner=lambda theta, phi, batch: -((0.5 + rank) * theta * phi.float()).sum(),
        outer=lambda theta, phi: theta.sum(), init=torch.zeros(3), optimizer=hg.SGD(lr=1 / 1024), steps=900,
        group=dist.group.WORLD,
    )  # fmt: skip
    return hg.hypergradient(made, torch.ones(3, dtype=torch.bfloat16), method).grad


def work() -> dict[str, Any]:
    """Every run by every method, and what is refused."""
    rank = dist.get_rank()
    found = {
        f"{run}, {name}": told(parted(rank, **changes), method)
        for run, changes in RUNS.items()
        for name, method in METHODS.items()
    }
    mine = parted(rank)
    found["solved"] = hg.solve(mine, PHI)
    found["apart"] = {name: told(apart(name, [rank]), hg.Reverse()) for name in APART}
    found["16 bits"] = {name: sums_in_16_bits(rank, LONG[name]) for name in LONG}
    many = replace(problem(*uneven(rank)), group=dist.group.WORLD, steps=5)
    found["in a budget"] = told(many, hg.Checkpointed(memory=BUDGET))
    found["uneven"] = told(problem(*uneven(rank), group=dist.group.WORLD), hg.Checkpointed())
    other = {**PHI, "weight": PHI["weight"] + rank}
    found["refused"] = {
        "another phi": refusal(lambda: hg.hypergradient(mine, other, hg.Reverse())),
        "another seed": refusal(lambda: hg.hypergradient(mine, PHI, hg.Reverse(), seed=rank)),
        "other weights": refusal(
            lambda: hg.hypergradient(replace(mine, init={k: v + rank for k, v in start().items()}), PHI, hg.Reverse())
        ),
        "one number of many": refusal(
            lambda: hg.hypergradient(mine, {**PHI, "scale": PHI["scale"] + 1e-14 * rank}, hg.Reverse())
        ),
        "another method": refusal(lambda: hg.hypergradient(mine, PHI, hg.Truncated(steps=2) if rank else hg.Reverse())),
        "a part that is refused": refusal(
            lambda: hg.hypergradient(
                replace(mine, inner=lambda *_: torch.zeros(2)) if rank else mine, PHI, hg.Reverse()
            )
        ),
        "a part that fails": refusal(
            lambda: hg.hypergradient(replace(mine, inner=failing) if rank else mine, PHI, hg.Reverse())
        ),
        "a bottleneck of its own": refusal(
            lambda: hg.hypergradient(replace(mine, through=lambda phi: phi) if rank else mine, PHI, hg.Reverse())
        ),
        "other steps": refusal(lambda: hg.hypergradient(replace(mine, steps=5 - rank), PHI, hg.Reverse())),
        "a rate of its own": refusal(
            lambda: hg.hypergradient(replace(mine, optimizer=hg.SGD(lr=0.1 + rank / 10)), PHI, hg.Reverse())
        ),
        "sampled": refusal(lambda: hg.hypergradient(mine, PHI, hg.ForwardGradient(directions=2))),
        "implicit": refusal(lambda: hg.hypergradient(mine, PHI, hg.HessianFree())),
        "differences": refusal(lambda: hg.hypergradient(mine, PHI, hg.ZerothOrder(directions=2))),
        "a stream": refusal(lambda: hg.Stream(mine, PHI, hg.ForwardGradient(directions=2))),
        "a plan": refusal(lambda: hg.choose(mine, PHI, memory="1GB")),
    }
    return found


def uneven(rank: int) -> tuple[slice, slice]:
    """Three rows on rank 0 and five on rank 1."""
    return (slice(3), slice(2)) if rank == 0 else (slice(3, 8), slice(2, 6))


BUDGET = 1700
"""Bytes in which ranks with parts of unequal size would keep different numbers of states."""


def apart(name: str, ranks: list[int]) -> hg.Bilevel:
    """Losses in which a rank has no graph to φ, or to θ, in some step; of one rank in a group, or of both in one."""

    def linear(rank: int, theta: Any, phi: Any, step: int) -> Tensor:
        w, scale = theta["out"], phi["scale"].sum()
        return scale * w.sum() if step == rank + 1 else (w.square().sum() * scale / 9 + w.sin().sum() * scale / 5)

    def regular(rank: int, theta: Any, phi: Any, step: int) -> Tensor:
        misfit = (predict(theta, X[step, 4 * rank : 4 * rank + 4]) - Y[step, 4 * rank : 4 * rank + 4]).square().mean()
        return misfit + 2 * phi["scale"].square().sum() * theta["out"].square().sum() / 50 if rank == 0 else misfit

    part = {"linear": linear, "regular": regular}[name]
    return replace(
        problem(),
        inner=lambda theta, phi, step: sum(part(rank, theta, phi, step) for rank in ranks) / len(ranks),
        outer=lambda theta, phi: (predict(theta, VALID_X) - VALID_Y).square().mean(),
        batches=lambda step: step,
        group=dist.group.WORLD if len(ranks) == 1 else None,
    )


APART = ("linear", "regular")
