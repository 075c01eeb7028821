"""What the demo trains and on what: a real pretrained model and real text of another kind, as far as it is available.

Stories15M and a children's book of 1907 come through npm; SmolLM2 and encyclopaedia text through pip; with no network
at all, a tiny model is trained here on text that ships with the package, and says so.
"""

from __future__ import annotations

import itertools
import logging
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from sparing.data import asset, available, bundled_text, fetch, load_text, wiki_articles
from sparing.errors import UserError
from sparing.jobs.demo.settings import Scale, Source
from sparing.jobs.lm.models import load_model, load_tokenizer
from sparing.jobs.lm.packing import Packed, pack_stream

LOG = logging.getLogger("sparing.demo")


@dataclass(frozen=True, kw_only=True, slots=True)
class Inputs:
    """A model on disk, text cut into rows, and how long a run on two cores may be."""

    model: Path  # Hugging Face directory
    title: str  # model and text, in words
    licence: str  # of both
    train: Packed  # rows to train on, (rows, length)
    dev: Packed  # rows that pick the learning rate
    test: Packed  # rows that nothing is chosen by
    prompts: tuple[str, ...]  # openings from the test text, for samples
    steps: int  # optimizer steps of a full run (count)
    trial: int  # optimizer steps of a run that tries a learning rate (count)
    batch: int  # rows a step (count)
    rates: Mapping[str, tuple[float, ...]]  # learning rates to try, by arm

    def load(self) -> tuple[nn.Module, Any]:
        """A fresh fp32 copy of the model, and its tokenizer."""
        return load_model(self.model, dtype=torch.float32), load_tokenizer(self.model)


RATES = {
    "full": (1e-5, 3e-5, 1e-4),
    "LISA": (3e-5, 1e-4, 3e-4),
    "LISA, embedding frozen": (3e-5, 1e-4, 3e-4),
    "LoRA": (1e-4, 3e-4, 1e-3),
}
"""Rates to try, a factor of about three apart, around what a pretrained model of 15 to 135 M parameters likes."""

TINY_RATES = {arm: tuple(30 * rate for rate in rates) for arm, rates in RATES.items()}
"""A model of under a million parameters takes larger steps."""


def split(ids: list[int], length: int, *, rows: tuple[int, int, int]) -> tuple[Packed, Packed, Packed]:
    """Cut one text into training, development and test rows, in this order and without overlap.

    ``rows`` are at most so many of each; too short a text shrinks all three alike.
    """
    have, want = len(ids) // length, sum(rows)
    if have < 3:
        raise UserError("text", got=f"{len(ids)} tokens", why=f"three rows of {length} are needed", do="give more text")
    # a short text shrinks all three parts, and leaves each a row
    share = min(1.0, have / want)
    dev = min(max(1, int(rows[1] * share)), have - 2)
    test = min(max(1, int(rows[2] * share)), have - 1 - dev)
    train = min(rows[0], have - dev - test)
    ends = list(itertools.accumulate((0, train, dev, test)))
    cuts = [pack_stream(ids[length * a : length * b], length) for a, b in itertools.pairwise(ends)]
    return cuts[0], cuts[1], cuts[2]


def unwrapped(text: str) -> str:
    r"""Join the lines of each paragraph; a printed book breaks them where its page ends.

    Example:
        >>> unwrapped("Once upon\na time.\n\nThe end.")
        'Once upon a time.\n\nThe end.'
    """
    return re.sub(r"(?<!\n)\n(?!\n)", " ", text)


def _cut(model: Path, text: str, *, length: int, rows: int, held: int = 12) -> dict[str, Any]:
    """A text in the tokens of a model: rows to train on, held-out ones twice, and two openings of twelve words."""
    tokenizer = load_tokenizer(model)
    ids = tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]
    train, dev, test = split(ids, length, rows=(rows, held, held))
    texts = [tokenizer.decode(row, skip_special_tokens=True) for row in test.ids[:8:2]]
    starts = [text.split(". ", 1)[-1].split() for text in texts]  # at a sentence where there is one
    prompts = tuple(" ".join(start[:12]) for start in starts if len(start) >= 12)[:2]
    return {"model": model, "train": train, "dev": dev, "test": test, "prompts": prompts}


def stories(out: Path) -> Inputs:
    """Stories15M, trained by its authors on invented children's stories, on a real book of them."""
    model, text = fetch("stories15m"), unwrapped(load_text("bryant-stories"))
    licence = f"{asset('stories15m').licence}; {asset('bryant-stories').licence}"
    title = "stories15M (15 M parameters) on Bryant's Stories to Tell to Children"
    cut = _cut(model, text, length=128, rows=4 * 32)
    return Inputs(title=title, licence=licence, rates=RATES, batch=4, steps=32, trial=6, **cut)


def smollm(out: Path) -> Inputs:
    """SmolLM2-135M on encyclopedia text; nine times the parameters, so fewer steps."""
    model = fetch("smollm2-135m-instruct")
    text = "\n".join(itertools.islice(wiki_articles(load_text("enwik8", first=2_000_000)), 40))
    licence = f"{asset('smollm2-135m-instruct').licence}; {asset('enwik8').licence}"
    title = "SmolLM2 (135 M parameters) on encyclopaedia text (enwik8)"
    cut = _cut(model, text, length=64, rows=2 * 8, held=6)
    return Inputs(title=title, licence=licence, rates=RATES, batch=2, steps=8, trial=2, **cut)


def bundled(out: Path) -> Inputs:
    """A tiny model trained here on one of the texts that ship with the package, fine-tuned on the other."""
    from sparing.jobs.demo.tiny import make_tiny_model

    model = make_tiny_model(out / "tiny-model", bundled_text("alice"))
    title = "a tiny Llama trained here on Alice in Wonderland, on Blake's poems"
    cut = _cut(model, bundled_text("blake"), length=128, rows=4 * 32)
    return Inputs(title=title, licence="public domain", rates=TINY_RATES, batch=4, steps=32, trial=6, **cut)


def first_look(whole: Inputs, *, rows: int = 4) -> Inputs:
    """The same model and text for a quarter of the steps: no search for a rate, fewer rows to judge by."""
    steps = min(whole.steps, max(4, whole.steps // 4))
    rates = {arm: tried[len(tried) // 2 :][:1] for arm, tried in whole.rates.items()}

    def first(packed: Packed, count: int) -> Packed:
        kept = None if packed.positions is None else packed.positions[:count]
        return replace(packed, ids=packed.ids[:count], labels=packed.labels[:count], positions=kept)

    return replace(
        whole, train=first(whole.train, steps * whole.batch), dev=first(whole.dev, rows), trial=1, rates=rates,
        test=first(whole.test, rows), steps=steps, prompts=whole.prompts[:1],
    )  # fmt: skip


def gather(source: Source, out: Path, scale: Scale) -> Inputs:
    """Take the source that is asked for, or the first that is available; fewer rows at the scale tiny."""
    makers: dict[str, Callable[[Path], Inputs]] = {"stories": stories, "smollm": smollm, "bundled": bundled}
    needs = {"stories": "stories15m", "smollm": "smollm2-135m-instruct"}
    whole = None
    for name, make in makers.items() if source == "auto" else [(source, makers[source])]:
        try:
            whole = make(out)
            break
        except UserError as missing:
            if source != "auto" or name not in needs:
                raise
            have = "in the cache but unusable" if available(needs[name]) else "not available"
            LOG.warning("demo: %s is %s (%s); trying the next", needs[name], have, missing)
    assert whole is not None
    return first_look(whole) if scale == "tiny" else whole
