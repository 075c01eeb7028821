"""Prices from a few blocks, from formulas and from three lengths, against every block run at the very length."""

from __future__ import annotations

import itertools
import math
import random
from dataclasses import replace
from functools import cache

import pytest
import transformers as tf

from sparing import UserError
from sparing.jobs.lm import formula
from sparing.jobs.lm.adapters import Lora
from sparing.jobs.lm.meta import Source, cut
from sparing.jobs.lm.optimizer import AdamW
from sparing.jobs.lm.prices import peak_by_length, price, trained_of, trains
from sparing.jobs.lm.step import FitStep, tokens_at_once
from sparing.layersample import Bernoulli, Fixed, LayerSampling
from sparing.layersample.price.predict import Full
from sparing.layersample.price.shape import Shape
from sparing.memory import predict

pytestmark = pytest.mark.slow  # a minute of fake passes, a second each

HEADS = {"num_attention_heads": 4, "num_key_value_heads": 2}
SMALL = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 6, "vocab_size": 512}
START = {"decoder_start_token_id": 0}
EXPERTS = {"moe_intermediate_size": 32, "num_experts_per_tok": 2}
TWICE = {"d_model": 64, "vocab_size": 512}

FAMILIES = {
    "llama": tf.LlamaConfig(**SMALL, **HEADS),
    "qwen3": tf.Qwen3Config(**SMALL, **HEADS, head_dim=16, tie_word_embeddings=True),
    "gemma3": tf.Gemma3TextConfig(**SMALL, **HEADS, head_dim=16, sliding_window=16),
    "phi3": tf.Phi3Config(**SMALL, **HEADS, pad_token_id=0),
    "mixtral": tf.MixtralConfig(**SMALL, **HEADS, num_local_experts=3),
    "qwen3-moe": tf.Qwen3MoeConfig(**SMALL, **HEADS, head_dim=16, **EXPERTS, num_experts=4),
    "gpt-oss": tf.GptOssConfig(**SMALL, **HEADS, head_dim=16, num_local_experts=4, num_experts_per_tok=2),
    "gpt2": tf.GPT2Config(n_embd=64, n_layer=6, n_head=4, vocab_size=512),
    "neox": tf.GPTNeoXConfig(**SMALL, num_attention_heads=4),
    "t5": tf.T5Config(**TWICE, d_kv=16, d_ff=128, num_layers=6, num_decoder_layers=6, num_heads=4, **START),
    "vit": tf.ViTConfig(**SMALL, num_attention_heads=4, image_size=32, patch_size=8),
    "whisper": tf.WhisperConfig(
        **TWICE, encoder_layers=6, decoder_layers=6, encoder_attention_heads=4, decoder_attention_heads=4,
        encoder_ffn_dim=128, decoder_ffn_dim=128, num_mel_bins=8, max_source_positions=16, max_target_positions=64,
        pad_token_id=0, bos_token_id=1, eos_token_id=2, decoder_start_token_id=1,
    ),
}  # fmt: skip
FROZEN = LayerSampling(active=3, embed=False, head=False)
METHODS = {
    "full": (Full(), False), "LISA": (LayerSampling(active=2), True), "LISA, many": (LayerSampling(active=4), False),
    "LISA, embedding frozen": (FROZEN, True), "LISA, all": (LayerSampling(active=6), False),
    "LoRA": (Lora(rank=4), True),
}  # fmt: skip
"""Method, and whether blocks compute their activations again."""
# every method of the families whose blocks cost differently, and of the others one that trains a part
CELLS = [
    (family, method)
    for family in FAMILIES
    for method in METHODS
    if family in {"t5", "gemma3", "llama"}
    or method == "LISA, embedding frozen"
    or (family, method) in {("mixtral", "LISA, many"), ("vit", "LoRA"), ("whisper", "LoRA")}
]


@cache
def source_of(family: str) -> Source:
    """One for all cells of a family, as a plan has one for all its steps: models are built once."""
    return Source(FAMILIES[family], "auto")


def step_for(family: str, method, **changes) -> FitStep:
    causal = family not in {"t5", "vit", "whisper"}
    given = {"batch": 2, "length": 32, "accumulate": 2, "packing": causal, "dtype": "bfloat16"}
    return FitStep(method=method, **given | changes)


