"""A failure on one rank is told in the same words on all."""

from __future__ import annotations

import contextlib
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from sparing.errors import RunError, UserError
from sparing.sharding.network.on_ranks import on_all_ranks, on_first_rank


def mesh_of(rank: int, heard: list[torch.Tensor]) -> Any:
    """A mesh whose other ranks have said what they said."""

    def gather(mine: torch.Tensor) -> torch.Tensor:
        return torch.stack([*heard[:rank], mine, *heard[rank:]])

    return SimpleNamespace(rank=rank, ranks=range(len(heard) + 1), gather_scalars=gather)


def said(error: Exception | None) -> torch.Tensor:
    """What a rank sends when its work raises."""
    sent: list[torch.Tensor] = []
    alone: Any = SimpleNamespace(rank=0, ranks=[0], gather_scalars=lambda mine: sent.append(mine) or mine[None])
    with contextlib.suppress(UserError, RunError):
        on_all_ranks(alone, lambda: _fail(error))
    return sent[0]


def _fail(error: Exception | None) -> str:
    if error is not None:
        raise error
    return "done"


MISTAKE = UserError("file", got="nothing — at all", why="it is needed", do="look for it")


@pytest.mark.parametrize("rank", range(3))
def test_a_mistake_keeps_its_words_on_every_rank(rank: int) -> None:
    errors = [None, MISTAKE, RuntimeError("later")]
    others = [said(error) for k, error in enumerate(errors) if k != rank]
    with pytest.raises(UserError) as caught:
        on_all_ranks(mesh_of(rank, others), lambda: _fail(errors[rank]))
    assert str(caught.value) == str(MISTAKE)


def test_another_failure_names_its_rank() -> None:
    with pytest.raises(RunError, match="rank 1 failed: OSError: disk"):
        on_all_ranks(mesh_of(0, [said(OSError("disk"))]), lambda: "done")


def test_only_the_first_rank_works() -> None:
    done: list[int] = []
    for rank in range(2):
        on_first_rank(mesh_of(rank, [said(None)]), lambda rank=rank: done.append(rank))  # type: ignore[misc]
    assert done == [0]


def test_long_words_fit() -> None:
    with pytest.raises(UserError, match="do it"):
        on_all_ranks(mesh_of(0, []), lambda: _fail(UserError("x", got="y" * 5000, why="z", do="do it")))
