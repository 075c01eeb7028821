"""Kept activations are, to the byte, the storages that autograd saves in a real forward pass."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

from oracles.small_lms import BATCH, CONFIGS, LAYERS, LENGTH, VOCAB, lora_targets, model_of, train_
from sparing.errors import UserError
from sparing.layersample.price.activations import LoRA, Trained, Work, at_forward_end
from sparing.layersample.price.shape import Shape

FULL = Trained(blocks=frozenset(range(LAYERS)))
CASES = {
    "full": FULL,
    "one block": Trained(blocks=frozenset({1})),
    "ends only": Trained(),
    "frozen embedding": Trained(embed=False, blocks=frozenset({1})),
    "frozen embedding, first block": Trained(embed=False, blocks=frozenset({0})),
    "top only": Trained(embed=False),
    "one block alone": Trained(embed=False, tail=False, head=False, blocks=frozenset({2})),
}


def storages(model: nn.Module, extra: Mapping[str, Tensor] | None = None) -> Iterator[tuple[int, int]]:
    """Address and bytes of what autograd saves and of batch and logits, without parameters and buffers."""
    ids = torch.randint(0, VOCAB, (BATCH, LENGTH), generator=torch.Generator().manual_seed(0))
    batch = {"input_ids": ids, "labels": ids.clone()}
    kept: list[Tensor] = []

    def pack(value: Tensor) -> Tensor:
        kept.append(value)
        return value

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda value: value):
        out = model(**batch, **(extra or {}), use_cache=False)
    standing = {t.untyped_storage().data_ptr() for t in [*model.parameters(), *model.buffers()]}
    for value in [*kept, *batch.values(), out.logits]:
        if value.untyped_storage().data_ptr() not in standing:
            yield value.untyped_storage().data_ptr(), value.untyped_storage().nbytes()


def saved(model: nn.Module, extra: Mapping[str, Tensor] | None = None) -> int:
    return sum(dict(storages(model, extra)).values())


def work(dtype: torch.dtype, **changes: object) -> Work:
    return replace(Work(batch=BATCH, length=LENGTH, dtype=dtype, logits=True), **changes)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("name", CONFIGS)
def test_what_is_kept_is_counted_to_the_byte(name: str, attention: str, dtype: torch.dtype) -> None:
    model, shape = model_of(name, dtype, attention), Shape.from_config(CONFIGS[name])
    for trained in CASES.values():
        if shape.tied and trained.embed != trained.head:
            trained = replace(trained, embed=False, head=False)
        train_(model, trained)
        predicted = at_forward_end(shape, work(dtype, attention=attention), trained)
        # a graph also holds one scalar, the sum of the loss's weights
        assert abs(predicted - saved(model)) <= 8, trained


def test_a_padding_mask_repeats_keys_and_is_kept_by_each_block() -> None:
    model, shape = model_of("grouped", torch.bfloat16, "sdpa"), Shape.from_config(CONFIGS["grouped"])
    mask = torch.ones(BATCH, LENGTH, dtype=torch.long)
    mask[0, :3] = 0
    measured = saved(model, {"attention_mask": mask})
    assert abs(at_forward_end(shape, work(torch.bfloat16, padded=True), FULL) - measured) <= 8
    assert at_forward_end(shape, work(torch.bfloat16), FULL) < measured


def test_logits_count_only_if_the_loop_holds_them() -> None:
    shape = Shape.from_config(CONFIGS["llama"])
    held, let_go = (at_forward_end(shape, work(torch.bfloat16, logits=keep), FULL) for keep in (True, False))
    assert held - let_go == 2 * BATCH * LENGTH * VOCAB


@pytest.mark.parametrize("trained", CASES.values(), ids=CASES.keys())
def test_checkpointing_keeps_one_stream_per_block_that_has_a_backward_pass(trained: Trained) -> None:
    shape, rest = Shape.from_config(CONFIGS["llama"]), replace(trained, blocks=frozenset(), embed=False)
    with_blocks = at_forward_end(shape, work(torch.float32, checkpointing=True), trained)
    reached = LAYERS - trained.lowest(LAYERS)
    table = 2 * LENGTH * shape.head_dim * 4 if reached else 0
    norm_input = 0 if rest.enters(LAYERS) == trained.enters(LAYERS) else 4 * BATCH * LENGTH * (shape.width + 1)
    logits = 4 * BATCH * LENGTH * VOCAB if trained.blocks and not (trained.tail or trained.head) else 0
    without = at_forward_end(shape, work(torch.float32, checkpointing=True), rest)
    assert with_blocks == without + reached * 4 * BATCH * LENGTH * shape.width + table + norm_input + logits


@pytest.mark.parametrize("wide", [False, True], ids=["same type", "float adapters"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize(
    ("name", "ends", "dropout"),
    [
        ("grouped", False, 0.0),
        ("grouped", True, 0.0),
        ("llama", False, 0.5),
        ("gpt2", False, 0.0),
        ("gpt2", False, 0.5),
    ],
)
@pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning")  # peft's own
def test_adapters_of_peft_have_the_size_and_keep_the_bytes_we_say(
    name: str, ends: bool, dropout: float, dtype: torch.dtype, wide: bool
) -> None:
    peft = pytest.importorskip("peft")
    shape = Shape.from_config(CONFIGS[name])
    targets = lora_targets(name, ends=ends)
    config = peft.LoraConfig(r=4, target_modules=targets, lora_dropout=dropout, fan_in_fan_out=name == "gpt2")
    model = peft.get_peft_model(model_of(name, dtype, "sdpa"), config, autocast_adapter_dtype=wide)
    lora = LoRA(rank=4, embed=ends, head=ends, dropout=dropout > 0, float_adapters=wide)
    assert sum(p.numel() for p in model.parameters() if p.requires_grad) == lora.params(shape)
    predicted = at_forward_end(shape, work(dtype), Trained(embed=False, tail=False, head=False, lora=lora))
    if dropout:  # on the CPU the mask is a factor in the adapter's type; on CUDA, which we count, it is one byte
        masks = LAYERS * sum(inputs for inputs, _ in shape.linears) - sum(inputs for inputs, _ in shape.entrance)
        predicted += BATCH * LENGTH * masks * ((4 if wide else dtype.itemsize) - 1)
    assert abs(predicted - saved(model)) <= 8


def test_lora_of_rank_128_everywhere_on_llama_2_7b_trains_329_million() -> None:
    shape = Shape(layers=32, width=4096, ffn=11008, heads=32, kv_heads=32, head_dim=128, vocab=32000)
    assert LoRA(rank=128).params(shape) == pytest.approx(319.8e6, rel=1e-3)
    assert LoRA(rank=128, embed=True, head=True).params(shape) == pytest.approx(329e6, rel=1e-3)


def test_an_adapter_without_rank_is_refused() -> None:
    with pytest.raises(UserError, match="rank"):
        LoRA(rank=0)