@pytest.mark.parametrize(("family", "name"), CELLS)
def test_a_few_blocks_tell_the_bytes_of_all(family, name):
    """Linear in the blocks, so equal to the byte; operations too."""
    source, (method, checkpointing) = source_of(family), METHODS[name]
    step = step_for(family, method, checkpointing=checkpointing, accumulate=1 + checkpointing)
    few, whole = price(source, step), price(source, step, whole=True)
    if formula.shape_of(source.config) is None:
        assert few == whole
    else:
        # by closed formula; the temporaries it leaves out are those of the smallest tensors
        assert few.bytes.total == pytest.approx(whole.bytes.total, rel=0.03)
        assert (few.flops, few.trainable, few.parameters) == (whole.flops, whole.trainable, whole.parameters)


# every method, tied and untied, with one micro-batch and two, with and without checkpointing
@pytest.mark.parametrize(
    ("name", "tied", "accumulate", "again"),
    [
        ("full", True, 2, True), ("LISA", False, 1, True), ("LISA, many", True, 1, False),
        ("LISA, embedding frozen", False, 2, True), ("LISA, all", False, 2, False), ("LoRA", True, 2, True),
    ],
)  # fmt: skip
def test_the_formula_of_a_loss_in_parts_is_that_of_every_block(name, tied, accumulate, again):
    """Bytes of both passes and operations; what the formula leaves out are temporaries of the smallest tensors."""
    config = tf.LlamaConfig(**SMALL | {"vocab_size": 4096}, **HEADS, tie_word_embeddings=tied)
    step = step_for("llama", METHODS[name][0], length=128, loss_tokens=32, batch=1, accumulate=accumulate)
    step = replace(step, checkpointing=again)
    source = Source(config, "auto")
    found, whole = price(source, step), price(source, step, whole=True)
    assert formula.passes_of(config, step) is not None
    assert found.bytes.total == pytest.approx(whole.bytes.total, rel=0.01)
    assert found.flops == whole.flops


def test_the_price_is_that_of_the_step_with_its_real_optimizer():
    """Passes and optimizer priced apart, against both under one ledger."""
    source, step = source_of("mixtral"), step_for("mixtral", Full(), checkpointing=True)
    model = source.build(step)
    make = lambda parameters: AdamW().make([{"params": parameters}], lr=1e-3)  # noqa: E731
    loss = source.loss(model, step)
    real = predict(model, source.batch(step), make, loss=loss, checkpointing=True, accumulate=2, device="cuda")
    assert price(source, step).bytes.total == real.total


@pytest.mark.parametrize("family", ["llama", "mixtral"])
@pytest.mark.parametrize("length", [20, 64, 200, 512])
def test_three_lengths_tell_the_bytes_of_any(family, length):
    """Rows below and above the tokens whose logits are held at once; of short ones another instant is the largest."""
    source = source_of(family)
    step = step_for(family, FROZEN, checkpointing=True, loss_tokens=128, batch=1)
    found, exact = peak_by_length(source, step)(length), price(source, replace(step, length=length))
    assert found == pytest.approx(exact.bytes.total, rel=1e-3 if length > 32 else 1e-2)


def test_a_loss_in_parts_lowers_the_peak_where_the_vocabulary_is_large():
    config = tf.LlamaConfig(**SMALL | {"vocab_size": 50_000}, **HEADS)
    source = Source(config, "auto")
    whole, parts = (
        price(source, step_for("llama", FROZEN, length=256, loss_tokens=count)).bytes.total for count in (0, 32)
    )
    assert parts < whole / 2


def test_a_step_of_several_ranks_is_refused():
    step = step_for("llama", Full(), plan="GGG", ranks=4)
    with pytest.raises(UserError, match="step: got GGG on 4 ranks"):
        price(source_of("llama"), step)


def test_logits_that_are_scaled_or_capped_are_held_whole():
    config = tf.Gemma2Config(**SMALL, **HEADS, head_dim=16)
    step = step_for("gemma2", Full(), loss_tokens=16)
    with pytest.raises(UserError, match=r"loss_tokens: got 16; its logits are not what its head returns"):
        price(Source(config, "auto"), step)
    # by themselves they stay whole
    vast = tf.Gemma2Config(**SMALL | {"vocab_size": 2**22}, **HEADS, head_dim=16)
    counted = price(Source(vast, "auto"), step_for("gemma2", FROZEN, loss_tokens=None))
    assert counted.bytes.total > 2 * 32 * 2**22 * 4


