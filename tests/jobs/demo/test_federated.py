"""The demo's sixth chapter, small: four runs, its page, going on, and the same run on Flower."""

from __future__ import annotations

import dataclasses
import importlib.util

import pytest

from sparing.jobs.demo import federated as room
from sparing.jobs.demo.federated import WORK, run_chapter
from sparing.jobs.demo.federated_page import answer, chapter, rows_of
from sparing.jobs.federate import job
from sparing.report import Page, Record

MAIN = dataclasses.replace(WORK.main, data="digits", clients=6, participation=0.5, rounds=2, local_epochs=1)
SMALL = dataclasses.replace(WORK, main=MAIN, flower_rounds=1)


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    path = tmp_path_factory.mktemp("demo") / "record.jsonl"
    record = Record(question="Q?", settings={}, seed=0, environment={})
    run_chapter(record, seed=0, path=path, work=SMALL)
    return record, path


def test_the_methods_and_the_run_with_drawn_blocks_have_their_rows(finished):
    record, path = finished
    assert [row["method"] for row in rows_of(record, SMALL)] == [
        "FedAvg",
        "FedSign",
        "own sign",
        "FedDyn",
        "FedAvg, 1 block drawn",
    ]
    assert Record.read(path).rows == record.rows
    whole, few = (next(r for r in record.table("federated_methods") if r["run"] == run) for run in ("main", "blocks"))
    assert few["bytes_up"] < whole["bytes_up"]
    assert all(row["up_counted"] == row["up_predicted"] for row in rows_of(record, SMALL))


def test_a_finished_chapter_is_not_run_again(finished, monkeypatch):
    record, path = finished
    again = Record.read(path)
    monkeypatch.setattr(job, "run", lambda settings: pytest.fail("ran again"))
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    run_chapter(again, seed=0, path=path, work=SMALL)
    assert again.rows == record.rows


def test_the_chapter_has_its_sentence_pictures_and_command(finished, tmp_path):
    record, _ = finished
    reached = rows_of(record, SMALL)[0]["accuracy"]
    assert f"**{100 * reached:.1f} %**" in answer(record, SMALL)
    section = chapter(record, SMALL)
    assert len(section.figures) == 3
    page = Page("T", "Q", "A", [section]).write(tmp_path / "page.html").read_text()
    assert "sparing federate --method fedavg fedsign own-sign" in page


def test_flower_gives_the_same_model(finished):
    pytest.importorskip("flwr")
    record, _ = finished
    (row,) = record.table("federated_flower")
    assert row["apart"] < 1e-6  # float32: the embedded engine multiplies stacked clients, Flower each alone


def test_without_flower_its_run_is_left_out(tmp_path, monkeypatch):
    monkeypatch.setattr(room.importlib.util, "find_spec", lambda name: None)
    monkeypatch.setattr(job, "run", lambda settings: Record(question="", settings=settings, seed=0, environment={}))
    record = Record(question="Q?", settings={}, seed=0, environment={})
    run_chapter(record, seed=0, path=tmp_path / "record.jsonl", work=SMALL)
    assert not record.table("federated_flower")
