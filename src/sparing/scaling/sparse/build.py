"""Build a C file by the machine's compiler at first use, and keep the library where only this user can write."""

from __future__ import annotations

import ctypes
import hashlib
import os
import platform
import shlex
import shutil
import stat
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path


def load(source: Path, flags: Sequence[str]) -> ctypes.CDLL:
    """Load the library of a C file from the cache, or build it there.

    Args:
        source: C file of plain functions.
        flags: What the compiler is told besides.

    Returns:
        The library; where the cache cannot be written, or is not this user's alone, it is built for this process.

    Raises:
        OSError: If there is no compiler, or no folder from which code may be loaded.
        subprocess.SubprocessError: If the compiler fails or takes longer than two minutes.
    """
    if os.name != "posix":
        raise OSError("it is written for POSIX threads")
    command = [*compiler(), *flags, str(source)]
    name = f"{source.stem}-{_key(source, command)}.so"
    try:
        return _from_cache(command, name)
    except OSError:  # of the folder: read-only, without the right to run code, another user's, no home
        with tempfile.TemporaryDirectory() as apart:
            return ctypes.CDLL(str(_build(command, Path(apart), name)))


def compiler() -> list[str]:
    """Return the words that call the C compiler: those in ``CC``, as in ``ccache gcc``, or the first one installed."""
    named = os.environ.get("CC", "").strip()
    try:
        words = [named] if shutil.which(named) else shlex.split(named)
    except ValueError as error:
        raise OSError(f"CC is {named!r}: {error}") from error
    words = words or [next(filter(None, map(shutil.which, ("cc", "gcc", "clang"))), "")]
    if not (program := shutil.which(words[0])):
        raise FileNotFoundError(f"no C compiler {words[0]}".rstrip())
    return [program, *words[1:]]


def _key(source: Path, command: Sequence[str]) -> str:
    """Return what a library's name must say: its source, the flags, the compiler and the machine, as a hash."""
    # A new compiler may make better code, and has another size or date; so has what a launcher such as ccache calls.
    programs = [Path(found).resolve().stat() for word in command if (found := shutil.which(word))]
    seen = [(program.st_size, program.st_mtime_ns) for program in programs]
    key = repr((source.read_bytes(), command[:-1], seen, platform.machine(), sys.platform))
    return hashlib.sha256(key.encode()).hexdigest()[:16]


def _from_cache(command: Sequence[str], name: str) -> ctypes.CDLL:
    folder = _folder()
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    # Everything is looked at and loaded through this handle: whoever may rename the folder cannot put another there
    # in between. In it nobody else can write.
    handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    try:
        if not _is_private(os.fstat(handle)):
            raise PermissionError(f"others can write in {folder}")
        if not _has(handle, name):
            _build(command, folder, name)
        through = Path(f"/proc/self/fd/{handle}")
        return ctypes.CDLL(str((through if through.is_dir() else folder) / name))
    finally:
        os.close(handle)


def _folder() -> Path:
    """Return this user's folder of libraries; several users may share a cache of data sets."""
    cache = os.environ.get("SPARING_CACHE")
    root = Path(cache or os.environ.get("XDG_CACHE_HOME") or "~/.cache", "" if cache else "sparing")
    try:
        return root.expanduser() / f"kernels-{os.getuid()}"
    except RuntimeError as error:  # a user without an entry and without HOME, as containers have
        raise OSError(str(error)) from error


def _has(handle: int, name: str) -> bool:
    """Tell whether a folder has a file that this user alone could have written."""
    try:
        return _is_private(os.stat(name, dir_fd=handle, follow_symlinks=False))
    except FileNotFoundError:
        return False


def _is_private(found: os.stat_result) -> bool:
    return found.st_uid == os.getuid() and not found.st_mode & (stat.S_IWGRP | stat.S_IWOTH)


def _build(command: Sequence[str], folder: Path, name: str) -> Path:
    """Compile beside the path and rename, so that no other process loads half a file."""
    apart = Path(tempfile.mkdtemp(dir=folder))
    try:
        made = apart / name
        # What compilers say need not be in the locale's encoding.
        call = [*command, "-o", str(made)]
        subprocess.run(call, check=True, capture_output=True, text=True, errors="replace", timeout=120)
        made.chmod(0o700)  # whatever the umask
        return made.replace(folder / name)
    finally:
        shutil.rmtree(apart, ignore_errors=True)
