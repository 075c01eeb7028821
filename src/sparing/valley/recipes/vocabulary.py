"""Embeddings brought to one vocabulary: row t of every model is that of token t of the result."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import Tensor

from sparing.errors import require
from sparing.valley.merging.method import Slices, recut, slice_lengths
from sparing.valley.recipes.parts import Part

# Tensors whose rows are tokens: input and output embeddings, and the bias of the latter
BY_TOKEN: Final = re.compile(
    r"(^|\.)(embed_tokens|wte|word_embeddings|tok_embeddings|embed_in|embed_out|lm_head|shared|decoder\.bias)"
    r"(\.(weight|bias))?$"
)
INPUT_EMBEDDING: Final = re.compile(r"(^|\.)(embed_tokens|wte|word_embeddings|tok_embeddings|embed_in|shared)\.weight$")


@dataclass(frozen=True, slots=True)
class Vocabulary:
    """The tokens of the result, and of each model; rows beyond the tokens are the mean of all."""

    tokens: Mapping[str, int]  # of the result
    models: Sequence[Mapping[str, int]]  # of each model, in the order of the recipe's models
    names: Sequence[str]  # of these models
    rules: Mapping[str, Any]  # of a recipe: where embeddings of single tokens come from
    base: int | None
    pad_to: int

    @property
    def rows(self) -> int:
        """Rows of the result's embeddings (count)."""
        highest = max(self.tokens.values(), default=-1) + 1
        return -(-highest // self.pad_to) * self.pad_to


@dataclass(frozen=True, slots=True)
class Row:
    """Where a row comes from: the mean of rows of models; a row of zeros where there are none."""

    sources: tuple[tuple[int, int], ...]  # (place of a model, row)


MEAN: Final = Row(((-1, -1),))  # of all rows of tokens that the model has


def aligned(vocabulary: Vocabulary, at: int, places: Sequence[int], parts: Sequence[Part]) -> Slices:
    """The embedding of one model in the rows of the result; ``places`` are the models that ``parts`` are of."""
    heights = {place: part.shape[0] for place, part in zip(places, parts, strict=True)}
    rows = [MEAN] * vocabulary.rows
    for token, row in vocabulary.tokens.items():
        rows[row] = _source(vocabulary, token, places[at], heights)
    by_place = dict(zip(places, parts, strict=True))
    shape = (vocabulary.rows, *parts[at].shape[1:])
    count = shape[0] * (parts[at].entry.count // max(1, parts[at].shape[0]))
    means: list[Tensor] = []

    def read() -> Iterator[Tensor]:
        if MEAN in rows and not means:
            total = torch.zeros(shape[1:], dtype=torch.float64)
            known = [row for row in rows if row is not MEAN]
            for block in _blocks(known, by_place, shape[1:], []):
                total += block.double().sum(0)
            means.append((total / max(1, len(known))).float())
        return recut((block.reshape(-1) for block in _blocks(rows, by_place, shape[1:], means)), slice_lengths(count))

    return Slices(read, shape)


def _source(vocabulary: Vocabulary, token: str, place: int, heights: Mapping[int, int]) -> Row:
    """Where a model's row for a token is: its own, or, as mergekit has it, the base's, the only one's, or the mean."""
    # A token beyond the rows of its model has no embedding there
    has = {
        one: found for one in heights
        if (found := vocabulary.models[one].get(token, -1)) >= 0 and found < heights[one]
    }  # fmt: skip
    rule = vocabulary.rules.get(token) or {}
    if place in has and not rule.get("force"):
        return Row(((place, has[place]),))
    if rule.get("source") is not None:
        return _ruled(vocabulary, token, rule["source"], heights)
    if not has:
        return MEAN
    if vocabulary.base in has:
        return Row(((vocabulary.base, has[vocabulary.base]),))
    return Row(tuple(has.items()))


def _ruled(vocabulary: Vocabulary, token: str, source: Any, heights: Mapping[int, int]) -> Row:
    """The row that a recipe names for a token."""
    if isinstance(source, dict) and source.get("kind") == "zero":
        return Row(())
    wanted = source.get("token", token) if isinstance(source, dict) else token
    model = source.get("model") if isinstance(source, dict) else source
    why, do = "its embedding comes from a model of the recipe", "name one, or kind: zero"
    require(model in vocabulary.names, f"tokenizer, tokens, {token!r}", source, why, do)
    place = vocabulary.names.index(model)
    given = source.get("token_id") if isinstance(source, dict) else None
    row = vocabulary.models[place].get(wanted, -1) if given is None else int(given)
    why, do = f"{model} has no such row", "name a token that it has"
    require(0 <= row < heights.get(place, 0), f"tokenizer, tokens, {token!r}", wanted, why, do)
    return Row(((place, row),))


def _blocks(
    rows: Sequence[Row], parts: Mapping[int, Part], shape: tuple[int, ...], means: Sequence[Tensor]
) -> Iterator[Tensor]:
    """Read rows in order; those that follow each other in a file are read at once, at most 64."""
    at = 0
    while at < len(rows):
        sources = rows[at].sources
        if len(sources) != 1 or rows[at] is MEAN:
            found = [parts[place].rows(row, 1).float() for place, row in sources] if rows[at] is not MEAN else means
            total = sum(found, torch.zeros((1, *shape)))
            yield total / max(1, len(found))
            at += 1
            continue
        place, first = sources[0]
        end = at + 1
        while end < len(rows) and end - at < 64 and rows[end].sources == ((place, first + end - at),):
            end += 1
        yield parts[place].rows(first, end - at).float()
        at = end
