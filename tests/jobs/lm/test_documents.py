"""Attention document by document: the losses and gradients of a mask of all pairs, without it."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest
import torch
import transformers as tf

from sparing import UserError
from sparing.jobs.lm import documents
from sparing.jobs.lm.documents import Documents, check_documents, loader_arguments, packed
from sparing.jobs.lm.losses import isolates_documents, loss_of
from sparing.jobs.lm.meta import Source
from sparing.jobs.lm.prices import price
from sparing.jobs.lm.step import FitStep
from sparing.layersample.price.predict import Full
from sparing.memory.steps import checkpoint_

SMALL = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "vocab_size": 64}
HEADS = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8}
KINDS = ["sliding_attention", "full_attention"]
CONFIGS = {
    "llama": tf.LlamaConfig(**SMALL, **HEADS),
    "qwen3": tf.Qwen3Config(**SMALL, **HEADS),
    "gemma3": tf.Gemma3TextConfig(**SMALL, **HEADS, sliding_window=4, layer_types=KINDS),
    "mistral": tf.MistralConfig(**SMALL, **HEADS, sliding_window=3),
    "gpt2": tf.GPT2Config(n_embd=32, n_layer=2, n_head=4, vocab_size=64, resid_pdrop=0, embd_pdrop=0, attn_pdrop=0),
    "phi3": tf.Phi3Config(**SMALL, num_attention_heads=4, pad_token_id=0),
}  # fmt: skip
# documents of a row, and rows of one document each
ROWS = {"several": [[0, 1, 2, 3, 4, 0, 1, 2, 0, 1], [0, 0, 1, 2, 3, 4, 5, 6, 7, 8]], "one": [list(range(10))] * 2}


def model_of(name: str, attention: str) -> torch.nn.Module:
    torch.manual_seed(0)
    return tf.AutoModelForCausalLM.from_config(CONFIGS[name], dtype=torch.float64, **loader_arguments(attention))


def gradients(name: str, attention: str, rows: str, again: bool) -> dict[str, torch.Tensor]:
    model, places = model_of(name, attention), torch.tensor(ROWS[rows])
    if again:
        checkpoint_(model)
    model.train()
    ids = torch.arange(20).reshape(2, 10).mul(7).remainder(64)
    with packed(places):
        loss = loss_of(model, ids, ids, places)
    loss.backward()
    return {"loss": loss.detach()} | {name: p.grad for name, p in model.named_parameters()}


@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("name", CONFIGS)
def test_loss_and_gradients_are_those_of_a_mask(name, rows):
    """Rounding of float64: the same products are summed in another order. Eager attention takes softmax in float32."""
    ours, theirs = (gradients(name, way, rows, again=name == "gemma3") for way in ("documents", "sdpa"))
    for key, value in theirs.items():
        torch.testing.assert_close(ours[key], value, rtol=1e-9, atol=1e-11, msg=lambda text, key=key: f"{key}: {text}")


def test_documents_of_other_rows_do_not_count():
    """Rows that nobody announced have the mask that transformers makes of their positions."""
    model, places = model_of("llama", "documents"), torch.tensor(ROWS["several"])
    ids = torch.arange(20).reshape(2, 10)
    with packed(places):
        announced = loss_of(model, ids, ids, places)
    with packed(places[:1]):
        others = loss_of(model, ids, ids, places)
    torch.testing.assert_close(announced, loss_of(model, ids, ids, places), rtol=1e-12, atol=0)
    torch.testing.assert_close(announced, others, rtol=1e-12, atol=0)
    assert isolates_documents(model)


@pytest.mark.parametrize("groups", ["of the kernel", "repeated, for a torch before 2.13"])
def test_the_one_kernel_is_asked_for_the_same_documents(monkeypatch, groups):
    """What CUDA's kernel gets, given to a product of each document in turn."""

    def each(query, key, value, ends, others, longest, _, *, scale, window_size, enable_gqa):
        assert torch.equal(ends, others)
        assert longest == int(ends.diff().max())
        assert window_size == (-1, 0)
        parts = [
            torch.nn.functional.scaled_dot_product_attention(
                *(t[a:b].transpose(0, 1)[None] for t in (query, key, value)), is_causal=True, scale=scale,
                enable_gqa=enable_gqa,
            )[0].transpose(0, 1)
            for a, b in itertools.pairwise(ends)
        ]  # fmt: skip
        return torch.cat(parts)

    def older(*given, scale, window_size):
        return each(*given, scale=scale, window_size=window_size, enable_gqa=False)

    monkeypatch.setattr("torch.nn.attention.varlen.varlen_attn", each if groups == "of the kernel" else older)
    torch.manual_seed(0)
    query, key, value = (torch.randn(2, heads, 10, 8, dtype=torch.float64) for heads in (4, 2, 2))
    mask = Documents(((5, 3, 2), (1, 9)), None)
    layer = torch.nn.Module()
    layer.num_key_value_groups = 2
    expected, _ = documents._attend(layer, query, key, value, mask, scaling=0.3)
    torch.testing.assert_close(documents._at_once(query, key, value, mask, 0.3), expected)


