"""The demo's fifth chapter: how its images are cut, and what it does where they cannot be had."""

from __future__ import annotations

import logging

import pytest

from sparing.errors import UserError
from sparing.jobs.demo import valley as module
from sparing.jobs.demo.valley import load_inputs, run_chapter
from sparing.report import Record

pytest.importorskip("sklearn", reason="its digits are the images")


def test_the_three_parts_of_the_images_do_not_overlap(small):
    inputs = load_inputs(small.valley, 0)
    rows = [inputs.start[0], inputs.halves["a"][0], inputs.halves["b"][0]]
    assert list(map(len, rows)) == [120, 60, 60]
    assert len({image.numpy().tobytes() for part in rows for image in part}) == 240  # each image once


def test_digits_stand_in_for_images_that_cannot_be_had(small, monkeypatch, caplog):
    def missing(*_, **__):
        raise UserError("asset", got="fashion-mnist", why="no network", do="try later")

    monkeypatch.setattr(module, "image_rows", missing)
    caplog.set_level(logging.WARNING)
    assert load_inputs(small.valley, 0).name == "digits"
    assert "stand in" in caplog.text


def test_without_any_images_the_chapter_is_left_out_and_said_to_be(small, monkeypatch, tmp_path, caplog):
    def missing(*_, **__):
        raise UserError("data", got="digits", why="they come with scikit-learn", do="run: pip install scikit-learn")

    monkeypatch.setattr(module, "load_inputs", missing)
    record = Record(question="Q?", settings={}, seed=0, environment={})
    run_chapter(record, seed=0, path=tmp_path / "record.jsonl", work=small.valley)
    assert record.rows == []
    assert "scikit-learn" in caplog.text
