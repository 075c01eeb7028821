"""The language models of ``benchmarks.token_weights``: texts, tokenizers, training, documents with questions.

Text: articles of enwik8 and three children's books. An article belongs to one part by its number (in turn: five to
pretraining, one to other text, one to meta-training, one to validation, two to testing), so all parts have all topics;
a book is cut into a beginning, a middle and an end. Questions come from the rule of ``sparing adapt``. A model is made
again from seed 0 where its folder is missing, by AdamW on documents that no other part has: the small one from scratch,
with byte pairs of its own, the other from stories15M.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from sparing.data import fetch, load_text
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
TUNED, TUNED_RATE = 3_000, 5e-4
"""Likewise of stories15M, which has read no encyclopedia before: documents, and peak rate of AdamW."""
TUNING = 8
"""The seed that only chooses rates, and sees no test document."""
LONGER = 4
"""Times as many seconds of a last run of three arms, on validation documents alone: is more time the cure?"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Study:
    """What differs between the two models."""

    name: str  # of the result file, and of the model's folder
    seconds: float  # CPU time of meta-training of each learnt arm at each seed; evaluation does not count
    inner: tuple[float, float, float]  # rates of SGD on the model that are tried at first
    shared: bool  # each learnt arm runs at the inner rate that suits uniform weights as well, and its sweep is a grid


SMALL = Study(name="token_weights", seconds=15.0, inner=(0.4, 0.8, 1.6), shared=True)
STORIES = Study(name="token_weights_stories", seconds=75.0, inner=(0.01, 0.02, 0.04), shared=False)


@dataclass(frozen=True, slots=True, eq=False)
class Base:
    """What every arm shares."""

    study: Study
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


def untrained(study: Study, text: str) -> tuple[LanguageModel, int, float]:
    """What a study's model is trained from, and for how many documents at which peak rate."""
    if study is STORIES:
        folder = fetch("stories15m")
        return as_functions(load_model(folder, dtype=torch.float32), load_tokenizer(folder)), TUNED, TUNED_RATE
    tokenizer = byte_pairs(text[:4_000_000], VOCABULARY)
    return as_functions(fresh_model(shape(tokenizer.eos_token_id), seed=0), tokenizer), PRETRAINED, RATE


def make(lm: LanguageModel, count: int, lr: float, folder: Path, text: str, books: Sequence[Document]) -> None:
    """Train a model on ``count`` documents of ``text`` and on those of the books, and keep it in a folder."""
    chosen = [*documents(text, lambda part: len(lm.encode(part)), length=ROW - 1)[:count], *books]
    ids = [torch.tensor([lm.start, *lm.encode(document.text)]) for document in chosen]
    lm = tune_(lm, ids, passes=1, lr=lr, seed=0, batch=16)
    lm.scored.model.save_pretrained(folder)
    lm.tokenizer.save_pretrained(folder)


def prepare(study: Study, folder: Path) -> Base:
    """Cut the texts, and open or make the model."""
    wiki = encyclopedia()
    first, count, lr = untrained(study, wiki["pretrain"])
    tokenizer = first.tokenizer

    def cut(book: str, most: int = LENGTH) -> list[Document]:
        return documents(book, lambda part: len(tokenizer(part, verbose=False)["input_ids"]), length=most - 1)

    def asked(part: str) -> tuple[Document, ...]:
        return tuple(document for document in cut(wiki[part]) if document.questions)

    # the same shares of each book, cut into the longer documents of pretraining and into those that are asked about
    plain, *_ = split([cut(load_text(name), ROW) for name in BOOKS], validation=0.2, test=0.5)
    _, *told = split([cut(load_text(name)) for name in BOOKS], validation=0.2, test=0.5)
    if not (folder / "config.json").is_file():
        make(first, count, lr, folder, wiki["pretrain"], plain)
    lm = as_functions(load_model(folder, dtype=torch.float32), load_tokenizer(folder))
    other = passages(lm, wiki["elsewhere"], length=LENGTH)[:64]
    train = (*asked("train")[:TRAINED], *told[0])
    data = Corpus((), train, (), (), tuple(other[:32]), tuple(other[32:]))
    return Base(study, lm, data, (asked("validation"), told[1]), (asked("test"), told[2]))
