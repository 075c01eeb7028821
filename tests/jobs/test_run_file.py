"""Settings from a TOML file: what is written is read back, the command line wins, mistakes name file, line and key."""

from __future__ import annotations

import dataclasses
import importlib
import os
import tomllib
from pathlib import Path
from typing import Literal

import pytest

from sparing.cli import VERBS, _parse, main
from sparing.jobs import run_file
from sparing.jobs.run import Run
from sparing.report import Record

# what a verb needs, and other values than the defaults, of every type that settings have
OTHER = {
    "finetune": ["m", "a.jsonl", "b.jsonl", "--mix", "0.25", "0.75", "--method", "lora", "--lora.rank", "3",
                 "--no-packing", "--lr", "1e-05",
                 "--prompts", 'say "é"\t\x7f', "", "--steps", "7"],
    "pretrain": ["--density", "1/8", "--betas", "0.8", "0.95", "--dynamic", "rigl", "--mask-updates.every", "7",
                 "--model-config", "c.json"],
    "merge": ["a", "b", "--method", "linear", "--model-weights", "0.3", "0.7"],
    "federate": ["--methods", "fedsign", "fedprox", "--fedsign.temperature", "2", "--fedprox.mu", "0.5",
                 "--blocks", "3"],
    "invert": ["--penalty", "evidence", "--observe", "3", "4", "--seeds", "4", "5"],
    "transfer": ["--log2-rates", "-8", "-6.5", "--rules", "sp", "supar"],
    "scan": ["m:f"],
    "compare": ["a", "b", "c"],
    "evaluate": ["m", "--data", "d", "--against", "o"],
    "plan": ["m", "--weights", "nf4", "--lora.ranks", "2", "3", "--no-masters", "--memory", "80GB"],
}  # fmt: skip


def settings_of(verb: str, *words: str) -> object:
    return _parse(verb, importlib.import_module(VERBS[verb].module).Settings, words)


@pytest.mark.parametrize("verb", VERBS)
def test_a_written_file_is_read_back_equal(verb: str, tmp_path: Path) -> None:
    settings = settings_of(verb, *OTHER.get(verb, []))
    file = tmp_path / "run.toml"
    file.write_text(run_file.text_of(settings), encoding="utf-8")
    assert tomllib.loads(file.read_text(encoding="utf-8"))["verb"] == verb
    assert settings_of(verb, f"--config={file}") == settings


def test_the_command_line_wins_over_the_file(tmp_path: Path) -> None:
    file = tmp_path / "run.toml"
    file.write_text('model = "m"\ndata = ["d"]\nbatch = 4\npacking = false\nlr = 1\n[lisa]\nactive = 3\nperiod = 9\n')
    found = settings_of("finetune", "n", "e", "f", "--batch", "8", "--config", str(file), "--lisa.active", "5")
    assert (found.model, found.data, found.batch) == (Path("n"), (Path("e"), Path("f")), 8)
    assert (found.packing, found.lisa.active, found.lisa.period) == (False, 5, 9)
    assert type(found.lr) is float
    # a conflict within the file that the command line resolves is none
    file.write_text('model = "m"\ndata = ["d"]\nmethod = "lora"\nkeep_zeros = true\n')
    assert settings_of("finetune", "--config", str(file), "--method", "full").keep_zeros


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("\nbatsh = 4\n", "line 2, batsh: got 4; `sparing finetune` has no such setting; write batch"),
        ("[lisa]\nactiv = 4\n", "line 2, lisa.activ: got 4; `sparing finetune` has no such setting; write active"),
        ('batch = "many"\n', "line 1, batch: got many; it takes a whole number;"),
        ("batch = true\n", "line 1, batch: got True; it takes a whole number;"),
        ("packing = 1\n", "line 1, packing: got 1; it takes true or false;"),
        ("lisa.active = 2.5\n", "line 1, lisa.active: got 2.5; it takes a whole number;"),
        ('method = "lisp"\n', 'line 1, method: got lisp; it takes one of "full", "lisa", "lora";'),
        ('mix = ["a"]\n', "line 1, mix: got ['a']; it takes a number;"),
        ('data = "d"\n', "line 1, data: got d; it takes a list, such as [1, 2];"),
        ("lisa = 3\n", "line 1, lisa: got 3; it is a table, such as [lisa];"),
        ("batch = 0\n", "line 1, batch: got 0; it is a count; pass 1 or more"),
        ("lora.rank = 1\n\nbatch 4\n", "it is not TOML (Expected '=' after a key in a key/value pair (at line 3"),
        ('verb = "scan"\n', "it is a file of `sparing scan`; pass it to that verb"),
    ],
)  # fmt: skip
def test_a_mistake_is_a_line_with_file_line_and_key(text: str, told: str, tmp_path: Path, capsys) -> None:
    file = tmp_path / "mine.toml"
    file.write_text(text)
    assert main(["finetune", "m", "d", "--config", str(file)]) == 2
    said = capsys.readouterr().err
    assert said.count("\n") == 1
    assert str(file) in said
    assert told in said


@pytest.mark.parametrize(
    "words", [["--config"], ["--config", "--json"], ["--config", "a", "--config", "b"], ["--config=no"]]
)
def test_what_names_no_file_is_refused(words: list[str], tmp_path: Path, capsys, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["plan", *words]) == 2
    assert capsys.readouterr().err.startswith("sparing: config: got ")


def test_no_password_and_no_word_about_the_start_is_written() -> None:
    url = "postgresql://me:s3cret@host/db"
    written = run_file.text_of(settings_of("transfer", "--storage", url, "--overwrite"))
    assert "s3cret" not in written
    assert "# storage holds a password, which is not written: pass --storage" in written
    assert "overwrite" not in tomllib.loads(written)


def test_a_name_that_is_no_text_is_left_to_the_command_line() -> None:
    written = run_file.text_of(settings_of("finetune", "m", os.fsdecode(b"\xff.jsonl")))
    assert "# data is no UTF-8 text: pass --data" in written
    tomllib.loads(written)


def test_a_run_leaves_the_file_that_repeats_it(tmp_path: Path) -> None:
    settings = settings_of("invert", "--out", str(tmp_path / "out"), "--grid", "32")
    for more in ({}, {"resume": True}):
        with Run(dataclasses.replace(settings, **more)) as run:
            run.resume(Record(question="Is it written?", settings=settings, seed=0, environment={}))
            run.claim()
        assert settings_of("invert", "--config", str(settings.out / "run.toml")) == settings
    assert "run.toml" in run.folder.held()


def test_a_choice_of_numbers_is_one_of_them_exactly() -> None:
    assert run_file.converted(Literal[4, 8] | None, 8) == 8
    assert run_file.converted(Literal[4, 8] | None, "None") is None
    for value in (True, "8", 8.0, 5):
        with pytest.raises(ValueError, match="it takes one of"):
            run_file.converted(Literal[4, 8] | None, value)
