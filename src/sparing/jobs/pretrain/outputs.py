"""What a run leaves in its directory, and what makes two such runs the same."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

from sparing.jobs import folder
from sparing.jobs.disk import digest
from sparing.jobs.folder import Folder
from sparing.jobs.pretrain.inputs import Inputs
from sparing.jobs.pretrain.settings import Pretrain
from sparing.jobs.sharded import SPREAD

MODEL = "model"  # directory of the finished model, beside what every job writes

# Settings that may differ when a run is resumed: they do not change what is learnt, or count by their tokens.
HARMLESS = {"data", "first", "tokenizer", "eval_every", "checkpoint_every", "device", "samples", "sample_tokens"}

FILES = {"text", "config"}  # parts of the identity that are hashes


def folder_of(settings: Pretrain) -> Folder:
    """The directory of a run."""
    named = [Path(name) for name in (*settings.data, settings.tokenizer)]
    reads = tuple(path for path in (*named, settings.config) if path is not None and path.exists())
    return Folder(settings.out, resume=settings.resume, overwrite=settings.overwrite, names=(MODEL,), reads=reads)


def identity(settings: Pretrain, inputs: Inputs) -> dict[str, Any]:
    """What makes two runs the same: settings as JSON, text by its tokens, a configuration by its content."""
    known = folder.identity(settings, harmless=HARMLESS | set(SPREAD))
    parts = (inputs.train, inputs.validation.rows.ids, inputs.test.rows.ids)
    known["text"] = hashlib.sha256(b"".join(part.numpy().tobytes() for part in parts)).hexdigest()
    if settings.config is not None:
        path = settings.config / "config.json" if settings.config.is_dir() else settings.config
        known["config"] = digest(path)
    return known
