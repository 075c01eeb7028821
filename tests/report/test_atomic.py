"""A file appears whole or not at all."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from sparing.report.atomic import write_whole


def test_text_is_utf8_and_folders_are_made(tmp_path: Path) -> None:
    path = write_whole(tmp_path / "a" / "b.txt", "2.7× – γ")
    assert path.read_bytes() == "2.7× – γ".encode()
    assert [entry.name for entry in path.parent.iterdir()] == ["b.txt"]


@pytest.mark.parametrize("fails", ["fsync", "replace"])
def test_after_a_failure_the_old_file_stands_and_nothing_lies_beside_it(tmp_path, monkeypatch, fails) -> None:
    path = write_whole(tmp_path / "file", b"old")

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os if fails == "fsync" else Path, fails, full)
    with pytest.raises(OSError, match="No space left"):
        write_whole(path, b"new")
    monkeypatch.undo()
    assert path.read_bytes() == b"old"
    assert list(tmp_path.iterdir()) == [path]


def test_others_may_read_it_as_the_umask_says(tmp_path: Path) -> None:
    before = os.umask(0o022)
    try:
        assert write_whole(tmp_path / "page", "x").stat().st_mode & 0o777 == 0o644
    finally:
        os.umask(before)


def test_a_temporary_file_that_another_process_clears_away_is_written_again(monkeypatch, tmp_path):
    """As when two processes begin one study in one folder."""
    real, lost = Path.chmod, []

    def cleared(self, mode, **more):
        if not lost:
            lost.append(self.name)
            self.unlink()
        real(self, mode, **more)

    monkeypatch.setattr(Path, "chmod", cleared)
    assert write_whole(tmp_path / "run.toml", "a = 1\n").read_text() == "a = 1\n"
    assert [path.name for path in tmp_path.iterdir()] == ["run.toml"]
    assert lost[0].endswith(".part")
