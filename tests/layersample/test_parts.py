"""What layer sampling draws, keeps on and keeps frozen, in models with more than one stack of blocks."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import zoo
from idioms.layersample.families import FAMILIES
from sparing.blocks import find_blocks
from sparing.errors import UserError
from sparing.layersample import LayerSampling, Sampler
from sparing.layersample.parts import encoder_blocks, non_text_parameters, other_block_lists

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


class Pair(nn.Module):
    """An encoder and a decoder of one kind of block, as people write them."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.ModuleList(nn.TransformerEncoderLayer(4, 2, 8) for _ in range(2))
        self.decoder = nn.ModuleList(nn.TransformerDecoderLayer(4, 2, 8) for _ in range(3))


def test_encoders_are_found_where_there_are_any() -> None:
    assert encoder_blocks(FAMILIES["T5"].make()) == ["encoder.block.0", "encoder.block.1"]
    assert encoder_blocks(FAMILIES["Whisper"].make()) == ["model.encoder.layers.0", "model.encoder.layers.1"]
    assert encoder_blocks(zoo.llama()) == encoder_blocks(Pair()) == []


@pytest.mark.parametrize("name", ["Qwen2.5-VL", "Gemma 3 with pictures"])
def test_towers_are_what_no_text_passes(name: str) -> None:
    model = FAMILIES[name].make()
    found = non_text_parameters(model, find_blocks(model))
    assert found == {n for n, _ in model.named_parameters() if n.startswith(FAMILIES[name].frozen)}
    assert non_text_parameters(zoo.llama(), find_blocks(zoo.llama())) == frozenset()


def test_lists_beside_the_body_are_told() -> None:
    model = Pair()
    assert other_block_lists(model, find_blocks(model, body="decoder")) == ["encoder"]
    assert other_block_lists(model, find_blocks(model, body=["encoder", "decoder"])) == []
    assert [block.name for block in find_blocks(model, body=["encoder", "decoder.1"]) if block.role == "body"] == [
        "encoder.0",
        "encoder.1",
        "decoder.1",
    ]
    assert other_block_lists(zoo.llama(), find_blocks(zoo.llama())) == []
