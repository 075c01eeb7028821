"""What a rank is told where weights are written in a pass, inside a step, or under an engine that has ended."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from sparing import sharding as sh
from sparing.errors import UserError

SGD = partial(torch.optim.SGD, lr=0.1)


class Clamped(nn.Linear):
    """Holds its weights within bounds in its own forward pass."""

    bound = 0.2

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            self.weight.clamp_(-self.bound, self.bound)
        return super().forward(x).tanh()


def tower(kind: type[nn.Linear] = nn.Linear) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(kind(3, 3, dtype=torch.float64) for _ in range(4)))


def loss_of(model: nn.Module, rank: int) -> Tensor:
    generator = torch.Generator().manual_seed(rank)
    return model(torch.randn(2, 3, generator=generator, dtype=torch.float64)).square().mean()


def told(act: Callable[[], Any]) -> str:
    """The words of a refusal; empty if there was none."""
    try:
        act()
    except UserError as error:
        return str(error)
    return ""


def gathered(engine: Any) -> None:
    with engine.gathered():
        pass


def written(mesh: Any) -> dict[str, Any]:
    """Weights written in the forward pass of a block whose weights are cut there; then an ordinary step and edit."""
    engine = sh.shard_(tower(Clamped), "GGG", mesh, optimizer=SGD, engine="sparing")
    before = engine.full_state_dict()
    found: dict[str, Any] = {"refused": told(lambda: loss_of(engine.model, mesh.rank))}
    engine.abandon()
    kept = engine.full_state_dict()
    found["kept"] = all(torch.equal(kept[name], value) for name, value in before.items())
    with engine.gathered() as model, torch.no_grad():
        for block in model:
            block.weight.clamp_(-0.5, 0.5)
            block.bound = torch.inf
    own = tower(Clamped)
    for block in own:
        block.weight.data.clamp_(-0.5, 0.5)
        block.bound = torch.inf
    found["apart"] = apart_after_a_step(engine, own)
    return found


def whole(mesh: Any) -> float:
    """The same where each rank has all weights between steps, so that what is written stays."""
    engine, own = sh.shard_(tower(Clamped), "NNG", mesh, optimizer=SGD, engine="sparing"), tower(Clamped)
    return apart_after_a_step(engine, own)


def apart_after_a_step(engine: Any, own: nn.Module) -> float:
    optimizer = SGD(own.parameters())
    for rank in range(engine.mesh.world):
        (loss_of(own, rank) / engine.mesh.world).backward()
    optimizer.step()
    engine.backward(loss_of(engine.model, engine.mesh.rank))
    engine.step()
    found = engine.full_state_dict()
    return max(float((found[name] - value).abs().max()) for name, value in own.state_dict().items())


def ended(mesh: Any, kind: Any) -> dict[str, Any]:
    """Calls inside a step, and of an engine that was closed, whose model then trains without it."""
    engine: Any = sh.shard_(tower(), "GGG", mesh, optimizer=SGD, engine=kind)
    state = tower().state_dict()
    engine.backward(loss_of(engine.model, mesh.rank))
    found: dict[str, Any] = {"inside a step": told(lambda: engine.load_full_state_dict_(state))}
    engine.step()
    engine.load_full_state_dict_(state)
    engine.close()
    calls = {
        "set_plan": lambda: engine.set_plan("NNG"), "freeze": lambda: engine.freeze(["1"]),
        "thaw": lambda: engine.thaw(["1"]),
    }  # fmt: skip
    if kind == "sparing":
        calls |= {
            "full_state_dict": engine.full_state_dict, "gathered()": partial(gathered, engine),
            "load_full_state_dict_": lambda: engine.load_full_state_dict_(state), "abandon": engine.abandon,
        }  # fmt: skip
    found |= {name: told(call) for name, call in calls.items()}
    if kind == "sparing":
        found["free"] = bool(loss_of(engine.model, 0) == loss_of(tower(), 0))
    return found


def asked(work: Callable[..., Any], *more: Any) -> Any:
    """In two groups of one."""
    with sh.make_mesh(per_group=1, groups=2) as mesh:
        return work(mesh, *more)
