"""Measurements against the model's own loss, a hand-written greedy loop, and closed forms."""

from __future__ import annotations

import math

import pytest
import torch

import zoo
from sparing.blocks import find_blocks
from sparing.jobs.finetune.evaluate import continuations, held_out_loss, loss_of, measuring, movement, perplexity
from sparing.jobs.finetune.labels import IGNORED
from sparing.jobs.finetune.packing import Packed


def ragged() -> Packed:
    ids = zoo.tokens(5, 9)["input_ids"]
    labels = ids.clone()
    for row in range(5):
        labels[row, : 2 * row] = IGNORED
    return Packed(ids, labels)


@pytest.mark.parametrize("batch", [1, 2, 5])
def test_the_mean_is_over_labels_not_rows(batch: int) -> None:
    model, data = zoo.llama(dtype=torch.float32), ragged()
    with torch.no_grad():
        want = model(input_ids=data.ids, labels=data.labels).loss.item()  # transformers' own mean over labels
    got, tokens = held_out_loss(model, data, batch=batch)
    assert tokens == 8 + 7 + 5 + 3 + 1
    assert got == pytest.approx(want, rel=1e-6)  # float32 sums in another order


def test_sixteen_bit_logits_are_summed_in_thirty_two() -> None:
    model, data = zoo.llama(dtype=torch.bfloat16), ragged()
    assert loss_of(model, data.ids, data.labels).dtype == torch.float32
    assert loss_of(zoo.llama(), data.ids, data.labels).dtype == torch.float64


def test_modes_and_gradients_come_back() -> None:
    model = zoo.llama().train()
    model.model.layers[1].eval()
    with measuring(model):
        assert not any(module.training for module in model.modules())
        assert not torch.is_grad_enabled()
    assert model.training
    assert not model.model.layers[1].training
    assert torch.is_grad_enabled()


def test_perplexity_of_a_hopeless_model_is_infinite_not_an_error() -> None:
    assert perplexity(math.log(7)) == pytest.approx(7, rel=1e-15)
    assert perplexity(1e6) == math.inf


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
    rows = movement(model, original)
    assert [row["block"] for row in rows] == [block.name for block in blocks]
    assert [row["moved"] for row in rows] == pytest.approx([0.25 * index for index in range(len(blocks))], rel=1e-12)
