"""Clients run without a shell, in their own folder, within their time, and a failure is one short reason."""

from __future__ import annotations

import os
import shutil
import sys
import time
from pathlib import Path

import pytest

from sparing.data.clients import ClientError, Debian, Npm, Pypi, bytes_under, cause_of, only_file, run

PIN = {"sha256": "0" * 64, "size": 1}


def test_a_failing_client_says_why(tmp_path: Path) -> None:
    program = "import sys; print('ERROR: first'); sys.stderr.write('ERROR: it broke\\nhint: call home\\n'); sys.exit(3)"
    with pytest.raises(ClientError, match=r"failed with status 3: ERROR: it broke$"):
        run([sys.executable, "-c", program], tmp_path)


@pytest.mark.parametrize(
    ("said", "told"),
    [
        (
            "npm error code ENOTFOUND\nnpm error network request to X failed, reason: Y\nnpm error A log is in /x",
            "npm error network request to X failed, reason: Y",
        ),
        (
            "WARNING: Retrying\nERROR: Could not find a version\nERROR: No matching distribution",
            "ERROR: Could not find a version",
        ),
        ("W: unsandboxed\nE: Version '1' for 'a' was not found", "E: Version '1' for 'a' was not found"),
        ("ERROR: odd\nbye", "ERROR: odd"),
        ("python: No module named pip\n\n", "python: No module named pip"),
        ("", "it said nothing"),
    ],
)
def test_the_telling_line_is_found_in_each_clients_output(said: str, told: str) -> None:
    assert cause_of(said) == told


def test_what_is_too_slow_dies_with_its_children(tmp_path: Path) -> None:
    child = "import subprocess, sys; p = subprocess.Popen(['sleep', '60']); print(p.pid, flush=True); p.wait()"
    with pytest.raises(ClientError, match="took longer than 1 s"):
        run([sys.executable, "-c", child], tmp_path, timeout=1.0, output=tmp_path / "pid")
    pid = int((tmp_path / "pid").read_text())
    for _ in range(2000):  # the grandchild is reaped by init, a moment later
        if not Path(f"/proc/{pid}").exists() or "\nState:\tZ" in Path(f"/proc/{pid}/status").read_text():
            break
        time.sleep(0.05)
    else:
        pytest.fail("the client's child outlived it")


def test_what_receives_nothing_is_given_up_on(tmp_path: Path) -> None:
    program = "import time; open('x', 'wb').write(b'1'); time.sleep(60)"
    with pytest.raises(ClientError, match="received nothing for 1 s"):
        run([sys.executable, "-c", program], tmp_path, stall=1.0)


def test_runs_in_its_folder_with_its_own_temporary_folder(tmp_path: Path) -> None:
    program = "import os, tempfile; print(os.getcwd()); print(tempfile.gettempdir()); print(os.environ['EXTRA'])"
    run([sys.executable, "-c", program], tmp_path, settings={"EXTRA": "yes"}, output=tmp_path / "said")
    assert (tmp_path / "said").read_text().splitlines() == [str(tmp_path), str(tmp_path / "tmp"), "yes"]


def test_arguments_reach_no_shell(tmp_path: Path) -> None:
    program = "import sys; print(sys.argv[1])"
    run([sys.executable, "-c", program, "$(touch hacked); x"], tmp_path, output=tmp_path / "said")
    assert (tmp_path / "said").read_text() == "$(touch hacked); x\n"
    assert not (tmp_path / "hacked").exists()


def test_the_watcher_hears_the_bytes_grow(tmp_path: Path) -> None:
    program = "import time; open('x', 'wb').write(b'1' * 1000); time.sleep(0.6); open('y', 'wb').write(b'1' * 500)"
    heard: list[int] = []
    run([sys.executable, "-c", program], tmp_path, watch=heard.append)
    assert heard == sorted(heard)
    assert heard[-1] in {1000, 1500}
    assert bytes_under(tmp_path) == 1500


def test_a_folder_that_vanishes_while_it_is_counted_counts_nothing(tmp_path: Path, monkeypatch) -> None:
    """As pip's own temporary folders do while their bytes are watched."""
    (tmp_path / "kept.bin").write_bytes(b"x" * 10)
    (tmp_path / "gone").mkdir()
    (tmp_path / "gone" / "part.bin").write_bytes(b"x" * 99)
    real = os.scandir

    def scandir(path):
        if str(path).endswith("gone"):
            shutil.rmtree(path)
        return real(path)

    monkeypatch.setattr(os, "scandir", scandir)
    assert bytes_under(tmp_path) == 10


def test_only_one_archive_is_expected(tmp_path: Path) -> None:
    with pytest.raises(ClientError, match="left 0 files"):
        only_file(tmp_path, ".tgz")
    (tmp_path / "a.tgz").touch()
    assert only_file(tmp_path, ".tgz") == tmp_path / "a.tgz"
    (tmp_path / "b.tgz").touch()
    with pytest.raises(ClientError, match="left 2 files"):
        only_file(tmp_path, ".tgz")


def test_npm_is_asked_to_pack_and_to_run_nothing(shop, tmp_path: Path) -> None:
    shop.open()
    folder = tmp_path / "work"
    folder.mkdir()
    archive = shop.asset.package.download(folder)
    assert shop.calls == ["pack --loglevel=error --ignore-scripts tiny@1.0.0"]
    assert archive.read_bytes() == shop.archive.read_bytes()


@pytest.mark.parametrize(("sdist", "kind"), [(True, "--no-binary"), (False, "--only-binary")])
def test_pip_must_see_the_checksum_before_it_builds_anything(
    tmp_path: Path, monkeypatch, sdist: bool, kind: str
) -> None:
    said: list[list[str]] = []

    def fake_run(command, folder, **options) -> None:
        said.append(command)
        assert (folder / "requirement.txt").read_text() == f"tiny==1.0 --hash=sha256:{'0' * 64}\n"
        (folder / ("tiny-1.0.tar.gz" if sdist else "tiny-1.0.whl")).touch()

    monkeypatch.setattr("sparing.data.clients.run", fake_run)
    Pypi(name="tiny", version="1.0", sdist=sdist, **PIN).download(tmp_path)
    assert {"--require-hashes", "--no-deps", "--no-input"} <= set(said[0])
    assert said[0][:4] == [sys.executable, "-m", "pip", "download"]
    assert said[0][said[0].index(kind) + 1] == "tiny"


def test_labels_and_mending_commands() -> None:
    assert Npm(name="a", version="1", **PIN).by_hand == "npm pack a@1"
    assert (
        Pypi(name="a", version="1", sdist=True, **PIN).by_hand == "python -m pip download --no-deps --no-binary a a==1"
    )
    assert Debian(name="a", version="1", **PIN).by_hand == "apt-get update && apt-get download a=1"
    assert Pypi(name="a", version="1", sdist=True, **PIN).label == "PyPI a==1 (source distribution)"
