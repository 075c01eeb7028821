"""An asset's folder appears whole or not at all, and damage to it is noticed."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest

from sparing.data.cache import (
    MANIFEST,
    cache_directory,
    is_complete,
    locked,
    publish,
    read_manifest,
    remove_leftovers,
    staging,
    write_manifest,
)


@pytest.fixture
def sealed(tmp_path: Path) -> Path:
    folder = tmp_path / "made"
    (folder / "deep").mkdir(parents=True)
    (folder / "a.txt").write_bytes(b"hello")
    (folder / "deep" / "b.txt").write_bytes(b"world")
    write_manifest(folder, asset="tiny", build=1, source="npm tiny@1", archive="0" * 64)
    return folder


def test_directory_by_precedence(quiet_environment, monkeypatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    assert cache_directory() == tmp_path / ".cache" / "sparing"
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert cache_directory() == tmp_path / "xdg" / "sparing"
    monkeypatch.setenv("SPARING_CACHE", "~/mine")
    assert cache_directory() == tmp_path / "mine"


def test_manifest_names_every_file(sealed: Path) -> None:
    manifest = read_manifest(sealed)
    assert manifest is not None
    assert (manifest.asset, manifest.build, manifest.source) == ("tiny", 1, "npm tiny@1")
    assert {name: facts["bytes"] for name, facts in manifest.files.items()} == {"a.txt": 5, "deep/b.txt": 5}
    # sha256 of "hello", as published everywhere
    assert manifest.files["a.txt"]["sha256"].startswith("2cf24dba5fb0a30e26e83b2ac5b9e29e")


def test_sizes_are_checked_always_and_bytes_on_demand(sealed: Path) -> None:
    manifest = read_manifest(sealed)
    assert is_complete(sealed, manifest, verify=True)
    (sealed / "a.txt").write_bytes(b"hellO")
    assert is_complete(sealed, manifest)
    assert not is_complete(sealed, manifest, verify=True)
    (sealed / "a.txt").write_bytes(b"hell")
    assert not is_complete(sealed, manifest)
    (sealed / "a.txt").unlink()
    assert not is_complete(sealed, manifest)


def test_files_that_are_not_in_the_manifest_do_no_harm(sealed: Path) -> None:
    (sealed / "notes.txt").write_text("mine")
    assert is_complete(sealed, read_manifest(sealed), verify=True)


@pytest.mark.parametrize("content", ["", "{", "[]", '{"asset": "x"}', '"text"', "\0"])
def test_an_unreadable_manifest_is_none(sealed: Path, content: str) -> None:
    (sealed / MANIFEST).write_text(content)
    assert read_manifest(sealed) is None


def test_private_files_become_as_open_as_their_folder(tmp_path: Path) -> None:
    folder = tmp_path / "made"
    folder.mkdir(mode=0o755)
    folder.chmod(0o755)
    (folder / "a").write_bytes(b"x")
    (folder / "a").chmod(0o600)
    write_manifest(folder, asset="tiny", build=1, source="", archive="")
    assert (folder / "a").stat().st_mode & 0o777 == 0o644


def test_staging_leaves_nothing_behind_when_it_fails(tmp_path: Path) -> None:
    def interrupted() -> None:
        with staging(tmp_path, "tiny") as work:
            (work / "half").write_text("half")
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert list(tmp_path.iterdir()) == []


def test_publish_replaces_what_was_there(sealed: Path, tmp_path: Path) -> None:
    final = tmp_path / "cache" / "tiny"
    (final / "old").mkdir(parents=True)
    publish(sealed, final)
    assert sorted(path.name for path in final.iterdir()) == ["a.txt", "deep", MANIFEST]
    assert [path.name for path in final.parent.iterdir()] == ["tiny"]


def test_sweep_removes_only_this_assets_remains(tmp_path: Path) -> None:
    for name in (".making-tiny-x1", ".making-other-x1", "tiny"):
        (tmp_path / name / "sub").mkdir(parents=True)
    remove_leftovers(tmp_path, "tiny")
    assert sorted(path.name for path in tmp_path.iterdir()) == [".making-other-x1", "tiny"]


def test_the_lock_lets_one_in_at_a_time(tmp_path: Path) -> None:
    entered = threading.Event()

    def other() -> None:
        with locked(tmp_path, "tiny"):
            entered.set()

    thread = threading.Thread(target=other)
    with locked(tmp_path, "tiny"):
        thread.start()
        assert not entered.wait(0.2)
        with locked(tmp_path, "another"):
            pass  # other assets are not held up
    thread.join(10)
    assert entered.is_set()
