"""What a run leaves in its directory, and what makes two of them the same."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from sparing.jobs import folder
from sparing.jobs.adapt.settings import Adapt
from sparing.jobs.disk import digest
from sparing.jobs.folder import Folder

WEIGHTS, BASE = "weights", "base.safetensors"  # learned weights by method; the tuned θ₀

HARMLESS = {"seconds", "steps", "methods"}
"""Settings that may differ when a run is resumed: they say how far it goes, not where."""


def folder_of(settings: Adapt) -> Folder:
    """The directory of a run; what it reads is safe there."""
    elsewhere = () if settings.elsewhere is None else (settings.elsewhere,)
    reads = (Path(settings.model), *settings.books, *elsewhere)
    return Folder(
        settings.out, resume=settings.resume, overwrite=settings.overwrite, names=(WEIGHTS, BASE), reads=reads
    )


def weights_of(settings: Adapt, name: str) -> Path:
    """File of the network that a method learned."""
    return settings.out / WEIGHTS / f"{name}.safetensors"


def identity(settings: Adapt) -> dict[str, Any]:
    """What makes two runs the same: plain settings, text files by their hash."""
    known = folder.identity(settings, harmless=HARMLESS)
    files = {str(at): digest(path) for at, path in enumerate(settings.books)}
    if settings.elsewhere is not None:
        files["elsewhere"] = digest(settings.elsewhere)
    return {**known, "books": None, "elsewhere": None, "model": Path(settings.model).name, "files": files}
