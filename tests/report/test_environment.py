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
        ("/a/b", "b"),
        ("/think", "/think"),
        ("a/b", "a/b"),
        ("~/a/b", "b"),
        ("~", "~"),
        ("/a/b\nmore", "/a/b\nmore"),
        ("C:/x/y", "y"),
    ],
)
def test_only_a_whole_absolute_path_is_reduced(text: str, kept: str) -> None:
    assert without_folders(text) == kept


@pytest.mark.processes
def test_the_commit_is_that_of_the_current_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(tmp_path.parent))
    assert commit() is None
    who = ["-c", "user.name=a", "-c", "user.email=a@b", "-c", "commit.gpgsign=false"]
    (tmp_path / "file").write_text("1")
    for words in (["init", "-q"], ["add", "file"], [*who, "commit", "-q", "-m", "first"]):
        subprocess.run(["git", *words], check=True)
    full = subprocess.run(["git", "rev-parse", "HEAD"], check=True, capture_output=True, text=True).stdout.strip()
    assert commit() == full[:12]
    (tmp_path / "file").write_text("2")
    assert commit() == f"{full[:12]}-dirty"


def test_without_git_there_is_no_commit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "")
    assert commit() is None


def test_a_cuda_device_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: "Card")
    assert environment()["cuda"] == "2 × Card"


def test_the_processor_is_named_where_proc_is_absent(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "Path", lambda _: Path("/nowhere/cpuinfo"))
    monkeypatch.setattr(module.platform, "processor", lambda: "arm")
    assert environment()["cpu"] == "arm"
