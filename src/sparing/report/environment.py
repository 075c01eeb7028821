"""Where numbers come from: versions, machine, commit and command, without names of people, hosts or folders."""

from __future__ import annotations

import os
import platform
import re
import shlex
import subprocess
import sys
from collections.abc import Sequence
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path, PurePath, PureWindowsPath
from typing import Any

_PACKAGES = ("sparing", "torch", "numpy", "transformers", "peft", "datasets", "safetensors")
_FOLDERS = re.compile(r"""(?:(?<=^)|(?<=[\s=,:;"'(\[{@]))(?:~|[A-Za-z]:\\|/)[^=,;"')\]}]*""")


def environment() -> dict[str, Any]:
    """Describe this process and machine, for the head of a record.

    Returns:
        Plain JSON: ``python``, ``platform``, ``cpu``, ``cores`` (count this process may use), ``memory`` (bytes, None
        where unknown), ``threads`` (of torch), ``cuda`` (device name, None without), one entry per installed package,
        ``commit`` (of the current folder, None outside a checkout), ``command`` and ``time`` (UTC). No user name, host
        name or absolute path.
    """
    return {
        "python": platform.python_version(),
        "platform": f"{platform.system()} {platform.machine()}",
        "cpu": _cpu(),
        "cores": _cores(),
        "memory": _memory(),
        "threads": _threads(),
        "cuda": _cuda(),
        **_versions(),
        "commit": commit(),
        "command": command(sys.argv),
        "time": datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC"),
    }


def without_folders(text: str) -> str:
    """Reduce a text that is one absolute path to its last name; other texts are kept.

    Args:
        text: A path or any other text.

    Returns:
        The last name of an absolute path, or the text.

    Example:
        >>> without_folders("/data/models/stories"), without_folders("models/stories"), without_folders("and / or")
        ('stories', 'models/stories', 'and / or')
    """
    path = PureWindowsPath(text) if re.match(r"[A-Za-z]:[\\/]", text) else PurePath(text)
    if text.startswith("~") and len(path.parts) > 1:
        return path.name
    return path.name if path.is_absolute() and len(path.parts) > 2 and "\n" not in text else text


def command(arguments: Sequence[str]) -> str:
    """Write a command line as one would type it, absolute paths reduced to their last names.

    Args:
        arguments: ``sys.argv``.

    Returns:
        One line, quoted for a shell.

    Example:
        >>> command(["/opt/env/bin/sparing", "finetune", "/data/stories", "--out=/srv/run 1", "--lr", "1e-4"])
        "sparing finetune stories '--out=run 1' --lr 1e-4"
    """
    if not arguments:
        return ""
    program, *rest = arguments
    path = PurePath(program)
    if path.name == "__main__.py":
        start = ["python", "-m", path.parent.name]
    else:
        start = ["python", path.name] if path.suffix == ".py" else [path.name]
    return shlex.join([*start, *(_FOLDERS.sub(_last_name, word) for word in rest)])


def _last_name(match: re.Match[str]) -> str:
    text = match.group().rstrip("/\\")
    return re.split(r"[/\\]", text)[-1]


def commit() -> str | None:
    """Name the commit of the current folder, "-dirty" where files differ from it; None outside a checkout."""
    describe = ["git", "describe", "--always", "--dirty", "--abbrev=12", "--exclude=*"]
    try:
        done = subprocess.run(describe, capture_output=True, text=True, timeout=2, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip() or None


def _versions() -> dict[str, str]:
    found = {}
    for name in _PACKAGES:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return found


def _cpu() -> str:
    try:
        listing = Path("/proc/cpuinfo").read_text(encoding="utf-8")
    except OSError:
        listing = ""
    model = re.search(r"^(?:model name|Model)\s*:\s*(.+)$", listing, re.MULTILINE)
    return model.group(1).strip() if model else platform.processor() or platform.machine()


def _cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _memory() -> int | None:
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (AttributeError, OSError, ValueError):
        return None


def _threads() -> int:
    import torch

    return torch.get_num_threads()


def _cuda() -> str | None:
    import torch

    if not torch.cuda.is_available():
        return None
    count = torch.cuda.device_count()
    return (f"{count} × " if count > 1 else "") + torch.cuda.get_device_name(0)
