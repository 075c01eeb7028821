"""The demo's third chapter on a net small enough for a test: its runs, going on, the sentence and the pictures."""

from __future__ import annotations

import dataclasses

import pytest

from sparing.errors import UserError
from sparing.jobs.demo import transfer as room
from sparing.jobs.demo.transfer import WORK, run_chapter
from sparing.jobs.demo.transfer_page import answer, chapter, rows_of, study_of
from sparing.report import Page, Record, format_number

SMALL = dataclasses.replace(
    WORK, widths=(64,), base_width=32, layers=1, densities=(1.0, 0.5), rates=(-8, -6), steps=10, batch=8, least_live=4
)


@pytest.fixture(scope="module")
def finished(tmp_path_factory) -> tuple[Record, object]:
    path = tmp_path_factory.mktemp("demo") / "record.jsonl"
    record = Record(question="Q?", settings={}, seed=0, environment={})
    run_chapter(record, seed=0, path=path, work=SMALL)
    return record, path


def test_every_run_is_in_the_record_and_on_the_disk(finished) -> None:
    record, path = finished
    assert len(record.table("transfer_runs")) == 3 * 2 * 2
    assert Record.read(path).rows == record.rows


def test_a_finished_run_is_not_done_again(finished, monkeypatch) -> None:
    record, path = finished
    monkeypatch.setattr(room, "train", lambda *_: pytest.fail("a run that the record holds"))
    again = Record.read(path)
    run_chapter(again, seed=0, path=path, work=SMALL)
    assert again.rows == record.rows


def test_the_seed_of_the_demo_is_that_of_the_runs(finished, tmp_path) -> None:
    other = Record(question="Q?", settings={}, seed=1, environment={})
    run_chapter(other, seed=1, path=tmp_path / "record.jsonl", work=dataclasses.replace(SMALL, rates=(-8,)))
    first = {(row["rule"], row["density"]): row["loss"] for row in finished[0].table("transfer_runs") if row["x"] == -8}
    assert all(row["loss"] != first[row["rule"], row["density"]] for row in other.table("transfer_runs"))


def test_the_chapter_has_its_sentence_pictures_and_command(finished, tmp_path) -> None:
    record, _ = finished
    study = study_of(record, SMALL)
    sparse = next(row for row in study.table("transfer") if (row["rule"], row["density"]) == ("supar", 0.5))
    assert f"**{format_number(sparse['loss_transferred'])} nat**" in answer(study, SMALL)
    assert [(row["rule"], row["density"]) for row in rows_of(study)][-2:] == [("SμPar", "dense"), ("SμPar", "1/2")]
    section = chapter(record, SMALL)
    assert len(section.figures) == 5
    assert "sparing transfer --seeds 0 1 2" in Page("T", "Q", "A", [section]).write(tmp_path / "page.html").read_text()


def test_without_scikit_learn_the_chapter_is_left_out_and_said_to_be(monkeypatch, tmp_path, caplog) -> None:
    def missing() -> None:
        raise UserError("model", got="mlp", why="its digits come with scikit-learn", do="run: pip install scikit-learn")

    monkeypatch.setattr(room, "digits", missing)
    record = Record(question="Q?", settings={}, seed=0, environment={})
    run_chapter(record, seed=0, path=tmp_path / "record.jsonl", work=SMALL)
    assert record.rows == []
    assert "scikit-learn" in caplog.text
