"""The processes of a run as one of them sees them: who writes, who reads which rows, and what all agree on.

One process runs the same code; nothing is sent then.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeVar

import torch
from torch import Tensor

if TYPE_CHECKING:
    from sparing.sharding.network.mesh import Mesh

_Result = TypeVar("_Result")


# without slots: with them no subclass can have fields of its own
@dataclass(frozen=True)
class Ranks:
    """All processes of a run; without a mesh there is one. Methods are collective: every process calls them."""

    mesh: Mesh | None = None

    @property
    def rank(self) -> int:
        """This process, from 0."""
        return 0 if self.mesh is None else self.mesh.rank

    @property
    def world(self) -> int:
        """Processes (count)."""
        return 1 if self.mesh is None else self.mesh.world

    @property
    def first(self) -> bool:
        """Whether this process writes and prints."""
        return self.rank == 0

    @property
    def several(self) -> bool:
        """Whether there are others."""
        return self.world > 1

    def on_all_ranks(self, work: Callable[[], _Result]) -> _Result:
        """Do work that sends nothing on every process; if one fails, all raise its error."""
        if not self.several:
            return work()
        # here, because every command imports this module and most need no network
        from sparing.sharding.network.on_ranks import on_all_ranks

        assert self.mesh is not None
        return on_all_ranks(self.mesh, work)

    def on_first_rank(self, work: Callable[[], object]) -> None:
        """Let the first work, and the others wait for it and share its failure."""
        self.on_all_ranks(work if self.first else lambda: None)

    def check_same(self, facts: object) -> None:
        """Refuse to start where processes differ."""
        if self.several:
            from sparing.sharding.network.consistency import check_same

            assert self.mesh is not None
            check_same(self.mesh, facts, "run")

    def sum(self, number: float) -> float:
        """A number added up over the processes, the same bits on all."""
        if not self.several:
            return number
        assert self.mesh is not None
        # gathered and added here, in the order of the ranks: that gives the same bits on all
        return float(self.mesh.gather_scalars(torch.tensor([number], dtype=torch.float64)).sum())

    def total(self, value: Tensor) -> Tensor:
        """A number added up over the processes, float64, shape (); of one process it stays on its device."""
        return torch.tensor(self.sum(float(value)), dtype=torch.float64) if self.several else value.double()

    def agree_to_stop(self, signals: list[int]) -> list[int]:
        """Signals on account of which all stop: those of any process."""
        return signals if not self.several else [1] if self.sum(len(signals)) else []

    def part(self, rows: Tensor) -> Tensor:
        """The share of this process in some rows, shape (n,); none where there are fewer rows than processes."""
        # not ``chunk``, which gives fewer parts than processes where rows are few
        return torch.tensor_split(rows, self.world)[self.rank]

    def share(self, rows: Tensor) -> list[Tensor]:
        """The rows that this process reads in each micro-step, of those of one step, shape (accumulate, batch).

        Over all processes and micro-steps every row comes once, and no process holds more at a time than one alone.
        """
        return [self.part(micro) for micro in torch.tensor_split(rows.flatten(), micro_steps(len(rows), self.world))]

    @property
    def seed_labels(self) -> tuple[int, ...]:
        """What tells the dropout of this process from that of others; one process draws as if it were none of many."""
        return (self.rank,) if self.several else ()


ONE_PROCESS = Ranks()


def micro_steps(accumulate: int, world: int) -> int:
    """Micro-steps of a rank in a step of so many micro-batches, so that none holds more rows than one process would.

    Example:
        >>> micro_steps(8, 1), micro_steps(8, 3), micro_steps(2, 4)
        (8, 3, 1)
    """
    return math.ceil(accumulate / world)
