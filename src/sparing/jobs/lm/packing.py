"""Rows of equal length, filled with several examples each or padded with one."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from sparing.errors import UserError
from sparing.jobs.lm.labels import IGNORED, Tokens

if TYPE_CHECKING:
    from sparing.jobs.lm.mixture import Mixture


@dataclass(frozen=True, slots=True, eq=False)
class Packed:
    """Token rows, ready to train on."""

    ids: Tensor  # token ids, int64, shape (rows, length)
    labels: Tensor  # ids where they are learnt, −100 elsewhere, int64, shape (rows, length); not shifted

    # Place of each token in its own document, int64, shape (rows, length), restarting at 0 with each; the model then
    # keeps documents apart. None where each row is one document.
    positions: Tensor | None = None
    cut: int = 0  # tokens that did not fit and were left out (count)
    dropped: int = 0  # examples left out because none of what is learnt fitted (count)
    mixture: Mixture | None = None  # how many rows of each file a pass draws; None: every row once

    @property
    def rows(self) -> int:
        """Number of rows."""
        return self.ids.shape[0]

    @property
    def length(self) -> int:
        """Tokens per row."""
        return self.ids.shape[1]

    @property
    def tokens(self) -> int:
        """Labels that count towards the loss: the first token of a row is never predicted."""
        return int((self.labels[:, 1:] != IGNORED).sum())

    def taken(self, rows: Tensor) -> Packed:
        """Some of the rows, int64, shape (n,)."""
        return Packed(self.ids[rows], self.labels[rows], None if self.positions is None else self.positions[rows])


def pack_stream(ids: Sequence[int] | Tensor, length: int) -> Packed:
    """Cut one long text into rows, learnt whole; the tail that does not fill a row is dropped."""
    flat = torch.as_tensor(ids, dtype=torch.int64)
    rows = len(flat) // length
    if not rows:
        raise UserError("length", got=length, why=f"the text has {len(flat)} tokens", do="pass a smaller length")
    table = flat[: rows * length].view(rows, length)
    return Packed(table, table.clone(), cut=len(flat) - rows * length)


def pieces(tokens: Tokens, length: int) -> list[Tokens]:
    """An example cut to what rows can hold: a text learnt whole goes on in the next row, an answer is cut off."""
    if IGNORED in tokens.labels:
        return [Tokens(tokens.ids[:length], tokens.labels[:length])]
    starts = range(0, len(tokens.ids), length)
    return [Tokens(tokens.ids[s : s + length], tokens.labels[s : s + length]) for s in starts]


def _fill(pieces: Sequence[Tokens], length: int) -> list[list[Tokens]]:
    """Lay pieces into rows, first fit among the sixteen rows opened last, so that order hardly changes."""
    rows: list[list[Tokens]] = []
    room: list[int] = []
    for piece in pieces:
        recent = range(max(0, len(rows) - 16), len(rows))
        place = next((index for index in recent if room[index] >= len(piece.ids)), None)
        if place is None:
            rows.append([])
            room.append(length)
            place = -1
        rows[place].append(piece)
        room[place] -= len(piece.ids)
    return rows


def _lay(rows: Sequence[Sequence[Tokens]], length: int, pad: int) -> tuple[Tensor, Tensor, Tensor]:
    shape = (len(rows), length)
    ids, labels = torch.full(shape, pad), torch.full(shape, IGNORED)
    positions = torch.zeros(shape, dtype=torch.int64)
    for index, row in enumerate(rows):
        start = 0
        for piece in row:
            stop = start + len(piece.ids)
            ids[index, start:stop] = torch.tensor(piece.ids)
            # The first token of a document is predicted by nothing, least of all by the document before it.
            labels[index, start + 1 : stop] = torch.tensor(piece.labels[1:])
            positions[index, start:stop] = torch.arange(stop - start)
            start = stop
        positions[index, start:] = torch.arange(length - start)
    return ids, labels, positions


def pack(examples: Sequence[Tokens], *, length: int, pad: int, packing: bool = True) -> Packed:
    """Lay examples into rows of at most ``length`` tokens.

    A text longer than a row continues in another; a prompt with its answer is truncated. With packing, a row holds
    several documents whose positions each start at 0, and the first token of each is not predicted. Without, rows are
    padded on the right to the longest example, and padding is never learnt.
    """
    parts = [piece for tokens in examples for piece in pieces(tokens, length)]
    kept = [piece for piece in parts if any(label != IGNORED for label in piece.labels[1:])]
    if not kept:
        why = "every prompt alone is longer than a row, so no answer is left"
        raise UserError("length", got=f"{length} tokens", why=why, do="pass a larger --length")
    width = length if packing else max(len(piece.ids) for piece in kept)
    rows = _fill(kept, width) if packing else [[piece] for piece in kept]
    ids, labels, positions = _lay(rows, width, pad)
    several = any(len(row) > 1 for row in rows)
    cut = sum(len(tokens.ids) for tokens in examples) - sum(len(piece.ids) for piece in kept)
    return Packed(ids, labels, positions if several else None, cut=cut, dropped=len(parts) - len(kept))
