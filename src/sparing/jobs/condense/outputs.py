"""What a condensation leaves in its folder."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from torch import Tensor

from sparing.jobs.condense.ranks import Ranks
from sparing.jobs.condense.settings import Condense
from sparing.jobs.disk import save_tensors
from sparing.jobs.run import Run

IMAGES, PICTURE = "images.safetensors", "images.png"


def run_of(settings: Condense, ranks: Ranks) -> Run:
    """A run, described; it stays the same whether or not the bytes of other methods are measured too."""
    return Run(settings, writes=(IMAGES, PICTURE), ignore={"compare"}, ranks=ranks)


def save_images(path: Path, images: Tensor, labels: Tensor, kept: Mapping[int, Tensor]) -> None:
    """Write condensed images as safetensors, whole or not at all: names "images", "labels" and "step-00000010"."""
    looks = {f"step-{step:08d}": then for step, then in kept.items()}
    save_tensors(path, {"images": images, "labels": labels, **looks})
