"""The price of a run: published tables, means over all draws, and what one is told before paying."""

from __future__ import annotations

import math
from dataclasses import replace
from itertools import combinations

import pytest
import torch

from sparing.errors import UserError
from sparing.layersample.config import LayerSampling
from sparing.layersample.draws import Adaptive, Bernoulli, Fixed, Reshuffle, Weighted
from sparing.layersample.price.activations import Trained, Work
from sparing.layersample.price.flops import flops
from sparing.layersample.price.predict import Full, LoRA, predict, prefer_lora, shape_of
from sparing.layersample.price.shape import Shape

LLAMA2 = {"layers": 32, "width": 4096, "ffn": 11008, "heads": 32, "kv_heads": 32, "head_dim": 128, "vocab": 32000}
SHAPES = {
    "TinyLlama-1.1B": Shape(layers=22, width=2048, ffn=5632, heads=32, kv_heads=4, head_dim=64, vocab=32000),
    "LLaMA-2-7B": Shape(**LLAMA2),
    "Mistral-7B": Shape(**LLAMA2 | {"ffn": 14336, "kv_heads": 8}),
    "Llama-3.1-8B": Shape(**LLAMA2 | {"ffn": 14336, "kv_heads": 8, "vocab": 128256}),
    "LLaMA-2-70B": Shape(layers=80, width=8192, ffn=28672, heads=64, kv_heads=8, head_dim=128, vocab=32000),
}
HALF = {"batch": 1, "length": 1024, "dtype": torch.bfloat16}
SMALL = Shape(layers=5, width=24, ffn=40, heads=4, kv_heads=2, head_dim=6, vocab=50)
STEP = {"batch": 2, "length": 16, "dtype": torch.float32}

# parameters (1e9); trainable with none, two and four blocks (1e6); gradients and half-precision moments for the three
# (1e9 bytes); the same with fp32 masters and moments: worked out from P_layer = 2d² + 2d·d_kv + 3d·d_ff + 2d
PUBLISHED = {
    "TinyLlama-1.1B": (1.100, (131, 219, 307), (0.79, 1.31, 1.84), (1.84, 3.07, 4.30)),
    "LLaMA-2-7B": (6.738, (262, 667, 1072), (1.57, 4.00, 6.43), (3.67, 9.34, 15.0)),
    "Mistral-7B": (7.242, (262, 698, 1135), (1.57, 4.19, 6.81), (3.67, 9.78, 15.9)),
    "Llama-3.1-8B": (8.030, (1051, 1487, 1923), (6.30, 8.92, 11.5), (14.7, 20.8, 26.9)),
    "LLaMA-2-70B": (68.98, (524, 2236, 3947), (3.15, 13.4, 23.7), (7.3, 31.3, 55.3)),
}


@pytest.mark.parametrize("name", SHAPES)
def test_active_parameters_and_their_bytes_are_those_of_the_analytic_table(name: str) -> None:
    """Rounded to the printed digits; half of the last digit is the tolerance, twice that where the table cut off."""
    billions, millions, plain, masters = PUBLISHED[name]
    assert float(f"{SHAPES[name].total / 1e9:.4g}") == pytest.approx(billions, abs=1e-9)
    for index, active in enumerate((0, 2, 4)):
        for wide, column in ((False, plain), (True, masters)):
            price = predict(SHAPES[name], LayerSampling(active=active, masters=wide), **HALF)
            end = price.bytes.phases["step"]
            assert price.trainable / 1e6 == pytest.approx(millions[index], abs=0.6)
            assert (end.grads + end.optimizer) / 1e9 == pytest.approx(column[index], rel=0.01)


