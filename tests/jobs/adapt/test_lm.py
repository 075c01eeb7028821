"""A model and a tokenizer that do not belong together."""

from __future__ import annotations

import pytest

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
