"""What Hugging Face models say of themselves, taken at their word and no further."""

from __future__ import annotations

import pytest
import torch
import transformers as tf
from torch import nn

import zoo
from sparing.blocks import find_blocks
from sparing.blocks.declared import declared
from sparing.errors import UserError

SMALL = {"hidden_size": 8, "intermediate_size": 16, "num_attention_heads": 2}
PICTURE = {**SMALL, "image_size": 32, "patch_size": 8}


def on_meta(kind: type, config: object) -> nn.Module:
    with torch.device("meta"):
        return kind(config)


def test_plain_modules_and_pairs_of_models_declare_nothing() -> None:
    assert declared(nn.TransformerEncoderLayer(4, 2)) is None
    pair = nn.ModuleDict({"left": zoo.llama(), "right": zoo.gpt2()})
    assert declared(pair) is None
    with pytest.raises(
        UserError, match=r"left\.model\.layers \(ModuleList of 4 .*right\.transformer\.h \(ModuleList of 3"
    ):
        find_blocks(pair)


def test_a_decoder_of_another_depth_is_not_taken_for_the_backbone() -> None:
    """A masked autoencoder's ``get_decoder`` is its small picture decoder; the declared depth is the encoder's."""
    config = tf.ViTMAEConfig(
        **PICTURE,
        num_hidden_layers=3,
        decoder_hidden_size=8,
        decoder_num_hidden_layers=2,
        decoder_num_attention_heads=2,
    )
    facts = declared(on_meta(tf.ViTMAEForPreTraining, config))
    assert facts is not None
    assert len(facts.blocks) == 3
    assert all(not block.path.startswith("decoder") for block in facts.blocks)


def test_as_many_experts_or_vision_layers_as_text_layers_mislead_nobody() -> None:
    text = {**SMALL, "num_hidden_layers": 2, "vocab_size": 64}
    mixture = on_meta(tf.MixtralForCausalLM, tf.MixtralConfig(**text, num_key_value_heads=2, num_local_experts=2))
    vision = tf.CLIPVisionConfig(**PICTURE, num_hidden_layers=2)
    llava = on_meta(
        tf.LlavaForConditionalGeneration,
        tf.LlavaConfig(text_config=tf.LlamaConfig(**text, num_key_value_heads=2), vision_config=vision),
    )
    for model, path in ((mixture, "model.layers"), (llava, "model.language_model.layers")):
        facts = declared(model)
        assert facts is not None
        assert [block.path for block in facts.blocks] == [f"{path}.0", f"{path}.1"]
    assert declared(llava).tower == "model.language_model"


def test_stages_are_opened_to_the_declared_depths_or_not_at_all() -> None:
    resnet = on_meta(tf.ResNetModel, tf.ResNetConfig(embedding_size=8, hidden_sizes=[8, 16], depths=[1, 2]))
    facts = declared(resnet)
    assert facts is not None
    assert [block.path for block in facts.blocks] == [
        f"encoder.stages.{i}" for i in ("0.layers.0", "1.layers.0", "1.layers.1")
    ]
    config = tf.SwinConfig(embed_dim=8, depths=[1, 2], num_heads=[1, 2], image_size=32, window_size=4)
    swin = on_meta(tf.SwinForImageClassification, config)  # a stage holds a merging layer beside its blocks
    assert [block.name for block in find_blocks(swin) if block.role == "body"] == [
        "swin.encoder.layers.0",
        "swin.encoder.layers.1",
    ]
