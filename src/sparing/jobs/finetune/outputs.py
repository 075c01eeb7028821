"""The directory of a run: whose it is, and what may be deleted in it."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from sparing.errors import UserError
from sparing.jobs.finetune.checkpoint import digest, load, refusing_to_write, saved
from sparing.jobs.finetune.models import fingerprint
from sparing.jobs.finetune.settings import Finetune, require

RUN, RECORD, PAGE, MODEL, ADAPTER, CHECKPOINTS = (
    "run.json", "record.jsonl", "report.html", "model", "adapter", "checkpoints",
)  # fmt: skip
OURS = (RUN, RECORD, PAGE, MODEL, ADAPTER, CHECKPOINTS)
"""Every name that a run writes in its directory."""

HARMLESS = {"out", "resume", "overwrite", "save_every", "evaluate_every", "device", "lisa", "lora"}
"""Settings that may differ when a run is resumed: they do not change what is learnt."""


def identity(settings: Finetune) -> dict[str, Any]:
    """What makes two runs the same: settings as JSON, files by their content.

    Args:
        settings: Of the run.

    Returns:
        Plain values by name of the setting.

    Raises:
        UserError: If a file cannot be read.
    """
    known = {name: value for name, value in asdict(settings).items() if name not in HARMLESS}
    if settings.method != "full":
        own = asdict(settings.lisa if settings.method == "lisa" else settings.lora)
        known |= {f"{settings.method}.{name}": value for name, value in own.items()}
    known["model"] = fingerprint(settings.model)
    for name in ("data", "held_out_data"):
        path = getattr(settings, name)
        known[name] = path and digest(path)
    plain: dict[str, Any] = json.loads(json.dumps(known, default=str))
    return plain


def differences(before: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """The settings in which two runs differ.

    Args:
        before: One identity.
        now: The other.

    Returns:
        A few words per setting; of files, only that they changed.
    """
    files = {"model", "data", "held_out_data"}
    names = [name for name in {**before, **now} if before.get(name) != now.get(name)]
    return [f"{n} (other content)" if n in files else f"{n} ({before.get(n)} before, now {now.get(n)})" for n in names]


def check_out(settings: Finetune) -> None:
    """Refuse a directory that holds another run; nothing is changed.

    Args:
        settings: ``out``, ``resume`` and ``overwrite``.

    Raises:
        UserError: If the directory is none, holds a run that may not be touched, or none that can be resumed.
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
    read = [path.resolve() for path in (settings.model, settings.data, settings.held_out_data) if path is not None]
    doomed = [path for path in read if any(path.is_relative_to((out / name).resolve()) for name in held)]
    require(not doomed, "overwrite", out, "this run reads from what it would delete", "pass another --out")


def latest(settings: Finetune, now: Mapping[str, Any]) -> dict[str, Any] | None:
    """The newest checkpoint of a run that is to be resumed.

    Args:
        settings: ``out`` and ``resume``.
        now: Identity of the present settings.

    Returns:
        Its tree, or None when the run starts at its beginning.

    Raises:
        UserError: If the settings differ from those of the run, or the checkpoint is damaged.
    """
    if not settings.resume:
        return None
    try:
        before = json.loads((settings.out / RUN).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        why = f"its {RUN} is broken ({error})"
        raise UserError("resume", got=settings.out, why=why, do="start anew with --overwrite") from None
    if changed := differences(before, now):
        why = "a resumed run must reach the same bits"
        raise UserError("resume", got=", ".join(changed), why=why, do="pass the settings of the run, or another --out")
    found = saved(settings.out / CHECKPOINTS)
    return load(found[-1]) if found else None


def claim_(settings: Finetune, now: Mapping[str, Any]) -> None:
    """Make the directory this run's: delete what may be deleted and leave a mark.

    Args:
        settings: ``out``, ``resume`` and ``overwrite``.
        now: Identity of the run.

    Raises:
        UserError: If the directory cannot be written.
    """
    if settings.resume:
        return
    with refusing_to_write("out", settings.out):
        settings.out.mkdir(parents=True, exist_ok=True)
        for name in OURS:
            path = settings.out / name
            shutil.rmtree(path) if path.is_dir() else path.unlink(missing_ok=True)
        draft = settings.out / f".{RUN}.draft"
        draft.write_text(json.dumps(dict(now), indent=2) + "\n", encoding="utf-8")
        draft.replace(settings.out / RUN)
