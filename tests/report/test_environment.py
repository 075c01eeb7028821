"""The environment names versions and machine, never people, hosts or folders."""

from __future__ import annotations

import getpass
import json
import re
import socket
import subprocess
import sys
from importlib import metadata
from pathlib import Path

import pytest
import torch

from sparing.errors import without_password
from sparing.report.environment import command, commit, environment, without_folders

module = sys.modules["sparing.report.environment"]


def test_versions_and_machine_are_there() -> None:
    found = environment()
    assert found["python"] == ".".join(map(str, sys.version_info[:3]))
    assert found["torch"] == metadata.version("torch")
    assert found["threads"] == torch.get_num_threads()
    assert found["cores"] >= 1
    assert re.fullmatch(r"\d{4}-\d\d-\d\d \d\d:\d\d UTC", found["time"])
    assert json.loads(json.dumps(found, allow_nan=False)) == found


def test_no_user_host_or_absolute_path(monkeypatch: pytest.MonkeyPatch) -> None:
    home = str(Path.home())
    monkeypatch.setattr(sys, "argv", [f"{home}/venv/bin/sparing", "finetune", f"{home}/m", f"--out={home}/runs/a b"])
    text = json.dumps(environment())
    assert home + "/" not in text
    assert not re.search(r"(?<![\w.])/\w", text.replace("UTC", ""))
    for name in (socket.gethostname(), getpass.getuser()):
        assert not re.search(rf"(?<!\w){re.escape(name)}(?!\w)", text)


def test_a_package_that_is_absent_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    def absent(name: str) -> str:
        raise metadata.PackageNotFoundError(name)

    monkeypatch.setattr(module.metadata, "version", absent)
    assert "peft" not in environment()
    assert module.version() == "from source"


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        ([], ""),
        (["/usr/lib/pkg/sparing/__main__.py", "plan"], "python -m sparing plan"),
        (["/srv/bench/run.py", "--n", "3"], "python run.py --n 3"),
        (["sparing", "--model=/a/b/c", "--data", "/x/y.jsonl"], "sparing --model=c --data y.jsonl"),
        (["sparing", "rel/path", "1e-4", "a/b"], "sparing rel/path 1e-4 a/b"),
        (["sparing", "~/models/m", "x=/a/b,y=/c/d/"], "sparing m x=b,y=d"),
        (["sparing", "C:\\Users\\me\\m"], "sparing m"),
        (["sparing", "file:///srv/me/m"], "sparing file:m"),
        (["sparing", '{"path": "/srv/me/m"}'], """sparing '{"path": "m"}'"""),
        (["sparing", "/srv/me/with space/m"], "sparing m"),
        (["sparing", "don't"], "sparing 'don'\"'\"'t'"),
    ],
)
def test_the_command_is_as_typed_less_the_folders(arguments: list[str], line: str) -> None:
    assert command(arguments) == line


@pytest.mark.parametrize(
    ("text", "kept"),
    [
        ("/a/b", "b"), ("/think", "/think"), ("a/b", "a/b"), ("~/a/b", "b"), ("~", "~"),
        ("/a/b\nmore", "/a/b\nmore"), ("C:/x/y", "y"),
    ],
)  # fmt: skip
def test_only_a_whole_absolute_path_is_reduced(text: str, kept: str) -> None:
    assert without_folders(text) == kept


WHO = ("-c", "user.name=a", "-c", "user.email=a@b", "-c", "commit.gpgsign=false")


def git(folder: Path, *words: str) -> str:
    done = subprocess.run(["git", "-C", str(folder), *words], check=True, capture_output=True, text=True)
    return done.stdout.strip()


