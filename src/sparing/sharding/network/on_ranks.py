"""Work whose failure on one rank is everybody's: all raise the same error, and none waits for who has left."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, TypeVar

import torch
from safetensors import SafetensorError

from sparing.errors import RunError, UserError
from sparing.report import Progress

if TYPE_CHECKING:
    from sparing.sharding.network.mesh import Mesh

ERROR_BYTES = 1024  # bytes of an error that travel

_Result = TypeVar("_Result")


def on_all_ranks(mesh: Mesh, work: Callable[[], _Result]) -> _Result:
    """Do work on every rank and return its result; if one rank failed, all raise that rank's error. All call; blocking.

    The work may read and write files but must not communicate.
    """
    # Nothing else is caught: an interrupt or a failed assertion must end this rank at once.
    results: list[_Result] = []
    failure: Exception | None = None
    try:
        results.append(work())
    except (OSError, ValueError, RuntimeError, KeyError, SafetensorError) as caught:
        failure = caught
    for rank, row in zip(mesh.ranks, mesh.gather_scalars(_packed(failure)), strict=True):
        if row.any():
            parts = bytes(row.tolist()).rstrip(b"\0").decode(errors="ignore").split("\x1f")
            if len(parts) == 4:
                raise UserError(parts[0], got=parts[1], why=parts[2], do=parts[3]) from failure
            raise RunError(f"rank {rank} failed: {parts[0]}") from failure
    return results[0]


def on_first_rank(mesh: Mesh, work: Callable[[], object]) -> None:
    """Let rank 0 work while all others wait for it and share its failure."""
    on_all_ranks(mesh, work if mesh.rank == 0 else lambda: None)


@contextlib.contextmanager
def progress_on_first_rank(mesh: Mesh, label: str, total: int, unit: str) -> Iterator[Callable[[], object]]:
    """Rank 0 shows a progress bar, unless the label is empty; yields what to call after each unit."""
    if mesh.rank or not label:
        yield lambda: None
        return
    with Progress(label, total=total, unit=unit) as bar:
        yield bar.advance


def _packed(failure: Exception | None) -> torch.Tensor:
    """Fixed length, so that one gather does; a user's mistake keeps its four parts."""
    text = ""
    if isinstance(failure, UserError):
        text = "\x1f".join(
            str(part)[: ERROR_BYTES // 4] for part in (failure.what, failure.got, failure.why, failure.do)
        )
    elif failure is not None:
        text = f"{type(failure).__name__}: {failure}"
    return torch.frombuffer(bytearray(text.encode()[:ERROR_BYTES].ljust(ERROR_BYTES, b"\0")), dtype=torch.uint8)
