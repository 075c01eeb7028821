"""Directions shared among processes: each rank takes some, only weights or columns travel, a lost rank is omitted."""

from __future__ import annotations

import base64
import math
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta

import torch
from torch import Tensor
from torch.distributed import Store  # type: ignore[attr-defined]  # a builtin, not in its list of names

from sparing.errors import RunError, UserError, require


@dataclass(frozen=True, kw_only=True)
class Spread:
    """Processes that estimate one hypergradient, or make one Jacobian, together, over a ``torch.distributed`` store.

    Rank r takes directions r, r + size, …; it sends its weights w_i (eight bytes each) and regenerates the directions
    of the others from their seeds; of a Jacobian it sends columns. Rank 0 waits up to ``timeout`` for each rank and
    tells all the same result: weights of a rank that did not deliver are missing, the mean is over the rest, and the
    estimate stays unbiased because who fails does not depend on the directions; missing columns are made by all that
    are left. Two more numbers identify the run, and those of another run are refused.

    Use a fresh ``key`` for each outer step. Rank 0 must stay alive; it holds the store anyway.
    """

    store: Store
    """Where ranks put their weights, such as a TCPStore or a FileStore."""
    rank: int
    """This process, from 0."""
    size: int
    """Processes in all (count)."""
    key: str = "0"
    """Name of this outer step, the same on all ranks and never used twice."""
    timeout: float = 300.0
    """How long rank 0 waits for another (s)."""

    def __post_init__(self) -> None:
        require(0 <= self.rank < self.size, "rank", self.rank, f"there are {self.size}", "pass 0 <= rank < size")

    def owned(self, count: int) -> range:
        """Numbers of the directions that this rank takes, of ``count``."""
        return range(self.rank, count, self.size)

    def exchange(self, weights: Tensor, count: int, run: Sequence[float] = ()) -> Tensor:
        """Put this rank's weights into the store and get those of all.

        Args:
            weights: Weights of the owned directions, in order, shape (len(owned),), or a column each, (len(owned), m).
            count: Directions in all b.
            run: What identifies a run, as of ``FirstPass.signature``: a name, a sum, and its rounding (which is not
                sent); or nothing.

        Returns:
            Shape (b,) or (b, m); not a number where a rank was lost.

        Raises:
            RunError: If rank 0 is lost.
            UserError: If a rank ran something other than rank 0: its weights would belong to another gradient.
        """
        self.leave(weights, run)
        others: list[tuple[int, list[float]]] = []
        shape = (count, *weights.shape[1:])
        if self.rank == 0:
            whole, others = self._collect(count, len(run[:2]), math.prod(shape[1:]))
            self.store.set(self._key("all"), _pack([*run[:2], *whole]))
        try:
            self.store.wait([self._key("all")], timedelta(seconds=self.timeout * (self.size + 1)))
        except RuntimeError as failure:
            raise RunError(f"rank 0 did not answer within {self.timeout * (self.size + 1):.0f} s: {failure}") from None
        shared = _unpack(self.store.get(self._key("all")))
        header = len(run[:2])
        for rank, theirs in [*others, (self.rank, list(run[:2]))]:
            _refuse_other_run(rank, theirs, shared[:header], run[-1] if run else 0.0)
        return torch.tensor(shared[header:], dtype=weights.dtype, device=weights.device).reshape(shape)

    def leave(self, weights: Tensor, run: Sequence[float] = ()) -> None:
        """Put this rank's part into the store.

        Args:
            weights: As of ``exchange``.
            run: Likewise.
        """
        self.store.set(self._key(self.rank), _pack([*run[:2], *weights.double().reshape(-1).tolist()]))

    def _collect(self, count: int, header: int, height: int) -> tuple[list[float], list[tuple[int, list[float]]]]:
        """Weights of all directions, ``height`` each, NaN for those of lost ranks; (rank, signature) of the others."""
        whole, runs = [math.nan] * (count * height), []
        for rank in range(self.size):
            try:
                self.store.wait([self._key(rank)], timedelta(seconds=self.timeout))
            except RuntimeError:  # a timeout: the directions of this rank are left out
                continue
            received = _unpack(self.store.get(self._key(rank)))
            runs.append((rank, received[:header]))
            columns = [received[low : low + height] for low in range(header, len(received), height)]
            for number, column in zip(range(rank, count, self.size), columns, strict=True):
                whole[number * height : (number + 1) * height] = column
        return whole, runs

    def _key(self, who: int | str) -> str:
        return f"hypergrad/{self.key}/{who}"


def _refuse_other_run(rank: int, run: Sequence[float], first: Sequence[float], tolerance: float) -> None:
    """Refuse a rank whose signature has another hash, or another sum by more than rounding."""
    if not run or (run[0] == first[0] and abs(run[1] - first[1]) <= tolerance):
        return
    raise UserError(
        "spread", got=f"another run on rank {rank} than on rank 0",
        why="directions that are averaged must belong to one gradient",
        do="give all ranks the same problem, φ, seed and method, and no randomness of their own",
    )  # fmt: skip


def _pack(numbers: Sequence[float]) -> str:
    """Numbers as text, to the bit: a store takes strings."""
    return base64.b64encode(struct.pack(f"<{len(numbers)}d", *numbers)).decode()


def _unpack(text: bytes | str) -> list[float]:
    raw = base64.b64decode(text)
    return list(struct.unpack(f"<{len(raw) // 8}d", raw))
