"""The small language model of ``benchmarks.token_weights``: texts, tokenizer, pretraining, documents with questions.

Text: articles of enwik8 and three children's books. An article belongs to one part by its number (in turn: five to
pretraining, one to other text, one to meta-training, one to validation, two to testing), so all parts have all topics;
a book is cut into a beginning, a middle and an end. Questions come from the rule of ``sparing adapt``. The model is
made again from seed 0 where its folder is missing: byte pairs and AdamW on documents that no other part has.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from sparing.data.loaders import load_text
from sparing.data.text import wiki_articles
from sparing.jobs.adapt.corpus import Corpus, Document, documents, passages, split
from sparing.jobs.adapt.lm import LanguageModel, as_functions, tune_
from sparing.jobs.lm.corpus import byte_pairs
from sparing.jobs.lm.models import load_model, load_tokenizer
from sparing.jobs.pretrain.models import fresh_model

BOOKS = ("bryant-stories", "burgess-busterbrown", "alice")
DUMP = 24_000_000
"""Bytes of enwik8 that are read."""
PARTS = ("pretrain",) * 5 + ("elsewhere", "train", "validation", "test", "test")
"""The part of an article, by its number modulo ten."""
VOCABULARY, WIDTH, LAYERS, HEADS = 1024, 128, 4, 4
LENGTH, ROW = 64, 96
"""Tokens of a document at most, and of one of pretraining."""
PRETRAINED, RATE = 12_000, 3e-3
"""Documents of pretraining, one pass in batches of 16; peak rate of AdamW."""
TRAINED = 1_200
"""Most documents of enwik8 for meta-training; the books' are about 250 more."""


@dataclass(frozen=True, slots=True, eq=False)
class Base:
    """What every arm shares."""

    lm: LanguageModel  # with its θ₀
    data: Corpus  # for meta-training, which reads ``train`` and ``elsewhere`` of it
    validation: tuple[tuple[Document, ...], ...]  # documents of enwik8, documents of the books
    test: tuple[tuple[Document, ...], ...]  # likewise


def encyclopedia() -> dict[str, str]:
    """Text of each part of enwik8; a line of capitals before every article keeps documents within one."""
    articles = list(wiki_articles(load_text("enwik8", first=DUMP)))
    return {
        part: "\n\n".join(f"NEXT\n\n{text}" for at, text in enumerate(articles) if PARTS[at % len(PARTS)] == part)
        for part in PARTS
    }


def shape(end: int) -> object:
    """The configuration of the model: a Llama with tied embeddings, 1.0 M weights."""
    from transformers import LlamaConfig

    return LlamaConfig(
        vocab_size=VOCABULARY, bos_token_id=end, eos_token_id=end, pad_token_id=end, hidden_size=WIDTH,
        intermediate_size=3 * WIDTH, num_hidden_layers=LAYERS, num_attention_heads=HEADS, num_key_value_heads=HEADS,
        max_position_embeddings=2 * ROW, tie_word_embeddings=True,
    )  # fmt: skip


def pretrained(folder: Path, text: str, books: Sequence[Document]) -> LanguageModel:
    """The model of a folder, or one that is trained now on documents of ``text`` and of the books, and kept there."""
    if not (folder / "config.json").is_file():
        tokenizer = byte_pairs(text[:4_000_000], VOCABULARY)
        lm = as_functions(fresh_model(shape(tokenizer.eos_token_id), seed=0), tokenizer)
        chosen = [*documents(text, lambda part: len(lm.encode(part)), length=ROW - 1)[:PRETRAINED], *books]
        ids = [torch.tensor([lm.start, *lm.encode(document.text)]) for document in chosen]
        lm = tune_(lm, ids, passes=1, lr=RATE, seed=0, batch=16)
        lm.scored.model.save_pretrained(folder)
        tokenizer.save_pretrained(folder)
    return as_functions(load_model(folder, dtype=torch.float32), load_tokenizer(folder))


def prepare(folder: Path) -> Base:
    """Cut the texts, and open or make the model."""
    wiki = encyclopedia()
    tokenizer = byte_pairs(wiki["pretrain"][:4_000_000], VOCABULARY)

    def cut(book: str, most: int = LENGTH) -> list[Document]:
        return documents(book, lambda part: len(tokenizer(part, verbose=False)["input_ids"]), length=most - 1)

    def asked(part: str) -> tuple[Document, ...]:
        return tuple(document for document in cut(wiki[part]) if document.questions)

    # the same shares of each book, cut into the longer documents of pretraining and into those that are asked about
    plain, *_ = split([cut(load_text(name), ROW) for name in BOOKS], validation=0.2, test=0.5)
    _, *told = split([cut(load_text(name)) for name in BOOKS], validation=0.2, test=0.5)
    lm = pretrained(folder, wiki["pretrain"], plain)
    other = passages(lm, wiki["elsewhere"], length=LENGTH)[:64]
    train = (*asked("train")[:TRAINED], *told[0])
    data = Corpus((), train, (), (), tuple(other[:32]), tuple(other[32:]))
    return Base(lm, data, (asked("validation"), told[1]), (asked("test"), told[2]))