MEASURED = [  # bf16, batch 1, 1024 tokens, logits held; peaks (1e9 bytes) of an independent tracker on fake tensors
    ("LLaMA-2-7B", Full(), None, {}, 54.43),
    ("LLaMA-2-7B", LayerSampling(), (5, 20), {}, 21.07),
    ("LLaMA-2-7B", Full(), None, {"attention": "eager"}, 54.43),
    ("LLaMA-2-7B", LayerSampling(), (30, 31), {"attention": "eager"}, 27.42),
    ("LLaMA-2-7B", LayerSampling(), (5, 20), {"attention": "eager"}, 27.19),
    ("LLaMA-2-7B", LayerSampling(active=0), (), {"attention": "eager"}, 25.44),
    ("LLaMA-2-7B", LayerSampling(embed=False, head=False), (0, 1), {"attention": "eager"}, 26.10),
    ("LLaMA-2-7B", LayerSampling(embed=False, head=False), (30, 31), {"attention": "eager"}, 16.27),
    ("Mistral-7B", LayerSampling(), (5, 20), {"padded": True}, 22.87),
    ("TinyLlama-1.1B", Full(), None, {"padded": True}, 9.18),
    ("TinyLlama-1.1B", LayerSampling(), (4, 15), {"padded": True}, 5.09),
    ("TinyLlama-1.1B", LayerSampling(), (4, 15), {"checkpointing": True}, 3.78),
    ("TinyLlama-1.1B", Full(), None, {"checkpointing": True}, 9.06),
]


@pytest.mark.parametrize(("name", "method", "blocks", "how", "peak"), MEASURED)
def test_peaks_of_large_models_are_those_an_independent_tracker_saw(name, method, blocks, how, peak) -> None:
    price = predict(SHAPES[name], method, blocks=blocks, **HALF, **how)
    assert price.bytes.total / 1e9 == pytest.approx(peak, rel=0.02)


@pytest.mark.parametrize("embed", [True, False])
@pytest.mark.parametrize("checkpointing", [True, False])
@pytest.mark.parametrize("length", [64, 1024, 4096, 16384])
@pytest.mark.parametrize("vocab", [1000, 32000])
@pytest.mark.parametrize("active", [1, 2, 3])
def test_the_bytes_are_those_of_the_dearest_draw(embed, checkpointing, length, active, vocab) -> None:
    """Long rows: activations decide; short ones: gradients do."""
    shape, settings = replace(SHAPES["LLaMA-2-7B"], layers=6, vocab=vocab), LayerSampling(active=active, embed=embed)
    how = {"batch": 1, "length": length, "dtype": torch.bfloat16, "checkpointing": checkpointing}
    prices = {
        blocks: predict(shape, settings, blocks=blocks, **how).bytes.total
        for blocks in combinations(range(shape.layers), active)
    }
    assert predict(shape, settings, **how).bytes.total == max(prices.values())


def test_the_lowest_blocks_do_not_always_hold_most() -> None:
    """Gradients of the highest come while the blocks below still keep their inputs."""
    how = HALF | {"length": 4096, "checkpointing": True}
    low, high = (
        predict(SHAPES["LLaMA-2-7B"], LayerSampling(), blocks=blocks, **how).bytes.total / 1e9
        for blocks in ((0, 1), (30, 31))
    )
    assert high > low + 0.1
    assert predict(SHAPES["LLaMA-2-7B"], LayerSampling(), **how).bytes.total / 1e9 == high


@pytest.mark.parametrize("embed", [True, False])
@pytest.mark.parametrize("checkpointing", [True, False])
def test_expected_operations_are_the_mean_over_all_draws(embed: bool, checkpointing: bool) -> None:
    work = Work(**STEP, checkpointing=checkpointing)
    sets = list(combinations(range(SMALL.layers), 2))
    totals = [flops(SMALL, work, Trained(embed=embed, blocks=frozenset(blocks))).total for blocks in sets]
    price = predict(SMALL, LayerSampling(active=2, embed=embed), checkpointing=checkpointing, **STEP)
    assert price.flops == pytest.approx(sum(totals) / len(sets), abs=1.0)
    full = flops(SMALL, work, Trained(blocks=frozenset(range(SMALL.layers)))).total
    assert price.ratio == pytest.approx(full / (sum(totals) / len(sets)))


@pytest.mark.parametrize("embed", [True, False])
def test_expected_operations_of_coins_are_the_mean_over_all_their_draws(embed: bool) -> None:
    """Their memory is priced for a large draw, their operations are not."""
    chance, total = 2 / SMALL.layers, 0.0
    for count in range(SMALL.layers + 1):
        for blocks in combinations(range(SMALL.layers), count):
            share = chance**count * (1 - chance) ** (SMALL.layers - count)
            total += share * flops(SMALL, Work(**STEP), Trained(embed=embed, blocks=frozenset(blocks))).total
    price = predict(SMALL, LayerSampling(active=2, embed=embed, sampler=Bernoulli()), **STEP)
    assert price.flops == pytest.approx(total, abs=1.0)  # a whole number


