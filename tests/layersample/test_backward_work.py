"""What the backward pass of a sampled model computes, in operations that torch counts: nothing for what is frozen."""

from __future__ import annotations

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from lisa_loop import AdamW
from oracles.small_lms import BATCH, CONFIGS, LAYERS, LENGTH, VOCAB, model_of
from sparing.layersample import Fixed, LayerSampling, Sampler
from sparing.layersample.price.activations import Trained, Work
from sparing.layersample.price.flops import flops
from sparing.layersample.price.shape import Shape

TOKENS = BATCH * LENGTH
ALONE = {"embed": False, "head": False, "tail": False}


def backward_operations(model: torch.nn.Module, settings: LayerSampling, *, checkpointing: bool = False) -> int:
    """Operations of one backward pass under a sampler (multiply-adds count as two); recomputation is part of it."""
    model.train()
    if checkpointing:
        model.activation_checkpointing_enable({"use_reentrant": False})
    sampler = Sampler(model, AdamW(model.parameters()), settings)
    sampler.begin_step(0)
    ids = torch.randint(0, VOCAB, (BATCH, LENGTH), generator=torch.Generator().manual_seed(0))
    loss = model(input_ids=ids, labels=ids, use_cache=False).loss
    with FlopCounterMode(display=False) as counter:
        loss.backward()
    assert {n for n, p in model.named_parameters() if p.grad is not None} == set(sampler.trainable)
    return counter.get_total_flops()


@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize("blocks", [(0,), (1,), (2,), (0, 2), (1, 2)])
@pytest.mark.parametrize("name", ["grouped", "gpt2"])
def test_it_stops_at_the_lowest_block_and_spares_frozen_weights(name: str, blocks: tuple, checkpointing: bool) -> None:
    """As the closed formula says, which is held to torch's counter for models whose flags are set by hand."""
    settings = LayerSampling(active=len(blocks), period=1, sampler=Fixed(blocks=blocks), **ALONE)
    work = Work(batch=BATCH, length=LENGTH, dtype=torch.float32, attention="eager", checkpointing=checkpointing)
    trained = Trained(embed=False, tail=False, head=False, blocks=frozenset(blocks))
    price = flops(Shape.from_config(CONFIGS[name]), work, trained)
    spent = backward_operations(model_of(name), settings, checkpointing=checkpointing)
    assert spent == price.recompute + price.inputs + price.weights


@pytest.mark.parametrize("matrix", ["mlp.down_proj", "mlp.gate_proj", "self_attn.o_proj"])
def test_one_matrix_of_the_last_block_asks_for_no_more_than_its_way_up(matrix: str) -> None:
    """By hand: input gradients of the head and of the maps above the matrix, and its own weight gradient."""
    model = model_of("grouped")
    sampler = Sampler(model, AdamW(model.parameters()), LayerSampling(units="module", active=1, **ALONE))
    index = next(i for i, unit in enumerate(sampler.units) if unit.name.endswith(f"{LAYERS - 1}.{matrix}.weight"))
    size = {name: m.weight.numel() for name, m in model.model.layers[-1].named_modules() if hasattr(m, "weight")}
    above = {
        "mlp.down_proj": [],
        "mlp.gate_proj": ["mlp.down_proj"],
        "self_attn.o_proj": ["mlp.down_proj", "mlp.gate_proj", "mlp.up_proj"],
    }[matrix]
    maps = [model.lm_head.weight.numel(), *(size[name] for name in above), size[matrix]]
    settings = LayerSampling(units="module", active=1, sampler=Fixed(blocks=(index,)), **ALONE)
    assert backward_operations(model, settings) == 2 * TOKENS * sum(maps)