@pytest.mark.parametrize(("vocabulary", "tokens"), [(128_256, 512), (32_000, 2048), (50_257, 1024), (2**30, 1)])
def test_tokens_at_once_are_a_power_of_two_within_256_mib(vocabulary, tokens):
    assert tokens_at_once(vocabulary, None) == tokens
    assert tokens == 1 or 4 * vocabulary * tokens <= 2**28 < 8 * vocabulary * tokens


def test_a_cut_configuration_keeps_every_kind_of_block():
    config = FAMILIES["gemma3"]
    assert len(set(config.layer_types)) == 2
    assert set(cut(config, 2).layer_types) == set(config.layer_types)


def test_blocks_that_differ_run_whole():
    """A mixture whose first blocks are dense: each block is counted as it is."""
    config = tf.Qwen3MoeConfig(
        **SMALL, **HEADS, head_dim=16, **EXPERTS, num_experts=4, mlp_only_layers=[0, 1]
    )  # fmt: skip
    source, step = Source(config, "auto"), step_for("qwen3-moe", Full())
    assert price(source, step) == price(source, step, whole=True)


def test_of_blocks_that_differ_the_dearest_draw_is_priced():
    """The lowest are dense and small, the others hold experts."""
    config = tf.Qwen3MoeConfig(
        **SMALL, **HEADS, head_dim=16, **EXPERTS, num_experts=16, mlp_only_layers=[0, 1]
    )  # fmt: skip
    source, method = Source(config, "auto"), LayerSampling(active=2)
    low, high = (
        price(source, step_for("qwen3-moe", replace(method, sampler=Fixed(blocks=blocks)))).bytes.total
        for blocks in ((0, 1), (2, 3))
    )
    assert price(source, step_for("qwen3-moe", method)).bytes.total == high > low


@pytest.mark.parametrize("blocks", [(0, 7, 8), (0, 5, 6, 7, 8), (6, 7, 8), (0, 1, 2, 8), (0, 8)])
def test_draws_at_both_ends_are_told_by_a_few_blocks(blocks):
    """Linear in the blocks between them, so equal to the byte."""
    source = Source(tf.MixtralConfig(**SMALL | {"num_hidden_layers": 9}, **HEADS, num_local_experts=3), "auto")
    method = LayerSampling(active=len(blocks), sampler=Fixed(blocks=blocks), embed=False)
    step = step_for("mixtral", method, accumulate=1)
    assert price(source, step) == price(source, step, whole=True)


@pytest.mark.parametrize("embed", [True, False])
@pytest.mark.parametrize("seed", range(6))
def test_no_draw_of_any_model_holds_more_than_is_priced(embed, seed):
    """By formula: wide and narrow, short rows and long; every draw there is. Nor does one compute more."""
    draw = random.Random(seed)
    shape = Shape(
        layers=draw.randint(4, 8), width=64 * draw.randint(2, 64), ffn=64 * draw.randint(2, 256), heads=8,
        kv_heads=draw.choice([1, 8]), head_dim=64, vocab=draw.choice([1000, 150_000]),
    )  # fmt: skip
    source = Source(shape, "sdpa")
    for active, checkpointing, length in itertools.product((1, 2, 3), (False, True), (128, 4096)):
        method = LayerSampling(active=active, embed=embed)
        step = FitStep(
            method=method, dtype="bfloat16", batch=4, length=length, accumulate=1 + seed % 2, packing=False,
            attention="sdpa", checkpointing=checkpointing,
        )  # fmt: skip
        found = price(source, step)
        prices = [
            price(source, replace(step, method=replace(method, sampler=Fixed(blocks=blocks))))
            for blocks in itertools.combinations(range(shape.layers), active)
        ]
        assert found.bytes.total == max(one.bytes.total for one in prices)
        assert found.flops == max(one.flops for one in prices)


@pytest.mark.parametrize(("embed", "checkpointing"), [(True, True), (False, True), (True, False)])
def test_no_draw_of_a_traced_model_holds_more_than_is_priced(embed, checkpointing):
    source, method = source_of("mixtral"), LayerSampling(active=2, embed=embed)
    step = step_for("mixtral", method, checkpointing=checkpointing, accumulate=1)
    draws = [(0, 1), (0, 5), (1, 4), (2, 3), (4, 5)]
    prices = [price(source, replace(step, method=replace(method, sampler=Fixed(blocks=draw)))) for draw in draws]
    assert price(source, step).bytes.total == max(one.bytes.total for one in prices)


