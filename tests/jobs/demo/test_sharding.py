"""The demo's chapter on sharding: bytes of four real processes against closed forms written out here, and its page."""

from __future__ import annotations

import dataclasses

import pytest

from sparing.errors import RunError
from sparing.jobs.demo import sharding as room
from sparing.jobs.demo.sharding import run_chapter
from sparing.jobs.demo.sharding_page import answer, apart, chapter, exact, statements
from sparing.jobs.demo.sharding_ranks import Work, reader
from sparing.report import Page, Record

SMALL = Work(width=64, blocks=2, batch=2, steps=2, accumulate=2, inter=1e9, intra=1e9)


@pytest.fixture(scope="module")
def finished(tmp_path_factory) -> tuple[Record, object]:
    path = tmp_path_factory.mktemp("demo") / "record.jsonl"
    record = Record(question="Q?", settings={}, seed=0, environment={})
    run_chapter(record, seed=0, path=path, work=SMALL)
    return record, path


@pytest.fixture(scope="module")
def planned(tmp_path_factory) -> Record:
    """The chapter where no process can be started."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(room, "run_ranks", broken)
        record = Record(question="Q?", settings={}, seed=0, environment={})
        run_chapter(record, seed=0, path=tmp_path_factory.mktemp("demo") / "record.jsonl")
    return record


def broken(work: Work) -> None:
    raise RunError("no network here")


@pytest.mark.processes
@pytest.mark.slow  # four processes
@pytest.mark.timeout(240)
def test_bytes_of_the_processes_are_those_of_closed_forms(finished):
    """Float32, all sizes divisible by four. DDP holds 16 bytes a weight; GGG a quarter of it; IIG 4/2 + 4/2 + 8/4."""
    record, _ = finished
    weights = sum(p.numel() for p in reader(SMALL).parameters())
    rows = {row["plan"]: row for row in record.table("shard_runs")}
    assert {plan: row["held"] / weights for plan, row in rows.items()} == {"NNN": 16, "NNG": 10, "IIG": 6, "GGG": 4}
    assert rows["NNN"]["sent_intra"] == 4 * weights  # reduce-scatter and all-gather of halves
    assert rows["NNN"]["sent_inter"] == 2 * weights
    assert rows["IIG"]["sent_inter"] == 2 * weights
    assert exact(record)
    assert apart(record) < 1e-5  # float32 sums in another order


@pytest.mark.processes
@pytest.mark.slow
def test_the_chapter_has_its_sentence_pictures_and_command(finished, tmp_path):
    record, path = finished
    assert Record.read(path).rows == record.rows
    assert "37.5 %" in answer(record)
    section = chapter(record)
    assert len(section.figures) == 3
    page = Page("T", "Q", "A", [section]).write(tmp_path / "page.html").read_text()
    assert "sparing plan --params 65e9" in page


@pytest.mark.processes
@pytest.mark.slow
def test_what_is_there_is_not_run_again(finished, monkeypatch):
    record, path = finished
    monkeypatch.setattr(room, "run_ranks", lambda work: pytest.fail("a run that the record holds"))
    again = Record.read(path)
    run_chapter(again, seed=0, path=path, work=SMALL)
    assert again.rows == record.rows


def test_without_processes_the_plan_is_still_shown(planned):
    assert planned.table("shards")
    assert not planned.table("shard_runs")
    section = chapter(planned)
    assert len(section.figures) == 1
    assert "losses below" not in section.text
    assert "4 fit" in section.answer


def test_the_paper_s_statements_hold(planned):
    rows = {row["statement"]: row for row in statements(planned)}
    assert rows["7B, full: leaders"]["by_formula"] == rows["7B, full: leaders"]["paper"] == "NII, IIG, III"
    fits = rows["65B, full: what fits 80 GB"]
    assert set(fits["paper"].split(", ")) == set(fits["by_formula"].split(", ")) - {"GIG"}  # which it did not try
    for row in rows.values():
        if "over" in row["statement"]:  # what the paper saw faster has less to send
            assert float(row["by_formula"].rstrip("×")) > 1
            assert float(row["simulated"].rstrip("×")) > 1


@pytest.mark.processes
@pytest.mark.slow
@pytest.mark.timeout(120)
def test_a_rank_that_fails_ends_the_others_and_is_told():
    with pytest.raises(RunError, match="status 1"):
        room.run_ranks(dataclasses.replace(SMALL, plans=("INN",)))  # a plan that breaks the rule
