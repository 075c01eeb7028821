"""The directory of a condensation: whose it is, what may be deleted in it, and the images that it leaves."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from safetensors.torch import save
from torch import Tensor

from sparing.errors import UserError
from sparing.jobs.condense.settings import Condense
from sparing.jobs.finetune.checkpoint import load, refusing_to_write, saved
from sparing.jobs.finetune.outputs import differences
from sparing.jobs.finetune.settings import require
from sparing.report.atomic import write_whole

RUN, RECORD, PAGE, IMAGES, PICTURE, CHECKPOINTS = (
    "run.json", "record.jsonl", "report.html", "images.safetensors", "images.png", "checkpoints",
)  # fmt: skip
OURS = (RUN, RECORD, PAGE, IMAGES, PICTURE, CHECKPOINTS)
"""Every name that a run writes in its directory."""

HARMLESS = {"out", "resume", "overwrite", "save_every", "compare"}
"""Settings that may differ when a run is resumed: they do not change the images."""


def identity(settings: Condense) -> dict[str, Any]:
    """What makes two runs the same.

    Args:
        settings: Of the run.

    Returns:
        Plain values by name of the setting.
    """
    return {name: value for name, value in asdict(settings).items() if name not in HARMLESS}


def check_out(settings: Condense) -> None:
    """Refuse a directory that holds another run; nothing is changed.

    Args:
        settings: ``out``, ``resume`` and ``overwrite``.
    """
    out = settings.out
    require(out.is_dir() or not out.exists(), "out", out, "it is not a directory", "pass another --out")
    if settings.resume:
        there = (out / RUN).is_file()
        require(there, "resume", out, "no run was started there", "leave --resume away, or pass its --out")
        return
    held = [name for name in OURS if (out / name).exists()]
    do = "pass another --out, --resume to go on with it, or --overwrite to delete it"
    require(settings.overwrite or not held, "out", out, f"it holds another run ({', '.join(held)})", do)
    foreign = bool(held) and RUN not in held
    require(not foreign, "overwrite", out, f"no run wrote its {', '.join(held)}", "pass another --out")


def latest(settings: Condense) -> dict[str, Any] | None:
    """The newest checkpoint of a run that is to be resumed.

    Args:
        settings: Of the run.

    Returns:
        Its tree, or None when the run starts at its beginning.

    Raises:
        UserError: If the settings differ from those of the run, or a file is damaged.
    """
    if not settings.resume:
        return None
    try:
        before = json.loads((settings.out / RUN).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        why = f"its {RUN} is broken ({error})"
        raise UserError("resume", got=settings.out, why=why, do="start anew with --overwrite") from None
    if changed := differences(before, identity(settings)):
        why = "a resumed run must reach the same bits"
        raise UserError("resume", got=", ".join(changed), why=why, do="pass the settings of the run, or another --out")
    found = saved(settings.out / CHECKPOINTS)
    return load(found[-1]) if found else None


def claim_(settings: Condense) -> None:
    """Make the directory this run's: delete what may be deleted and leave a mark.

    Args:
        settings: Of the run.
    """
    if settings.resume:
        return
    with refusing_to_write("out", settings.out):
        settings.out.mkdir(parents=True, exist_ok=True)
        for name in OURS:
            path = settings.out / name
            shutil.rmtree(path) if path.is_dir() else path.unlink(missing_ok=True)
        write_whole(settings.out / RUN, json.dumps(identity(settings), indent=2) + "\n")


def save_images(path: Path, images: Tensor, labels: Tensor, kept: Mapping[int, Tensor]) -> Path:
    """Write condensed images as safetensors, whole or not at all.

    Args:
        path: Target.
        images: The final ones, 0 to 1, shape (N, channels, side, side).
        labels: Their classes, int64 (N,).
        kept: Outer step -> the images then.

    Returns:
        The target; names "images", "labels" and "step-00000010".
    """
    tensors = {"images": images.contiguous(), "labels": labels.contiguous()}
    return write_whole(path, save(tensors | {f"step-{step:08d}": then.clone() for step, then in kept.items()}))
