"""Directions shared out over processes: each rank takes some, only scalars travel, a lost rank is left out."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta

import torch
from torch import Tensor
from torch.distributed import Store  # type: ignore[attr-defined]  # a builtin, not in its list of names

from sparing.errors import RunError, UserError


@dataclass(frozen=True, kw_only=True)
class Spread:
    """Processes that estimate one hypergradient together, over a ``torch.distributed`` store.

    Rank r takes directions r, r + size, …; it sends its weights w_i (eight bytes each) and makes the directions of the
    others again from their seeds. Rank 0 waits up to ``timeout`` for each rank and tells all the same result: weights
    of a rank that did not deliver are missing, the mean is over the rest, and the estimate stays unbiased because who
    fails does not depend on the directions.

    Use a fresh ``key`` for each outer step. Rank 0 must live; it holds the store anyway.
    """

    store: Store
    """Where weights are left, such as a TCPStore or a FileStore."""
    rank: int
    """This process, from 0."""
    size: int
    """Processes in all (count)."""
    key: str = "0"
    """Name of this outer step, the same on all ranks and never used twice."""
    timeout: float = 300.0
    """How long rank 0 waits for another (s)."""

    def __post_init__(self) -> None:
        """Refuse a rank outside the group."""
        if not 0 <= self.rank < self.size:
            raise UserError("rank", got=self.rank, why=f"there are {self.size}", do="pass 0 <= rank < size")

    def owned(self, count: int) -> range:
        """Numbers of the directions that this rank takes, of ``count``."""
        return range(self.rank, count, self.size)

    def exchange(self, weights: Tensor, count: int) -> Tensor:
        """Leave this rank's weights and get those of all.

        Args:
            weights: Of the owned directions, in order, shape (len(owned),).
            count: Directions in all b.

        Returns:
            Shape (b,); not a number where a rank was lost.

        Raises:
            RunError: If rank 0 is lost.
        """
        self.store.set(self._key(self.rank), _packed(weights.double().tolist()))
        if self.rank == 0:
            self.store.set(self._key("all"), _packed(self._collected(count)))
        try:
            self.store.wait([self._key("all")], timedelta(seconds=self.timeout * (self.size + 1)))
        except RuntimeError as failure:
            raise RunError(f"rank 0 did not answer within {self.timeout * (self.size + 1):.0f} s: {failure}") from None
        whole = json.loads(self.store.get(self._key("all")))
        return torch.tensor(whole, dtype=weights.dtype, device=weights.device)

    def _collected(self, count: int) -> list[float]:
        """All weights by number; those of lost ranks are not numbers."""
        whole = [math.nan] * count
        for rank in range(self.size):
            numbers = range(rank, count, self.size)
            try:
                self.store.wait([self._key(rank)], timedelta(seconds=self.timeout))
            except RuntimeError:  # it did not deliver: its directions are left out
                continue
            for number, weight in zip(numbers, json.loads(self.store.get(self._key(rank))), strict=True):
                whole[number] = weight
        return whole

    def _key(self, who: int | str) -> str:
        return f"hypergrad/{self.key}/{who}"


def _packed(weights: Sequence[float]) -> str:
    return json.dumps(list(weights))
