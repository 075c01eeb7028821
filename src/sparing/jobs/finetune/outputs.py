"""What a fine-tuning run leaves in its directory, and what makes two such runs the same."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from sparing.jobs import folder
from sparing.jobs.disk import digest
from sparing.jobs.finetune.settings import Finetune
from sparing.jobs.folder import Folder
from sparing.jobs.lm.models import hash_folder
from sparing.jobs.sharded import SPREAD
from sparing.report.record import plain

MODEL, ADAPTER = "model", "adapter"  # directories that a run writes beside what every job does

# Settings that may differ when a run is resumed: they do not change what is learnt.
HARMLESS = {"evaluate_every", "device", "lisa", "lora"}

FILES = {"model", "data", "held_out_data"}  # settings that count by the content of what they name


def folder_of(settings: Finetune) -> Folder:
    """The directory of a run."""
    reads = tuple(path for path in (settings.model, settings.data, settings.held_out_data) if path is not None)
    return Folder(
        settings.out, resume=settings.resume, overwrite=settings.overwrite, names=(MODEL, ADAPTER), reads=reads
    )


def identity(settings: Finetune) -> dict[str, Any]:
    """What makes two runs the same: settings as JSON, files by their content."""
    # Settings of the methods that are not in use are harmless; those of the one in use come back by name.
    known = folder.identity(settings, harmless=HARMLESS | set(SPREAD))
    if settings.method != "full":
        own = asdict(settings.lisa if settings.method == "lisa" else settings.lora)
        known |= {f"{settings.method}.{name}": value for name, value in plain(own).items()}
    known["model"] = hash_folder(settings.model)
    for name in ("data", "held_out_data"):
        path = getattr(settings, name)
        known[name] = path and digest(path)
    return known
