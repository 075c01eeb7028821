"""Weights of a directory beside a live model, against the model that transformers loads from it."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import transformers as tf

import zoo
from sparing.jobs.finetune.movement import Stored, movement
from sparing.jobs.lm.models import load_model

SIZES = {
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "vocab_size": 64,
}


def mixtral():
    config = tf.MixtralConfig(**SIZES, num_local_experts=3, num_experts_per_tok=2)
    return zoo.redraw_(tf.MixtralForCausalLM(config))


@pytest.mark.parametrize(
    ("make", "dtype"),
    [
        (zoo.llama, torch.float64),
        (lambda: zoo.llama(tied=True), torch.float64),
        (zoo.gpt2, torch.float64),
        (mixtral, torch.float32),  # torch multiplies experts in groups, which it cannot in float64
    ],
    ids=["llama", "tied", "gpt2", "mixtral"],
)
def test_movement_from_the_files_is_that_from_a_loaded_model(tmp_path: Path, make, dtype: torch.dtype) -> None:
    """Mixtral's experts are matrices of their own in the file, and one tensor in the model."""
    make().save_pretrained(tmp_path)
    model, stored = load_model(tmp_path, dtype=dtype), Stored(tmp_path)
    before = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.01 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(1)))
    assert stored.holds(model)
    rows, expected = movement(model, stored), movement(model, before)
    assert [row["moved"] for row in rows] == pytest.approx([row["moved"] for row in expected], rel=1e-12)
    assert [row["block"] for row in rows] == [row["block"] for row in expected]


def test_files_that_only_the_loader_understands_are_told(tmp_path: Path) -> None:
    """A backbone saved without its head has names without the head's prefix."""
    zoo.gpt2().transformer.save_pretrained(tmp_path)
    stored = Stored(tmp_path)
    assert not stored.holds(load_model(tmp_path, dtype=torch.float64))
    assert len(stored) == len(list(stored)) == 40
    assert stored.shape("nothing") is None
