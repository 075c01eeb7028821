"""Small models, rows and arms of the study of layer sampling, for its tests; ``benchmarks`` must be importable."""

from __future__ import annotations

from typing import Any

import torch

from sparing.jobs.lm.packing import Packed, pack_stream

PACE: dict[str, Any] = {"steps": 6, "batch": 2, "accumulate": 1, "warmup": 1}


def rows(count: int = 24, *, vocabulary: int = 64, length: int = 128) -> Packed:
    """Numbers that count upwards from a random start: a model of any size learns them."""
    starts = torch.randint(0, vocabulary, (count, 1), generator=torch.Generator().manual_seed(0))
    return pack_stream(((starts + torch.arange(length)) % vocabulary).flatten(), length)


def tiny(**changes: Any) -> Any:
    from benchmarks.layers.base import Recipe

    return Recipe(
        **{"layers": 4, "width": 32, "hidden": 48, "heads": 2, "vocabulary": 300, "batch": 2, "steps": 6, "warmup": 2}
        | changes
    )


def arm(name: str) -> Any:
    from benchmarks.layers.arms import ARMS

    return next(one for one in ARMS if one.name == name)
