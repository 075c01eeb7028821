"""What a run leaves in its directory, and what makes two of them the same."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from sparing.jobs.adapt.settings import Adapt
from sparing.jobs.disk import digest
from sparing.jobs.run import Run

WEIGHTS, BASE = "weights", "base.safetensors"  # learned weights by method; the tuned θ₀

HARMLESS = {"seconds", "steps", "methods"}
"""Settings that may differ when a run is resumed: they say how far it goes, not where."""


def run_of(settings: Adapt) -> Run:
    """A run, described; what it reads is safe in its folder."""
    reads = (Path(settings.model), *settings.books, settings.elsewhere)
    return Run(settings, writes=(WEIGHTS, BASE), reads=reads, ignore=HARMLESS)


def weights_of(settings: Adapt, name: str) -> Path:
    """File of the network that a method learned."""
    return settings.out / WEIGHTS / f"{name}.safetensors"


def identity(settings: Adapt) -> dict[str, Any]:
    """What makes two runs the same beside the plain settings: the model by its name, texts by their hash."""
    files = {str(at): digest(path) for at, path in enumerate(settings.books)}
    if settings.elsewhere is not None:
        files["elsewhere"] = digest(settings.elsewhere)
    return {"books": None, "elsewhere": None, "model": Path(settings.model).name, "files": files}
