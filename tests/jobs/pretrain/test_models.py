"""Configurations become models with the library's own initial weights."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from sparing.errors import UserError
from sparing.jobs.pretrain import Pretrain
from sparing.jobs.pretrain.models import config_for, context_of, fresh_model, shape_of


def test_the_shapes_of_both_families(settings: Pretrain):
    llama = config_for(replace(settings, width=32, kv_heads=2), 50, 0)
    assert (llama.hidden_size, llama.num_attention_heads, llama.num_key_value_heads, llama.head_dim) == (32, 4, 2, 8)
    assert (llama.intermediate_size, llama.num_hidden_layers, llama.vocab_size) == (96, 2, 50)
    gpt2 = config_for(replace(settings, family="gpt2"), 50, 0)
    assert (gpt2.n_embd, gpt2.n_head, gpt2.n_positions, gpt2.vocab_size) == (16, 2, 16, 50)
    assert gpt2.resid_pdrop == gpt2.embd_pdrop == gpt2.attn_pdrop == 0.0
    assert shape_of(fresh_model(gpt2, seed=0)) == "GPT-2 of 2 layers and width 16"


def test_weights_come_from_the_seed_and_leave_the_global_generator_alone(settings: Pretrain):
    config = config_for(settings, 50, 0)
    before = torch.get_rng_state()
    one, two, other = (fresh_model(config, seed=seed) for seed in (0, 0, 1))
    assert torch.equal(torch.get_rng_state(), before)
    pairs = list(zip(one.parameters(), two.parameters(), other.parameters(), strict=True))
    assert all(torch.equal(a, b) for a, b, _ in pairs)
    assert not all(torch.equal(a, c) for a, _, c in pairs)
    assert one.lm_head.weight.std().item() == pytest.approx(0.02, rel=0.1)


@pytest.mark.parametrize("as_file", [True, False])
def test_a_configuration_from_the_disk(settings: Pretrain, tmp_path: Path, as_file: bool):
    from transformers import GPTNeoXConfig

    sizes = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 32}
    GPTNeoXConfig(**sizes, max_position_embeddings=32, attention_dropout=0.1).save_pretrained(tmp_path)
    own = replace(settings, model_config=tmp_path / "config.json" if as_file else tmp_path)
    config = config_for(own, 50, 3)
    assert (config.model_type, config.vocab_size, config.eos_token_id) == ("gpt_neox", 50, 3)
    assert config.attention_dropout == 0.0
    assert context_of(own) == 16
    assert fresh_model(config, seed=0)(torch.tensor([[1, 2]])).logits.shape == (1, 2, 50)
    with pytest.raises(UserError, match="length: got 64; the configuration has 32 positions"):
        context_of(replace(own, length=64))


def test_nothing_drops_out_whatever_a_configuration_calls_it(settings: Pretrain, tmp_path: Path):
    """Two training passes agree; a rate may be a whole number, and in a configuration inside."""
    path = tmp_path / "config.json"
    own = replace(settings, model_config=path)
    sizes = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 32}
    path.write_text(json.dumps({"model_type": "biogpt", **sizes}), encoding="utf-8")
    model = fresh_model(config_for(own, 50, 0), seed=0).train()
    tokens = torch.arange(12).view(2, 6)
    assert torch.equal(model(tokens).logits, model(tokens).logits)
    path.write_text(json.dumps({"model_type": "mpt", "attn_config": {"attn_pdrop": 1}}), encoding="utf-8")
    assert config_for(own, 50, 0).attn_config.attn_pdrop == 0


def test_what_is_no_configuration_is_refused(settings: Pretrain, tmp_path: Path):
    with pytest.raises(UserError, match=r"config: got .*; there is no such file"):
        config_for(replace(settings, model_config=tmp_path), 50, 0)
    path = tmp_path / "config.json"
    for words in ("not json", json.dumps({"width": 3}), json.dumps({"model_type": "nonsense"})):
        path.write_text(words, encoding="utf-8")
        with pytest.raises(UserError, match=r"config: got .*; it is no transformers configuration") as caught:
            config_for(replace(settings, model_config=path), 50, 0)
        assert "\n" not in str(caught.value)
    path.write_text(json.dumps({"model_type": "gpt2", "n_layer": 10**30}), encoding="utf-8")
    with pytest.raises(UserError, match=r"config: got .*; its config.json is broken \(num_hidden_layers is 10{30}\)"):
        config_for(replace(settings, model_config=path), 50, 0)


def test_a_configuration_of_another_kind_of_model_is_refused(settings: Pretrain, tmp_path: Path):
    from transformers import ViTConfig

    ViTConfig().save_pretrained(tmp_path)
    with pytest.raises(UserError, match="config: got vit; no causal language model comes of it"):
        fresh_model(config_for(replace(settings, model_config=tmp_path), 50, 0), seed=0)
