"""Loss per token and per byte, and text that a seed draws."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch

from sparing.jobs.pretrain.course import Course
from sparing.jobs.pretrain.evaluate import measured, written
from sparing.jobs.pretrain.material import Material


def test_a_model_without_knowledge_needs_log_vocabulary(begun: Callable[..., Course], material: Material):
    course = begun()
    with torch.no_grad():
        course.model.lm_head.weight.zero_()
    row = measured(course.model, material.validation, batch=3)
    tokens = len(material.tokenizer)
    assert row["loss"] == pytest.approx(math.log(tokens), rel=1e-6)
    assert row["perplexity"] == pytest.approx(tokens, rel=1e-5)
    per_byte = material.validation.size / material.validation.tokens
    assert row["bits_per_byte"] == pytest.approx(math.log2(tokens) / per_byte, rel=1e-6)


def test_the_mean_does_not_depend_on_the_batch(begun: Callable[..., Course], material: Material):
    course = begun()
    losses = [measured(course.model, material.test, batch=batch)["loss"] for batch in (1, 4)]
    assert losses[0] == pytest.approx(losses[1], abs=1e-6)


def test_samples_are_of_the_length_and_the_seed(begun: Callable[..., Course], material: Material):
    course = begun()
    before = torch.get_rng_state()
    texts = [written(course.model, material.tokenizer, ["Once upon", "The"], length=12, seed=s) for s in (0, 0, 1)]
    assert texts[0] == texts[1] != texts[2]
    assert all(len(text) <= 12 - len(start) for text, start in zip(texts[0], ("Once upon", "The"), strict=True))
    assert torch.equal(torch.get_rng_state(), before)
    assert course.model.training


def test_an_opening_as_long_as_the_context_is_cut(begun: Callable[..., Course], material: Material):
    assert len(written(begun().model, material.tokenizer, ["Once upon a time"], length=16, seed=0)[0]) <= 1
