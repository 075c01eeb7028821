"""Low-rank additions: the same first values always, on every kind of linear layer."""

from __future__ import annotations

import pytest
import torch

import zoo
from sparing.errors import UserError
from sparing.jobs.lm.adapters import Lora, with_adapters_


def test_adapters_begin_the_same_whatever_the_global_generator_is_at() -> None:
    found = []
    for noise in (1, 2):
        torch.rand(noise)
        adapted = with_adapters_(zoo.llama(layers=2), Lora(rank=2), seed=5)
        found.append({n: p.detach() for n, p in adapted.named_parameters() if "lora_A" in n})
    assert len(found[0]) == 2 * 7  # seven linear maps a block, none on the head
    assert all(torch.equal(value, found[1][name]) for name, value in found[0].items())


def test_gpt2_gets_adapters_too() -> None:
    adapted = with_adapters_(zoo.gpt2(layers=2), Lora(rank=2, targets="c_attn, c_fc"), seed=0)
    assert sum("lora_A" in name for name, _ in adapted.named_parameters()) == 4


def test_targets_that_no_layer_has() -> None:
    with pytest.raises(UserError, match=r"lora\.targets: got nothing_like_it; .*not found"):
        with_adapters_(zoo.llama(layers=2), Lora(targets="nothing_like_it"), seed=0)