@pytest.mark.parametrize("blocks", [(10, 11), (0, 11), (8, 9, 10, 11), (0, 1, 11)])
def test_draws_of_a_decoder_are_told_by_a_few_blocks(blocks):
    source, method = source_of("t5"), LayerSampling(active=len(blocks), sampler=Fixed(blocks=blocks))
    step = step_for("t5", method, accumulate=1)
    assert price(source, step) == price(source, step, whole=True)


def test_of_equally_large_blocks_the_highest_are_priced():
    """Every other block holds experts."""
    config = tf.Qwen3MoeConfig(
        **SMALL, **HEADS, head_dim=16, **EXPERTS, num_experts=16, decoder_sparse_step=2
    )  # fmt: skip
    source, method = Source(config, "auto"), LayerSampling(active=2)
    step = step_for("qwen3-moe", method, checkpointing=True, accumulate=1)
    low, high = (
        price(source, replace(step, method=replace(method, sampler=Fixed(blocks=draw)))).bytes.total
        for draw in ((1, 3), (3, 5))
    )
    assert price(source, step).bytes.total == high > low


def test_of_an_encoder_and_a_decoder_the_dearest_draw_is_priced():
    """Blocks of the decoder hold more, and have gradients first."""
    source, method = source_of("t5"), LayerSampling(active=2)
    step = step_for("t5", method, checkpointing=True)
    low, high = (
        price(source, replace(step, method=replace(method, sampler=Fixed(blocks=draw)))).bytes.total
        for draw in ((0, 1), (10, 11))
    )
    assert price(source, step).bytes.total >= high > 1.05 * low


@pytest.mark.parametrize("name", ["llama", "mixtral"])
def test_the_last_blocks_are_priced_as_those_blocks(name):
    """Where a formula is known and where blocks are counted; frozen blocks below them keep nothing for backward."""
    source, method = source_of(name), LayerSampling(active=2, embed=False)
    count = len(source.blocks)
    last = replace(method, sampler=Fixed(blocks=(count - 2, count - 1)))
    found = price(source, step_for(name, replace(method, sampler=Fixed(blocks="last"))))
    assert found == price(source, step_for(name, last))
    assert found.bytes.total < price(source, step_for(name, method)).bytes.total


@pytest.mark.parametrize("masters", [False, True])
def test_state_that_is_kept_or_offloaded_is_counted_for_all_blocks(masters):
    """Beside resetting it: two moments of 16 or 32 bits and a step's number for each parameter of four more blocks."""
    source = source_of("mixtral")
    reset, keep, offload = (
        price(source, replace(step_for("mixtral", LayerSampling(active=2, state=state)), masters=masters))
        for state in ("reset", "keep", "offload")
    )
    block = [tuple(p.shape) for p in source.bare.model.layers[0].parameters()]
    numbers = sum(map(math.prod, block))
    more = 4 * (numbers * (3 * 4 if masters else 2 * 2) + 4 * len(block))
    assert keep.bytes.total - reset.bytes.total == more == offload.host
    assert (offload.bytes.total, keep.host, reset.host) == (reset.bytes.total, 0, 0)


@pytest.mark.parametrize("method", [LayerSampling(sampler=Bernoulli()), LayerSampling.misa()])
def test_draws_of_changing_size_are_refused(method):
    with pytest.raises(UserError, match="draws differ in size"):
        price(source_of("llama"), step_for("llama", method))


def test_rows_of_several_documents_are_for_causal_models():
    with pytest.raises(UserError, match=r"packing: got t5; rows of several documents are for causal language models"):
        price(source_of("t5"), step_for("t5", Full(), packing=True))


def test_a_model_of_no_known_kind_is_refused():
    with pytest.raises(UserError, match="no language model, image classifier or speech recogniser"):
        price(Source(tf.HubertConfig(), "auto"), step_for("hubert", Full()))


@pytest.mark.parametrize("family", ["t5", "gemma3", "whisper"])
def test_adapters_of_a_whole_model_are_counted_on_cut_ones(family):
    """Shapes and parameters are those of adapters that were put on every block."""
    source, step = source_of(family), FitStep(method=Lora(rank=4), batch=1, length=16, packing=False)
    model = source.build(step)
    whole = trained_of(model, source.trained(model, step.method), step, parameters=source.parameters)
    found = trains(source, step)
    assert sorted(found.shapes) == sorted(whole.shapes)
    assert (found.dtype, found.parameters) == (whole.dtype, whole.parameters)
