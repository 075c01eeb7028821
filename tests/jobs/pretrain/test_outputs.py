"""What makes two runs the same."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

from sparing.jobs.pretrain import Pretrain
from sparing.jobs.pretrain.inputs import Inputs, gather
from sparing.jobs.pretrain.job import resume, run_of
from sparing.report import Record


def identity(settings: Pretrain, inputs: Inputs) -> dict[str, Any]:
    run = run_of(settings)
    resume(run, Record(question="", settings={}, seed=0, environment={}), inputs)
    return run.mark


def test_the_identity_is_what_is_learnt(settings: Pretrain, inputs: Inputs, tmp_path: Path):
    known = identity(settings, inputs)
    harmless = replace(settings, out=tmp_path, evaluate_every=1, save_every=7, samples=0)
    assert identity(harmless, inputs) == known
    for changes in ({"lr": 1e-3}, {"density": "1/4"}, {"rule": "mup"}, {"backend": "csr"}, {"dynamic": "set"}):
        assert identity(replace(settings, **changes), inputs) != known


def test_the_text_counts_by_its_content(settings: Pretrain, inputs: Inputs, text_file: Path, tmp_path: Path):
    copy, other = tmp_path / "copy", tmp_path / "other"
    copy.write_bytes(text_file.read_bytes())
    other.write_bytes(text_file.read_bytes().replace(b"cat", b"cow"))
    texts = [identity(settings, gather(replace(settings, data=(str(p),)), 16))["text"] for p in (copy, other)]
    assert texts[0] == identity(settings, inputs)["text"] != texts[1]


def test_a_configuration_counts_by_its_content(settings: Pretrain, inputs: Inputs, tmp_path: Path):
    path = tmp_path / "config.json"
    hashes = []
    for words in ("{}", "[]"):
        path.write_text(words, encoding="utf-8")
        hashes += [
            identity(replace(settings, model_config=place), inputs)["model_config"] for place in (path, tmp_path)
        ]
    assert hashes[0] == hashes[1] != hashes[2]


def test_what_a_run_reads_is_never_deleted(settings: Pretrain, text_file: Path, tmp_path: Path):
    own = replace(settings, model_config=tmp_path, tokenizer=str(tmp_path))
    assert run_of(own).folder.reads == (text_file, tmp_path, tmp_path)
    assert run_of(replace(settings, data=("alice",))).folder.reads == ()
