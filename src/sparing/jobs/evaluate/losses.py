"""The loss of every record by itself, so that two models can be compared record by record."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from sparing.jobs.lm.labels import IGNORED, Tokens
from sparing.jobs.lm.packing import Packed, pack, pieces
from sparing.jobs.torch_state import device_of, measuring, to_device


def row_losses(model: nn.Module, rows: Packed) -> Tensor:
    """Summed next-token loss of each row (nat), float64, shape (rows,), on the CPU."""
    device = device_of(model)
    ids, labels = to_device(rows.ids, device), rows.labels[:, 1:]
    with measuring(model):
        # padding is on the right, where nothing that counts looks
        logits = model(input_ids=ids, use_cache=False).logits[:, :-1]
        logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
        each = F.cross_entropy(
            logits.transpose(1, 2), to_device(labels, device), ignore_index=IGNORED, reduction="none"
        )
    return each.double().sum(1).cpu()


def predicted(piece: Tokens) -> int:
    """Tokens of a row that count (count); its first is predicted by nothing."""
    return sum(label != IGNORED for label in piece.labels[1:])


class Measurement:
    """Losses of records, a batch of rows a step: a loop that can stop and go on."""

    def __init__(
        self, records: Sequence[Tokens], *, length: int, batch: int, pad: int, left: Mapping[str, Any] | None = None
    ) -> None:
        """Cut the records into rows of at most ``length`` tokens; ``left`` is what ``tree`` gave."""
        rows = [(at, piece) for at, one in enumerate(records) for piece in pieces(one, length) if predicted(piece)]
        # long ones first: rows of a batch are padded to its longest, and memory is known from the first on
        rows.sort(key=lambda row: -len(row[1].ids))
        self._batches = [rows[start : start + batch] for start in range(0, len(rows), batch)]
        self._length, self._pad = length, pad
        self.counts = [0] * len(records)  # tokens that are predicted, of each record
        for at, piece in rows:
            self.counts[at] += predicted(piece)
        self.step = 0 if left is None else int(left["step"])
        before = [piece for some in self._batches[: self.step] for _, piece in some]
        self._known = sum(predicted(piece) for piece in before)
        self.sums: list[float] = [0.0] * len(records) if left is None else list(left["sums"])

    @property
    def total(self) -> int:
        """Batches (count)."""
        return len(self._batches)

    def tree(self) -> Mapping[str, Any]:
        """What is known so far."""
        return {"step": self.step, "sums": self.sums}

    def take_step(self, model: nn.Module) -> dict[str, float]:
        """Measure one batch; returns the loss of all rows so far."""
        chosen = self._batches[self.step]
        rows = pack([piece for _, piece in chosen], length=self._length, pad=self._pad, packing=False)
        for (at, _), loss in zip(chosen, row_losses(model, rows).tolist(), strict=True):
            self.sums[at] += loss
        self.step += 1
        self._known += rows.tokens
        return {"loss": sum(self.sums) / self._known}
