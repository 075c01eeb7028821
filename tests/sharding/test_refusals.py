"""What cannot be sharded is refused with a reason, before anything is changed."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn

from sparing import sharding as sh
from sparing.blocks import Block, find_blocks
from sparing.errors import UserError
from sparing.sharding import apply
from sparing.sharding.engine.refusals import check_elementwise, check_model


class Lamb(torch.optim.Optimizer):
    """A step as long as the tensor: not elementwise."""

    def __init__(self, params: Any, lr: float = 0.1) -> None:
        super().__init__(params, {"lr": lr})

    def step(self, closure: Any = None) -> None:
        del closure
        with torch.no_grad():
            for group in self.param_groups:
                for p in group["params"]:
                    p -= group["lr"] * p.norm() * p.grad / p.grad.norm()


class Tower(nn.Module):
    """Four equal blocks."""

    def __init__(self, width: int = 3) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(width, width) for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return x


@pytest.mark.parametrize(
    "factory",
    [
        torch.optim.AdamW, partial(torch.optim.SGD, lr=0.1, momentum=0.9, nesterov=True), torch.optim.Adagrad,
        torch.optim.RMSprop, torch.optim.Adamax, torch.optim.NAdam, torch.optim.RAdam, torch.optim.Adadelta,
        partial(torch.optim.AdamW, amsgrad=True, weight_decay=0.3), torch.optim.Rprop, torch.optim.ASGD,
    ],
)  # fmt: skip
def test_elementwise_optimizers_pass(factory: Callable[..., Any]) -> None:
    assert check_elementwise(factory) == getattr(factory, "func", factory).__name__


@pytest.mark.parametrize(
    ("factory", "name"),
    [(Lamb, "Lamb"), (torch.optim.LBFGS, "LBFGS"), (torch.optim.Muon, "Muon"), (torch.optim.Adafactor, "Adafactor")],
)
def test_optimizers_that_look_at_whole_tensors_are_named(factory: Callable[..., Any], name: str) -> None:
    with pytest.raises(UserError, match=name) as caught:
        check_elementwise(factory)
    assert caught.value.what == "optimizer"


@pytest.mark.parametrize("factory", [partial(torch.optim.SGD, lr=-1.0), nn.Linear, partial(torch.optim.AdamW, rate=1)])
def test_a_factory_that_makes_no_optimizer_is_refused(factory: Callable[..., Any]) -> None:
    with pytest.raises(UserError, match="optimizer"):
        check_elementwise(factory)


def blocks_of(parameter: nn.Parameter) -> list[Block]:
    model = Tower()
    blocks = list(find_blocks(model))
    blocks[0].params[next(iter(blocks[0].params))] = parameter  # type: ignore[index]
    return blocks


@pytest.mark.parametrize(
    ("parameter", "words"),
    [
        (nn.Parameter(torch.empty(3, device="meta")), "meta"),
        (nn.Parameter(torch.zeros(3, dtype=torch.int64), requires_grad=False), "int64"),
        (nn.Parameter(torch.zeros(3, dtype=torch.complex64)), "complex64"),
    ],
)
def test_parameters_without_real_values_are_refused(parameter: nn.Parameter, words: str) -> None:
    with pytest.raises(UserError, match=words):
        check_model(Tower(), blocks_of(parameter), 2)


@pytest.mark.parametrize("kind", [nn.Embedding, nn.EmbeddingBag])
def test_an_embedding_that_writes_into_its_weight_is_refused_on_several_ranks(kind: Any) -> None:
    model, plain = Tower(), Tower()
    model.words, plain.words = kind(5, 3, max_norm=0.8), kind(5, 3)
    check_model(plain, find_blocks(plain), 2)
    check_model(model, find_blocks(model), 1)
    with pytest.raises(UserError, match=r"words: got max_norm=0\.8; its forward pass writes into its weight"):
        check_model(model, find_blocks(model), 2)


def views(*cut: Any, trains: bool = True) -> nn.Module:
    """A tower with parameters that are parts of one matrix."""
    whole, model = torch.randn(6, 6), Tower()
    for index, part in enumerate(cut):
        model.register_parameter(f"part{index}", nn.Parameter(whole[part], requires_grad=trains))
    return model


def test_parameters_that_share_elements_are_refused() -> None:
    tower = Tower()
    tower.blocks[2].weight = nn.Parameter(tower.blocks[1].weight.data)
    columns = (slice(None), slice(0, 3)), (slice(None), slice(3, 6)), (slice(None), slice(5, 6))
    for model in (tower, views(slice(0, 3), slice(2, 6)), views(*columns)):
        with pytest.raises(UserError, match=r"got values of another parameter; it shares memory with .*(weight|part)"):
            check_model(model, find_blocks(model), 1)


def test_parameters_that_share_memory_and_no_element_pass() -> None:
    """As flat buffers and fused matrices have them; and those that are one parameter, or do not train."""
    tied = Tower()
    tied.blocks[2].weight = tied.blocks[1].weight
    columns = views((slice(None), slice(0, 3)), (slice(None), slice(3, 6)))
    for model in (tied, columns, views(slice(0, 3), slice(3, 6)), views(slice(0, 3), slice(2, 6), trains=False)):
        check_model(model, find_blocks(model), 1)


class ScheduleFree(torch.optim.SGD):
    """Trains at one sequence of weights and is evaluated at another."""

    def eval(self) -> None:
        """Move the parameters from one to the other."""


def test_an_optimizer_of_two_sequences_of_weights_is_refused() -> None:
    with pytest.raises(UserError, match=r"optimizer: got ScheduleFree; its evaluation mode would move slices alone"):
        check_elementwise(ScheduleFree)


class DistributedDataParallel(nn.Module):
    """By its name."""


def test_a_model_that_distributes_itself_is_refused() -> None:
    with pytest.raises(UserError, match="DistributedDataParallel"):
        check_model(DistributedDataParallel(), [], 2)


@pytest.mark.parametrize("world", [12, 13])
def test_a_model_too_small_for_its_ranks_is_refused(world: int) -> None:
    model = Tower()
    blocks = find_blocks(model)
    if world == 12:  # as many as one block has parameters
        check_model(model, blocks, world)
        return
    with pytest.raises(UserError, match="at most 12 ranks"):
        check_model(model, blocks, world)


@pytest.fixture
def mesh() -> Iterator[sh.Mesh]:
    with sh.make_mesh(groups=1) as made:
        yield made


def refused(model: nn.Module, words: str, **options: Any) -> None:
    before = {name: value.clone() for name, value in model.state_dict().items()}
    with pytest.raises(UserError, match=words):
        sh.shard_(model, **{"plan": "IIG", "optimizer": torch.optim.AdamW} | options)
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())
    model(torch.ones(1, 3))


def test_a_refused_model_is_left_as_it_was(mesh: sh.Mesh) -> None:
    model = Tower()
    refused(model, "III", plan="IIN", mesh=mesh)  # the nearest legal plan
    refused(model, "Lamb", optimizer=Lamb, mesh=mesh)
    refused(model, "not a parameter of this model", groups=[{"params": [nn.Parameter(torch.ones(2))]}], mesh=mesh)
    refused(model, "left out", groups=[{"params": [model.blocks[0].weight]}], mesh=mesh)
    refused(model, "nowhere", plans={"nowhere": "IIG"}, mesh=mesh)
    for name in ("accumulate", "clip", "loss_scale", "check_every"):
        refused(model, name, **{name: 0}, mesh=mesh)
    refused(model, "prefetch", prefetch=-1, mesh=mesh)


def test_an_unknown_name_of_a_plan_is_refused_before_anything_is_cut(
    mesh: sh.Mesh, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Several ranks would have only slices by then."""
    monkeypatch.setattr(apply, "Bucket", None)
    model = Tower()
    for plans in ({"nowhere": "IIG"}, {"blocks.1": "IIG", "blocks.9": "NNN"}, {"blocks.1/frozen": "NNN"}):
        with pytest.raises(
            UserError, match=r"plans: got .*; the model has no such bucket, block or kind; name some of"
        ):
            sh.shard_(model, "GGG", mesh, optimizer=torch.optim.AdamW, plans=plans)
