"""The directory of a run: whose it is, the tuned base model, the learnt weights."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from safetensors.torch import load_file, save_file
from torch import Tensor

from sparing.errors import UserError
from sparing.jobs.adapt.settings import Adapt
from sparing.jobs.finetune import checkpoint
from sparing.report.atomic import write_whole
from sparing.report.record import plain

RUN, RECORD, PAGE, WEIGHTS, CHECKPOINTS, BASE = (
    "run.json", "record.jsonl", "report.html", "weights", "checkpoints", "base.safetensors",
)  # fmt: skip

HARMLESS = {"out", "resume", "seconds", "steps", "methods"}
"""Settings that may differ when a run is resumed: they say how far it goes, not where."""


def identity(settings: Adapt) -> dict[str, Any]:
    """What makes two runs the same.

    Args:
        settings: Of the run.

    Returns:
        Plain settings; text files by their hash.
    """
    known = {name: value for name, value in plain(settings).items() if name not in HARMLESS}
    files = {str(at): checkpoint.digest(path) for at, path in enumerate(settings.books)}
    if settings.elsewhere is not None:
        files["elsewhere"] = checkpoint.digest(settings.elsewhere)
    return {**known, "books": None, "elsewhere": None, "model": Path(settings.model).name, "files": files}


def claim_(settings: Adapt) -> None:
    """Take an empty directory, or go on in one's own.

    Args:
        settings: ``out`` and ``resume``.

    Raises:
        UserError: If it holds a run and ``resume`` is off, holds none and it is on, or holds another run.
    """
    mark, now = settings.out / RUN, identity(settings)
    if settings.resume != mark.is_file():
        why, do = ("no run was started there", "leave --resume away")
        if mark.is_file():
            why, do = ("it holds a run", "pass --resume to go on with it, or another --out")
        raise UserError("out", got=settings.out, why=why, do=do)
    if not settings.resume:
        with checkpoint.refusing_to_write("out", settings.out):
            settings.out.mkdir(parents=True, exist_ok=True)
            write_whole(mark, json.dumps(now, indent=2) + "\n")
        return
    before = json.loads(mark.read_text(encoding="utf-8"))
    if odd := [name for name in now if before.get(name) != now[name]]:
        why = "a resumed run must reach the same bits"
        raise UserError("resume", got=f"other {', '.join(odd)}", why=why, do="pass the settings of the run")


def latest(settings: Adapt) -> dict[str, Any] | None:
    """The newest checkpoint.

    Args:
        settings: ``out`` and ``resume``.

    Returns:
        Its tree; None where there is none or the run begins.
    """
    found = checkpoint.saved(settings.out / CHECKPOINTS) if settings.resume else []
    return checkpoint.load(found[-1]) if found else None


def save_tensors(path: Path, tensors: Mapping[str, Tensor]) -> None:
    """Write tensors whole or not at all.

    Args:
        path: Target, safetensors.
        tensors: By name.
    """
    with checkpoint.refusing_to_write("saving", path):
        path.parent.mkdir(parents=True, exist_ok=True)
        draft = path.with_name(f".{path.name}.draft")
        save_file({name: value.detach().contiguous().clone() for name, value in tensors.items()}, draft)
        draft.replace(path)


def load_tensors(path: Path) -> dict[str, Tensor]:
    """Read what ``save_tensors`` wrote.

    Args:
        path: Where.

    Returns:
        Tensors by name.
    """
    return load_file(path)
