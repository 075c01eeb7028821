"""The demo's third chapter without scikit-learn."""

from __future__ import annotations

from sparing.errors import UserError
from sparing.jobs.demo import transfer as module
from sparing.jobs.demo.transfer import run_chapter
from sparing.report import Record


def test_without_scikit_learn_the_chapter_is_left_out_and_said_to_be(small, monkeypatch, tmp_path, caplog) -> None:
    def missing() -> None:
        raise UserError("model", got="mlp", why="its digits come with scikit-learn", do="run: pip install scikit-learn")

    monkeypatch.setattr(module, "digits", missing)
    record = Record(question="Q?", settings={}, seed=0, environment={})
    run_chapter(record, seed=0, path=tmp_path / "record.jsonl", work=small.transfer)
    assert record.rows == []
    assert "scikit-learn" in caplog.text
