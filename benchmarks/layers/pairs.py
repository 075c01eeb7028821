"""Pairs of a question and its answer: what words mean, from WordNet 3.0, and items that ask for one answer of four.

Words are lower-case and English, with the meaning that the data base lists first for a part of speech, less its
examples. They are shuffled once; no word is in two splits. Licence: that of WordNet, which permits any use.
"""

from __future__ import annotations

import re
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from benchmarks.choices import Item, choices_of
from sparing.data import cache_directory
from sparing.data.archives import check_sha256, unpack
from sparing.data.cache import locked
from sparing.data.clients import Debian, tar_of
from sparing.jobs.disk import write_folder
from sparing.jobs.lm.labels import all_tokens
from sparing.jobs.lm.packing import Packed, pack
from sparing.jobs.lm.records import Pair
from sparing.seeds import stream

WORDNET = Debian(
    name="wordnet-base",
    version="1:3.0-37",
    sha256="61060d960f9ada8fa120872312eccd3ecebfbab8c4579e4f5a74e1cf67620752",
    size=6_467_132,
)
SPEECH = {"noun": "a noun", "verb": "a verb", "adj": "an adjective"}
"""Files of the data base -> what their words are."""
LONGEST = 120
"""Letters of a meaning, so that a pair fits a row in the tokens of either model."""
COUNTS = {"train": 1600, "dev": 240, "test": 480}
"""Pairs of each split."""


@dataclass(frozen=True, slots=True)
class Meaning:
    """A word and what it means."""

    word: str
    speech: str
    text: str

    @property
    def question(self) -> str:
        """What is asked."""
        return f"What does {self.word} mean, as {self.speech}?"


def files() -> dict[str, str]:
    """File of the data base -> its lines, fetched once."""
    place = cache_directory() / "layers" / "wordnet"

    def fill(draft: Path) -> None:
        with tempfile.TemporaryDirectory() as folder:
            archive = WORDNET.download(Path(folder))
            check_sha256(archive, WORDNET.sha256)
            members = {f"usr/share/wordnet/data.{name}": f"{name}.txt" for name in SPEECH}
            unpack(tar_of(archive, Path(folder)), members, draft, limit=30_000_000)

    with locked(place.parent, "wordnet"):
        if not place.exists():
            write_folder(place, fill)
    return {name: (place / f"{name}.txt").read_text(encoding="utf-8") for name in SPEECH}


def meanings(lines: str, speech: str) -> Iterator[Meaning]:
    r"""What the first words of a file's entries mean.

    Example:
        >>> entry = '001 03 n 02 toy_box 0 chest 0 001 @ 002 n 0000 | a box for toys; to keep them; "a toy box"  \n'
        >>> list(meanings("  1 a line of the licence\n" + entry, "a noun"))
        [Meaning(word='toy box', speech='a noun', text='a box for toys; to keep them')]
    """
    for line in lines.splitlines():
        if line.startswith(" "):
            continue
        entry, _, gloss = line.partition(" | ")
        word = re.sub(r"\(\w+\)$", "", entry.split()[4]).replace("_", " ")
        text = re.split(r';? ?"', gloss, maxsplit=1)[0].strip()
        if re.fullmatch(r"[a-z][a-z' -]{2,}", word) and 8 <= len(text) <= LONGEST and text.isascii():
            yield Meaning(word, speech, text)


def drawn(found: dict[str, str]) -> dict[str, list[Meaning]]:
    """The meanings of each split."""
    first: dict[str, Meaning] = {}
    for name, lines in found.items():
        for meaning in meanings(lines, SPEECH[name]):
            first.setdefault(meaning.word, meaning)
    every = list(first.values())
    order = iter(torch.randperm(len(every), generator=stream(0, "layers", "wordnet")).tolist())
    return {split: [every[next(order)] for _ in range(count)] for split, count in COUNTS.items()}


def rows_of(some: list[Meaning], tokenizer: Any, length: int) -> Packed:
    """Pairs in rows: answers are learnt, questions are read."""
    pairs = [Pair("WordNet", one.question, f" {one.text}") for one in some]
    return pack(all_tokens(tokenizer, pairs), length=length, pad=tokenizer.pad_token_id)


def items_of(some: list[Meaning], count: int) -> list[Item]:
    """Questions with four answers, those of words of one part of speech."""
    parts = [[(one.question, one.text) for one in some if one.speech == speech] for speech in SPEECH.values()]
    items = [item for pairs in parts for item in choices_of(pairs[: round(count * len(pairs) / len(some))])]
    return items[:count]
