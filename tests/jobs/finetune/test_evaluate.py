"""Continuations against a hand-written greedy loop, movement against closed forms."""

from __future__ import annotations

import pytest
import torch

import zoo
from sparing.blocks import find_blocks
from sparing.jobs.finetune.movement import movement
from sparing.jobs.lm.labels import IGNORED
from sparing.jobs.lm.packing import Packed
from sparing.jobs.lm.texts import continuations


def ragged() -> Packed:
    ids = zoo.tokens(5, 9)["input_ids"]
    labels = ids.clone()
    for row in range(5):
        labels[row, : 2 * row] = IGNORED
    return Packed(ids, labels)


def test_continuations_are_the_likeliest_tokens(tokenizer) -> None:
    model = zoo.llama(vocab=258)
    got = continuations(model, tokenizer, ["ab", "c"], max_new_tokens=6)
    for prompt, text in zip(["ab", "c"], got, strict=True):
        ids = tokenizer(prompt)["input_ids"]
        for _ in range(6):
            ids.append(int(model(input_ids=torch.tensor([ids])).logits[0, -1].argmax()))
            if ids[-1] == tokenizer.eos_token_id:
                break
        assert text == tokenizer.decode(ids[len(prompt) :], skip_special_tokens=True)


def test_a_prompt_that_fills_the_model_keeps_its_end(tokenizer) -> None:
    """64 positions, 4 new: the last 60 tokens of the prompt are read."""
    model, prompt = zoo.llama(vocab=258), "x" * 20 + "abcde" * 12
    assert continuations(model, tokenizer, [prompt], max_new_tokens=4) == continuations(
        model, tokenizer, [prompt[-60:]], max_new_tokens=4
    )


@pytest.mark.parametrize("make", [zoo.gpt2, zoo.llama])
def test_a_continuation_ends_where_the_positions_do(make, tokenizer) -> None:
    """64 positions, 80 asked for: GPT-2 has no embedding of a 65th."""
    texts = continuations(make(vocab=258).eval(), tokenizer, ["x" * 70, "x"], max_new_tokens=80)
    assert all(texts)


def test_a_rendered_chat_gets_no_second_beginning() -> None:
    seen = []

    class Telling:
        eos_token_id, pad_token_id = 1, None

        def __call__(self, text, **options):
            seen.append(options["add_special_tokens"])
            return {"input_ids": torch.tensor([[5, 6]])}

        def decode(self, ids, **options):
            return " ".join(["word"] * len(ids))

    # Decoded alone the new token would lose its space.
    assert continuations(zoo.llama(), Telling(), ["x"], max_new_tokens=1) == [" word"]
    continuations(zoo.llama(), Telling(), ["x"], max_new_tokens=1, special=False)
    assert seen == [True, False]


@pytest.mark.parametrize("make", [zoo.llama, zoo.gpt2])
def test_movement_is_relative_to_where_a_block_was(make) -> None:
    """Scaling a block by 1 + ε moves it by exactly ε of its norm."""
    model, original = make(), make()
    blocks = find_blocks(model)
    with torch.no_grad():
        for index, block in enumerate(blocks):
            for parameter in block.params.values():
                parameter.mul_(1 + 0.25 * index)
    rows = movement(model, dict(original.named_parameters()))
    assert [row["block"] for row in rows] == [block.name for block in blocks]
    assert [row["moved"] for row in rows] == pytest.approx([0.25 * index for index in range(len(blocks))], rel=1e-12)
