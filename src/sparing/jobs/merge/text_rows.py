"""Rows of text for each kind of model: the next token, masked tokens, or a text and its answer."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

import torch
from torch import Tensor

from sparing.errors import UserError, require
from sparing.jobs.lm.files import read
from sparing.jobs.lm.records import Pair
from sparing.jobs.merge.scores import NONE, Rows
from sparing.jobs.subjects.folders import Encoder
from sparing.jobs.subjects.text import token_rows
from sparing.seeds import stream

MASKED: Final = 0.15  # share of the tokens that are masked, as BERT was trained


def text_rows(encoder: Encoder | None, name: str, tokenizer: Any, *, rows: int, length: int, seed: int) -> Rows:
    """Up to ``rows`` rows of ``length`` tokens of a text."""
    if encoder is None:
        return Rows(token_rows(name, tokenizer, rows=rows, length=length))
    if encoder == "masked":
        return _masked(name, tokenizer, rows=rows, length=length, seed=seed)
    if Path(name).suffix in {".jsonl", ".json"}:
        return _answered(name, tokenizer, rows=rows, length=length)
    return _halves(name, tokenizer, rows=rows, length=length)


def joined(parts: Sequence[Rows]) -> Rows:
    """Rows one behind the other."""

    def whole(name: str) -> Tensor | None:
        found = [getattr(part, name) for part in parts]
        return None if found[0] is None else torch.cat(found)

    inputs = whole("inputs")
    assert inputs is not None
    return Rows(inputs, whole("targets"), whole("places"), whole("mask"))


def _masked(name: str, tokenizer: Any, *, rows: int, length: int, seed: int) -> Rows:
    """Rows with the tokenizer's start and end, of whose other tokens a share is masked, alike for all models."""
    mask = tokenizer.mask_token_id
    do = "save the model's own tokenizer with it"
    require(mask is not None, "tokenizer", "no mask token", "an encoder is measured on masked tokens", do)
    ends = [one for one in (tokenizer.cls_token_id, tokenizer.sep_token_id) if one is not None]
    inside = length - len(ends)
    require(inside >= 2, "length", length, "a row holds start, end and two tokens", "pass a larger one")
    plain = token_rows(name, tokenizer, rows=rows, length=inside)
    start = int(tokenizer.cls_token_id is not None)
    count = max(1, round(MASKED * inside))
    places = torch.stack(
        [torch.randperm(inside, generator=stream(seed, "masks", at))[:count] for at in range(len(plain))]
    )
    places = places.sort(1).values
    whole = torch.empty(len(plain), length, dtype=torch.long)
    whole[:, start : start + inside] = plain
    if start:
        whole[:, 0] = tokenizer.cls_token_id
    if tokenizer.sep_token_id is not None:
        whole[:, -1] = tokenizer.sep_token_id
    return Rows(whole.scatter(1, places + start, mask), plain.gather(1, places), places + start)


def _halves(name: str, tokenizer: Any, *, rows: int, length: int) -> Rows:
    """Rows of a plain text: the encoder reads the first half, and the second is the answer."""
    plain = token_rows(name, tokenizer, rows=rows, length=length)
    first, second = plain[:, : length // 2], plain[:, length // 2 :]
    return Rows(first, second, mask=torch.ones_like(first))


def _answered(name: str, tokenizer: Any, *, rows: int, length: int) -> Rows:
    """Prompts and responses of a file, each with the tokenizer's end, cut to ``length`` tokens and padded."""
    source = read(Path(name))
    if source.left_out:
        raise source.left_out[0]
    pairs = [one for one in source.examples if isinstance(one, Pair)]
    do = 'write {"prompt", "response"} a line, or pass a .txt file'
    fits = bool(pairs) and len(pairs) == len(source.examples)
    require(fits, "data", name, "a sequence-to-sequence model answers one text by another", do)
    chosen = [pairs[at] for at in torch.linspace(0, len(pairs) - 1, min(rows, len(pairs))).long().tolist()]
    pad = tokenizer.pad_token_id
    if pad is None:
        raise UserError("tokenizer", got="no padding token", why="pairs differ in length", do="name one in it")
    inputs, read_mask = _padded([_ids(tokenizer, one.prompt, length) for one in chosen], pad, length)
    answers = [_ids(tokenizer, one.response, length) for one in chosen]
    for one, answer in zip(chosen, answers, strict=True):
        require(bool(answer), one.where, "an empty response", "there is nothing to measure", "drop the line")
    targets, _ = _padded(answers, NONE, length)
    return Rows(inputs, targets, mask=read_mask)


def _ids(tokenizer: Any, text: str, length: int) -> list[int]:
    ids: list[int] = tokenizer(text, add_special_tokens=True, verbose=False)["input_ids"]
    return ids[:length]


def _padded(rows: Sequence[Sequence[int]], value: int, length: int) -> tuple[Tensor, Tensor]:
    """Rows of one length, and 1 where a token is."""
    ids = torch.full((len(rows), length), value)
    mask = torch.zeros_like(ids)
    for at, row in enumerate(rows):
        ids[at, : len(row)] = torch.tensor(list(row))
        mask[at, : len(row)] = 1
    return ids, mask
