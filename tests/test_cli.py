"""The command line: exit status, one-line mistakes, help generated from the settings."""

from __future__ import annotations

import dataclasses
import importlib
import json
import subprocess
import sys

import pytest

from sparing.cli import SHELLS, VERBS, main


def test_without_a_verb_the_list_is_shown(capsys):
    assert main([]) == 0
    shown = capsys.readouterr().out
    assert all(f"  {name}" in shown for name in VERBS)


def test_version_is_the_packages(capsys):
    from importlib.metadata import version

    assert main(["--version"]) == 0
    assert capsys.readouterr().out.strip() == version("sparing")


@pytest.mark.parametrize("shell", SHELLS)
def test_completion_knows_verbs_and_their_settings(shell: str, capsys):
    assert main(["--print-completion", shell]) == 0
    shown = capsys.readouterr().out
    assert all(name in shown for name in VERBS)
    assert "--local-epochs" in shown


def test_an_unknown_shell_is_a_mistake(capsys):
    assert main(["--print-completion", "fish"]) == 2
    assert "bash, zsh" in capsys.readouterr().err


@pytest.mark.parametrize("name", VERBS)
def test_help_shows_every_setting_with_its_sentence(name: str, capsys, monkeypatch):
    """The help is generated: no field of the settings may be missing from it."""
    monkeypatch.setenv("COLUMNS", "200")
    assert main([name, "--help"]) == 0
    shown = capsys.readouterr().out
    settings = importlib.import_module(VERBS[name].module).Settings
    for field in dataclasses.fields(settings):
        words = field.name.replace("_", "-")
        assert words in shown or field.name.upper() in shown, field.name


@pytest.mark.parametrize(
    "arguments",
    [
        ["nonsense"],
        ["fetch", "no-such-asset"],
        ["fetch", "--nonsense"],
        ["plan"],
        ["plan", "--model", "missing-directory"],
        ["finetune"],
        ["finetune", "missing-directory", "missing.jsonl"],
        ["finetune", "missing-directory", "missing.jsonl", "--batch", "many"],
        ["demo", "--seed", "many"],
    ],
    ids=" ".join,
)
def test_a_mistake_is_one_line_and_status_two(arguments: list[str], capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert main(arguments) == 2
    streams = capsys.readouterr()
    assert streams.out == ""
    assert len(streams.err.strip().splitlines()) == 1
    assert streams.err.startswith("sparing: ")
    assert list(tmp_path.iterdir()) == []


def test_json_is_one_document_on_standard_output(capsys):
    assert main(["fetch", "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert {"question", "settings", "seed", "environment", "units", "tables"} <= set(document)
    assert {row["name"] for row in document["tables"]["assets"]} >= {"stories15m"}


@pytest.mark.processes
def test_module_runs_as_the_command():
    done = subprocess.run([sys.executable, "-m", "sparing", "--help"], capture_output=True, text=True, check=False)
    assert done.returncode == 0
    assert "finetune" in done.stdout
