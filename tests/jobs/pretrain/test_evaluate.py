"""Loss per token and per byte, and text that a seed draws."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch

from sparing.jobs.lm.texts import sample_texts
from sparing.jobs.pretrain.inputs import Inputs
from sparing.jobs.pretrain.loop import evaluate
from sparing.jobs.pretrain.state import TrainState


def test_a_model_without_knowledge_needs_log_vocabulary(started: Callable[..., TrainState], inputs: Inputs):
    state = started()
    with torch.no_grad():
        state.model.lm_head.weight.zero_()
    row = evaluate(state.model, inputs.validation, batch=3)
    tokens = len(inputs.tokenizer)
    assert row["loss"] == pytest.approx(math.log(tokens), rel=1e-6)
    assert row["perplexity"] == pytest.approx(tokens, rel=1e-5)
    per_byte = inputs.validation.size / inputs.validation.tokens
    assert row["bits_per_byte"] == pytest.approx(math.log2(tokens) / per_byte, rel=1e-6)


def test_the_mean_does_not_depend_on_the_batch(started: Callable[..., TrainState], inputs: Inputs):
    state = started()
    losses = [evaluate(state.model, inputs.test, batch=batch)["loss"] for batch in (1, 4)]
    assert losses[0] == pytest.approx(losses[1], abs=1e-6)


def test_samples_are_of_the_length_and_the_seed(started: Callable[..., TrainState], inputs: Inputs):
    state = started()
    before = torch.get_rng_state()
    texts = [sample_texts(state.model, inputs.tokenizer, ["Once upon", "The"], length=12, seed=s) for s in (0, 0, 1)]
    assert texts[0] == texts[1] != texts[2]
    assert all(len(text) <= 12 - len(start) for text, start in zip(texts[0], ("Once upon", "The"), strict=True))
    assert torch.equal(torch.get_rng_state(), before)
    assert state.model.training


def test_an_opening_as_long_as_the_context_is_cut(started: Callable[..., TrainState], inputs: Inputs):
    assert len(sample_texts(started().model, inputs.tokenizer, ["Once upon a time"], length=16, seed=0)[0]) <= 1
