"""BAdam, GRASS and MISA on the families that people fine-tune, against AdamW by its formula on what was drawn."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from idioms.layersample.families import FAMILIES, Family
from idioms.layersample.reference import adamw_, apart, block_names
from sparing.layersample import LayerSampling, Sampler

NAMES = ("GPT-2", "Llama", "Mixtral", "Gemma 3", "Phi-3", "T5", "Whisper", "ViT", "Qwen2.5-VL")
PRESETS = {
    "badam": LayerSampling.badam(period=2),
    "grass": LayerSampling.grass(active=1, period=2, probe=1),
    "misa": LayerSampling.misa(budget=0.3, period=2),
}
ROUNDING = 1e-13  # as in test_families.py


def by_hand(model: nn.Module, family: Family, drawn: list[set[str]], *, drops: bool, probe: int) -> None:
    """Train what was drawn in each step; moments begin anew with each draw, or stay."""
    state: dict[str, dict] = {}
    params = {name: p for name, p in model.named_parameters() if p.requires_grad}
    for step, names in enumerate(drawn):
        loss = model(**family.batch(step)).loss
        grads = torch.autograd.grad(loss, list(params.values()), allow_unused=True)
        if drops and step % 2 == 0:
            state = {}
        with torch.no_grad():
            for (name, p), grad in zip(params.items(), grads, strict=True):
                if name in names and grad is not None and step >= probe:
                    adamw_(p, grad, state.setdefault(name, {}), lr=1e-2, decay=0.1)


@pytest.mark.parametrize("preset", PRESETS)
@pytest.mark.parametrize("name", NAMES)
def test_it_trains_what_it_draws_and_nothing_outside_the_blocks(name: str, preset: str) -> None:
    family, settings = FAMILIES[name], PRESETS[preset]
    model = family.make().train()
    twin, blocks, drawn = copy.deepcopy(model), tuple(block_names(model, family.lists)), []
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.1, eps=1e-4)
    with Sampler(model, optimizer, settings) as sampler:
        for step in range(7):
            sampler.begin_step(step)
            drawn.append(set(sampler.trainable))
            assert all(one.startswith(blocks) for one in drawn[-1])
            model(**family.batch(step)).loss.backward()
            optimizer.step()
            optimizer.zero_grad()
    assert len(set(map(frozenset, drawn[settings.probe :]))) > 1
    by_hand(twin, family, drawn, drops=settings.state == "reset_all", probe=settings.probe)
    assert apart(model, twin) < ROUNDING
