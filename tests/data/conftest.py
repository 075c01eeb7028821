"""A cache of its own for each test, a fake npm, and real assets where they can be had."""

from __future__ import annotations

import gzip
import hashlib
import io
import os
import stat
import sys
import tarfile
from pathlib import Path

import pytest

from sparing.data import assets, fetch
from sparing.data.clients import Npm
from sparing.data.text import BOOK, build_book
from sparing.errors import UserError

FAKE_NPM = """#!{python}
# A fake npm: writes down how it was called and hands out one prepared archive.
import os, shutil, sys, time
from pathlib import Path
with open({log!r}, "a") as log:
    log.write(" ".join(sys.argv[1:]) + "\\n")
time.sleep({seconds})
if {status}:
    sys.exit("npm error code ENOTFOUND\\nnpm error network request failed")
shutil.copyfile({archive!r}, Path.cwd() / "tiny-1.0.0.tgz")
"""


def tgz(path: Path, members: dict[str, bytes]) -> Path:
    """Write a .tgz with these files, the same bytes each time."""
    with gzip.GzipFile(path, "wb", mtime=0) as packed, tarfile.open(fileobj=packed, mode="w") as archive:
        for name, data in members.items():
            entry = tarfile.TarInfo(name)
            entry.size = len(data)
            archive.addfile(entry, io.BytesIO(data))
    return path


class Shop:
    """A registry of one text package, behind a fake npm on a PATH of its own."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.folder, self.monkeypatch = folder, monkeypatch
        self.archive = tgz(folder / "tiny.tgz", {"package/tiny.txt": b"[Tiny by Nobody 1900]\r\n\r\nOnce.\r\n"})
        self.log = folder / "calls.txt"
        self.asset = assets.Asset(
            name="tiny",
            kind="text",
            title="a tiny text",
            licence="public domain",
            size=6,
            package=Npm(
                name="tiny",
                version="1.0.0",
                sha256=hashlib.sha256(self.archive.read_bytes()).hexdigest(),
                size=self.archive.stat().st_size,
            ),
            members={"package/tiny.txt": BOOK},
            build=build_book,
        )
        monkeypatch.setattr(assets, "ASSETS", (self.asset,))
        monkeypatch.setenv("PATH", str(folder / "bin"))

    def open(self, *, status: int = 0, seconds: float = 0.0) -> None:
        """Put the fake npm in place."""
        program = self.folder / "bin" / "npm"
        program.parent.mkdir(exist_ok=True)
        values = {"python": sys.executable, "log": str(self.log), "archive": str(self.archive)}
        program.write_text(FAKE_NPM.format(**values, status=status, seconds=seconds))
        program.chmod(program.stat().st_mode | stat.S_IXUSR)

    @property
    def calls(self) -> list[str]:
        """How the fake npm was called, in order."""
        return self.log.read_text().splitlines() if self.log.exists() else []


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache directory."""
    monkeypatch.setenv("SPARING_CACHE", str(tmp_path / "cache"))
    monkeypatch.delenv("SPARING_HUB", raising=False)
    return tmp_path / "cache"


@pytest.fixture
def shop(tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> Shop:
    """A registry with one asset called ``tiny``; its client is not installed until ``shop.open()``."""
    (tmp_path / "shop").mkdir()
    return Shop(tmp_path / "shop", monkeypatch)


@pytest.fixture
def fetched():
    """A function that fetches a real asset into the user's own cache, or skips the test with the reason."""

    def get(name: str) -> Path:
        try:
            return fetch(name, progress=False, hub=False)
        except UserError as error:
            pytest.skip(str(error))

    return get


@pytest.fixture
def quiet_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """No environment variable of the user's chooses a cache."""
    for name in ("SPARING_CACHE", "XDG_CACHE_HOME"):
        if name in os.environ:
            monkeypatch.delenv(name)
