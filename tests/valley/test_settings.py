"""Settings that are told or refused, against the logits of one state under both."""

from __future__ import annotations

import peft
import pytest
import torch
from torch import nn
from transformers import (
    BartConfig,
    BertConfig,
    CLIPTextConfig,
    EsmConfig,
    LlamaConfig,
    LlamaForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen2VLConfig,
    RobertaConfig,
    RobertaForMaskedLM,
    T5Config,
)

from refusals import refused
from sparing.errors import UserError
from sparing.valley.merging.model_configs import ModelConfig, compare_configs, config_of, flatten_config
from sparing.valley.merging.model_folders import require_same_function

SMALL = {
    "vocab_size": 16, "hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 2, "num_attention_heads": 2,
    "max_position_embeddings": 16, "bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 1,
}  # fmt: skip
HEADS = {"num_key_value_heads": 2}
DYNAMIC = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}
LINEAR = {"rope_type": "linear", "factor": 2.0, "rope_theta": 1e4}


def told(one, other):
    return compare_configs("config", one, other, ("a", "b"))


PAIRS = {
    "end": (LlamaForCausalLM, LlamaConfig, {}, {"eos_token_id": [1, 2]}),
    "padding": (LlamaForCausalLM, LlamaConfig, {}, {"pad_token_id": 5}),
    "longer": (LlamaForCausalLM, LlamaConfig, {}, {"max_position_embeddings": 64}),
    "longer, linear": (LlamaForCausalLM, LlamaConfig, {"rope_parameters": LINEAR}, {"max_position_embeddings": 64}),
    "windows": (Qwen2ForCausalLM, Qwen2Config, {"max_window_layers": 1, **HEADS}, {"max_window_layers": 2}),
    "longer, dynamic": (LlamaForCausalLM, LlamaConfig, {"rope_parameters": DYNAMIC}, {"max_position_embeddings": 64}),
    "padding of positions": (RobertaForMaskedLM, RobertaConfig, {}, {"pad_token_id": 0}),
    "windows that are on": (
        Qwen2ForCausalLM, Qwen2Config,
        {"max_window_layers": 1, "use_sliding_window": True, "sliding_window": 2} | HEADS,
        {"max_window_layers": 2},
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", PAIRS)
def test_what_is_told_changes_no_logits_and_what_is_refused_does(name):
    """One state and 20 tokens (12 of RoBERTa, which has 16 positions): equal to the bit where told, else not."""
    kind, config, start, change = PAIRS[name]
    torch.manual_seed(0)
    one = kind(config(**SMALL | start)).eval()
    other = kind(config(**SMALL | start | change)).eval()
    other.load_state_dict(one.state_dict())
    tokens = torch.arange(12 if kind is RobertaForMaskedLM else 20).remainder(13)[None] + 3
    try:
        require_same_function([one, other])
        refused = ""
    except UserError as error:
        refused = str(error)
    with torch.no_grad():
        same = torch.equal(one(input_ids=tokens).logits, other(input_ids=tokens).logits)
    assert same == (not refused)
    assert bool(refused) == (name in {"longer, dynamic", "padding of positions", "windows that are on"})
    assert not refused or any(key in refused for key in [*change, "layer_types"])


@pytest.mark.parametrize(("config", "key", "values"), [
    (CLIPTextConfig, "eos_token_id", (2, 3)),  # where the text's vector is read
    (BartConfig, "decoder_start_token_id", (2, 0)),
    (EsmConfig, "mask_token_id", (32, 31)), (EsmConfig, "token_dropout", (True, False)),
    (Qwen2VLConfig, "image_token_id", (5, 6)),
])  # fmt: skip
def test_what_the_code_of_a_model_reads_is_refused(config, key, values):
    one, other = (config_of(config(**({"vocab_size": 33} if config is EsmConfig else {}), **{key: x})) for x in values)
    refused(f"'{key}': got {values[0]} in a and {values[1]} in b", told, one, other)


@pytest.mark.parametrize(("config", "key"), [
    (BertConfig, "hidden_dropout_prob"), (BertConfig, "attention_probs_dropout_prob"), (T5Config, "dropout_rate"),
])  # fmt: skip
def test_dropout_of_any_name_is_reported_and_not_refused(config, key):
    notes = " ".join(told(*(config_of(config(**{key: value})) for value in (0.0, 0.1))))
    assert f"'{key}'" in notes


def test_a_reward_model_reads_before_its_padding():
    kinds = [config_of(LlamaConfig(**SMALL | {"pad_token_id": x}, architectures=[kind]))
             for kind in ("LlamaForSequenceClassification", "LlamaForCausalLM") for x in (1, 2)]  # fmt: skip
    refused("'pad_token_id'", told, *kinds[:2])
    assert "'pad_token_id'" in told(*kinds[2:])[0]


def test_parts_are_read_by_their_own_code():
    def config(**changes):
        return config_of(Qwen2VLConfig(text_config={"max_position_embeddings": 64, "eos_token_id": 3} | changes))

    notes = " ".join(told(config(), config(max_position_embeddings=32, eos_token_id=4, unheard_of=1)))
    assert all(f"'text_config.{name}'" in notes for name in ("max_position_embeddings", "eos_token_id", "unheard_of"))


def test_without_code_a_language_model_is_told_by_what_it_is_called():
    plain = {"architectures": ["XForCausalLM"], "rope_theta": 1e4, "rope_scaling": None, "max_position_embeddings": 8}
    one, other = ({**plain, "eos_token_id": 3}, {**plain, "eos_token_id": 4, "max_position_embeddings": 16})
    assert len(told(ModelConfig(flatten_config(one)), ModelConfig(flatten_config(other)))) == 2
    for change in ({"rope_scaling": {"type": "yarn", "factor": 2}}, {"rope_theta": None}):
        with pytest.raises(UserError, match="'max_position_embeddings'"):
            told(*(ModelConfig(flatten_config(each | change)) for each in (one, other)))
    with pytest.raises(UserError, match="'unheard_of'"):
        told(ModelConfig(flatten_config(one)), ModelConfig(flatten_config(one | {"unheard_of": 1})))


class OwnDropout(nn.Linear):
    """Named like one that drops, but with a weight."""


def test_adapters_of_other_dropouts_are_one_function():
    def adapted(dropout):
        settings = peft.LoraConfig(target_modules=["0"], r=2, lora_dropout=dropout)
        return peft.get_peft_model(nn.Sequential(nn.Linear(2, 2)), settings)

    for other in (adapted(0.0), adapted(0.3)):
        require_same_function([adapted(0.1), other])


@pytest.mark.parametrize(("one", "other"), [
    (nn.BatchNorm1d(2), nn.BatchNorm1d(2, eps=0.1)), (nn.ReLU(inplace=True), nn.SiLU(inplace=True)),
    (nn.ReLU(), nn.Identity()), (nn.ELU(1.0), nn.ELU(2.0, inplace=True)), (nn.Dropout(), nn.ReLU()),
    (nn.Conv2d(2, 2, 3, padding=1), nn.Conv2d(2, 2, 3, padding=1, padding_mode="reflect")),
    (nn.LSTM(2, 2, dropout=0.0), nn.LSTM(2, 2, batch_first=True)), (nn.GroupNorm(1, 2), nn.GroupNorm(2, 2)),
    (nn.EmbeddingBag(2, 2, padding_idx=0), nn.EmbeddingBag(2, 2, padding_idx=1)),
    (nn.InstanceNorm1d(2), nn.InstanceNorm1d(2, track_running_stats=True)), (OwnDropout(2, 2), nn.Linear(2, 2)),
])  # fmt: skip
def test_what_computes_something_else_in_evaluation_is_refused(one, other):
    refused(r"models at '0'|models at 'the top'", require_same_function, [nn.Sequential(one), nn.Sequential(other)])


@pytest.mark.parametrize(("one", "other"), [
    (nn.ReLU(inplace=True), nn.ReLU()), (nn.SiLU(), nn.SiLU(inplace=True)), (nn.Dropout(0.1), nn.Identity()),
    (nn.Hardtanh(inplace=True), nn.Hardtanh()), (nn.BatchNorm2d(2, momentum=None), nn.BatchNorm2d(2)),
])  # fmt: skip
def test_what_only_training_or_memory_asks_for_is_one_function(one, other):
    require_same_function([nn.Sequential(one), nn.Sequential(other)])