def test_freezing_the_embedding_shortens_the_backward_pass_to_the_lowest_block() -> None:
    price = predict(SHAPES["LLaMA-2-7B"], LayerSampling(embed=False), **HALF)
    assert price.lowest_active == 10.0  # (32 + 1)/(2 + 1) − 1
    high = predict(SHAPES["LLaMA-2-7B"], LayerSampling(embed=False), blocks=(30, 31), **HALF)
    assert high.lowest_active == 30.0
    assert high.ratio > price.ratio > predict(SHAPES["LLaMA-2-7B"], LayerSampling(), **HALF).ratio
    assert high.bytes.total < price.bytes.total


def test_coverage_needs_steps_and_counts_whole_intervals() -> None:
    assert predict(SMALL, LayerSampling(), **STEP).coverage is None
    for steps, rounds in ((1, 1), (20, 1), (21, 2), (100, 5)):
        price = predict(SMALL, LayerSampling(active=2, period=20), steps=steps, **STEP)
        assert price.coverage == pytest.approx(1 - (1 - 2 / 5) ** rounds)
    assert predict(SMALL, LayerSampling(active=2, sampler=Reshuffle()), steps=60, **STEP).coverage == 1.0
    assert predict(SMALL, Full(), steps=1, **STEP).coverage == 1.0


@pytest.mark.parametrize("method", [LayerSampling(active=5), Full()])
def test_all_blocks_active_cost_what_full_fine_tuning_costs(method) -> None:
    full, price = predict(SMALL, Full(), **STEP), predict(SMALL, method, **STEP)
    assert price.bytes == full.bytes
    assert (price.flops, price.trainable, price.ratio) == (full.flops, SMALL.total, 1.0)


@pytest.mark.parametrize(("state", "device_share", "host_share"), [("reset", 0, 0), ("keep", 1, 0), ("offload", 0, 1)])
def test_state_of_frozen_blocks_is_dropped_kept_or_in_host_memory(state, device_share, host_share) -> None:
    price = predict(SMALL, LayerSampling(active=2, state=state), **STEP)
    others = 3 * SMALL.block * 2 * 4
    assert price.host == host_share * others
    assert price.bytes.phases["step"].optimizer == price.trainable * 2 * 4 + device_share * others


def test_blocks_that_are_never_drawn_have_no_state_to_keep() -> None:
    price = predict(SMALL, LayerSampling(active=2, state="keep", sampler=Fixed(blocks=(1, 3))), **STEP)
    assert price.bytes.phases["step"].optimizer == price.trainable * 2 * 4
    weights = Weighted(weights=(0.0, 1.0, 1.0, 1.0, 1.0), floor=0.0)
    low = predict(SMALL, LayerSampling(active=2, embed=False, sampler=weights), **STEP)
    assert low.bytes == predict(SMALL, LayerSampling(active=2, embed=False), blocks=(1, 2), **STEP).bytes


def test_masters_are_for_half_precision_only() -> None:
    wide, plain = (predict(SMALL, LayerSampling(masters=masters), **STEP).bytes for masters in (True, False))
    assert wide == plain


def test_grouped_steps_hold_a_copy_of_all_that_trains() -> None:
    settings, big = LayerSampling(active=4), HALF | {"length": 8}
    shape = SHAPES["TinyLlama-1.1B"]
    price = predict(shape, settings, device="cuda", **big)
    assert price.bytes.transient == 2 * price.trainable
    assert predict(shape, settings, device="cpu", **big).bytes.transient == 2 * 2 * shape.vocab * shape.width


def test_a_model_gives_its_shape_and_must_be_what_its_configuration_says() -> None:
    import zoo

    model = zoo.llama(layers=3)
    assert predict(model, LayerSampling(), **STEP) == predict(shape_of(model), LayerSampling(), **STEP)
    assert shape_of(zoo.gpt2(layers=2)).total == sum(p.numel() for p in zoo.gpt2(layers=2).parameters())
    model.extra = torch.nn.Linear(2, 2)
    with pytest.raises(UserError, match="its configuration makes"):
        shape_of(model)
    with pytest.raises(UserError, match=r"Linear; it has no configuration.*sparing\.memory\.predict"):
        predict(torch.nn.Linear(2, 2), LayerSampling(), **STEP)


