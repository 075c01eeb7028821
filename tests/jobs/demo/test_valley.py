"""The demo's fifth chapter on nets small enough for a test: its tables, going on, the sentence and the pictures."""

from __future__ import annotations

import logging

import pytest

from sparing.errors import UserError
from sparing.jobs.demo import valley as room
from sparing.jobs.demo.valley import PAIRS, Work, path_of, run_chapter, stage
from sparing.jobs.demo.valley_page import answer, chapter, rows_of
from sparing.jobs.scan.nets import Training
from sparing.jobs.scan.settings import Settings
from sparing.report import Page, Record

SMALL = Work(
    data="digits", start=120, half=60, rows=40, widths=(4,), training=Training(epochs=1, batch=30), positions=3,
    tuning=Training(epochs=1, batch=30), scan=Settings(checkpoint="demo", points=3, draws=2),
)  # fmt: skip

pytest.importorskip("sklearn", reason="its digits are the images")


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    path = tmp_path_factory.mktemp("demo") / "record.jsonl"
    record = Record(question="Q?", settings={}, seed=0, environment={})
    run_chapter(record, seed=0, path=path, work=SMALL)
    return record, path


def test_every_net_curve_and_pair_is_in_the_record(finished):
    record, path = finished
    assert [row["net"] for row in record.table("valley_nets")] == ["start", "tuned-a", "tuned-b", "other-a", "other-b"]
    assert [row["sign"] for row in record.table("valley_curves")] == ["raw", "consistent"]
    assert [row["pair"] for row in record.table("valley_merges")] == list(PAIRS)
    assert Record.read(path).rows == record.rows
    same, other = record.table("valley_merges")
    assert same["agreement"] > other["agreement"]  # copies of one net against strangers
    for row in (same, other):
        assert row["gap"] == pytest.approx(row["error_merged"] - (row["error_a"] + row["error_b"]) / 2)


def test_a_chapter_goes_on_to_the_same_numbers(finished, tmp_path, monkeypatch):
    """Killed while the third net trains: those on the disk are kept."""
    made = []
    inner = room.train

    def train(*arguments, **settings):
        if len(made) == 2:
            raise KeyboardInterrupt
        made.append(inner(*arguments, **settings))
        return made[-1]

    path = tmp_path / "record.jsonl"
    record = Record(question="Q?", settings={}, seed=0, environment={})
    with monkeypatch.context() as patch:
        patch.setattr(room, "train", train)
        with pytest.raises(KeyboardInterrupt):
            run_chapter(record, seed=0, path=path, work=SMALL)
    again = Record.read(path)
    assert [row["net"] for row in again.table("valley_nets")] == ["start", "tuned-a"]
    run_chapter(again, seed=0, path=path, work=SMALL)

    def numbers(one):
        return [{name: cell for name, cell in row.items() if name != "seconds"} for row in one.rows]

    assert numbers(again) == numbers(finished[0])
    monkeypatch.setattr(room, "stage", lambda *_: pytest.fail("a chapter that the record holds"))
    run_chapter(again, seed=0, path=path, work=SMALL)


def test_the_three_parts_of_the_images_do_not_overlap():
    on = stage(SMALL, 0)
    rows = [on.start[0], on.halves["a"][0], on.halves["b"][0]]
    assert list(map(len, rows)) == [120, 60, 60]
    assert len({image.numpy().tobytes() for part in rows for image in part}) == 240  # each image once


def test_the_chapter_has_its_sentence_pictures_and_command(finished, tmp_path):
    record, path = finished
    told = answer(record)
    assert told.count("**") == 8  # two indices, two gaps
    assert "two random starts" in told
    section = chapter(record)
    assert len(section.figures) == 2
    page = Page("T", "Q", "A", [section]).write(tmp_path / "page.html").read_text()
    assert "sparing scan module:function" in page
    assert "Figure 11 shows" in page
    assert rows_of(record)[0]["gap"] == pytest.approx(100 * record.table("valley_merges")[0]["gap"])
    assert path_of(path.parent, "start").exists()


def test_without_a_calibration_the_gap_is_measured_and_not_predicted(finished, tmp_path, monkeypatch):
    def missing(*_, **__):
        raise UserError("calibration", got="the shipped file", why="it has too few pairs", do="measure them")

    monkeypatch.setattr(room, "predict_merge", missing)
    on = stage(SMALL, 0)
    record = Record(question="Q?", settings={}, seed=0, environment={})
    load = room.train_all(on, finished[0], finished[1])
    room.merge_pair(on, record, tmp_path / "record.jsonl", "one start", load)
    (row,) = record.table("valley_merges")
    assert row["predicted"] is None
    assert row["gap"] == finished[0].table("valley_merges")[0]["gap"]


def test_digits_stand_in_for_images_that_cannot_be_had(monkeypatch, caplog):
    def missing(*_, **__):
        raise UserError("asset", got="fashion-mnist", why="no network", do="try later")

    monkeypatch.setattr(room, "image_rows", missing)
    caplog.set_level(logging.WARNING)
    assert stage(SMALL, 0).name == "digits"
    assert "stand in" in caplog.text


def test_without_any_images_the_chapter_is_left_out_and_said_to_be(monkeypatch, tmp_path, caplog):
    def missing(*_, **__):
        raise UserError("data", got="digits", why="they come with scikit-learn", do="run: pip install scikit-learn")

    monkeypatch.setattr(room, "stage", missing)
    record = Record(question="Q?", settings={}, seed=0, environment={})
    run_chapter(record, seed=0, path=tmp_path / "record.jsonl", work=SMALL)
    assert record.rows == []
    assert "scikit-learn" in caplog.text
