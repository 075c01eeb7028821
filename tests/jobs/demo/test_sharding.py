"""The demo's chapter on sharding where no process can be started, its statements, and a rank that fails."""

from __future__ import annotations

import dataclasses

import pytest

from sparing.errors import RunError
from sparing.jobs.demo import sharding as module
from sparing.jobs.demo.sharding import run_chapter
from sparing.jobs.demo.sharding_page import chapter, statements
from sparing.jobs.demo.sharding_ranks import Work
from sparing.report import Record


@pytest.fixture(scope="module")
def planned(tmp_path_factory) -> Record:
    """The chapter where no process can be started."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "run_ranks", broken)
        record = Record(question="Q?", settings={}, seed=0, environment={})
        run_chapter(record, seed=0, path=tmp_path_factory.mktemp("demo") / "record.jsonl")
    return record


def broken(work: Work) -> None:
    raise RunError("no network here")


def test_without_processes_the_plan_is_still_shown(planned, small):
    assert planned.table("shards")
    assert not planned.table("shard_runs")
    shown = chapter(planned, small.shard)
    assert not shown.details.figures
    assert "Four processes" not in shown.story
    assert "4 fit" in shown.answer
    assert {number.note for number in shown.numbers} == {"computed from shapes, nothing run"}


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
def test_a_rank_that_fails_ends_the_others_and_is_told(small):
    with pytest.raises(RunError, match="status 1"):
        module.run_ranks(dataclasses.replace(small.shard, plans=("INN",)))  # a plan that breaks the rule
