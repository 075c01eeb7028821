"""Tiny models of the families that people fine-tune, each with the lists of its blocks written out by hand."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
import transformers as tf
from torch import Tensor, nn

import zoo

VOCAB = 64
_SIZE = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 3, "num_attention_heads": 2}
_TEXT = {**_SIZE, "vocab_size": VOCAB, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
_GROUPED = {**_TEXT, "num_key_value_heads": 1, "max_position_embeddings": 64}
_HEADS = {**_GROUPED, "head_dim": 8}
_PICTURE = {**_SIZE, "num_hidden_layers": 2, "image_size": 16, "patch_size": 8}
_STARTS = {"decoder_start_token_id": 1, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
_ROPE = {"rope_type": "default", "mrope_section": [1, 1, 2], "rope_theta": 1e4}


class Family(NamedTuple):
    """A model, the paths of the lists whose items are drawn, and what never trains."""

    make: Callable[[], nn.Module]
    lists: tuple[str, ...]
    frozen: tuple[str, ...] = ()
    batch: Callable[[int], Mapping[str, Tensor]] = lambda step: zoo.tokens(vocab=VOCAB, seed=step)
    causal: bool = True


def _of(kind: Any, config: Any) -> Callable[[], nn.Module]:
    return lambda: zoo.redraw_(kind(config()).to(torch.float64))


def _speech(step: int) -> dict[str, Tensor]:
    heard = torch.randn(2, 8, 16, generator=torch.Generator().manual_seed(step), dtype=torch.float64)
    return {"input_features": heard, "labels": zoo.tokens(vocab=VOCAB, seed=step)["labels"]}


def _pictures(step: int) -> dict[str, Tensor]:
    seen = torch.randn(2, 3, 16, 16, generator=torch.Generator().manual_seed(step), dtype=torch.float64)
    return {"pixel_values": seen, "labels": torch.tensor([step % 2, 1])}


def _gpt_neo() -> Any:
    return tf.GPTNeoConfig(
        hidden_size=16, num_layers=3, num_heads=2, intermediate_size=32, vocab_size=VOCAB,
        attention_types=[[["global"], 3]], max_position_embeddings=64, bos_token_id=1, eos_token_id=2,
        resid_dropout=0.0, embed_dropout=0.0, attention_dropout=0.0,
    )  # fmt: skip


def _opt() -> Any:
    return tf.OPTConfig(
        hidden_size=16, num_hidden_layers=3, num_attention_heads=2, ffn_dim=32, vocab_size=VOCAB, dropout=0.0,
        word_embed_proj_dim=16, max_position_embeddings=64, bos_token_id=1, eos_token_id=2, pad_token_id=0,
    )  # fmt: skip


def _t5() -> Any:
    return tf.T5Config(
        d_model=16, d_kv=8, d_ff=32, num_heads=2, num_layers=2, num_decoder_layers=2, vocab_size=VOCAB,
        dropout_rate=0.0, **_STARTS,
    )  # fmt: skip


def _bart() -> Any:
    return tf.BartConfig(
        d_model=16, encoder_layers=2, decoder_layers=2, encoder_attention_heads=2, decoder_attention_heads=2,
        encoder_ffn_dim=32, decoder_ffn_dim=32, vocab_size=VOCAB, max_position_embeddings=32, dropout=0.0, **_STARTS,
        forced_eos_token_id=2,
    )  # fmt: skip


def _whisper() -> Any:
    return tf.WhisperConfig(
        d_model=16, encoder_layers=2, decoder_layers=2, encoder_attention_heads=2, decoder_attention_heads=2,
        encoder_ffn_dim=32, decoder_ffn_dim=32, vocab_size=VOCAB, max_source_positions=8, max_target_positions=16,
        num_mel_bins=8, dropout=0.0, suppress_tokens=[], begin_suppress_tokens=[], **_STARTS,
    )  # fmt: skip


def _qwen_pictures() -> Any:
    vision = {
        "depth": 2, "hidden_size": 16, "intermediate_size": 32, "num_heads": 2, "out_hidden_size": 16, "patch_size": 4,
        "window_size": 16, "fullatt_block_indexes": [1],
    }  # fmt: skip
    return tf.Qwen2_5_VLConfig(text_config={**_GROUPED, "rope_parameters": _ROPE}, vision_config=vision)


def _mixtral() -> Any:
    return tf.MixtralConfig(**_GROUPED, num_local_experts=3, num_experts_per_tok=2, experts_implementation="eager")


FAMILIES: dict[str, Family] = {
    "GPT-2": Family(lambda: zoo.gpt2(vocab=VOCAB), ("transformer.h",)),
    "GPT-Neo": Family(_of(tf.GPTNeoForCausalLM, _gpt_neo), ("transformer.h",)),
    "GPT-NeoX": Family(_of(tf.GPTNeoXForCausalLM, lambda: tf.GPTNeoXConfig(**_TEXT, max_position_embeddings=64)),
        ("gpt_neox.layers",)),
    "OPT": Family(_of(tf.OPTForCausalLM, _opt), ("model.decoder.layers",)),
    "BLOOM": Family(_of(tf.BloomForCausalLM, lambda: tf.BloomConfig(hidden_size=16, n_layer=3, n_head=2,
        vocab_size=VOCAB, bos_token_id=1, eos_token_id=2)), ("transformer.h",)),
    "Falcon": Family(_of(tf.FalconForCausalLM, lambda: tf.FalconConfig(**_TEXT)), ("transformer.h",)),
    "Llama": Family(_of(tf.LlamaForCausalLM, lambda: tf.LlamaConfig(**_GROUPED)), ("model.layers",)),
    "Mistral": Family(_of(tf.MistralForCausalLM, lambda: tf.MistralConfig(**_GROUPED)), ("model.layers",)),
    "Mixtral": Family(_of(tf.MixtralForCausalLM, _mixtral), ("model.layers",)),
    "Qwen2": Family(_of(tf.Qwen2ForCausalLM, lambda: tf.Qwen2Config(**_GROUPED)), ("model.layers",)),
    "Qwen3": Family(_of(tf.Qwen3ForCausalLM, lambda: tf.Qwen3Config(**_HEADS)), ("model.layers",)),
    "Gemma 2": Family(_of(tf.Gemma2ForCausalLM, lambda: tf.Gemma2Config(**_HEADS)), ("model.layers",)),
    "Gemma 3": Family(_of(tf.Gemma3ForCausalLM, lambda: tf.Gemma3TextConfig(**_HEADS)), ("model.layers",)),
    "Phi-3": Family(_of(tf.Phi3ForCausalLM, lambda: tf.Phi3Config(**_GROUPED)), ("model.layers",)),
    "Qwen2.5-VL": Family(_of(tf.Qwen2_5_VLForConditionalGeneration, _qwen_pictures), ("model.language_model.layers",),
        ("model.visual.",), causal=False),
    "Gemma 3 with pictures": Family(_of(tf.Gemma3ForConditionalGeneration,
        lambda: tf.Gemma3Config(text_config=dict(_HEADS), vision_config=_PICTURE)), ("model.language_model.layers",),
        ("model.vision_tower.", "model.multi_modal_projector."), causal=False),
    "T5": Family(_of(tf.T5ForConditionalGeneration, _t5), ("encoder.block", "decoder.block"), causal=False),
    "BART": Family(_of(tf.BartForConditionalGeneration, _bart), ("model.encoder.layers", "model.decoder.layers"),
        causal=False),
    "Whisper": Family(_of(tf.WhisperForConditionalGeneration, _whisper), ("model.encoder.layers",
        "model.decoder.layers"), batch=_speech, causal=False),
    "ViT": Family(_of(tf.ViTForImageClassification, lambda: tf.ViTConfig(**_PICTURE)), ("vit.layers",),
        batch=_pictures, causal=False),
}  # fmt: skip
"""Name as people say it -> how it is made and divided."""
