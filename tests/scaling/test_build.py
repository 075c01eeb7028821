"""Building a C file: once, under a name that says of what and by what, where nobody else can put code."""

from __future__ import annotations

import _ctypes
import ctypes
import os
import shlex
import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from sparing.scaling.sparse import build

pytestmark = pytest.mark.skipif(not any(map(shutil.which, ("cc", "gcc", "clang"))), reason="no C compiler here")

FLAGS = ("-shared", "-fPIC")


@pytest.fixture
def cache(monkeypatch, tmp_path) -> Path:
    monkeypatch.setenv("SPARING_CACHE", str(tmp_path / "cache"))
    monkeypatch.delenv("CC", raising=False)
    return tmp_path / "cache" / f"kernels-{os.getuid()}"


@pytest.fixture
def source(tmp_path) -> Path:
    path = tmp_path / "answer.c"
    path.write_text("int answer(void) { return 42; }\n")
    return path


def answer(source: Path, *flags: str) -> int:
    library = build.load(source, (*FLAGS, *flags))
    got: int = library.answer()
    _ctypes.dlclose(library._handle)  # else a file of the same name would be taken for this one
    return got


def test_it_is_built_once_and_found_again(cache, source, monkeypatch):
    assert answer(source) == 42
    (built,) = cache.iterdir()
    monkeypatch.setattr(subprocess, "run", lambda *_, **__: pytest.fail("compiled a second time"))
    assert answer(source) == 42
    assert list(cache.iterdir()) == [built]


def test_nobody_else_can_write_what_is_built_whatever_the_umask(cache, source):
    before = os.umask(0)
    try:
        assert answer(source) == 42
    finally:
        os.umask(before)
    (built,) = cache.iterdir()
    assert (built.stat().st_mode & 0o777, cache.stat().st_mode & 0o777) == (0o700, 0o700)


def test_another_source_flag_or_compiler_is_another_library(cache, source, monkeypatch, tmp_path):
    assert answer(source) == 42
    source.write_text("int answer(void) { return LESS - 2; }\n")
    assert [answer(source, f"-DLESS={n}") for n in (5, 6)] == [3, 4]
    real = shutil.which("cc") or shutil.which("gcc") or shutil.which("clang")
    launcher = tmp_path / "launch"
    for turn in range(2):  # the launcher is the same file with another date, as after an upgrade
        launcher.write_text('#!/bin/sh\nexec "$@"\n')
        launcher.chmod(0o755)
        os.utime(launcher, ns=(turn, turn))
        monkeypatch.setenv("CC", f"{shlex.quote(str(launcher))} {real}")
        assert answer(source, "-DLESS=5") == 3
    assert len(list(cache.iterdir())) == 5


def test_a_compiler_in_a_folder_with_a_space_and_words_after_it(cache, source, monkeypatch, tmp_path):
    folder = tmp_path / "my tools"
    folder.mkdir()
    (folder / "cc").write_text(f'#!/bin/sh\nexec {build.compiler()[0]} "$@"\n')
    (folder / "cc").chmod(0o755)
    for named in (f"{folder}/cc", f"{shlex.quote(str(folder / 'cc'))} -O1"):
        monkeypatch.setenv("CC", named)
        assert answer(source) == 42
    monkeypatch.setenv("CC", "'cc")
    with pytest.raises(OSError, match="No closing quotation"):
        build.load(source, FLAGS)


def test_several_may_build_at_once(cache, source):
    with ThreadPoolExecutor(4) as pool:
        assert list(pool.map(lambda _: answer(source), range(8))) == [42] * 8
    assert len(list(cache.iterdir())) == 1


PLANTED = "int answer(void) { return 13; }\n"


def plant(source: Path, cache: Path) -> Path:
    """Put another library where ours would be looked for."""
    assert answer(source) == 42
    (built,) = cache.iterdir()
    built.unlink()  # it is mapped into this process: written over, it would take us down
    other = source.with_name("other.c")
    other.write_text(PLANTED)
    subprocess.run([*build.compiler(), *FLAGS, str(other), "-o", str(built)], check=True)
    built.chmod(0o700)
    return built


def test_a_library_in_our_own_folder_is_loaded(cache, source):
    """The twin of the next test: what is planted would run if nobody looked."""
    plant(source, cache)
    assert answer(source) == 13


@pytest.mark.parametrize("how", ["writable file", "writable folder", "link", "linked folder", "another user's"])
def test_a_library_that_another_user_may_have_put_there_is_not_loaded(cache, source, monkeypatch, how):
    built = plant(source, cache)
    if how == "writable file":
        built.chmod(0o720)
    elif how == "writable folder":
        cache.chmod(0o770)
    elif how == "link":
        built.rename(built.with_name("elsewhere.so"))
        built.symlink_to("elsewhere.so")
    elif how == "linked folder":
        cache.rename(cache.with_name("elsewhere"))
        cache.symlink_to("elsewhere")
    else:
        user = os.getuid()
        monkeypatch.setattr(build.os, "getuid", lambda: user + 1)
        cache.rename(cache.with_name(f"kernels-{user + 1}"))
    assert answer(source) == 42


@pytest.mark.parametrize("why", ["a file in its place", "no home", "not a library"])
def test_a_cache_that_cannot_be_used_is_passed_by(cache, source, monkeypatch, why):
    if why == "a file in its place":
        cache.parent.write_text("")
    elif why == "no home":
        for name in ("SPARING_CACHE", "XDG_CACHE_HOME", "HOME"):
            monkeypatch.delenv(name, raising=False)
        monkeypatch.setattr("pwd.getpwuid", lambda _: {}["nobody"])
    else:
        assert answer(source) == 42
        (built,) = cache.iterdir()
        built.unlink()
        built.write_text("")
        built.chmod(0o700)
    assert answer(source) == 42


def test_a_folder_from_which_no_code_may_be_loaded_is_passed_by(cache, source, monkeypatch):
    real, refused = ctypes.CDLL, []

    def load(path: str) -> ctypes.CDLL:
        if not refused:
            refused.append(path)
            raise OSError("failed to map segment from shared object")  # as of a mount with noexec
        return real(path)

    monkeypatch.setattr(build.ctypes, "CDLL", load)
    assert build.load(source, FLAGS).answer() == 42
    assert refused


def test_a_compiler_that_fails_says_why_in_any_encoding(cache, source, monkeypatch, tmp_path):
    broken = tmp_path / "broken"
    broken.write_text(f'#!{sys.executable}\nimport sys\nsys.stderr.buffer.write(b"caf\\xe9: no\\n")\nsys.exit(3)\n')
    broken.chmod(0o755)
    monkeypatch.setenv("CC", str(broken))
    with pytest.raises(subprocess.CalledProcessError) as raised:
        build.load(source, FLAGS)
    assert "no" in raised.value.stderr
    assert not list(cache.iterdir())


def test_elsewhere_than_on_posix_it_is_refused(source, monkeypatch):
    monkeypatch.setattr(build.os, "name", "nt")
    with pytest.raises(OSError, match="POSIX threads"):
        build.load(source, FLAGS)
