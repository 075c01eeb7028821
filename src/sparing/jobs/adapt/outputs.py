"""What a run leaves in its directory, and what makes two of them the same."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from sparing.jobs import folder
from sparing.jobs.adapt.settings import Adapt
from sparing.jobs.disk import digest
from sparing.jobs.folder import Folder

WEIGHTS, BASE = "weights", "base.safetensors"
"""What a run writes beside what every job does: learnt weights by method, and the tuned model θ₀."""

HARMLESS = {"seconds", "steps", "methods"}
"""Settings that may differ when a run is resumed: they say how far it goes, not where."""


def folder_of(settings: Adapt) -> Folder:
    """The directory of a run.

    Args:
        settings: Of the run.

    Returns:
        Where it writes; what it reads is safe there.
    """
    elsewhere = () if settings.elsewhere is None else (settings.elsewhere,)
    reads = (Path(settings.model), *settings.books, *elsewhere)
    return Folder(
        settings.out, resume=settings.resume, overwrite=settings.overwrite, names=(WEIGHTS, BASE), reads=reads
    )


def weights_of(settings: Adapt, name: str) -> Path:
    """File of the network that a method learnt.

    Args:
        settings: Of the run.
        name: The method.

    Returns:
        Its path.
    """
    return settings.out / WEIGHTS / f"{name}.safetensors"


def identity(settings: Adapt) -> dict[str, Any]:
    """What makes two runs the same.

    Args:
        settings: Of the run.

    Returns:
        Plain settings; text files by their hash.
    """
    known = folder.identity(settings, harmless=HARMLESS)
    files = {str(at): digest(path) for at, path in enumerate(settings.books)}
    if settings.elsewhere is not None:
        files["elsewhere"] = digest(settings.elsewhere)
    return {**known, "books": None, "elsewhere": None, "model": Path(settings.model).name, "files": files}
