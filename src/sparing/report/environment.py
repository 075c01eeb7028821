"""Where numbers come from: versions, machine, commit and command, without names of people, hosts or folders."""

from __future__ import annotations

import contextlib
import os
import platform
import re
import shlex
import sys
from collections.abc import Sequence
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path, PurePath, PureWindowsPath
from typing import Any

from sparing.errors import without_password

_PACKAGES = ("sparing", "torch", "numpy", "transformers", "peft", "datasets", "safetensors")
_FOLDERS = re.compile(r"""(?:(?<=^)|(?<=[\s=,:;"'(\[{@]))(?:~|[A-Za-z]:\\|/)[^=,;"')\]}]*""")


def environment(*, device: bool = True) -> dict[str, Any]:
    """Describe this process and machine, for the head of a record.

    Args:
        device: Whether torch is asked for its threads and devices; without, it is not loaded, and both are left out.

    Returns:
        Plain JSON: ``python``, ``platform``, ``cpu``, ``cores`` (count this process may use), ``memory`` (bytes, None
        where unknown), ``threads`` (of torch), ``cuda`` (device name, None without), one entry per installed package,
        ``commit`` (of the running sources, None where they are not a checkout), ``command`` and ``time`` (UTC). No user
        name, host name, absolute path or password of a URL.
    """
    memory = None
    # Windows has no ``sysconf``, and not every system knows both names
    with contextlib.suppress(AttributeError, OSError, ValueError):
        memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    versions = {}
    for name in _PACKAGES:
        with contextlib.suppress(metadata.PackageNotFoundError):
            versions[name] = metadata.version(name)
    return {
        "python": platform.python_version(),
        "platform": f"{platform.system()} {platform.machine()}",
        "cpu": _cpu(),
        # the cores that this process may use: os.cpu_count() counts those of the machine
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1,
        "memory": memory,
        **(_torch() if device else {}),
        **versions,
        "commit": commit(),
        "command": command(sys.argv),
        "time": datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC"),
    }


def _torch() -> dict[str, Any]:
    """Threads of torch, and its devices."""
    import torch

    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    several = f"{count} × " if count > 1 else ""
    return {"threads": torch.get_num_threads(), "cuda": several + torch.cuda.get_device_name(0) if count else None}


def without_folders(text: str) -> str:
    """Reduce a text that is one absolute path to its last name; other texts are kept.

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

    Example:
        >>> command(["/opt/env/bin/sparing", "finetune", "/data/stories", "--out=/srv/run 1", "--lr", "1e-4"])
        "sparing finetune stories '--out=run 1' --lr 1e-4"
    """
    if not arguments:
        return ""

    def last_name(match: re.Match[str]) -> str:
        return re.split(r"[/\\]", match.group().rstrip("/\\"))[-1]

    program, *rest = arguments
    path = PurePath(program)
    if path.name == "__main__.py":
        start = ["python", "-m", path.parent.name]
    else:
        start = ["python", path.name] if path.suffix == ".py" else [path.name]
    return shlex.join([*start, *(_FOLDERS.sub(last_name, without_password(word)) for word in rest)])


def version() -> str:
    """The installed version of this package; ``from source`` where it runs from a folder that was not installed."""
    with contextlib.suppress(metadata.PackageNotFoundError):
        return metadata.version("sparing")
    return "from source"


def commit() -> str | None:
    """Name the commit of the checkout that holds the running sources; files that differ from it are not reported."""
    # read from the files of .git, for git is not started: a repository may name programs that git would run
    root = Path(__file__).resolve().parent.parent.parent.parent
    if not (root / "src" / "sparing").is_dir():
        return None
    with contextlib.suppress(OSError, UnicodeDecodeError):
        git = root / ".git"
        # a worktree: the file names the folder of its HEAD
        if git.is_file():
            git = git.parent / _read(git).removeprefix("gitdir:").strip()
        head = _read(git / "HEAD")
        name = _commit_of(git, head.removeprefix("ref:").strip()) if head.startswith("ref:") else head
        return name[:12] if re.fullmatch(r"[0-9a-f]{40}|[0-9a-f]{64}", name) else None
    return None


def _commit_of(git: Path, name: str) -> str:
    """The commit that a branch points to; a worktree shares the branches of the checkout it belongs to."""
    shared = git / _read(git / "commondir") if (git / "commondir").is_file() else git
    for path in (git / name, shared / name):
        if path.is_file():
            return _read(path)
    packed = (line.partition(" ") for line in _read(shared / "packed-refs").splitlines())
    return next((commit for commit, _, branch in packed if branch == name), "")


def _read(path: Path) -> str:
    return path.read_text(encoding="utf-8").strip()


def _cpu() -> str:
    try:
        listing = Path("/proc/cpuinfo").read_text(encoding="utf-8")
    except OSError:
        listing = ""
    model = re.search(r"^(?:model name|Model)\s*:\s*(.+)$", listing, re.MULTILINE)
    return model.group(1).strip() if model else platform.processor() or platform.machine()