@pytest.mark.parametrize(
    ("shape", "settings", "blocks", "words"),
    [
        (SMALL, LayerSampling(active=6), None, ("got 6", "5 body blocks")),
        (SMALL, LayerSampling(), (1, 5), ("blocks", "5")),
        (SMALL, LayerSampling(), (-1,), ("blocks",)),
        (Shape(**LLAMA2, tied=True), LayerSampling(embed=False), None, ("tied", "same value")),
    ],
)
def test_what_cannot_be_trained_has_no_price(shape, settings, blocks, words) -> None:
    with pytest.raises(UserError) as caught:
        predict(shape, settings, blocks=blocks, **STEP)
    assert all(word in str(caught.value) for word in words)


def test_tied_weights_train_and_count_once() -> None:
    tied = Shape(**LLAMA2, tied=True)
    price = predict(tied, LayerSampling(active=0), **HALF)
    assert price.trainable == tied.vocab * tied.width + tied.width
    assert price.always == 1.0


def test_large_vocabularies_are_told_that_lora_is_smaller() -> None:
    """Llama-3.1-8B: 71 % of what trains is embedding, head and norm; an H100 measured 1.5 times the memory of LoRA."""
    price = predict(SHAPES["Llama-3.1-8B"], LayerSampling(), **HALF)
    assert price.always == pytest.approx(0.707, abs=1e-3)
    assert any("71 % of what trains is always on, and LoRA of rank 16" in line for line in price.advice)
    lora = predict(SHAPES["Llama-3.1-8B"], LoRA(rank=16), **HALF)
    assert lora.bytes.total < price.bytes.total
    assert not lora.advice
    assert prefer_lora(SHAPES["LLaMA-2-7B"], LayerSampling(), Work(**HALF)) is None  # 39 % always on


def test_short_runs_are_told_how_many_blocks_stay_untouched() -> None:
    price = predict(SHAPES["LLaMA-2-7B"], LayerSampling(period=13), steps=122, **HALF)
    assert any("17 of 32 blocks are expected never to train within 122 steps; Reshuffle()" in a for a in price.advice)
    dealt = predict(SHAPES["LLaMA-2-7B"], LayerSampling(period=13, sampler=Reshuffle()), steps=122, **HALF)
    assert [a for a in dealt.advice if "never to train" in a] == [
        "12 of 32 blocks are expected never to train within 122 steps"
    ]
    assert not predict(SHAPES["LLaMA-2-7B"], LayerSampling(period=1, sampler=Reshuffle()), steps=122, **HALF).advice


def test_coins_are_priced_at_a_size_one_interval_in_a_thousand_exceeds() -> None:
    price = predict(SHAPES["LLaMA-2-7B"], LayerSampling(sampler=Bernoulli()), **HALF)
    blocks = (price.trainable - 2 * 32000 * 4096 - 4096) // SHAPES["LLaMA-2-7B"].block
    above = sum(math.comb(32, k) * (1 / 16) ** k * (15 / 16) ** (32 - k) for k in range(blocks + 1, 33))
    assert above < 1e-3
    assert any("Bernoulli" in line for line in price.advice)


def test_kept_state_is_told() -> None:
    price = predict(SHAPES["LLaMA-2-7B"], LayerSampling(state="keep", sampler=Adaptive()), **HALF)
    assert any(
        "state of frozen blocks stays on the device: 22.6 GiB" in line for line in price.advice
    )  # 30 · 202.4e6 · 4 B


def test_blocks_in_low_bits_are_not_priced_as_if_they_were_whole() -> None:
    shape = Shape(layers=2, width=16, ffn=32, heads=2, kv_heads=2, head_dim=8, vocab=64)
    with pytest.raises(UserError, match=r"LayerSampling.frozen: got nf4; the formulas"):
        predict(shape, LayerSampling(active=1, frozen="nf4"), batch=1, length=8, dtype=torch.bfloat16)
