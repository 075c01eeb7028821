"""Every architecture of a small zoo is divided into blocks without loss, in order of use, at its declared depth."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import pytest
import torch
import transformers as tf
from torch import nn

from sparing.blocks import Block, find_blocks, named_parameters, submodule

TEXT = {
    "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 3, "num_attention_heads": 2, "vocab_size": 64,
    "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0,
}  # fmt: skip
GROUPED = {**TEXT, "num_key_value_heads": 2}
HEADS = {**GROUPED, "head_dim": 8}
EXPERTS = {"num_experts_per_tok": 2}
PICTURE = {**{k: TEXT[k] for k in list(TEXT)[:4]}, "num_hidden_layers": 3, "image_size": 32, "patch_size": 8}
GPT2 = {
    "n_embd": 16,
    "n_layer": 3,
    "n_head": 2,
    "vocab_size": 64,
    "n_positions": 64,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
STAGES = {"embedding_size": 8, "hidden_sizes": [16, 32], "depths": [2, 3]}
SEQ2SEQ = {"d_model": 16, "d_kv": 8, "d_ff": 32, "num_heads": 2, "vocab_size": 64}


PEFT = pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")  # peft's own use


class Case(NamedTuple):
    """An architecture, and words that the names of each part contain, all of them and no other names."""

    kind: type
    config: Callable[[], object]
    body: str
    embed: str
    tail: str
    head: str
    depth: int = 3


USUAL = ("model.layers", "embed_tokens", "norm", "lm_head")
USUAL_TIED = ("model.layers", "embed_tokens", "norm", "")
OF_GPT2 = ("transformer.h", "wte wpe", "ln_f")
SEEING = ("model.language_model.layers", "vision_tower multi_modal_projector embed_tokens", "norm")
OPT = {k: v for k, v in TEXT.items() if k != "intermediate_size"} | {"ffn_dim": 32, "word_embed_proj_dim": 8}

CASES = {
    "gpt2": Case(tf.GPT2LMHeadModel, lambda: tf.GPT2Config(**GPT2), *OF_GPT2, ""),
    "gpt2 bare": Case(tf.GPT2Model, lambda: tf.GPT2Config(**GPT2), "h", "wte wpe", "ln_f", ""),
    "gpt2 classifier": Case(tf.GPT2ForSequenceClassification, lambda: tf.GPT2Config(**GPT2), *OF_GPT2, "score"),
    "llama": Case(tf.LlamaForCausalLM, lambda: tf.LlamaConfig(**GROUPED), *USUAL),
    "llama tied": Case(tf.LlamaForCausalLM, lambda: tf.LlamaConfig(**GROUPED, tie_word_embeddings=True), *USUAL_TIED),
    "mistral": Case(tf.MistralForCausalLM, lambda: tf.MistralConfig(**GROUPED), *USUAL),
    "qwen2": Case(tf.Qwen2ForCausalLM, lambda: tf.Qwen2Config(**GROUPED), *USUAL),
    "qwen3": Case(tf.Qwen3ForCausalLM, lambda: tf.Qwen3Config(**HEADS), *USUAL),
    "gemma": Case(tf.GemmaForCausalLM, lambda: tf.GemmaConfig(**HEADS), *USUAL_TIED),
    "gemma2": Case(tf.Gemma2ForCausalLM, lambda: tf.Gemma2Config(**HEADS), *USUAL_TIED),
    "gemma3": Case(tf.Gemma3ForCausalLM, lambda: tf.Gemma3TextConfig(**HEADS), *USUAL_TIED),
    "gemma3 with pictures": Case(
        tf.Gemma3ForConditionalGeneration,
        lambda: tf.Gemma3Config(text_config=dict(HEADS), vision_config={**PICTURE, "num_hidden_layers": 3}),
        *SEEING, "",
    ),
    "llava": Case(
        tf.LlavaForConditionalGeneration,
        lambda: tf.LlavaConfig(text_config=tf.LlamaConfig(**GROUPED), vision_config=tf.CLIPVisionConfig(**PICTURE)),
        *SEEING, "lm_head",
    ),
    "opt": Case(
        tf.OPTForCausalLM, lambda: tf.OPTConfig(**OPT, max_position_embeddings=64), "model.decoder.layers",
        "embed_tokens embed_positions project_in", "final_layer_norm project_out", "",
    ),
    "gpt-neox": Case(
        tf.GPTNeoXForCausalLM, lambda: tf.GPTNeoXConfig(**TEXT), "gpt_neox.layers", "embed_in", "final_layer_norm",
        "lm_head",
    ),
    "phi": Case(
        tf.PhiForCausalLM, lambda: tf.PhiConfig(**TEXT), "model.layers", "embed_tokens", "final_layernorm", "lm_head"
    ),
    "phi3": Case(tf.Phi3ForCausalLM, lambda: tf.Phi3Config(**GROUPED), *USUAL),
    "mixtral": Case(tf.MixtralForCausalLM, lambda: tf.MixtralConfig(**GROUPED, **EXPERTS, num_local_experts=3), *USUAL),
    "qwen3 moe": Case(
        tf.Qwen3MoeForCausalLM,
        lambda: tf.Qwen3MoeConfig(**HEADS, **EXPERTS, num_experts=3, moe_intermediate_size=16), *USUAL,
    ),
    "bert masked": Case(
        tf.BertForMaskedLM, lambda: tf.BertConfig(**TEXT), "bert.encoder.layer", "bert.embeddings",
        "cls.predictions.transform", "cls.predictions.bias",
    ),
    "bert classifier": Case(
        tf.BertForSequenceClassification, lambda: tf.BertConfig(**TEXT), "bert.encoder.layer", "bert.embeddings",
        "bert.pooler", "classifier",
    ),
    "vit": Case(
        tf.ViTForImageClassification, lambda: tf.ViTConfig(**PICTURE), "vit.layers", "vit.embeddings", "layernorm",
        "classifier",
    ),
    "vit masked": Case(
        tf.ViTForMaskedImageModeling, lambda: tf.ViTConfig(**PICTURE, encoder_stride=8), "vit.layers",
        "vit.embeddings", "layernorm", "decoder",
    ),
    "resnet": Case(
        tf.ResNetForImageClassification, lambda: tf.ResNetConfig(**STAGES), "resnet.encoder.stages",
        "resnet.embedder", "", "classifier", depth=5,
    ),
    "resnet without shortcuts": Case(
        tf.ResNetForImageClassification,
        lambda: tf.ResNetConfig(embedding_size=8, hidden_sizes=[8], depths=[2], layer_type="basic"),
        "resnet.encoder.stages", "resnet.embedder", "", "classifier", depth=2,
    ),
    "t5": Case(
        tf.T5ForConditionalGeneration, lambda: tf.T5Config(**SEQ2SEQ, num_layers=2, num_decoder_layers=3),
        "decoder.block", "shared encoder", "decoder.final_layer_norm", "",
    ),
    "albert shares one layer": Case(
        tf.AlbertForMaskedLM, lambda: tf.AlbertConfig(**TEXT, embedding_size=8), "albert.encoder.albert_layer_groups",
        "albert.embeddings albert.encoder.embedding_hidden_mapping_in", "predictions.LayerNorm predictions.dense",
        "predictions.bias", depth=1,
    ),
    "mamba": Case(
        tf.MambaForCausalLM, lambda: tf.MambaConfig(hidden_size=16, num_hidden_layers=3, vocab_size=64, state_size=4),
        "backbone.layers", "backbone.embeddings", "norm_f", "",
    ),
}  # fmt: skip


def on_meta(case: Case) -> nn.Module:
    """The model without weights, tied as its configuration says."""
    with torch.device("meta"):
        model = case.kind(case.config())
    model.tie_weights()
    return model


def is_partition(model: nn.Module, blocks: list[Block]) -> None:
    """Assert that every parameter is in exactly one block, itself, and that the elements add up."""
    named = [(name, parameter) for block in blocks for name, parameter in block.params.items()]
    ours = named_parameters(model)
    assert len(named) == len(ours)
    assert all(ours[name] is parameter for name, parameter in named)
    assert sum(p.numel() for _, p in named) == sum({id(p): p.numel() for p in model.parameters()}.values())
    roles = ["embed", "body", "tail", "head"]
    assert [block.role for block in blocks] == sorted((block.role for block in blocks), key=roles.index)
    assert [b.index for b in blocks] == [[c for c in blocks if c.role == b.role].index(b) for b in blocks]


@pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())
def test_zoo(case: Case) -> None:
    model = on_meta(case)
    blocks = find_blocks(model)
    is_partition(model, blocks)
    body = [block for block in blocks if block.role == "body"]
    assert len(body) == case.depth
    for block in body:
        assert block.name.startswith(case.body)
        assert set(map(id, block.params.values())) == set(map(id, submodule(model, block.name).parameters()))
    for role in ("embed", "tail", "head"):
        names = [name for block in blocks if block.role == role for name in block.params]
        parts = getattr(case, role).split()
        assert all(any(part in name for part in parts) for name in names), (role, names)
        assert all(any(part in name for name in names) for part in parts), (role, names)


@pytest.mark.parametrize("case", ["gpt2", "llama", "opt", "bert masked", "resnet"])
def test_zoo_wrapped(case: str) -> None:
    model = on_meta(CASES[case])
    before = [(block.name, list(block.params.items())) for block in find_blocks(model)]
    for wrapped in (nn.DataParallel(model), torch.compile(model, backend="eager")):
        assert [(block.name, list(block.params.items())) for block in find_blocks(wrapped)] == before


@PEFT
def test_lora_stays_in_the_blocks_it_adapts() -> None:
    from peft import LoraConfig, get_peft_model

    model = CASES["llama"].kind(CASES["llama"].config())
    adapted = get_peft_model(model, LoraConfig(r=2, target_modules=["q_proj", "v_proj"], modules_to_save=["lm_head"]))
    blocks = find_blocks(adapted)
    is_partition(adapted, blocks)
    assert [block.name for block in blocks] == [
        "embed",
        *(f"base_model.model.model.layers.{i}" for i in range(3)),
        "tail",
        "head",
    ]
    trained = [sum(p.requires_grad for p in block.params.values()) for block in blocks]
    assert trained == [0, 4, 4, 4, 0, 1]  # A and B of q and v in each layer, and the saved copy of the head


@PEFT
def test_prompt_tuning_comes_first() -> None:
    from peft import PromptTuningConfig, get_peft_model

    model = CASES["llama"].kind(CASES["llama"].config())
    embed, *_ = find_blocks(get_peft_model(model, PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=2)))
    assert [name for name, p in embed.params.items() if p.requires_grad] == ["prompt_encoder.default.embedding.weight"]


def test_a_language_model_inside_a_users_module() -> None:
    """OPT, whose order of use registration hides; the module around it has no forward that could be tried."""

    class Valued(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.language = on_meta(CASES["opt"])
            self.value = nn.Linear(16, 1, device="meta")

    blocks = find_blocks(Valued())
    assert [block.name for block in blocks][1] == "language.model.decoder.layers.0"
    assert "language.model.decoder.project_out.weight" in blocks[-2].params
    assert list(blocks[-1].params) == ["value.weight", "value.bias"]
