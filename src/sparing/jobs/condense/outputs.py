"""What a condensation leaves in its directory, and what makes two of them the same."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from sparing.jobs import folder
from sparing.jobs.condense.settings import Condense
from sparing.jobs.disk import save_tensors
from sparing.jobs.folder import Folder

IMAGES, PICTURE = "images.safetensors", "images.png"


def folder_of(settings: Condense) -> Folder:
    """The directory of a run."""
    return Folder(settings.out, resume=settings.resume, overwrite=settings.overwrite, names=(IMAGES, PICTURE))


def identity(settings: Condense) -> dict[str, Any]:
    """What makes two runs the same: all but whether the bytes of other methods are measured too."""
    return folder.identity(settings, harmless={"compare"})


def save_images(path: Path, images: Tensor, labels: Tensor, kept: Mapping[int, Tensor]) -> None:
    """Write condensed images as safetensors, whole or not at all: names "images", "labels" and "step-00000010"."""
    looks = {f"step-{step:08d}": then for step, then in kept.items()}
    save_tensors(path, {"images": images, "labels": labels, **looks})
