"""Parameter counts are those of the real models, built without memory on the meta device."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from torch import nn

from oracles.small_lms import GROUPED, parts
from sparing.errors import UserError
from sparing.layersample.price.shape import Shape

transformers = pytest.importorskip("transformers")


def built(config: object) -> nn.Module:
    """The real model, without memory."""
    with torch.device("meta"):
        return transformers.AutoModelForCausalLM.from_config(config)


def held_against(shape: Shape, model: nn.Module) -> None:
    """Total, and each part, counted in the model itself."""
    layers, norm, tables = parts(model)

    def count(*modules: nn.Module) -> int:
        return sum(parameter.numel() for module in modules for parameter in module.parameters())

    assert shape.total == count(model)
    assert len(layers) == shape.layers
    assert {count(layer) for layer in layers} == {shape.block}
    assert shape.embed == count(*tables)
    assert shape.tail == count(norm)
    assert shape.head == (0 if shape.tied else count(model.get_output_embeddings()))


@pytest.mark.parametrize(
    "config",
    [
        transformers.LlamaConfig(**GROUPED),
        transformers.LlamaConfig(**GROUPED, head_dim=10, tie_word_embeddings=True),
        transformers.LlamaConfig(**GROUPED, attention_bias=True, mlp_bias=True),
        transformers.MistralConfig(**GROUPED),
        transformers.Qwen2Config(**GROUPED),
        transformers.Qwen3Config(**GROUPED, head_dim=8),
        transformers.Qwen3Config(**GROUPED, head_dim=8, attention_bias=True),
        transformers.GemmaConfig(**GROUPED, head_dim=16),
        transformers.GPT2Config(
            n_embd=24, n_layer=3, n_head=4, vocab_size=50, n_positions=32, bos_token_id=0, eos_token_id=0
        ),
        transformers.GPT2Config(
            n_embd=24, n_inner=30, n_layer=2, n_head=4, vocab_size=50, bos_token_id=0, eos_token_id=0
        ),
    ],
    ids=lambda config: config.model_type,
)
def test_every_part_of_every_family_is_counted_exactly(config: object) -> None:
    held_against(Shape.from_config(config), built(config))


def test_gpt2_small_is_124_million() -> None:
    assert Shape.from_config(transformers.GPT2Config()).total == 124_439_808


def test_an_unknown_family_names_the_known_ones_and_the_other_way() -> None:
    with pytest.raises(UserError, match=r"model type: got mamba; .*llama.*sparing\.memory\.predict"):
        Shape.from_config(SimpleNamespace(model_type="mamba"))


def test_a_shape_needs_no_library() -> None:
    """Any object with the attributes will do: a parsed config.json, for example."""
    config = SimpleNamespace(model_type="llama", tie_word_embeddings=False, max_position_embeddings=64, **GROUPED)
    assert Shape.from_config(config) == Shape.from_config(transformers.LlamaConfig(**GROUPED))
