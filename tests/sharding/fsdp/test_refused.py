"""What ``fully_shard`` cannot do is refused before anything is changed."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn

from sparing import sharding as sh
from sparing.errors import UserError
from sparing.sharding.network.mesh import Mesh


class Shared(nn.Module):
    """Two blocks with one weight."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)) for _ in range(3))
        self.blocks[2][0].weight = self.blocks[1][0].weight  # type: ignore[index]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return x


def plain() -> nn.Module:
    return nn.Sequential(*(nn.Linear(4, 4) for _ in range(4)))


def mixed() -> nn.Module:
    model = plain()
    model[1].bias.data = model[1].bias.data.double()  # type: ignore[index]
    return model


def scalar() -> nn.Module:
    model = plain()
    model[1].scale = nn.Parameter(torch.tensor(1.0))  # type: ignore[index,union-attr]
    return model


@pytest.fixture
def mesh() -> Iterator[Mesh]:
    with sh.make_mesh(groups=1) as made:
        yield made


def empty() -> nn.Module:
    model = plain()
    model[1].spare = nn.Parameter(torch.empty(0))  # type: ignore[index,union-attr]
    return model


def hooked() -> nn.Module:
    model = plain()
    model[1].weight.register_post_accumulate_grad_hook(lambda parameter: None)  # type: ignore[index]
    return model


REFUSED: dict[str, tuple[Any, dict[str, Any]]] = {
    "fully_shard has one plan": (plain, {"plans": {"frozen": "NNN"}}),
    "accumulates in the type that it sends": (plain, {"dtype": torch.bfloat16, "reduce_dtype": torch.bfloat16}),
    "sends the gradients of a block in one type": (mixed, {}),
    "fully_shard cuts rows": (scalar, {}),
    "fully_shard has nothing to send of it": (empty, {}),
    "train two copies": (Shared, {}),
    "a hook on its gradient": (hooked, {}),
    "fully_shard needs one": (plain, {}),
    "there is no such engine": (plain, {"engine": "fsdp3"}),
    "there is no such place": (plain, {"offload": "disk"}),
    "keeps parameters where they are": (plain, {"engine": "sparing", "offload": "cpu"}),
}


@pytest.mark.parametrize("words", REFUSED)
def test_what_fully_shard_cannot_do_is_refused_in_a_line(mesh: Mesh, words: str) -> None:
    made, settings = REFUSED[words]
    model = made()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    with pytest.raises(UserError, match=words):
        sh.shard_(model, "IIG", mesh, **{"optimizer": torch.optim.AdamW, "engine": "fsdp2"} | settings)
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())


def test_a_torch_that_lacks_what_the_engine_calls_is_refused(mesh: Mesh, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr("torch.distributed.fsdp.FSDPModule.reset_iter_state")
    with pytest.raises(
        UserError, match=r"recover from an error; install torch 2.13 or later, or pass engine='sparing'"
    ):
        sh.shard_(plain(), "IIG", mesh, optimizer=torch.optim.AdamW, engine="fsdp2")


def test_three_tiers_are_refused() -> None:
    with (
        sh.make_mesh(sizes=(1, 1, 1)) as mesh,
        pytest.raises(UserError, match="at most two of them; pass engine"),
    ):
        sh.shard_(plain(), "IIG", mesh, optimizer=torch.optim.AdamW, engine="fsdp2")
