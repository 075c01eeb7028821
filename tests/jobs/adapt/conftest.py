"""A tiny language model with a tokenizer of bytes, and a tiny book."""

from __future__ import annotations

import pytest
import torch

import zoo

BOOK = """THE FIRST CHAPTER

One day the old grey cat met Margery by the well. "Where do you go?" said the cat to
Margery. She said that she was on her way to Madrid. The cat had never been to Madrid.

So off they went together, and after a long while they came to Toledo. In the town there lived
a man called Pedro. He had 12 hens and a dog.

Wee folk, good folk,
Trooping all together;
Green jacket, red cap,
And white owl's feather!

THE SECOND CHAPTER

Then a tall man of the name of Robert came in. He asked for the road to Sicily. Nobody knew it,
but the dog of Pedro did. On the next day they all set out for Palermo. It rained and it
rained, and so they slept in the barn of Guido. In the end they sold it to Rosalba. She was glad.
"""


class ByteTokenizer:
    """Bytes as ids, a start and an end; as much of a tokenizer as the job asks for."""

    bos_token_id, eos_token_id, pad_token_id = 256, 257, 257

    def __call__(self, text: str, **options):
        return {"input_ids": list(text.encode("utf-8"))}

    def decode(self, ids, **options) -> str:
        return bytes(token for token in ids if token < 256).decode("utf-8", "replace")


@pytest.fixture(scope="session")
def book() -> str:
    return BOOK


@pytest.fixture
def lm():
    """A Llama of a few thousand float64 weights, large enough to differ between tokens."""
    from sparing.jobs.adapt.lm import as_functions

    model = zoo.llama(layers=2, vocab=258, tied=True, dtype=torch.float64, attn_implementation="eager")
    model.config.max_position_embeddings = 512
    return as_functions(zoo.redraw_(model, std=0.3), ByteTokenizer())


@pytest.fixture
def data(lm, book):
    from sparing.jobs.adapt.corpus import build_corpus

    return build_corpus(lm, [book, book], book, length=100)


@pytest.fixture(scope="session")
def model_dir(tmp_path_factory):
    """The same kind of model on disk, float32, with a tokenizer of bytes that transformers can load."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    folder = tmp_path_factory.mktemp("model")
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    raw = Tokenizer(models.BPE(vocab={piece: at for at, piece in enumerate([*alphabet, "<|end|>"])}, merges=[]))
    raw.pre_tokenizer, raw.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    PreTrainedTokenizerFast(tokenizer_object=raw, eos_token="<|end|>").save_pretrained(folder)
    model = zoo.llama(layers=2, vocab=258, dtype=torch.float32)
    model.config.max_position_embeddings = 512
    zoo.redraw_(model, std=0.3).save_pretrained(folder)
    return folder
