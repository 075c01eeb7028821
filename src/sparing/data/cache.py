"""The folder of fetched assets: one folder each, which appears whole or not at all.

An asset is built in a folder of another name beside its final place and renamed when it and its manifest are complete,
so a folder with the final name is never half-written. The manifest records size and sha256 of every file.
"""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sparing.data.archives import sha256

if TYPE_CHECKING:
    from collections.abc import Iterator

MANIFEST = "sparing-manifest.json"  # name of the manifest inside an asset's folder


@dataclass(frozen=True, kw_only=True, slots=True)
class Manifest:
    """What an asset's folder holds and where it came from."""

    asset: str  # name of the asset
    build: int  # version of the recipe that made the files; another number in the list of assets makes the folder stale
    source: str  # client, package and version
    archive: str  # sha256 of the archive (hexadecimal)
    files: dict[str, dict[str, Any]]  # file name -> ``{"bytes": int, "sha256": str}``


def cache_directory() -> Path:
    """Return the folder that holds fetched assets: ``$SPARING_CACHE``, or ``sparing`` in the user's cache directory.

    Returns:
        An absolute path; the folder need not exist yet.
    """
    if chosen := os.environ.get("SPARING_CACHE"):
        return Path(chosen).expanduser().absolute()
    root = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return (Path(root).expanduser() / "sparing").absolute()


def read_manifest(folder: Path) -> Manifest | None:
    """Read the manifest in an asset's folder; None when there is no readable one."""
    try:
        return Manifest(**json.loads((folder / MANIFEST).read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError, RecursionError):
        return None


def is_complete(folder: Path, manifest: Manifest, *, verify: bool = False) -> bool:
    """Compare an asset's files with its manifest."""
    for name, facts in manifest.files.items():
        path = folder / name
        if not path.is_file() or path.stat().st_size != facts["bytes"]:
            return False
        if verify and sha256(path) != facts["sha256"]:
            return False
    return bool(manifest.files)


def write_manifest(folder: Path, *, asset: str, build: int, source: str, archive: str) -> None:
    """Write the manifest of the files that lie in a folder."""
    # some writers make private files; a cache may be shared, so they get the read bits of their folder
    for path in folder.rglob("*"):
        path.chmod(path.stat().st_mode | (folder.stat().st_mode & 0o444))
    # sorted, so that two builds of the same files have the same manifest
    files = {
        path.relative_to(folder).as_posix(): {"bytes": path.stat().st_size, "sha256": sha256(path)}
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }
    manifest = Manifest(asset=asset, build=build, source=source, archive=archive, files=files)
    (folder / MANIFEST).write_text(json.dumps(asdict(manifest), indent=2) + "\n", encoding="utf-8")


@contextmanager
def staging(root: Path, name: str) -> Iterator[Path]:
    """Give a new folder beside the final places, removed on exit with whatever is still in it."""
    with tempfile.TemporaryDirectory(prefix=f".making-{name}-", dir=root, ignore_cleanup_errors=True) as folder:
        yield Path(folder)


def publish(made: Path, final: Path) -> None:
    """Give a finished folder its final name; what had the name before is removed."""
    if final.exists():
        # a directory cannot be renamed onto one that is not empty, so what was there steps aside first
        with tempfile.TemporaryDirectory(prefix=".old-", dir=final.parent, ignore_cleanup_errors=True) as old:
            final.rename(Path(old) / "was")
            made.rename(final)
    else:
        made.rename(final)


def remove_leftovers(root: Path, name: str) -> None:
    """Remove what killed processes left while making an asset; call it only while holding the asset's lock."""
    for left in root.glob(f".making-{name}-*"):
        shutil.rmtree(left, ignore_errors=True)


@contextmanager
def locked(root: Path, name: str) -> Iterator[None]:
    """Hold the asset's lock, so that of several processes one fetches and the others wait for it.

    The lock is the operating system's and dies with its process. Where there is none (Windows) two processes may fetch
    the same asset at once; renaming keeps what they leave whole.
    """
    root.mkdir(parents=True, exist_ok=True)
    try:
        import fcntl
    except ImportError:
        yield
        return
    # the file is never removed: a process that waits for it would then hold the lock of a file nobody else sees
    with (root / f".lock-{name}").open("w", encoding="utf-8") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield
