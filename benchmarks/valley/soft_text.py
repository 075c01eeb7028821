"""Gaps of averages of language models as unlabelled text tells them, against the gaps on other text.

One model is fine-tuned on each of three books, at two rates, and kept after a few, some and many steps; two of the
results, of different books, are averaged. Rows of both books' last fifth, which no model read, tell the gap, by their
next tokens and by the ensemble's own answers; other rows of the same fifth judge.
"""

from __future__ import annotations

import functools
import itertools
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from benchmarks.valley.cases import folder, kept
from benchmarks.valley.store import Store
from sparing.data import fetch, load_text
from sparing.seeds import stream
from sparing.valley.forecast.soft_labels import measure_gaps
from sparing.valley.merging.merge import merge
from sparing.valley.scans.evaluators import NextToken

PAIRS = tuple(itertools.combinations(("alice", "burgess-busterbrown", "bryant-stories"), 2))


@dataclass(frozen=True, kw_only=True, slots=True)
class Subject:
    """A language model, how it is fine-tuned, and how many rows tell and judge."""

    name: str
    """In the catalogue."""
    rates: tuple[float, ...]
    """AdamW's, constant: the model is looked at on the way."""
    stops: tuple[tuple[int, int], ...]
    """Steps after which the first and the second of a pair are taken."""
    batch: int
    """Rows of a step."""
    length: int
    """Tokens of a row."""
    told: int
    """Rows of a forecast, half of each book."""
    judged: int
    """Rows of the truth, half of each book."""


SUBJECTS = (
    Subject(
        name="stories15m", rates=(3e-4, 3e-3), stops=((5, 5), (20, 20), (60, 60), (160, 160), (20, 160)), batch=4,
        length=96, told=128, judged=256,
    ),
    Subject(
        name="smollm2-135m-instruct", rates=(3e-5, 3e-4), stops=((4, 4), (12, 12), (40, 40)), batch=2, length=64,
        told=32, judged=64,
    ),
)  # fmt: skip
JUDGED = 32
"""Tokens of a row that tells or judges."""


def soft_text() -> None:
    """Every pair's gap as forecast and as measured."""
    store = Store("soft_text")
    for subject in SUBJECTS:
        for books, rate, stops in itertools.product(PAIRS, subject.rates, subject.stops):
            key = f"{subject.name} {' + '.join(books)} {rate:g} {stops[0]} {stops[1]}"
            store.once(key, lambda at=(subject, books, rate, stops): _row(*at))


def _row(subject: Subject, books: tuple[str, str], rate: float, stops: tuple[int, int]) -> dict[str, Any]:
    model, measures = fresh(subject.name), []
    a, b = (_expert(subject, book, rate, stop) for book, stop in zip(books, stops, strict=True))
    told, judged = zip(*(_held(subject, book) for book in books), strict=True)
    begun = time.process_time()
    found = measure_gaps(a, b, torch.cat(told).split(4), model=model)
    seconds = time.process_time() - begun
    soft = measure_gaps(a, b, torch.cat(told).split(4), model=model, labels=False)
    measure = NextToken(torch.cat(judged), batch_size=4)
    for state in (a, b, merge([a, b])):
        model.load_state_dict(state)
        measures.append(measure.each(model))
    row: dict[str, Any] = {
        "case": subject.name, "seed": 0, "start": f"{rate:g}", "epoch": stops[0], "books": list(books),
        "stops": list(stops), "rows": len(found.values), "truth": len(measure), "seconds": seconds,
    }  # fmt: skip
    for at, metric in enumerate(("loss", "error")):
        true = measures[2][metric] - (measures[0][metric] + measures[1][metric]) / 2
        row[f"{metric} told"], row[f"{metric} sampling"] = _mean(found.values[:, at])
        row[f"{metric} soft"], row[f"{metric} soft sampling"] = _mean(soft.values[:, at])
        row[f"{metric} true"], row[f"{metric} true sampling"] = _mean(true)
    return row


def _mean(values: Tensor) -> tuple[float, float]:
    """Mean, and its standard error over rows."""
    return float(values.mean()), float(values.std()) / len(values) ** 0.5


def fresh(name: str) -> nn.Module:
    """The model as published."""
    from transformers import AutoModelForCausalLM

    model: nn.Module = AutoModelForCausalLM.from_pretrained(fetch(name), dtype=torch.float32).eval()
    return model


@functools.cache
def _tokens(name: str, book: str) -> Tensor:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(fetch(name))
    return torch.tensor(tokenizer(load_text(book), add_special_tokens=False)["input_ids"])


def _held(subject: Subject, book: str) -> tuple[Tensor, Tensor]:
    """Rows that tell and rows that judge, drawn from the last fifth of a book."""
    ids = _tokens(subject.name, book)
    rows = ids[len(ids) * 8 // 10 :].unfold(0, JUDGED, JUDGED)
    order = torch.randperm(len(rows), generator=stream(0, "held rows", book))
    told, judged = subject.told // 2, subject.judged // 2
    # A short book's fifth is shared in the same proportion
    told, judged = (min(each, len(rows) * each // (told + judged)) for each in (told, judged))
    return rows[order[:told]], rows[order[told : told + judged]]


def _expert(subject: Subject, book: str, rate: float, stop: int) -> Mapping[str, Tensor]:
    """The state after some steps on a book; the whole run is made when it is first asked for."""
    stops = sorted({each for pair in subject.stops for each in pair})
    names = {each: f"{subject.name}-soft-{book}-{rate:g}-{each}" for each in stops}
    if not (folder() / f"{names[stops[-1]]}.safetensors").exists():
        _learn_(fresh(subject.name), subject, book, rate, names)
    return load_file(folder() / f"{names[stop]}.safetensors")


def _learn_(model: nn.Module, subject: Subject, book: str, rate: float, names: Mapping[int, str]) -> None:
    ids = _tokens(subject.name, book)
    rows = ids[: len(ids) * 8 // 10].unfold(0, subject.length, subject.length // 2)
    optimizer = torch.optim.AdamW(model.parameters(), rate, weight_decay=0.01)
    generator = stream(0, "rows", book)
    model.train()
    for step in range(1, max(names) + 1):
        chosen = rows[torch.randint(0, len(rows), (subject.batch,), generator=generator)]
        optimizer.zero_grad()
        model(input_ids=chosen, labels=chosen).loss.backward()
        optimizer.step()
        if step in names:
            kept(names[step], model, lambda: None)
            model.train()
