"""A pretrained model and a real book: what the study of learned importance trains, and how long."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from sparing.data import bundled_text, cache_directory, load_text
from sparing.jobs.demo.inputs import unwrapped
from sparing.jobs.demo.tiny import make_tiny_model
from sparing.jobs.lm.losses import held_out_loss
from sparing.jobs.lm.models import load_model, load_tokenizer
from sparing.jobs.lm.packing import Packed, pack_stream
from sparing.seeds import stream


@dataclass(frozen=True, kw_only=True)
class Case:
    """A model and the pace at which it is tuned on Bryant's Stories to Tell to Children."""

    name: str
    title: str
    place: Callable[[], Path]
    """Gives the model's folder; made or fetched when first asked."""

    rates: tuple[float, ...]
    """Peak rates that every arm tries."""

    batch: int
    """Rows of a step (count)."""

    steps: int
    """Budget, in uniform steps of the mean cost (count)."""

    length: int = 64
    """Tokens of a row."""

    period: int = 5
    """Steps between draws, K."""

    inner: int = 5
    """Steps of the inner run by which importance is learned, T."""

    inner_batch: int = 2
    """Rows of such a step (count)."""

    rounds: int = 2
    """Hypergradients in all."""

    step: float = 1.0
    """Length of a step in φ, along the negative hypergradient."""

    outer: int = 8
    """Rows of the outer loss; they are used for nothing else."""

    dev: int = 48
    """Rows that choose the rate."""

    test: int = 96
    """Rows that choose nothing."""


def tiny() -> Path:
    """A Llama of 0.8 M parameters, trained here on Alice in Wonderland, kept in the cache."""
    return make_tiny_model(cache_directory() / "benchmarks-composition" / "tiny", bundled_text("alice"), steps=300)


CASES = {
    case.name: case
    for case in (
        Case(
            name="tiny", title="Llama, 0.8 M parameters, trained here on Alice in Wonderland", place=tiny,
            rates=(1e-3, 3e-3, 1e-2), batch=4, steps=120,
        ),
    )
}  # fmt: skip


@dataclass(frozen=True)
class Rows:
    """The rows of one seed, each in one part only."""

    train: Packed
    outer: Packed
    dev: Packed
    test: Packed


@functools.cache
def text(case: Case) -> Packed:
    """The whole book as rows of tokens."""
    ids: Any = load_tokenizer(case.place())(
        unwrapped(load_text("bryant-stories")), add_special_tokens=False, verbose=False
    )
    return pack_stream(ids["input_ids"], case.length)


def rows_of(case: Case, seed: int) -> Rows:
    """Split the book at random; every seed has another split."""
    book = text(case)
    order = torch.randperm(book.rows, generator=stream(seed, "composition", "split"))
    outer, dev, test, train = order.split(
        [case.outer, case.dev, case.test, book.rows - case.outer - case.dev - case.test]
    )
    return Rows(*(_taken(book, rows) for rows in (train, outer, dev, test)))


def _taken(book: Packed, rows: Tensor) -> Packed:
    return Packed(book.ids[rows], book.labels[rows])


def batch_of(case: Case, rows: Rows, seed: int, step: int) -> Tensor:
    """Training rows of a step, the same for every arm."""
    order = torch.randperm(rows.train.rows, generator=stream(seed, "composition", "order"))
    return order[torch.arange(step * case.batch, (step + 1) * case.batch) % len(order)]


def fresh(case: Case) -> nn.Module:
    """The pretrained model. Eager attention, for all arms alike: it alone has second derivatives."""
    model: Any = load_model(case.place(), dtype=torch.float32)
    model.set_attn_implementation("eager")
    return model.eval()  # it has no dropout


def loss_on(model: nn.Module, rows: Packed) -> float:
    """Mean loss (nat/token)."""
    return held_out_loss(model, rows, batch=16)[0]
