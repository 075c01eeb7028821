"""Damaged checkpoints: each is refused in a clear line or is the very same state; none loads to another."""

from __future__ import annotations

import dataclasses
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from sparing.jobs.condense import job
from sparing.jobs.condense.inputs import Inputs

EACH = 5
"""Damaged copies for each kind of damage."""


def _pair(count: int) -> tuple[torch.Tensor, torch.Tensor]:
    images = torch.randint(0, 256, (count, 1, 16, 16), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    return images, torch.arange(count) % 2


@pytest.fixture(scope="module")
def sources(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Any]]:
    """Checkpoints that cost no second: of a job on made-up images without a page, and of an engine of one rank."""
    from benchmarks.trust.sources import SOURCES

    material = Inputs(name="mnist", train=_pair(40), held_out=_pair(8), test=_pair(20), classes=("up", "down"))
    with pytest.MonkeyPatch.context() as patch, warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch's rules of forward mode warn of their own deprecation when first used
        patch.setattr(job, "gather", lambda name, held_out: material)
        patch.setattr(job, "_finish", lambda run, state: None)
        yield {name: SOURCES[name](tmp_path_factory.mktemp("of") / name) for name in ("condense", "sharding")}


@pytest.mark.parametrize("name", ["condense", "sharding"])
def test_no_damaged_checkpoint_loads_to_another_state(sources: dict[str, Any], name: str) -> None:
    from benchmarks.trust.damage import KINDS
    from benchmarks.trust.mutations import APART, tried

    rows = [tried(sources[name], kind, range(EACH)) for kind in KINDS if (name, kind) not in APART]
    assert [row["wrong"] for row in rows if row["wrong"]] == []
    assert all(row["refused"] + row["equal"] == EACH for row in rows)
    # A manifest that is laid out anew, or lacks what is not read, is the same state; damage elsewhere never is.
    assert sum(row["refused"] for row in rows) > 0.9 * EACH * len(rows)


def test_a_loader_that_does_not_look_is_found_out(sources: dict[str, Any]) -> None:
    """The same damage under a loader that trusts what it reads loads silently, or ends in a traceback."""
    from benchmarks.trust.damage import flip, replace, truncate
    from benchmarks.trust.mutations import tried

    def blind(place: Path) -> Any:
        return load_file(sorted((place / "checkpoints").glob("step-*"))[-1] / "tensors.safetensors")

    source = sources["condense"]
    trusting = dataclasses.replace(source, load=blind, state=blind(source.folder))
    rows = [tried(trusting, kind, range(20)) for kind in (flip, replace, truncate)]
    assert all(row["silent"] > 0 for row in rows[:2])
    assert rows[2]["crashed"] > 0
