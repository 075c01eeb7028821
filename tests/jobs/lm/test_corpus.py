"""Tokenizers give back what went in, before and after a trip through a directory."""

from __future__ import annotations

from pathlib import Path

import pytest

from sparing.errors import UserError
from sparing.jobs.lm import corpus
from sparing.jobs.lm.corpus import END, UNKNOWN, byte_pairs, characters, encode, tokenizer_for

TEXT = 'He said: "Don\'t!"\n\n\tWell , naïve café .  Two  spaces\n' * 3


@pytest.mark.parametrize("choice", ["char", "bpe"])
def test_text_comes_back_as_it_was_also_from_a_directory(choice: str, tmp_path: Path):
    made = tokenizer_for(choice, TEXT, 300)
    made.save_pretrained(tmp_path)
    for tokenizer in (made, tokenizer_for(str(tmp_path), "", 0)):
        ids = tokenizer(TEXT, add_special_tokens=False)["input_ids"]
        assert tokenizer.decode(ids) == TEXT
        assert max(ids) < len(tokenizer)
        assert tokenizer.eos_token == END


def test_characters_are_the_vocabulary_and_others_are_unknown():
    tokenizer = characters("abba\n")
    assert len(tokenizer) == 5
    assert tokenizer("abz", add_special_tokens=False)["input_ids"] == [3, 4, tokenizer.unk_token_id]
    assert tokenizer.unk_token == UNKNOWN


def test_pairs_are_learnt_and_their_number_is_held():
    assert len(byte_pairs("the cat the hat the bat " * 20, 262)) == 262
    few = byte_pairs("ab " * 5, 1000)
    assert 257 <= len(few) < 1000
    assert few("naïve", add_special_tokens=False)["input_ids"]  # bytes that were never seen


def test_a_long_text_is_encoded_in_pieces_with_the_same_result(monkeypatch: pytest.MonkeyPatch):
    tokenizer = byte_pairs(TEXT, 300)
    whole = encode(tokenizer, [TEXT])
    monkeypatch.setattr(corpus, "PIECE", 60)
    assert encode(tokenizer, [TEXT]).equal(whole)


def test_every_text_ends_with_the_end_of_text():
    tokenizer = characters("ab")
    assert encode(tokenizer, ["a", "b"]).tolist() == [2, 0, 3, 0]


def test_an_unknown_word_and_an_empty_directory_are_refused(tmp_path: Path):
    with pytest.raises(UserError, match="tokenizer: got words; it is no word we know"):
        tokenizer_for("words", TEXT, 300)
    with pytest.raises(UserError, match=r"tokenizer: got .*; it has no usable tokenizer"):
        tokenizer_for(str(tmp_path), TEXT, 300)
