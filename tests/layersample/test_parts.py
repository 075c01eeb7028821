"""What layer sampling draws, keeps on and keeps frozen, in models with more than one stack of blocks."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from idioms.layersample.families import FAMILIES
from sparing.errors import UserError
from sparing.layersample import LayerSampling, Sampler

AdamW = torch.optim.AdamW


def sampler(model: nn.Module, **settings) -> Sampler:
    return Sampler(model, AdamW(model.parameters()), LayerSampling(**{"active": 1} | settings))


@pytest.mark.parametrize("name", ["T5", "BART", "Whisper", "Qwen2.5-VL", "Gemma 3 with pictures"])
def test_no_tower_trains_whole(name: str) -> None:
    """They were 45 to 79 % of these models, in role embed."""
    model = FAMILIES[name].make()
    made = sampler(model)
    made.begin_step(0)
    stacks = [n for n in made.trainable if any(part in n for part in ("layers.", "block.", "blocks."))]
    drawn = made.body[made.active[0]].name
    assert {n.startswith(f"{drawn}.") for n in stacks} == {True}
    assert not [n for n in made.trainable if n.startswith(FAMILIES[name].frozen or "-")]


def test_a_tower_may_be_drawn_from() -> None:
    model = FAMILIES["Qwen2.5-VL"].make()
    made = sampler(model, active=2, body=("model.visual.blocks", "model.language_model.layers"))
    assert len(made.body) == 5
    assert not [n for n in made.trainable if n.startswith("model.visual.")]


class Two(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.left = nn.ModuleList(nn.Sequential(nn.Linear(4, 4), nn.Tanh()) for _ in range(2))
        self.right = nn.ModuleList(nn.TransformerEncoderLayer(4, 2, 8) for _ in range(3))
        self.encoder = nn.ModuleList(nn.TransformerEncoderLayer(4, 2, 8) for _ in range(2))


def test_a_list_that_nobody_spoke_of_is_refused_with_what_to_pass() -> None:
    model = Two()
    with pytest.raises(UserError, match=r"parameters in encoder, outside the body; .*body=\('right', 'encoder'\)"):
        sampler(model, body="right")
    assert len(sampler(model, body=("right", "encoder")).body) == 5
    model.encoder.requires_grad_(False)
    assert len(sampler(model, body="right").body) == 3
