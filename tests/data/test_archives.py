"""Unpacking trusts no name, no size and no checksum that it did not check."""

from __future__ import annotations

import gzip
import hashlib
import io
import tarfile
import zipfile
from pathlib import Path

import pytest

from sparing.data.archives import ArchiveError, check_name, check_sha256, gunzip, sha256, unpack


def tar(path: Path, *entries: tuple[tarfile.TarInfo, bytes], mode: str = "w:gz") -> Path:
    with tarfile.open(path, mode) as archive:
        for entry, data in entries:
            entry.size = len(data)
            archive.addfile(entry, io.BytesIO(data))
    return path


def linked(name: str, target: str, kind: bytes) -> tuple[tarfile.TarInfo, bytes]:
    entry = tarfile.TarInfo(name)
    entry.type, entry.linkname = kind, target
    return entry, b""


def plain(name: str, data: bytes = b"data") -> tuple[tarfile.TarInfo, bytes]:
    return tarfile.TarInfo(name), data


@pytest.mark.parametrize("mode", ["w", "w:gz", "w:xz"])
@pytest.mark.parametrize("prefix", ["", "./"])
def test_takes_only_the_named_members_of_a_tar(tmp_path: Path, mode: str, prefix: str) -> None:
    archive = tar(tmp_path / "a.tar", plain(prefix + "p/x", b"wanted"), plain(prefix + "p/run.py", b"boom"), mode=mode)
    out = tmp_path / "out"
    out.mkdir()
    unpack(archive, {"p/x": "ours.txt"}, out, limit=6)
    assert {path.name: path.read_bytes() for path in out.iterdir()} == {"ours.txt": b"wanted"}


def test_takes_only_the_named_members_of_a_wheel(tmp_path: Path) -> None:
    with zipfile.ZipFile(tmp_path / "a.whl", "w") as archive:
        archive.writestr("p/x", b"wanted")
        archive.writestr("p/run.py", b"boom")
    out = tmp_path / "out"
    out.mkdir()
    unpack(tmp_path / "a.whl", {"p/x": "ours.txt"}, out, limit=6)
    assert [path.name for path in out.iterdir()] == ["ours.txt"]


@pytest.mark.parametrize("name", ["/etc/x", "../x", "p/../../x", "C:/x", "p\\..\\x", "p/\0x"])
def test_refuses_a_name_that_climbs(name: str) -> None:
    with pytest.raises(ArchiveError, match="outside"):
        check_name(name)


@pytest.mark.parametrize("name", ["x", "p/x", "./p/x", "p/..x", "p/a:b", "p/ü.txt"])
def test_takes_a_harmless_name(name: str) -> None:
    check_name(name)


def test_one_climbing_name_condemns_the_archive_even_if_not_wanted(tmp_path: Path) -> None:
    evil_tar = tar(tmp_path / "a.tgz", plain("../evil"), plain("p/x"))
    with zipfile.ZipFile(tmp_path / "a.zip", "w") as archive:
        archive.writestr("p/x", b"data")
        archive.writestr("../evil", b"boom")
    for path in (evil_tar, tmp_path / "a.zip"):
        with pytest.raises(ArchiveError, match="outside"):
            unpack(path, {"p/x": "x"}, tmp_path, limit=100)
    assert not (tmp_path / "x").exists()


@pytest.mark.parametrize("kind", [tarfile.SYMTYPE, tarfile.LNKTYPE, tarfile.FIFOTYPE, tarfile.CHRTYPE])
def test_refuses_a_wanted_member_that_is_no_plain_file(tmp_path: Path, kind: bytes) -> None:
    archive = tar(tmp_path / "a.tgz", plain("p/y"), linked("p/x", "/etc/passwd", kind))
    with pytest.raises(ArchiveError, match="no plain file"):
        unpack(archive, {"p/x": "x"}, tmp_path, limit=100)


def test_refuses_a_link_in_a_zip(tmp_path: Path) -> None:
    entry = zipfile.ZipInfo("p/x")
    entry.external_attr = 0o120777 << 16
    with zipfile.ZipFile(tmp_path / "a.zip", "w") as archive:
        archive.writestr(entry, "/etc/passwd")
    with pytest.raises(ArchiveError, match="no plain file"):
        unpack(tmp_path / "a.zip", {"p/x": "x"}, tmp_path, limit=100)


def test_counts_all_members_against_the_limit(tmp_path: Path) -> None:
    archive = tar(tmp_path / "a.tgz", plain("x", b"12345"), plain("y", b"12345"))
    unpack(archive, {"x": "x", "y": "y"}, tmp_path, limit=10)
    with pytest.raises(ArchiveError, match="larger than allowed"):
        unpack(archive, {"x": "x", "y": "y"}, tmp_path, limit=9)


def test_names_what_the_archive_lacks(tmp_path: Path) -> None:
    with pytest.raises(ArchiveError, match="lacks p/z"):
        unpack(tar(tmp_path / "a.tgz", plain("p/x")), {"p/x": "x", "p/z": "z"}, tmp_path, limit=100)


@pytest.mark.parametrize("cut", [0, 5, 40, 80])
def test_a_damaged_archive_is_one_short_error(tmp_path: Path, cut: int) -> None:
    whole = tar(tmp_path / "a.tgz", plain("p/x", bytes(range(256)) * 50)).read_bytes()
    (tmp_path / "b.tgz").write_bytes(whole[:cut])
    with pytest.raises(ArchiveError, match=r"b\.tgz"):
        unpack(tmp_path / "b.tgz", {"p/x": "x"}, tmp_path, limit=1 << 20)


def test_a_fault_of_the_disk_is_not_blamed_on_the_archive(tmp_path: Path) -> None:
    archive = tar(tmp_path / "a.tgz", plain("p/x"))
    with pytest.raises(FileNotFoundError):
        unpack(archive, {"p/x": "x"}, tmp_path / "nowhere", limit=100)


def test_gunzip_round_trip_and_limit(tmp_path: Path) -> None:
    source = tmp_path / "a.gz"
    source.write_bytes(gzip.compress(b"12345"))
    gunzip(source, tmp_path / "a", limit=5)
    assert (tmp_path / "a").read_bytes() == b"12345"
    with pytest.raises(ArchiveError, match="larger than allowed"):
        gunzip(source, tmp_path / "a", limit=4)
    source.write_bytes(gzip.compress(b"12345")[:-4])
    with pytest.raises(ArchiveError, match="cannot be unpacked"):
        gunzip(source, tmp_path / "a", limit=5)


def test_checksum_is_that_of_the_bytes(tmp_path: Path) -> None:
    data = bytes(range(256)) * 9000  # more than one block of a mebibyte
    (tmp_path / "x").write_bytes(data)
    assert sha256(tmp_path / "x") == hashlib.sha256(data).hexdigest()
    check_sha256(tmp_path / "x", hashlib.sha256(data).hexdigest())
    with pytest.raises(ArchiveError, match="pinned is 000000000000"):
        check_sha256(tmp_path / "x", "0" * 64)
