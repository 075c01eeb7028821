"""Take named members out of tar and zip archives without trusting a single name in them.

Nothing of an archive is executed, and nothing is written except the members asked for, under names that we choose.
"""

from __future__ import annotations

import gzip
import hashlib
import lzma
import tarfile
import zipfile
import zlib
from contextlib import contextmanager
from pathlib import PurePosixPath
from typing import IO, TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping
    from pathlib import Path

CHUNK = 1 << 20  # bytes read or written at a time


class ArchiveError(Exception):
    """An archive is not what its pin or its list of members says; the message is one short reason."""


def sha256(path: Path) -> str:
    """Return the sha256 of a file as 64 hexadecimal digits, reading a mebibyte at a time."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def check_sha256(path: Path, expected: str) -> None:
    """Compare a file with its pinned checksum."""
    if (got := sha256(path)) != expected:
        raise ArchiveError(f"sha256 of {path.name} is {got[:12]}…, pinned is {expected[:12]}…")


def check_name(name: str) -> None:
    """Refuse a member name that could point outside the folder it is unpacked into."""
    path = PurePosixPath(name)
    # backslash and colon are harmless here, but on Windows part folders and name drives
    if path.is_absolute() or ".." in path.parts or "\\" in name or "\0" in name or ":" in name.split("/")[0]:
        raise ArchiveError(f"archive member {name!r} points outside its folder")


def unpack(archive: Path, members: Mapping[str, str], into: Path, *, limit: int) -> None:
    """Write the named members of an archive into a folder, under our own file names.

    Every name in the archive is checked, also those that are not wanted: an archive that tries to climb is refused.
    """
    missing = set(members)
    with _archive_faults(archive):
        # by content, not by suffix: a wheel is a zip, and a user's copy may have any name
        read = _from_zip if zipfile.is_zipfile(archive) else _from_tar
        for name, size, stream in read(archive, members):  # each after its checks
            limit -= size
            if limit < 0:
                raise ArchiveError(f"members of {archive.name} are larger than allowed")
            _copy(stream, into / members[name], most=size)
            missing.discard(name)
    if missing:
        raise ArchiveError(f"{archive.name} lacks {', '.join(sorted(missing))}")


def gunzip(source: Path, target: Path, *, limit: int) -> None:
    """Decompress one gzip file."""
    with _archive_faults(source), gzip.open(source, "rb") as stream:
        _copy(stream, target, most=limit)
        if stream.read(1):
            raise ArchiveError(f"{source.name} is larger than allowed")


@contextmanager
def _archive_faults(archive: Path) -> Iterator[None]:
    """Turn what the standard library says of a damaged archive into one error; the disk's own faults pass."""
    try:
        yield
    except (tarfile.TarError, zipfile.BadZipFile, zlib.error, lzma.LZMAError, EOFError, OSError) as error:
        # only an error of the operating system has an errno; gzip and tarfile raise bare OSErrors for bad data
        if isinstance(error, OSError) and error.errno is not None:
            raise
        raise ArchiveError(f"{archive.name} cannot be unpacked ({error})") from error


def _from_zip(archive: Path, members: Mapping[str, str]) -> Iterator[tuple[str, int, IO[bytes]]]:
    """Yield (name, bytes, stream) of each wanted member."""
    with zipfile.ZipFile(archive) as opened:
        for entry in opened.infolist():
            check_name(entry.filename)
        for entry in opened.infolist():
            if entry.filename in members:
                # the upper half holds the Unix mode; 0 where the archive was made elsewhere
                _refuse_unless_plain(entry.filename, plain=(entry.external_attr >> 16) & 0o170000 in {0, 0o100000})
                with opened.open(entry) as stream:
                    yield entry.filename, entry.file_size, stream


def _from_tar(archive: Path, members: Mapping[str, str]) -> Iterator[tuple[str, int, IO[bytes]]]:
    with tarfile.open(archive, "r:*") as opened:
        for entry in opened:
            check_name(entry.name)
            # dpkg-deb writes its members as ./usr/…, npm as package/…
            name = entry.name.removeprefix("./")
            if name in members:
                _refuse_unless_plain(name, plain=entry.isreg())
                stream = opened.extractfile(entry)
                assert stream is not None
                yield name, entry.size, stream


def _refuse_unless_plain(name: str, *, plain: bool) -> None:
    if not plain:
        raise ArchiveError(f"archive member {name!r} is a link or no plain file")


def _copy(stream: IO[bytes] | gzip.GzipFile, target: Path, *, most: int) -> None:
    """Copy at most ``most`` bytes, so that a size that lies in the archive's header cannot fill the disk."""
    with target.open("wb") as out:
        while most > 0 and (block := stream.read(min(CHUNK, most))):
            out.write(block)
            most -= len(block)