@pytest.fixture
def checkout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A checkout that holds the sources, as far as this module can tell."""
    root = tmp_path / "checkout"
    (root / "src" / "sparing").mkdir(parents=True)
    (root / "src" / "sparing" / "file").write_text("1")
    for words in (["init", "-q", "-b", "trunk"], ["add", "."], [*WHO, "commit", "-q", "-m", "first"]):
        git(root, *words)
    monkeypatch.setattr(module, "__file__", str(root / "src" / "sparing" / "report" / "environment.py"))
    return root


@pytest.mark.processes
def test_the_commit_is_that_of_the_sources_however_git_keeps_it(checkout: Path, tmp_path: Path, monkeypatch) -> None:
    """A branch, packed branches, a detached head, a worktree and a branch of its own: as git itself says."""
    full = git(checkout, "rev-parse", "HEAD")
    assert commit() == full[:12]
    git(checkout, "pack-refs", "--all")
    assert not (checkout / ".git" / "refs" / "heads" / "trunk").exists()
    assert commit() == full[:12]
    git(checkout, "worktree", "add", "-q", "-b", "side/way", str(tmp_path / "side"))
    git(tmp_path / "side", *WHO, "commit", "-q", "--allow-empty", "-m", "second")
    monkeypatch.setattr(module, "__file__", str(tmp_path / "side/src/sparing/report/environment.py"))
    second = git(tmp_path / "side", "rev-parse", "HEAD")
    assert commit() == second[:12] != full[:12]
    git(tmp_path / "side", "checkout", "-q", "--detach", full)
    assert commit() == full[:12]


@pytest.mark.processes
def test_nothing_runs_and_nothing_is_told_from_the_folder_one_stands_in(
    tmp_path: Path, checkout: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A repository may name a program that ``git status`` and ``git describe`` run."""
    hostile, proof = tmp_path / "hostile", tmp_path / "proof"
    hostile.mkdir()
    git(hostile, "init", "-q")
    (hostile / "hook").write_text(f"#!/bin/sh\ntouch '{proof}'\n")
    (hostile / "hook").chmod(0o755)
    for words in (["add", "."], [*WHO, "commit", "-q", "-m", "bait"]):
        git(hostile, *words)
    git(hostile, "config", "core.fsmonitor", str(hostile / "hook"))
    (checkout / ".git" / "config").write_text(f"[core]\n\tfsmonitor = {hostile / 'hook'}\n")
    monkeypatch.chdir(hostile)
    assert environment()["commit"] not in {None, git(hostile, "rev-parse", "HEAD")[:12]}
    assert not proof.exists()
    git(hostile, "describe", "--always", "--dirty")
    assert proof.exists()  # git itself would have run it


@pytest.mark.parametrize(
    "broken", [{"HEAD": ""}, {"HEAD": "ref: refs/heads/none"}, {"HEAD": "x" * 40}, {"HEAD": "ref: ../../../etc/passwd"}]
)
def test_a_broken_checkout_has_no_commit(broken: dict[str, str], checkout: Path) -> None:
    for name, content in broken.items():
        (checkout / ".git" / name).write_text(content)
    assert commit() is None


def test_installed_sources_have_no_commit(checkout: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A checkout around the folder they are installed in, such as that of a user's own project, is not theirs."""
    there = checkout / "lib/python3/site-packages/sparing/report/environment.py"
    monkeypatch.setattr(module, "__file__", str(there))
    assert commit() is None


def test_passwords_of_urls_are_left_out() -> None:
    url = "postgresql://me:s3cret@host/db?password=s3cret"
    assert "s3cret" not in command(["sparing", "transfer", "--storage", url, f"--storage={url}"])
    assert "s3cret" not in without_password(f"cannot reach {url}")
    assert without_password("no host word1@host", of="mysql://me:pass@word1@host/d") == "no host ***@host"


def test_a_cuda_device_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: "Card")
    assert environment()["cuda"] == "2 × Card"


def test_the_processor_is_named_where_proc_is_absent(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "Path", lambda _: Path("/nowhere/cpuinfo"))
    monkeypatch.setattr(module.platform, "processor", lambda: "arm")
    assert environment()["cpu"] == "arm"
