"""A model of 65B parameters starts on the meta device: what a rank of 32 keeps is the formulas', to the byte."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from datetime import timedelta
from functools import cache, partial

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.testing._internal.distributed.fake_pg import FakeStore
from transformers import LlamaConfig, LlamaForCausalLM

from sparing import sharding as sh
from sparing.sharding import effective
from sparing.sharding.fsdp.units import local_of
from sparing.sharding.network.mesh import Mesh, _axis
from sparing.sharding.network.wires import Wires
from sparing.sharding.planner.fsdp import UnitSpec, fsdp_live_bytes, shard_level

SIZES = (8, 4)  # four machines of eight
BF16 = 2  # bytes
CONFIG = LlamaConfig(
    vocab_size=32000, hidden_size=8192, intermediate_size=22016, num_hidden_layers=80, num_attention_heads=64,
    tie_word_embeddings=False,
)  # fmt: skip
"""LLaMA-65B."""


CLASSES = {
    "NNN": ("NNN",), "III": ("NNI", "NII", "INI", "III"), "IIG": ("ING", "IIG", "IGG"),
    "GGG": ("NNG", "NIG", "NGG", "GNG", "GIG", "GGG"),
}  # fmt: skip
"""A plan -> those that cut where it does: the same is built for all of them."""


@pytest.fixture(scope="module")
def found() -> Iterator[dict[str, dict[str, int]]]:
    """By class; on rank 0 of 32, which only believes that there are others."""
    dist.init_process_group("fake", rank=0, world_size=32, store=FakeStore())
    axes = [_axis(k, SIZES, 0, timedelta(seconds=1)) for k in range(2)]
    with Mesh(axes, 0, torch.device("cpu"), Wires()) as mesh:
        yield {plan: held(large(), plan, mesh) for plan in CLASSES}
    dist.destroy_process_group()


def large() -> nn.Module:
    with torch.device("meta"):
        model = LlamaForCausalLM(CONFIG).to(torch.bfloat16)
    # rotary angles are in no checkpoint
    model.model.rotary_emb = type(model.model.rotary_emb)(CONFIG)
    return model


@cache
def specs() -> list[UnitSpec]:
    model = large()
    assert sum(p.numel() for p in model.parameters()) == 65_285_660_672
    blocks = [f"model.layers.{at}." for at in range(CONFIG.num_hidden_layers)]
    held = {name: tuple(p.shape) for name, p in model.named_parameters()}
    roots = tuple(shape for name, shape in held.items() if not name.startswith("model.layers."))
    shapes = [tuple(shape for name, shape in held.items() if name.startswith(block)) for block in blocks]
    found = [UnitSpec(shapes=roots, trains=(True,) * len(roots), root=True, block=-1)]
    return found + [UnitSpec(shapes=some, trains=(True,) * len(some), block=at) for at, some in enumerate(shapes)]


def bytes_of(tensors: Iterable[Tensor]) -> int:
    """Of this rank's parts."""
    return sum(x.numel() * x.element_size() for x in map(local_of, tensors))


def held(model: nn.Module, plan: str, mesh: Mesh) -> dict[str, int]:
    engine = sh.shard_(model, plan, mesh, optimizer=partial(torch.optim.AdamW, lr=1e-4), engine="fsdp2")
    for unit in engine.units:
        # what the engine does once there are values
        unit.arm_([getattr(owner, name) for owner, name in unit.owners])
        unit.make_values_(torch.float32)
    shards = bytes_of(shard for unit in engine.units for shard in unit.shards)
    return {"shards": shards, "master": bytes_of(value for unit in engine.units for value in unit.values)}


def test_every_plan_is_of_a_class() -> None:
    assert sorted(plan for plans in CLASSES.values() for plan in plans) == sorted(plan.name for plan in effective())
    places = {plan: (shard_level(plan, 2), sh.Plan(plan).levels(2)[2]) for plans in CLASSES.values() for plan in plans}
    assert all(places[plan] == places[first] for first, plans in CLASSES.items() for plan in plans)


@pytest.mark.parametrize("plan", [plan.name for plan in effective()])
def test_a_rank_of_a_65b_model_keeps_what_the_formulas_say(found: dict[str, dict[str, int]], plan: str) -> None:
    live = fsdp_live_bytes(specs(), SIZES, plan, param_bytes=BF16)
    first = next(name for name, plans in CLASSES.items() if plan in plans)
    assert found[first] == {"shards": live.kept if plan.startswith("N") else live.params, "master": live.master}
