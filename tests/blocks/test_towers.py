"""Encoders, towers for other senses and further lists, on models written out by hand and from Hugging Face."""

from __future__ import annotations

import pytest
from torch import nn

import zoo
from idioms.layersample.families import FAMILIES
from sparing.blocks import find_blocks
from sparing.blocks.towers import encoder_blocks, non_text_parameters, other_block_lists


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