def test_what_is_more_than_a_causal_product_is_refused():
    sinks = tf.GptOssConfig(**SMALL, **HEADS, num_local_experts=2, num_experts_per_tok=1)
    with torch.device("meta"):
        model = tf.AutoModelForCausalLM.from_config(sinks)
    with pytest.raises(UserError, match="attention: got documents"):
        check_documents(model)


@pytest.mark.parametrize(
    "config",
    [
        tf.Gemma3TextConfig(**SMALL, **HEADS, use_bidirectional_attention=True, sliding_window=4),
        tf.FalconConfig(hidden_size=32, num_hidden_layers=2, num_attention_heads=4, vocab_size=64),
        tf.GPTJConfig(n_embd=32, n_layer=2, n_head=4, rotary_dim=4, vocab_size=64),
        tf.GptOssConfig(**SMALL, **HEADS, num_local_experts=2, num_experts_per_tok=1),
    ],
    ids=lambda config: config.model_type,
)
def test_a_plan_refuses_what_a_run_would(config):
    step = FitStep(method=Full(), dtype="bfloat16", batch=1, length=16, accumulate=1, attention="documents")
    with pytest.raises(UserError, match=r"attention: got documents; its attention is not a causal product"):
        price(Source(config, "documents"), step)


@pytest.mark.parametrize("row", [[5, 6, 7, 8, 9, 3, 4, 5, 6, 7], [0, 1, 2, 3, 4, 1, 2, 3, 4, 5]])
def test_documents_begin_where_positions_do_not_go_on(row):
    places, ids = torch.tensor([row]), torch.arange(10)[None]
    losses = []
    for way in ("documents", "sdpa"):
        with packed(places):
            losses.append(loss_of(model_of("llama", way), ids, ids, places))
    torch.testing.assert_close(*losses, rtol=1e-12, atol=0)


def test_a_window_weighs_nothing_where_one_kernel_knows_it():
    """On CUDA no mask of a window is made, in 16 bits; on the CPU one is."""
    step = FitStep(method=Full(), dtype="bfloat16", batch=1, length=256, accumulate=1, attention="documents")
    near, far = (
        Source(tf.MistralConfig(**SMALL | {"vocab_size": 512}, **HEADS, sliding_window=window), "documents")
        for window in (16, 10**6)
    )
    assert price(near, step, device="cuda").bytes == price(far, step, device="cuda").bytes
    assert price(near, step, device="cpu").bytes.activations > price(far, step, device="cpu").bytes.activations


def test_the_saved_configuration_is_that_of_any_other_attention(tmp_path):
    for attention in ("documents", "sdpa"):
        model_of("llama", attention).save_pretrained(tmp_path / attention)
    one, other = ((tmp_path / name / "config.json").read_text() for name in ("documents", "sdpa"))
    assert one == other


def test_no_mask_is_priced():
    """A mask and repeated keys and values go; the sum of documents is joined once a layer."""
    step = FitStep(method=Full(), dtype="bfloat16", batch=1, length=256, accumulate=1)
    config = tf.LlamaConfig(**SMALL | {"vocab_size": 512}, **HEADS)
    masked = price(Source(config, "sdpa"), step)
    alone = price(Source(config, "documents"), replace(step, attention="documents"))
    assert alone.bytes.total < masked.bytes.total
