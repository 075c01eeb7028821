"""Models that are refused: with the tokenizer of another, or with logits that are not their head's."""

from __future__ import annotations

import pytest
import torch

import zoo
from sparing.errors import UserError
from sparing.jobs.adapt.lm import as_functions


class Letters:
    """A tokenizer with one token a letter, after so many others."""

    def __init__(self, first: int, start: int | None) -> None:
        self.first, self.bos_token_id, self.eos_token_id = first, None, start

    def __call__(self, text: str, **how: bool) -> dict[str, list[int]]:
        return {"input_ids": [self.first + ord(letter) - ord("a") for letter in text]}


@pytest.mark.parametrize("start", [64, None])
def test_a_first_token_that_the_model_does_not_know_is_refused(start: int | None) -> None:
    with pytest.raises(UserError, match=rf"the model knows 64 tokens, and texts would begin with token {start}"):
        as_functions(zoo.llama(layers=1, vocab=64), Letters(0, start))


def test_a_token_that_the_model_does_not_know_is_refused() -> None:
    lm = as_functions(zoo.llama(layers=1, vocab=64), Letters(62, 63))
    assert lm.encode("ab") == [62, 63]
    with pytest.raises(UserError, match=r"the model knows 64 tokens, the tokenizer gives token 64; use the tokenizer"):
        lm.encode("abc")


SHAPE = {
    "vocab_size": 64, "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2,
    "num_key_value_heads": 2, "head_dim": 8, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip


def scaled():
    from transformers import GraniteConfig, GraniteForCausalLM

    return GraniteForCausalLM(GraniteConfig(**SHAPE, logits_scaling=8.0))


def capped():
    from transformers import Gemma2Config, Gemma2ForCausalLM

    return Gemma2ForCausalLM(Gemma2Config(**SHAPE, final_logit_softcapping=30.0))


def scaled_before_its_head():
    from transformers import LlamaConfig, LlamaForCausalLM
    from transformers.modeling_outputs import CausalLMOutputWithPast

    class Before(LlamaForCausalLM):
        def forward(self, input_ids=None, **how):
            return CausalLMOutputWithPast(logits=self.lm_head(0.5 * self.model(input_ids, **how).last_hidden_state))

    return Before(LlamaConfig(**SHAPE))


@pytest.mark.parametrize("make", [scaled, capped, scaled_before_its_head])
def test_a_model_that_changes_its_logits_is_refused(make) -> None:
    """Here scores are the head's, of chosen positions alone, so they would be another model's."""
    with pytest.raises(UserError, match="its logits are not what its head gives alone"):
        as_functions(make(), Letters(0, 1))


@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_scores_of_chosen_positions_are_those_of_the_model(family: str) -> None:
    lm = as_functions(zoo.redraw_(getattr(zoo, family)(layers=1, vocab=64), std=0.3), Letters(0, 1))
    ids = torch.randint(64, (3, 5), generator=torch.Generator().manual_seed(0))
    rows, cols = torch.tensor([2, 0, 1]), torch.tensor([4, 1, 3])
    with torch.no_grad():
        there = lm.scored.model(input_ids=ids).logits[rows, cols]
        torch.testing.assert_close(lm.logits(lm.theta, ids, rows, cols), there)
