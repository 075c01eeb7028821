"""Operations are, exactly, those that torch counts while a real step runs."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from oracles.small_lms import BATCH, CONFIGS, LAYERS, LENGTH, VOCAB, lora_targets, model_of, train_
from sparing.layersample.price.activations import LoRA, Trained, Work
from sparing.layersample.price.flops import block_backward, flops
from sparing.layersample.price.shape import Shape

CASES = [
    Trained(blocks=frozenset(range(LAYERS))),
    Trained(blocks=frozenset({1})),
    Trained(),
    Trained(embed=False, blocks=frozenset({1})),
    Trained(embed=False, blocks=frozenset({0, 2})),
    Trained(embed=False, tail=False, head=False, blocks=frozenset({2})),
    Trained(embed=False),
    Trained(embed=False, tail=False),
]
WORK = Work(batch=BATCH, length=LENGTH, dtype=torch.float32, attention="eager")


def counted(model: torch.nn.Module) -> int:
    """What torch's own counter sees; eager attention, because it knows no cost for the fused one on the CPU."""
    ids = torch.randint(0, VOCAB, (BATCH, LENGTH), generator=torch.Generator().manual_seed(0))
    with FlopCounterMode(display=False) as counter:
        model(input_ids=ids, labels=ids, use_cache=False).loss.backward()
    return counter.get_total_flops()


@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize("name", ["grouped", "gpt2"])
def test_a_step_costs_what_torch_counts(name: str, checkpointing: bool) -> None:
    model, shape = model_of(name), Shape.from_config(CONFIGS[name])
    model.train()
    if checkpointing:
        model.activation_checkpointing_enable()
        model.disable_input_require_grads()  # the hook would make the backward pass full length
    for trained in CASES:
        if shape.tied and trained.embed != trained.head:
            trained = replace(trained, embed=False, head=False)
        if not (trained.blocks or trained.head or trained.tail):
            continue
        train_(model, trained)
        assert flops(shape, replace(WORK, checkpointing=checkpointing), trained).total == counted(model), trained


@pytest.mark.parametrize(("name", "ends"), [("grouped", False), ("grouped", True), ("gpt2", False)])
@pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning")  # peft's own
def test_adapters_cost_what_torch_counts(name: str, ends: bool) -> None:
    peft = pytest.importorskip("peft")
    targets = lora_targets(name, ends=ends)
    model = peft.get_peft_model(
        model_of(name), peft.LoraConfig(r=4, target_modules=targets, fan_in_fan_out=name == "gpt2")
    )
    trained = Trained(embed=False, tail=False, head=False, lora=LoRA(rank=4, embed=ends, head=ends))
    assert flops(Shape.from_config(CONFIGS[name]), WORK, trained).total == counted(model)


@pytest.mark.parametrize("checkpointing", [False, True])
def test_each_block_further_down_adds_the_same(checkpointing: bool) -> None:
    shape, work = Shape.from_config(CONFIGS["grouped"]), replace(WORK, checkpointing=checkpointing)
    totals = [flops(shape, work, Trained(embed=False, blocks=frozenset({block}))).total for block in range(LAYERS)]
    assert [a - b for a, b in itertools.pairwise(totals)] == [block_backward(shape, work)] * (LAYERS - 1)


LLAMA = Shape(layers=32, width=4096, ffn=11008, heads=32, kv_heads=32, head_dim=128, vocab=32000)


@pytest.mark.parametrize("checkpointing", [False, True])
def test_the_familiar_rules_hold_for_short_sequences(checkpointing: bool) -> None:
    """6n, 4n + 2n_active, 2n + 2n_above + 2n_active operations a token, with n the weights that multiply.

    Recomputation adds 2n_above, less the last product of each block. One token has next to no attention.
    """
    work = Work(batch=1, length=1, dtype=torch.bfloat16, checkpointing=checkpointing)
    block, head = LLAMA.block_matmul, LLAMA.head
    n, active = 32 * block + head, 2 * block + head
    rules = {
        Trained(blocks=frozenset(range(32))): (6 * n, 32),
        Trained(blocks=frozenset({10, 20})): (4 * n + 2 * active, 32),
        Trained(embed=False, blocks=frozenset({10, 20})): (2 * n + 2 * (22 * block + head) + 2 * active, 22),
    }
    for trained, (rule, above) in rules.items():
        again = 2 * above * (block - LLAMA.ffn * LLAMA.width) if checkpointing else 0
        # attention of one token: 12 or 16 times width a block, beside 6 or 8 times 200 million
        assert flops(LLAMA, work, trained).total == pytest.approx(rule + again, rel=1e-4)


def test_layer_sampling_can_be_at_most_half_again_as_fast_while_the_embedding_trains() -> None:
    """The paper's 2.9 is out of reach: forward pass and input gradients stay. Two of 32 blocks: 1.43."""
    work = Work(batch=1, length=8, dtype=torch.bfloat16)
    full, lisa, ends = (
        flops(LLAMA, work, Trained(blocks=frozenset(blocks))).total for blocks in (range(32), {10, 20}, set())
    )
    assert full / lisa == pytest.approx(6 / 4.2, rel=0.015)
    assert full / ends < 1.5
