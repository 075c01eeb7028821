"""Atomic writes: a file appears whole or not at all."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path


def write_whole(path: str | os.PathLike[str], content: str | bytes) -> Path:
    """Write under a temporary name beside the target, force it to disk, then rename it over the target.

    Whatever goes wrong (a full disk, a killed process), the file of that name is the old one or the new one; on an
    error the temporary file is removed.
    """
    target = Path(path)
    target.parent.mkdir(parents=True, exist_ok=True)
    data = content.encode() if isinstance(content, str) else content
    try:
        _write(target, data)
    except FileNotFoundError:
        # another process that begins in this folder clears away what a killed one may have left, ours among it
        _write(target, data)
    return target


def _write(target: Path, data: bytes) -> None:
    handle, name = tempfile.mkstemp(dir=target.parent, prefix=f".{target.name}.", suffix=".part")
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        # mkstemp makes files that only their owner reads; the umask can be read only by setting it
        mask = os.umask(0)
        os.umask(mask)
        Path(name).chmod(0o666 & ~mask)
        Path(name).replace(target)
    except BaseException:
        Path(name).unlink(missing_ok=True)
        raise
